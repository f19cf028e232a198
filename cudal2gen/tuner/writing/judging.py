"""Judges drafts of kernels: each is compiled, proven, timed and rewarded. Copies are detected by their machine code.

No part of a text runs on this machine's processor; ``proof`` describes the stages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from cudal2gen import kernel, places
from cudal2gen.generation import catalog, compiler
from cudal2gen.generation.compiler import Artifact
from cudal2gen.kernel import Fields, IllegalRecord, Origin, Problem, Record, device_text
from cudal2gen.results import Outcome, Trial
from cudal2gen.tuner import reward
from cudal2gen.tuner.environment import refusal_trial, trial_of
from cudal2gen.tuner.executor import EvaluationJob, Executor
from cudal2gen.tuner.reward import RewardWeights
from cudal2gen.tuner.writing import proof
from cudal2gen.tuner.writing.kernel_answers import Draft
from cudal2gen.tuner.writing.proof import CheckLimits, CheckResult
from kernelproof.sass import sections

PROPOSER = "writer"
ORIGIN = Origin(source="written by a language model", structure="modelled", changed=("text",))


@dataclass(frozen=True)
class Attempt:
    """A draft with its trial, proof and reward (``reward.of_written``). ``record``: None for an illegal draft."""

    draft: Draft
    trial: Trial
    proof: CheckResult
    record: Record | None
    reward: float

    @property
    def report(self) -> str:
        """What the author of the text should know about its failure: the proof's findings, else the trial's reason."""
        return self.proof.report or self.trial.reason


class Examination(NamedTuple):
    """The result of compiling and checking a kernel.

    ``code``: its ``code_digest``, "" if it does not compile. ``proof``: None for a copy of a known kernel.
    """

    code: str
    proof: CheckResult | None


def examine(record: Record, launch: Fields, bounds: CheckLimits, known_codes: frozenset[str]) -> Examination:
    """Compiles a kernel, and proves it unless its ``code_digest`` is among ``known_codes``.

    This is the expensive part of judging; callers may run it in another process.
    """
    (built,) = compiler.attempt([record])
    code = code_digest(built, launch) if isinstance(built, Artifact) else ""
    return Examination(code, None if code in known_codes else proof.prove(record, bounds))


class CopiedText(NamedTuple):
    """A draft whose machine code and launch equal those of an earlier kernel. ``reward``: that kernel's reward now."""

    draft: Draft
    reward: float


@dataclass
class Judge:
    """Judges drafts for one problem. ``executor`` times kernels that are proven right.

    - ``stored`` returns the attempt that an earlier start of this run made for the draft, which is then not judged
      again; None if there is none.
    - ``known``: the trials of known kernels by ``code_digest``; None for the incumbent.
    - ``examine``: this module's ``examine``, or a function that runs it in another process.
    """

    problem: Problem
    executor: Executor
    bounds: CheckLimits
    weights: RewardWeights
    run_name: str = PROPOSER
    stored: Callable[[Draft, Record], Attempt | None] = lambda _draft, _record: None
    known: dict[str, Trial | None] = field(default_factory=dict)
    examine: Callable[[Record, Fields, CheckLimits, frozenset[str]], Examination] = examine

    def add_known(self, draft: Draft, trial: Trial | None) -> None:
        """Adds a kernel to ``known``, so that copies of it are detected. ``trial``: None for the incumbent."""
        try:
            (built,) = compiler.attempt([self._record(draft)])
        except IllegalRecord:  # the incumbent's launch convention may not be allowed for texts
            return
        if isinstance(built, Artifact):
            self.known[code_digest(built, draft.launch)] = trial

    def judge(self, draft: Draft, best: float = 1.0) -> Attempt | CopiedText:
        """Judges one draft. ``best``: the speed of the fastest kernel that the question shows, over the incumbent's."""
        if refusals := device_text.refusals(draft.text):
            return self._illegal_attempt(draft, "; ".join(refusals))
        try:
            record = self._record(draft)
        except IllegalRecord as error:
            return self._illegal_attempt(draft, str(error))
        if (earlier := self.stored(draft, record)) is not None:
            self._remember(record, draft, earlier.trial)
            return earlier
        code, proven = self.examine(record, draft.launch, self.bounds, frozenset(self.known))
        if proven is None:
            return CopiedText(draft, self.reward_of(self.known[code], best))
        attempt = self._timed_attempt(draft, record, proven, best)
        if code:
            self.known[code] = attempt.trial
        return attempt

    def reward_of(self, trial: Trial | None, best: float) -> float:
        """The reward of a kernel with this trial, None for the incumbent. ``best``: the speed of the fastest kernel
        that was shown, relative to the incumbent, whose speed is 1."""
        if trial is None:
            return self.weights.failed + reward.RIGHT + 1.0 / best
        return reward.of_written(trial, self.weights, best)

    def trial(self, record: Record, outcome: Outcome, proven: CheckResult) -> Trial:
        """The trial of a record whose proof decided the outcome."""
        digest = proven.artifact.digest if proven.artifact else ""
        trial = trial_of(self.executor, self.problem, record, "short", outcome, reason=proven.reason, digest=digest)
        return self._attributed(trial)

    def _record(self, draft: Draft) -> Record:
        """A draft's record. Its text is kept among the user's sources."""
        record = kernel.of_text(self.problem, draft.text, ORIGIN, draft.launch)
        catalog.keep_text(draft.text, places.user_data() / "sources", device_text.digest(draft.text))
        return record

    def _remember(self, record: Record, draft: Draft, trial: Trial) -> None:
        """Keeps a trial by its kernel's machine code and launch, so that an equal kernel is not tried again."""
        if trial.outcome != "compile error":
            (built,) = compiler.attempt([record])
            if isinstance(built, Artifact):
                self.known.setdefault(code_digest(built, draft.launch), trial)

    def _timed_attempt(self, draft: Draft, record: Record, proven: CheckResult, best: float) -> Attempt:
        """The attempt of a checked kernel, timed if it is right. ``best``: the speed of the best known kernel."""
        if not proven.right:
            return self._attempt(draft, self.trial(record, proven.outcome, proven), proven, record, best)
        (trial,) = self.executor.submit(EvaluationJob(self.problem, (record,), "short")).result()
        largest = max(trial.max_diff, proven.max_error)
        trial = self._attributed(trial.model_copy(update={"max_diff": largest}))
        return self._attempt(draft, trial, proven, record, best)

    def _illegal_attempt(self, draft: Draft, reason: str) -> Attempt:
        """An attempt that is refused before it is compiled, and why."""
        digest = device_text.digest(draft.text)  # distinguishes illegal texts with the same launch
        fields = self.problem.model_dump(mode="json") | draft.launch | {"text": digest}
        trial = self._attributed(refusal_trial(self.executor, self.problem, fields, reason))
        return self._attempt(draft, trial, CheckResult("illegal", reason, reason), None, 1.0)

    def _attributed(self, trial: Trial) -> Trial:
        """The trial with the proposer and the run of this session."""
        return trial.model_copy(update={"proposer": PROPOSER, "run": self.run_name})

    def _attempt(self, draft: Draft, trial: Trial, proven: CheckResult, record: Record | None, best: float) -> Attempt:
        """The attempt with its reward."""
        return Attempt(draft, trial, proven, record, self.reward_of(trial, best))


def code_digest(built: Artifact, launch: Fields) -> str:
    """A hash of a kernel's machine code and launch. Texts that differ only in what the compiler drops share it."""
    code = hashlib.sha256(json.dumps(launch, sort_keys=True).encode())
    file = built.cubin.read_bytes()
    for section in sections(file):
        if section.name.startswith(".text."):
            code.update(file[section.offset : section.offset + section.size])
    return code.hexdigest()[:32]
