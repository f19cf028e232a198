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
from cudal2gen.cli.selection import FILTERS, GPU_HELP, SIZE_HELP, Selection
from cudal2gen.generation import catalog
from cudal2gen.kernel import Problem, Record
from kernelproof.ground.command_line.groups import Offer, verb
from kernelproof.ground.command_line.messages import refuse
from kernelproof.ground.errors import Failure
from kernelproof.ground.files import write

if TYPE_CHECKING:
    from cudal2gen.tuner.campaign import Incumbents
    from cudal2gen.tuner.executor import Executor
    from cudal2gen.tuner.language_model.chat import Chat
    from cudal2gen.tuner.writing.crew import Examine
    from cudal2gen.tuner.writing.modelled import Profiler
    from cudal2gen.tuner.writing.session import Session

PlainProblems = Annotated[
    Selection, Offer(only=("mnk", *FILTERS), indexed=("gpu",), helps=SIZE_HELP | {"gpu": GPU_HELP})
]


@verb(app, "write")
def write_kernels(
    selection: PlainProblems,
    trials: Annotated[Trials, Offer(only=("chosen", "file", "settings_file"))],
    llm: ModelServer = "",
    rounds: Annotated[
        int, typer.Option("--rounds", min=1, help="How many questions to ask, including those of earlier starts.")
    ] = 4,
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of everything random; another one starts a run of its own.")
    ] = 0,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change in the catalog.")] = False,
    put_modelled: Annotated[
        bool, typer.Option("--put-modelled", help="Put a kernel into the catalog although its time is modelled.")
    ] = False,
) -> None:
    """Let a language model write kernels for one or more problems.

    Each kernel is compiled, proven in the emulator and timed. With --environment model times are modelled from machine
    code, so no GPU is needed. The same command continues where it ended: stored answers are not requested again, and
    stored trials are not repeated.
    """
    from cudal2gen.tuner import campaign
    from cudal2gen.tuner.language_model.transcript import NotSent
    from cudal2gen.tuner.writing import crew, page

    trials = replace(trials, device=selection.device)
    store, incumbents = _store(trials), campaign.Incumbents(catalog.load())
    problems = selection.problems()
    for problem in problems:
        if incumbents(problem) is None:
            refuse(f"{problem.title}: the catalog has no record to start from")
    language_models = [LanguageModel(server, trials) for server in llm.split(",")]
    chats = _chats(language_models, trials, seed)
    # A process for each core; a single session examines one kernel at a time.
    with crew.provers(None if len(problems) * len(chats) > 1 else 1) as examine:
        sessions = _sessions(problems, chats, trials, incumbents, seed, rounds, examine)
        show = partial(page.write, store.with_name(f"{store.stem}-progress.html"), trials.transcript, store)
        try:
            crew.run(sessions, trials.settings.write.at_once, show)
            for session in sessions:
                _conclude(session, store, dry_run=dry_run, put_modelled=put_modelled)
        except SystemExit:
            print(language_models[0].interruption(chats[0].usage, store), file=sys.stderr)
            raise
        finally:
            sessions[0].executor.close()
    for chat in chats:
        print(language_models[0].cost(chat.usage))
    print(f"trials are in {store}, and their progress in {store.stem}-progress.html beside it")
    for session in sessions:
        if (failure := session.unavailable) is not None and not (isinstance(failure, NotSent) and failure.for_good):
            raise failure.final
    if not any(session.attempts for session in sessions):
        raise Failure("no answer had a kernel: the transcript has them, with what was wrong")


def _chats(language_models: Sequence[LanguageModel], trials: Trials, seed: int) -> list[Chat]:
    """A chat for each trajectory, whose run has a name of its own. Several models get trajectories in rotation, at
    least one each."""
    name = f"{trials.environment} writer seed {seed}"
    count = max(trials.settings.write.trajectories, len(language_models))
    return [
        language_models[number % len(language_models)].chat(f"{name} trajectory {number}" if number else name)
        for number in range(count)
    ]


def _sessions(
    problems: Sequence[Problem], chats: Sequence[Chat], trials: Trials, incumbents: Incumbents, seed: int, rounds: int,
    examine: Examine,
) -> list[Session]:  # fmt: skip
    """The sessions of all problems and trajectories, with what earlier starts stored."""
    from cudal2gen import results
    from cudal2gen.tuner import memory
    from cudal2gen.tuner.writing import crew, session
    from cudal2gen.tuner.writing.lead import Lead
    from cudal2gen.tuner.writing.modelled import Profiler
    from cudal2gen.tuner.writing.proof import CheckLimits

    settings, store, profiler = trials.settings, _store(trials), Profiler()
    executor = crew.SerialExecutor(_executor(trials, catalog.load(), seed, profiler, incumbents))
    bounds = CheckLimits(settings.write.check_seconds, seed=zlib.crc32(f"written {seed}".encode()))
    limits = session.SessionLimits(rounds, settings.write.kernels, bounds=bounds, weights=settings.reward.weights)
    stored = results.trials(store) if store.is_file() else []
    sessions = []
    for problem in problems:
        lead = Lead()  # shared by the problem's trajectories
        for chat in chats:
            incumbent = incumbents(problem)
            assert incumbent is not None
            current = session.Session(
                problem, incumbent, chat, executor, memory.load(memory.lessons_path(trials.store)), limits,
                partial(results.append, path=store), chat.run, profiler=profiler, metrics=_metrics(trials),
                examine=examine, lead=lead,
            )  # fmt: skip
            current.restore(stored)
            sessions.append(current)
    return sessions


def _store(trials: Trials) -> Path:
    """The file of trials of written kernels. Modelled trials have a file of their own."""
    from cudal2gen import results

    if trials.file is not None:
        return trials.file
    if trials.environment == "model":
        return places.build_dir() / "tuner" / "written-modelled-trials.jsonl"
    return results.store("written-trials")


def _conclude(session: Session, store: Path, *, dry_run: bool, put_modelled: bool) -> None:
    """Prints the result of a session, writes a proposal of its best kernel, and puts the record into the catalog if the
    options say so."""
    from cudal2gen.tuner.writing import outcome

    outcomes = [attempt.trial.outcome for attempt in session.attempts]
    counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in dict.fromkeys(outcomes))
    print(f"{session.problem.title}: {len(outcomes)} kernels written{f': {counts}' if counts else ''}")
    if (winner := session.winner) is None:
        print("  none is beyond doubt faster than the catalog's record")
        return
    assert winner.record is not None
    ratio = winner.trial.faster_than("incumbent")
    measured = session.executor.name == "gpu"
    how = "measured" if measured else "modelled, not measured"
    print(f"  {winner.record.name}: {ratio.value if ratio else 1:.3f} times as fast ({how})")
    page = store.with_name(f"{store.stem}-proposals") / f"{session.problem.mnk}-{winner.record.name[-10:]}.md"
    write(page, outcome.proposal(session, winner))
    print(f"  proposal in {page}")
    if dry_run or not (measured or put_modelled):
        why = "this is a dry run" if dry_run else "its time is modelled; --put-modelled puts it all the same"
        print(f"  not written: {why}")
        return
    print(f"  written to {catalog.put(outcome.catalog_record(session, winner))}")


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
