"""The verb ``write`` has a language model write kernels for a problem.

Each kernel is compiled, proven in the emulator and timed; the fastest may be put into the catalog.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudal2gen import places
from cudal2gen.cli.program import app
from cudal2gen.cli.searching import LanguageModel, ModelServer, Trials
from cudal2gen.cli.selection import FILTERS, OF_GPU, SIZE, Selection
from cudal2gen.generation import catalog
from cudal2gen.kernel import Record
from kernelproof.ground.command_line.groups import Offer, verb
from kernelproof.ground.command_line.messages import refuse
from kernelproof.ground.errors import Failure
from kernelproof.ground.files import write

if TYPE_CHECKING:
    from cudal2gen.tuner.campaign import Incumbents
    from cudal2gen.tuner.executor import Executor
    from cudal2gen.tuner.writing.modelled import Profiler
    from cudal2gen.tuner.writing.session import Session

PlainProblem = Annotated[
    Selection, Offer(only=("mnk", *FILTERS), single=("mnk",), indexed=("gpu",), helps=SIZE | {"gpu": OF_GPU})
]


@verb(app, "write")
def write_kernels(
    selection: PlainProblem,
    trials: Annotated[Trials, Offer(only=("chosen", "file", "settings_file"))],
    llm: ModelServer = "",
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Questions, those of earlier starts included.")] = 4,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of everything random; another one starts a run of its own.")
    ] = 0,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change in the catalog.")] = False,
    put_modelled: Annotated[
        bool, typer.Option("--put-modelled", help="Put a kernel into the catalog although its time is modelled.")
    ] = False,
) -> None:
    """Have a language model write kernels for a problem.

    Each kernel is compiled, proven in the emulator and timed. With --environment model times are modelled from machine
    code, so no GPU is needed. The same command continues where it ended: stored answers are not
    asked for again, and stored trials are not repeated.
    """
    from cudal2gen import results
    from cudal2gen.tuner import campaign, memory
    from cudal2gen.tuner.language_model.transcript import Unasked
    from cudal2gen.tuner.writing import session
    from cudal2gen.tuner.writing.modelled import Profiler
    from cudal2gen.tuner.writing.proof import Bounds

    trials = replace(trials, device=selection.device)
    problem, records, settings = selection.problem(), catalog.load(), trials.settings
    profiler, incumbents, store = Profiler(), campaign.Incumbents(records), _store(trials)
    if (incumbent := incumbents(problem)) is None:
        refuse(f"{problem.title}: the catalog has no record to start from")
    language_model = LanguageModel(llm, trials)
    run_name = f"{trials.environment} writer seed {seed}"
    chat = language_model.chat(run_name)
    executor = _executor(trials, records, seed, profiler, incumbents)
    bounds = Bounds(settings.write.check_seconds, seed=zlib.crc32(f"written {seed}".encode()))
    limits = session.SessionLimits(rounds, settings.write.kernels, bounds=bounds, weights=settings.reward.weights)
    written = session.Session(
        problem, incumbent, chat, executor, memory.load(memory.lessons_path(trials.store)), limits,
        partial(results.append, path=store), run_name, profiler=profiler, metrics=_metrics(trials),
    )  # fmt: skip
    try:
        written.restore(results.trials(store) if store.is_file() else [])
        written.run()
        _conclude(written, store, dry_run=dry_run, put_modelled=put_modelled)
    except SystemExit:
        print(language_model.interrupted(chat.usage, store), file=sys.stderr)
        raise
    finally:
        executor.close()
    print(language_model.cost(chat.usage))
    print(f"trials in {store}")
    if written.unavailable is not None and not isinstance(written.unavailable, Unasked):
        raise written.unavailable.final
    if not written.attempts:
        raise Failure("no answer had a kernel: the transcript has them, with what was wrong")


def _store(trials: Trials) -> Path:
    """The file of trials of written kernels. Modelled trials have a file of their own."""
    from cudal2gen import results

    if trials.file is not None:
        return trials.file
    if trials.environment == "model":
        return places.build_dir() / "tuner" / "written-modelled-trials.jsonl"
    return results.store("written-trials")


def _conclude(written: Session, store: Path, *, dry_run: bool, put_modelled: bool) -> None:
    """Prints the result of a session, writes a proposal of its best kernel, and puts the record into the catalog if the
    options say so."""
    from cudal2gen.tuner.writing import outcome

    ended = [attempt.trial.outcome for attempt in written.attempts]
    counts = ", ".join(f"{ended.count(kind)} {kind}" for kind in dict.fromkeys(ended))
    print(f"{written.problem.title}: {len(ended)} kernels written{f': {counts}' if counts else ''}")
    if (winner := written.winner) is None:
        print("  none is beyond doubt faster than the catalog's record")
        return
    assert winner.record is not None
    ratio = winner.trial.faster_than("incumbent")
    measured = written.executor.name == "gpu"
    how = "measured" if measured else "modelled, not measured"
    print(f"  {winner.record.name}: {ratio.value if ratio else 1:.3f} times as fast ({how})")
    page = store.with_name(f"{store.stem}-proposals") / f"{written.problem.mnk}-{winner.record.name[-10:]}.md"
    write(page, outcome.proposal(written, winner))
    print(f"  proposal in {page}")
    if dry_run or not (measured or put_modelled):
        why = "this is a dry run" if dry_run else "its time is modelled; --put-modelled puts it all the same"
        print(f"  not written: {why}")
        return
    print(f"  written to {catalog.put(outcome.catalog_record(written, winner))}")


def _executor(
    trials: Trials, records: Sequence[Record], seed: int, profiler: Profiler, incumbents: Incumbents
) -> Executor:
    """The executor that times kernels: on a GPU, or by the timing model from their machine code."""
    from cudal2gen.tuner.executor import InProcess
    from cudal2gen.tuner.writing.modelled import ModelledTimes

    if trials.environment != "model":
        return trials.executor(records, seed)
    return InProcess(ModelledTimes(incumbents, profiler))


def _metrics(trials: Trials) -> Callable[[Record], Sequence[str]]:
    """A function that gives a record's metrics from Nsight Compute; it gives none if times are modelled."""
    from cudal2gen.tuner.writing import counters

    if trials.environment != "gpu":
        return lambda _: ()
    return partial(counters.lines, device=trials.device)
