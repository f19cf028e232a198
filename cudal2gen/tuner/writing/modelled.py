"""Times of built kernels without a GPU: the timing model on their machine code, and what a profile of it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cudal2gen import kernel, places
from cudal2gen.generation import catalog, compiler
from cudal2gen.generation.compiler import Artifact
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import IllegalRecord, Problem, Record, device_text
from cudal2gen.results import INCUMBENT, KERNEL, Effort, Source, Timing, Trial
from cudal2gen.timing import profile
from cudal2gen.tuner.environment import trial_of
from kernelproof.ground.errors import MissingTool, UserError
from kernelproof.profile import Profile


class Profiler:
    """Profiles of built records, each made once."""

    def __init__(self) -> None:
        self._profiles: dict[tuple[object, ...], Profile | str] = {}

    def profile(self, record: Record) -> Profile | str:
        """The profile of a record, which is built if it is not; or why there is none."""
        key = (record.problem, *record.kernel_key)
        if key not in self._profiles:
            (artifact,) = compiler.attempt([record])
            self._profiles[key] = self._profiled(record, artifact) if isinstance(artifact, Artifact) else str(artifact)
        return self._profiles[key]

    @staticmethod
    def _profiled(record: Record, artifact: Artifact) -> Profile | str:
        try:
            return profile.of_record(record, artifact.cubin, artifact.source)
        except MissingTool:
            raise
        except (UserError, ValueError, ZeroDivisionError, LookupError) as error:
            # The code of a text may be beyond the model: then it gets no time, which is no fault of the kernel.
            return f"no profile: {type(error).__name__}: {error}"


def as_text(record: Record) -> Record:
    """The record with its rendered text as a text of its own, so that the model knows as much of it as of written
    texts, and their times compare."""
    text, launch = kernel.as_text(record, render(record))
    try:
        revised = kernel.of_text(record.problem, text, record.origin, launch)
    except IllegalRecord:
        return record
    catalog.keep_text(text, places.user_data() / "sources", device_text.digest(text))
    return revised


class ModelledTimes:
    """``Environment``: the time that the model gives a kernel's machine code, beside the incumbent's as a text. Not
    measured."""

    name: Source = "model"

    def __init__(self, incumbent: Callable[[Problem], Record | None], profiler: Profiler) -> None:
        self.on = "timing model of machine code, nothing measured"
        self._incumbent, self._profiler = incumbent, profiler

    def evaluate(self, problem: Problem, records: Sequence[Record], effort: Effort = "short") -> list[Trial]:
        """See ``Environment``. A kernel whose machine code the model cannot simulate is a time-out with the reason."""
        trials = []
        for record in records:
            profiled = self._profiler.profile(record)
            if isinstance(profiled, str) or profiled.time is None:
                reason = profiled if isinstance(profiled, str) else "no time: its launch is not known"
                trials.append(trial_of(self, problem, record, effort, "time-out", reason=reason))
                continue
            timings = [_timing(KERNEL, profiled.time.us)]
            incumbent = self._incumbent(problem)
            other = self._profiler.profile(as_text(incumbent)) if incumbent is not None else ""
            if isinstance(other, Profile) and other.time:
                timings.append(_timing(INCUMBENT, other.time.us))
            trials.append(trial_of(self, problem, record, effort, "measured", timings=tuple(timings)))
        return trials


def _timing(contender: str, us: float) -> Timing:
    return Timing(contender=contender, detail="modelled from machine code", calls=1, event_us=(us,), error=0.0)
