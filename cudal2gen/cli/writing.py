"""tune --write-kernels: a language model writes kernels for the selected problems, and what is done with the best."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cudal2gen import places
from cudal2gen.cli.searching import LanguageModel, Reward, Trials
from cudal2gen.generation import catalog
from cudal2gen.kernel import Problem, Record
from kernelproof.ground.command_line.messages import refuse
from kernelproof.ground.files import write

if TYPE_CHECKING:
    from cudal2gen.tuner.campaign import Incumbents
    from cudal2gen.tuner.executor import Executor
    from cudal2gen.tuner.writing.modelled import Profiler
    from cudal2gen.tuner.writing.session import Session


@dataclass(frozen=True)
class Writing:
    """Whether, how long and with which limits a language model writes kernels."""

    rounds: Annotated[
        int | None,
        typer.Option(
            "--write-kernels",
            metavar="ROUNDS",
            min=1,
            help="Have the model of --llm-url write kernels: so many questions for each problem. With --environment "
            "model times are modelled from machine code, else measured.",
        ),
    ] = None
    kernels: Annotated[int, typer.Option("--write-count", min=1, max=16, help="Kernels of an answer.")] = 3
    check_seconds: Annotated[
        float, typer.Option("--write-timeout", min=1, help="Seconds for each check of a written kernel.")
    ] = 120.0
    put_modelled: Annotated[
        bool,
        typer.Option("--put-modelled", help="Put a written kernel into the catalog by its modelled time."),
    ] = False

    def store(self, trials: Trials) -> Path:
        """The file of trials of written kernels: apart from others, modelled ones apart from measured ones."""
        from cudal2gen import results

        if trials.file is not None:
            return trials.file
        if trials.environment == "model":
            return places.build_dir() / "tuner" / "written-modelled-trials.jsonl"
        return results.store("written-trials")

    def write_kernels(
        self,
        problems: Sequence[Problem],
        seed: int,
        trials: Trials,
        rewarded: Reward,
        language_model: LanguageModel,
        dry_run: bool,
    ) -> None:
        """A session for each problem; prints attempts as they end, then winners and where they went."""
        from cudal2gen import results
        from cudal2gen.tuner import campaign, memory
        from cudal2gen.tuner.transcript import Unasked
        from cudal2gen.tuner.writing import session
        from cudal2gen.tuner.writing.modelled import Profiler
        from cudal2gen.tuner.writing.proof import Bounds

        if trials.environment == "replay":
            refuse("--write-kernels: new kernels have no recorded trials; --environment gpu measures, model models")
        records = catalog.load()
        profiler, incumbents, store = Profiler(), campaign.Incumbents(records), self.store(trials)
        bounds = Bounds(self.check_seconds, seed=zlib.crc32(f"written {seed}".encode()))
        settings = session.Settings(self.rounds or 1, self.kernels, bounds=bounds, reward=rewarded.settings)
        run_name = f"{trials.environment} writer seed {seed}"
        talk = language_model.chat(trials, run_name)
        executor = _executor(trials, records, seed, profiler, incumbents)
        lessons = memory.load(memory.lessons_path(trials.store))
        unavailable = None
        try:
            for problem in problems:
                incumbent = incumbents(problem)
                if incumbent is None or problem.fusion or problem.batched:
                    why = (
                        "the catalog has no record to start from"
                        if incumbent is None
                        else "written kernels are plain products"
                    )
                    print(f"fault: {problem.title}: {why}", file=sys.stderr)
                    continue
                written = session.Session(
                    problem, incumbent, talk, executor, lessons, settings, partial(results.append, path=store),
                    run_name, profiler=profiler, metrics=_metrics(trials),
                )  # fmt: skip
                written.restore(results.trials(store) if store.is_file() else [])
                written.run()
                self._conclude(written, store, dry_run)
                if (unavailable := written.unavailable) is not None:
                    break
        except SystemExit:
            print(language_model.interrupted(talk.usage, trials, store), file=sys.stderr)
            raise
        finally:
            executor.close()
        print(f"llm: {talk.usage}; transcript: {language_model.replay or language_model.file(trials)}")
        print(f"trials in {store}")
        if unavailable is not None and not isinstance(unavailable, Unasked):
            raise unavailable.final

    def _conclude(self, written: Session, store: Path, dry_run: bool) -> None:
        """Prints what a session won, writes the proposal, and puts the record where that is asked for."""
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
        if dry_run or not (measured or self.put_modelled):
            why = "this is a dry run" if dry_run else "its time is modelled; --put-modelled puts it all the same"
            print(f"  not written: {why}")
            return
        print(f"  written to {catalog.put(outcome.catalog_record(written, winner))}")


def _executor(
    trials: Trials, records: Sequence[Record], seed: int, profiler: Profiler, incumbents: Incumbents
) -> Executor:
    from cudal2gen.tuner.executor import InProcess
    from cudal2gen.tuner.writing.modelled import ModelledTimes

    if trials.environment != "model":
        return trials.executor(records, seed)
    return InProcess(ModelledTimes(incumbents, profiler))


def _metrics(trials: Trials) -> Callable[[Record], Sequence[str]]:
    """Of Nsight Compute, where times are measured."""
    from cudal2gen.tuner.writing import counters

    if trials.environment != "gpu":
        return lambda _: ()
    return partial(counters.lines, device=trials.device)
