"""Runs the session in which a language model writes kernels for one problem.

In each round the model is asked, and its drafts are read, proven, timed and rewarded; the next question shows the
results. The model's reply is data: texts, which are compiled and executed as ``proof`` describes, and the numbers of
their launches. Faults before there is a kernel, such as a patch that does not apply or an illegal launch, go back with
an explanation (``conversation``) and take no evaluation.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from cudal2gen import kernel, places, results
from cudal2gen.generation import catalog, compiler
from cudal2gen.generation.compiler import Artifact
from cudal2gen.generation.renderer import render
from cudal2gen.kernel import Fields, Problem, Record, device_text, parse
from cudal2gen.results import INCUMBENT, Trial
from cudal2gen.tuner import reward
from cudal2gen.tuner.executor import Executor
from cudal2gen.tuner.exports import BASES
from cudal2gen.tuner.language_model.chat import MIN_BACKOFF_S, Chat
from cudal2gen.tuner.language_model.conversation import Conversation, Messages, ReadAnswer
from cudal2gen.tuner.language_model.transcript import ChatRequest, Exchange, Message, NotSent, Reply, Unavailable
from cudal2gen.tuner.memory import Memory, Note
from cudal2gen.tuner.reward import RewardWeights
from cudal2gen.tuner.writing import evidence, exemplars, kernel_answers, kernel_prompt
from cudal2gen.tuner.writing.judging import PROPOSER, Attempt, CopiedText, Examination, Judge, examine
from cudal2gen.tuner.writing.kernel_answers import Base, Draft
from cudal2gen.tuner.writing.lead import Lead
from cudal2gen.tuner.writing.modelled import Profiler, as_text
from cudal2gen.tuner.writing.proof import CheckLimits, CheckResult
from kernelproof.ground.errors import UserError

MAX_DRAWN, MAX_FAILURES = 4, 4  # most kernels in addition to the fastest, and most failures, in a prompt
MAX_COMPLETE = 2  # most kernels in a prompt with their complete texts; the others are shown as diffs
BEGUN_WITH = "begun with"  # name of the state that lists the trials of which a session's first start had attempts
GUEST = "guest "  # prefix of the states that name the guest of a round
MIN_GAIN = 1.01  # least speed over the incumbent's by modelled times that counts as faster


@dataclass(frozen=True)
class SessionLimits:
    """When a session ends, and limits of its questions and checks.

    - ``rounds``: most answered questions, including those of earlier starts.
    - ``patience``: number of rounds in a row without an answer or a new kernel after which the session ends. Another
      start of the same session counts them anew.
    - ``kernels``: most kernels of an answer; ``tokens``: most tokens of the notes in a prompt.
    - ``bounds``: limits of each check; ``weights``: weights of the reward.
    """

    rounds: int = 4
    kernels: int = 3
    patience: int = 2
    tokens: int = 1500
    bounds: CheckLimits = field(default_factory=CheckLimits)
    weights: RewardWeights = field(default_factory=RewardWeights)


@dataclass
class Session:
    """A session on one problem.

    - ``executor`` times kernels that are proven right; ``store`` receives each trial.
    - ``metrics`` gives lines with a device profiler's metrics of a record.
    - ``examine``: ``judging.examine``, or a function that runs it in another process.
    - ``lead``: the fastest kernel of all sessions on the problem, which they share.
    - ``say`` shows the user a line; ``pause`` waits for a number of seconds, and tests replace it.
    - ``unavailable``: the failure of the server because of which the session ended.
    """

    problem: Problem
    incumbent: Record
    chat: Chat
    executor: Executor
    memory: Memory
    limits: SessionLimits = field(default_factory=SessionLimits)
    store: Callable[[Sequence[Trial]], None] = lambda _: None
    run_name: str = PROPOSER
    say: Callable[[str], None] = lambda text: print(text, file=sys.stderr)
    profiler: Profiler = field(default_factory=Profiler)
    metrics: Callable[[Record], Sequence[str]] = lambda _: ()
    examine: Callable[[Record, Fields, CheckLimits, frozenset[str]], Examination] = examine
    pause: Callable[[float], None] = time.sleep
    lead: Lead = field(default_factory=Lead)
    attempts: list[Attempt] = field(default_factory=list)
    unavailable: Unavailable | None = None
    _metrics: dict[object, Sequence[str]] = field(default_factory=dict, repr=False)
    _answers: deque[Exchange] = field(default_factory=deque, repr=False)  # answers of earlier starts, still to be used
    _earlier_trials: dict[str, Trial] = field(default_factory=dict, repr=False)  # their kernels' trials, by ``_key``
    _other_trials: dict[str, Trial] = field(default_factory=dict, repr=False)  # other sessions' trials, by ``_key``
    _guest: Attempt | None = None  # another session's kernel that the present question shows
    _best: float = 1.0  # speed of the fastest kernel of the question, over the incumbent's

    @cached_property
    def _judge(self) -> Judge:
        """A judge that knows the incumbent and all measured attempts."""
        limits = self.limits
        judge = Judge(
            self.problem, self.executor, limits.bounds, limits.weights, self.run_name, self._earlier_attempt,
            examine=self.examine,
        )  # fmt: skip
        judge.add_known(Draft("incumbent", "", *self.base), None)
        for attempt in self.attempts:
            if attempt.record is not None and attempt.trial.measured:
                judge.add_known(attempt.draft, attempt.trial)
        return judge

    @cached_property
    def base(self) -> Base:
        """The incumbent's text and launch."""
        return Base(*kernel.as_text(self.incumbent, render(self.incumbent)))

    @cached_property
    def incumbent_text(self) -> Record:
        """The incumbent as a record whose kernel is a text."""
        return as_text(self.incumbent)

    @property
    def ranked(self) -> list[Attempt]:
        """Right kernels, the fastest first."""
        return sorted((attempt for attempt in self.attempts if attempt.trial.measured), key=lambda a: a.trial.cost)

    @property
    def winner(self) -> Attempt | None:
        """The fastest kernel if it is faster than the incumbent beyond noise, else None.

        The interval of a measured speed must be entirely above 1; a modelled speed must exceed ``MIN_GAIN``.
        """
        best = next(iter(self.ranked), None)
        ratio = best.trial.faster_than(INCUMBENT) if best else None
        if ratio is None or ratio.low <= (1.0 if self.executor.name == "gpu" else MIN_GAIN):
            return None
        return best

    def restore(self, trials: Sequence[Trial]) -> None:
        """Restores what earlier starts of the run stored: the incumbent, their answers and their trials. Kernels that
        already have a trial are not judged again.

        The trials on this problem that are there at the first start become attempts, if their texts still exist. Later
        starts restore the same ones, and not those that other sessions have stored since.
        """
        history = self.chat.history
        begun_with = history.state(self.problem, BEGUN_WITH)
        self._answers = deque(history.answers(self.problem))
        if fields := history.state(self.problem, INCUMBENT):
            with suppress(UserError):  # the record is illegal by today's rules, or its text is gone
                self.incumbent = parse(fields)
        for trial in trials:
            if trial.problem != self.problem or trial.proposer != PROPOSER or trial.environment != self.executor.name:
                continue
            key = _key(trial)
            if trial.run != self.run_name:
                self._other_trials[key] = trial
            if trial.run == self.run_name and self._answers:
                self._earlier_trials[key] = trial
            elif (begun_with is None or key in begun_with["trials"]) and (attempt := self._restored(trial)):
                self.attempts.append(attempt)
        if self._answers:
            self._say(f"resumes with {len(self._answers)} stored answers and {len(self._earlier_trials)} stored trials")

    def _restored(self, trial: Trial) -> Attempt | None:
        """The attempt of a stored trial; None if its record is illegal by today's rules, or its text is gone."""
        try:
            record = parse(trial.record)
            draft = Draft("incumbent", "", *kernel.as_text(record, ""))
        except UserError:
            return None
        return self._attempt_of_trial(draft, trial, record)

    def _attempt_of_trial(self, draft: Draft, trial: Trial, record: Record | None) -> Attempt:
        """The attempt of a stored trial, with the report and the counters that the transcript has of it."""
        state = self.chat.history.state(self.problem, _key(trial)) or {}
        report = state.get("report") or trial.reason
        proven = CheckResult(trial.outcome, trial.reason, report, counters=state.get("counters") or {})
        return Attempt(draft, trial, proven, record, reward.of_written(trial, self.limits.weights, self._best))

    def run(self) -> list[Attempt]:
        """Runs all rounds and returns all attempts. Rounds that were answered in earlier starts count."""
        if self.chat.history.state(self.problem, INCUMBENT) is None:
            self.chat.keep(self.problem, INCUMBENT, self.incumbent.model_dump(mode="json"))
            keys = [_key(attempt.trial) for attempt in self.attempts]
            self.chat.keep(self.problem, BEGUN_WITH, {"trials": keys})
        idle, number = 0, 1
        failure: Unavailable | None = None  # why the last question got no answer
        while number <= self.limits.rounds and idle < self.limits.patience:
            before, is_replay = len(self.attempts), bool(self._answers)
            try:
                self._round(number)
                number, failure = number + 1, None
            except Unavailable as error:
                is_backing_off = isinstance(error, NotSent) and not error.for_good
                failure = (self.chat.failure or error) if is_backing_off else error
                self._say(str(error))
                if error.for_good:
                    self.unavailable = error
                    break
                if self._wait_for_server():
                    continue
                self.pause(error.retry_after or MIN_BACKOFF_S)
            idle = 0 if len(self.attempts) > before else idle + 1
            if is_replay and idle == self.limits.patience:
                idle = 0  # an earlier start ended here, out of patience; this start counts anew
        if idle >= self.limits.patience:
            self._say(f"ends after {idle} questions without a new kernel; the same command asks as many again")
            self.unavailable = failure
        self._learn()
        return self.attempts

    def _wait_for_server(self) -> bool:
        """Waits for a server that is limited or overloaded. Returns whether to ask it again now."""
        waiting = "waits {:.0f} s, after which the server may be asked again"
        return self.chat.wait_for_server(lambda: False, lambda seconds: self._say(waiting.format(seconds)))

    def _round(self, number: int) -> None:
        """One question with its corrections. Raises Unavailable."""
        self._guest = self._invite(number)
        bases, wanted = self._bases(), self.limits.kernels
        speeds = {label: self._speed(attempt) for label, attempt in self._contrast().items()}
        self._best = max([1.0, *speeds.values()])

        def question() -> Messages:
            messages = Message("system", kernel_prompt.system()), Message("user", self._question(bases))
            self._keep_bases(messages, bases, speeds)
            return messages

        def read(reply: Reply) -> ReadAnswer:
            nonlocal wanted
            drafts, faults = kernel_answers.drafts(reply, bases, wanted)
            rewards = [self.limits.weights.failed] * len(faults)
            earlier = len(self.attempts)
            refused, copy_rewards = self._judge_drafts(drafts, number)
            faults += refused
            wanted -= len(drafts) - len(refused)
            again = bool(faults) and wanted > 0
            if again and not self._answers:
                for fault in dict.fromkeys(faults):
                    self._say(fault)
            correction = kernel_prompt.correction(faults, wanted) if again else ""
            return self._reading(self.attempts[earlier:], [*rewards, *copy_rewards], faults, correction)

        Conversation(
            self.chat, self.problem, kernel_answers.schema(), self._say,
            stored=self._answers, ask_again=self._ask_again,
        ).hold(question, read)  # fmt: skip

    def _ask_again(self, error: Unavailable) -> bool:
        """Whether to repeat a question of the current round after a failure; waits for the server first."""
        if error.for_good or not self._wait_for_server():
            return False
        self._say(str(error))
        return True

    def _keep_bases(self, messages: Messages, bases: dict[str, Base], speeds: dict[str, float]) -> None:
        """Stores the kernels that a question shows, which ``rewarding`` needs to score other answers to it."""
        digest = ChatRequest(messages, kernel_answers.schema()).digest
        for base in bases.values():
            catalog.keep_text(base.text, places.user_data() / "sources", device_text.digest(base.text))
        content = {
            label: {"text": device_text.digest(base.text), "launch": base.launch, "speed": speeds.get(label, 1.0)}
            for label, base in bases.items()
        }
        if self.chat.history.state(self.problem, f"{BASES}{digest}") is None:
            self.chat.keep(self.problem, f"{BASES}{digest}", content)

    def _reading(
        self, attempts: Sequence[Attempt], other_rewards: Sequence[float], faults: Sequence[str], correction: str
    ) -> ReadAnswer:
        """The outcome of an answer. Its reward is the mean over its new kernels (``attempts``) and ``other_rewards``,
        those of copies and of drafts that could not be read. ``correction``: the message that asks for better kernels;
        empty for none."""
        rewards = [*(attempt.reward for attempt in attempts), *other_rewards] or [self.limits.weights.failed]
        fields = [attempt.trial.record for attempt in attempts]
        right = bool(attempts) and not other_rewards and all(attempt.trial.measured for attempt in attempts)
        return ReadAnswer(fields, sum(rewards) / len(rewards), "; ".join(faults), correction, right)

    def _speed(self, attempt: Attempt) -> float:
        """The speed of a measured kernel over the incumbent's."""
        return reward.over_incumbent(attempt.trial, self.limits.weights)

    def _say(self, text: str) -> None:
        """Reports a line about progress."""
        self.say(f"writer: {text}")

    def _judge_drafts(self, drafts: Sequence[Draft], number: int) -> tuple[list[str], list[float]]:
        """Judges the drafts of round ``number``. Returns the faults of copies and illegal drafts, and the rewards of
        copies."""
        faults, copy_rewards = [], []
        for draft in drafts:
            attempt = self._judge.judge(draft, self._best)
            if isinstance(attempt, CopiedText):
                faults.append("a kernel was tried before: its machine code and launch are those of an earlier one")
                copy_rewards.append(attempt.reward)
                continue
            self.attempts.append(attempt)
            self.lead.offer(attempt)
            if self._earlier_trials.pop(_key(attempt.trial), None) is None:
                self._keep(attempt)
                self.say(f"round {number}: {_attempt_line(attempt)}")
            if attempt.record is None:
                faults.append(f"a kernel is illegal: {attempt.trial.reason}")
        return faults, copy_rewards

    def _keep(self, attempt: Attempt) -> None:
        """Stores what a restart needs of an attempt. The trial is stored last: once it exists, a restart does not judge
        the text again."""
        details = {"report": attempt.proof.report, "counters": attempt.proof.counters}
        if any(details.values()):
            self.chat.keep(self.problem, _key(attempt.trial), details)
        self.store([attempt.trial])

    def _earlier_attempt(self, draft: Draft, record: Record) -> Attempt | None:
        """The attempt of an earlier start with this draft, if it has a trial."""
        trial = self._earlier_trials.get(_key(self._judge.trial(record, "measured", CheckResult("measured"))))
        return None if trial is None else self._attempt_of_trial(draft, trial, record)

    # The question

    def _invite(self, number: int) -> Attempt | None:
        """The fastest kernel of the problem's other sessions, if it is faster than this session's own; else None.

        It is stored by its key, so that a restart, which reads the stored answer of round ``number``, finds the kernel
        that the answer may change.
        """
        if self._answers:
            state = self.chat.history.state(self.problem, f"{GUEST}{number}") or {}
            trial = self._other_trials.get(state.get("trial", ""))
            guest = self._restored(trial) if trial else None
        else:
            fastest, own = self.lead.fastest, self.ranked
            is_faster = fastest is not None and (not own or fastest.trial.cost < own[0].trial.cost)
            guest = fastest if is_faster else None
            self.chat.keep(self.problem, f"{GUEST}{number}", {"trial": _key(guest.trial) if guest else ""})
        if guest is not None:
            self._judge.add_known(guest.draft, guest.trial)
        return guest

    def _bases(self) -> dict[str, Base]:
        """The texts in a prompt by label: the incumbent and the kernels of ``_contrast``."""
        named = {label: Base(attempt.draft.text, attempt.draft.launch) for label, attempt in self._contrast().items()}
        return {"incumbent": self.base} | named

    def _contrast(self) -> dict[str, Attempt]:
        """The fastest kernel and those that ``exemplars`` draws, by label. A guest takes the place of the last of them.

        Labels are "best" with a running number for the fastest and for those at least as fast as the incumbent, and
        "slow" with one for the others.
        """
        first, rest = self.ranked[:1], self.ranked[1:]
        drawn = exemplars.draw([self._speed(item) for item in rest], MAX_DRAWN, f"{self.run_name} {len(self.attempts)}")
        shown = [*first, *(rest[index] for index in drawn)]
        if self._guest is not None:
            shown = [self._guest, *shown[:MAX_DRAWN]]
        labelled: dict[str, Attempt] = {}
        counts: Counter[str] = Counter()
        for attempt in shown:
            kind = "best" if attempt is shown[0] or self._speed(attempt) >= 1 else "slow"
            counts[kind] += 1
            labelled[f"{kind}{counts[kind]}"] = attempt
        return labelled

    def _question(self, bases: dict[str, Base]) -> str:
        """The text of the next question. ``bases``: texts that an answer's patches may change, by name."""
        variants = sorted(self._variants(), key=lambda pair: pair[0])
        ordered = [variant._replace(is_complete=number < MAX_COMPLETE) for number, (_, variant) in enumerate(variants)]
        modelled = "modelled from machine code, not measured" if self.executor.name == "model" else "measured"
        notes = self.memory.recall(self.problem, self.limits.tokens)
        failures = [self._failed_kernel(attempt, bases) for attempt in self._failures()]
        clock = f"{modelled} ({self.executor.on})"
        return kernel_prompt.question(self.problem, ordered, failures, notes, clock, self.limits.kernels)

    def _variants(self) -> Iterator[tuple[float, kernel_prompt.ShownKernel]]:
        """The kernels of a prompt: the incumbent and ``_contrast``, each with its cost, by which they are sorted."""
        reference = next((attempt.trial.timing(INCUMBENT) for attempt in self.ranked), None)
        profiled = self.profiler.profile(self.incumbent_text)
        us = reference.median_us if reference else None
        if us is None and not isinstance(profiled, str) and profiled.time:
            us = profiled.time.us
        text, launch = self.base
        yield 1.0, kernel_prompt.ShownKernel(
            "incumbent", f"{us:.2f} us" if us else "not timed yet", "", launch, text,
            [*evidence.lines(self.incumbent_text, profiled, self._counters), *self._device_metrics(self.incumbent)],
            evidence.listing(profiled),
        )  # fmt: skip
        for label, attempt in self._contrast().items():
            assert attempt.record is not None
            profiled = self.profiler.profile(attempt.record)
            yield attempt.trial.cost, kernel_prompt.ShownKernel(
                label, _time_in_words(attempt.trial), attempt.draft.why, attempt.draft.launch, attempt.draft.text,
                [
                    *evidence.lines(attempt.record, profiled, attempt.proof.counters),
                    *self._device_metrics(attempt.record),
                ],
                evidence.listing(profiled) if label == "best1" else (),
            )  # fmt: skip

    @cached_property
    def _counters(self) -> dict[str, float]:
        """The counters in the emulator's stored verdict on the incumbent; empty without one."""
        artifact = compiler.attempt([self.incumbent])[0]
        if not isinstance(artifact, Artifact):
            return {}
        verdict = results.verdict(artifact.digest, "emulator")
        return dict(verdict.counters) if verdict else {}

    def _device_metrics(self, record: Record) -> Sequence[str]:
        """The lines of the device's profiler, which is run once for each record."""
        if record.kernel_key not in self._metrics:
            self._metrics[record.kernel_key] = self.metrics(record)
        return self._metrics[record.kernel_key]

    def _failures(self) -> list[Attempt]:
        """The last failures, each reason once."""
        kept: dict[str, Attempt] = {}
        for attempt in reversed(self.attempts):
            if not attempt.trial.measured:
                kept.setdefault(attempt.trial.reason, attempt)
        return list(kept.values())[:MAX_FAILURES]

    def _failed_kernel(self, attempt: Attempt, bases: dict[str, Base]) -> kernel_prompt.FailedKernel:
        """A failure for a prompt, as the difference of its text from its base's, or from the incumbent's if the prompt
        does not show its base."""
        base = attempt.draft.base if attempt.draft.base in bases else "incumbent"
        # Texts of illegal drafts, which may be attacks, are not shown, because prompts become training data.
        diff = kernel_prompt.difference(bases[base].text, attempt.draft.text) if attempt.record else ""
        report = attempt.report[: kernel_prompt.LONGEST_REPORT]
        return kernel_prompt.FailedKernel(
            attempt.trial.outcome, attempt.trial.reason, attempt.draft.why, report, base, diff
        )

    # Lessons

    def _learn(self) -> None:
        """Writes a note on the winner, and one on each recent failure, so that it is not tried again."""
        notes = [self._note(f"{_time_in_words(attempt.trial)}", attempt) for attempt in filter(None, [self.winner])]
        notes += [self._note(f"failed, {attempt.trial.outcome}", attempt) for attempt in self._failures()]
        for note in notes:
            self.memory.keep(note)

    def _note(self, how: str, attempt: Attempt) -> Note:
        """The note that the memory keeps of an attempt. ``how``: how it ended."""
        trial = attempt.trial
        return Note(
            title=f"A written kernel, {how}",
            text=f"{attempt.draft.why} {trial.reason}".strip(),
            gpus=(self.problem.gpu,),
            classes=(self.problem.size_class,),
            source="cudal2gen write",
            measured=f"yes, on {trial.on}" if self.executor.name == "gpu" else f"no: {trial.on}",
            problem=self.problem.title,
            changes=json.dumps({"text": device_text.digest(attempt.draft.text), "outcome": trial.outcome}),
        )


def _time_in_words(trial: Trial) -> str:
    """A trial's time, and how it compares with the incumbent's."""
    ratio = trial.faster_than(INCUMBENT)
    times = f", {ratio.value:.3f} times as fast as the incumbent" if ratio else ""
    return f"{trial.median_us:.2f} us{times}"


def _attempt_line(attempt: Attempt) -> str:
    """An attempt in one line."""
    trial = attempt.trial
    how = _time_in_words(trial) if trial.measured else trial.reason
    return f"{trial.outcome}: {how}; reward {attempt.reward:.3f}"


def _key(trial: Trial) -> str:
    """A key that is equal for trials of the same text with the same launch."""
    fields = {name: value for name, value in trial.record.items() if name != "origin"}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode(errors="surrogatepass")).hexdigest()[:32]
