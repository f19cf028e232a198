"""Gives times and profiles of built kernels without a GPU, from the timing model of their machine code."""

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
    """Makes the profiles of records, each of them once."""

    def __init__(self) -> None:
        self._profiles: dict[tuple[object, ...], Profile | str] = {}

    def profile(self, record: Record) -> Profile | str:
        """The profile of a record, or the reason why there is none. Builds the record if necessary."""
        key = (record.problem, *record.kernel_key)
        if key not in self._profiles:
            (artifact,) = compiler.attempt([record])
            self._profiles[key] = (
                self._profile_of_built(record, artifact) if isinstance(artifact, Artifact) else str(artifact)
            )
        return self._profiles[key]

    @staticmethod
    def _profile_of_built(record: Record, artifact: Artifact) -> Profile | str:
        """The profile of a built kernel, or why there is none."""
        try:
            return profile.of_record(record, artifact.cubin, artifact.source)
        except MissingTool:
            raise
        except (UserError, ValueError, ZeroDivisionError, LookupError) as error:
            # The model may not understand the machine code of a text. That is not the kernel's fault.
            return f"no profile: {type(error).__name__}: {error}"


def as_text(record: Record) -> Record:
    """The record as one whose kernel is a written text, namely the rendered text; the record itself if that is illegal.

    The timing model uses fields of a rendered record that a written text does not have. Without them the modelled times
    of both can be compared.
    """
    text, launch = kernel.as_text(record, render(record))
    try:
        revised = kernel.of_text(record.problem, text, record.origin, launch)
    except IllegalRecord:
        return record
    catalog.keep_text(text, places.user_data() / "sources", device_text.digest(text))
    return revised


class ModelledTimes:
    """An ``Environment`` without measurements: the timing model gives the times of the kernel and of the incumbent."""

    name: Source = "model"

    def __init__(self, incumbent: Callable[[Problem], Record | None], profiler: Profiler) -> None:
        self.on = "timing model of machine code, nothing measured"
        self._incumbent, self._profiler = incumbent, profiler

    def evaluate(self, problem: Problem, records: Sequence[Record], effort: Effort = "short") -> list[Trial]:
        """See ``Environment``. If the model cannot simulate a kernel's machine code, its trial is a time-out."""
        trials = []
        for record in records:
            profiled = self._profiler.profile(record)
            if isinstance(profiled, str) or profiled.time is None:
                reason = profiled if isinstance(profiled, str) else "no time: its launch is not known"
                trials.append(trial_of(self, problem, record, effort, "time-out", reason=reason))
                continue
            timings = [_timing(KERNEL, profiled.time.us)]
            incumbent = self._incumbent(problem)
            reference = self._profiler.profile(as_text(incumbent)) if incumbent is not None else ""
            if isinstance(reference, Profile) and reference.time:
                timings.append(_timing(INCUMBENT, reference.time.us))
            trials.append(trial_of(self, problem, record, effort, "measured", timings=tuple(timings)))
        return trials


def _timing(contender: str, us: float) -> Timing:
    return Timing(contender=contender, detail="modelled from machine code", calls=1, event_us=(us,), error=0.0)
