"""Turns the winner of a session of ``cudal2gen write`` into a record of the catalog, and a page for a reviewer."""

from __future__ import annotations

from cudal2gen.generation import catalog
from cudal2gen.kernel import Origin, Record, device_text
from cudal2gen.tuner.writing import evidence, kernel_prompt
from cudal2gen.tuner.writing.judging import Attempt
from cudal2gen.tuner.writing.session import Session


def catalog_record(session: Session, winner: Attempt) -> Record:
    """The winner's record. Its origin names the record that it was written from, and says whether its time was
    measured."""
    assert winner.record is not None
    measured = session.executor.name == "gpu"
    how = f"measured on {winner.trial.on}" if measured else "its time modelled from machine code"
    source = f"cudal2gen write, {how}, from {session.incumbent.name}"
    origin = Origin(source=source, structure="tuned" if measured else "modelled", changed=("text",))
    return winner.record.at(session.problem, origin=origin)


def proposal(session: Session, winner: Attempt) -> str:
    """A Markdown page with the diff of the texts, the changes of the launch, evidence on the incumbent and the winner,
    the record's line for the catalog, and all attempts."""
    assert winner.record is not None
    ratio = winner.trial.faster_than("incumbent")
    timed = "measured" if session.executor.name == "gpu" else "modelled"
    factor = f"{ratio.value:.3f} times as fast as the incumbent" if ratio else "no incumbent was timed"
    incumbent = session.incumbent_text
    before, after = (
        evidence.lines(record, session.profiler.profile(record), {}) for record in (incumbent, winner.record)
    )
    launch = [
        f"launch {name}: {session.base.launch.get(name)} -> {value}"
        for name, value in winner.draft.launch.items()
        if session.base.launch.get(name) != value
    ]
    return kernel_prompt.page(
        "proposal.md.j2",
        title=f"A kernel for {session.problem.title}",
        summary=f"{winner.trial.median_us:.2f} us ({timed}, {winner.trial.on}): {factor}. Right in the emulator, all "
        "grades passed.",
        incumbent=session.incumbent.name,
        winner=winner.record.name,
        file=f"{device_text.digest(winner.draft.text)}.cu",
        why=_cell(winner.draft.why) or "none stated",
        launch=launch,
        line=catalog.dump(catalog_record(session, winner)),
        diff=kernel_prompt.difference(session.base.text, winner.draft.text),
        before=before,
        after=after,
        attempts=[_row(attempt) for attempt in session.attempts],
    )


def _row(attempt: Attempt) -> list[str]:
    """An attempt as a row of a table."""
    trial = attempt.trial
    time = f"{trial.median_us:.2f} us" if trial.measured else ""
    return [trial.outcome, time, f"{attempt.reward:.3f}", _cell(attempt.draft.why), _cell(trial.reason)]


def _cell(text: str) -> str:
    """The text as a cell of a Markdown table: one line of at most 160 characters, with / for each |."""
    return " ".join(text.split()).replace("|", "/")[:160]
