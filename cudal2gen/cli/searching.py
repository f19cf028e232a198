"""Options of tune: where trials run, what is rewarded, which language model proposes. Each group makes its part."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cudal2gen import places
from cudal2gen.cli.options import Device
from cudal2gen.generation import catalog
from cudal2gen.kernel import Acc, Problem, Record
from kernelproof.ground.command_line.messages import note, refuse
from kernelproof.ground.errors import MissingTool

if TYPE_CHECKING:
    from cudal2gen.tuner import reward
    from cudal2gen.tuner.chat import Chat, Endpoint
    from cudal2gen.tuner.environment import Replay
    from cudal2gen.tuner.executor import Executor
    from cudal2gen.tuner.llm import Llm
    from cudal2gen.tuner.memory import Memory
    from cudal2gen.tuner.policy import Policy
    from cudal2gen.tuner.transcript import Usage


@dataclass(frozen=True)
class Trials:
    """Where trials run, and where they are kept."""

    chosen: Annotated[
        Literal["gpu", "replay", "model"] | None,
        typer.Option(
            "--environment",
            help="gpu (the default) measures; replay searches among recorded trials; model is an analytic model with "
            "hidden terms, for trying the tuner itself: its gains never go into the catalog.",
        ),
    ] = None
    file: Annotated[Path | None, typer.Option("--trials", help="The file of trials to add to, and to replay from.")] = (
        None
    )
    recordings: Annotated[
        tuple[Path, ...],
        typer.Option(
            "--recordings",
            metavar="PATH",
            help="For replay, --train and --benchmark: files of trials (*.jsonl), or AutoHeuristic's files or folders "
            "(github.com/AlnisM/autoheuristic-datasets, unpacked). Repeatable.",
        ),
    ] = ()
    workers: Annotated[
        Literal["local", "ray"],
        typer.Option("--executor", help="local: beside this process; ray: on the GPUs of a Ray cluster."),
    ] = "local"
    address: Annotated[
        str | None,
        typer.Option("--address", help="Address of the Ray cluster, host:port; without it one is started here."),
    ] = None
    device: Device = 0
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds for a batch before it is ended.")] = 300.0

    @property
    def environment(self) -> Literal["gpu", "replay", "model"]:
        """What answers trials."""
        return self.chosen or "gpu"

    @property
    def store(self) -> Path:
        """The file of trials. Trials of a model are kept apart from measured ones."""
        from cudal2gen import results

        if self.file is not None:
            return self.file
        if self.environment == "model":
            return places.build_dir() / "tuner" / "modelled-trials.jsonl"
        if self.environment == "replay" and self.recordings:
            return places.build_dir() / "tuner" / "replayed-trials.jsonl"
        return results.store("trials")

    def replay(self, admits: Callable[[Problem], bool]) -> Replay:
        """The recorded trials of problems that ``admits``: of ``--recordings``, else of the file of trials."""
        from cudal2gen import results
        from cudal2gen.tuner import recorded
        from cudal2gen.tuner.environment import Replay

        if self.workers == "ray":
            refuse("--executor ray: is for --environment gpu or model, not replay")
        if self.recordings:
            return Replay(recorded.trials(self.recordings, admits))
        trials = [trial for trial in results.trials(self.store) if admits(trial.problem)]
        if not trials:
            refuse(
                f"--environment replay: no trials in {self.store}; record some with --environment gpu, or name files "
                "with --recordings"
            )
        return Replay(trials)

    def executor(self, records: Sequence[Record], seed: int) -> Executor:
        """What carries out trials, for the environments gpu and model. Ends the command where a device or Ray is
        missing."""
        return self._ray(records, seed) if self.workers == "ray" else self._local(records, seed)

    def _local(self, records: Sequence[Record], seed: int) -> Executor:
        """Measurements run in a process of their own, which may be ended."""
        from cudal2gen.tuner import campaign, executor
        from cudal2gen.tuner.environment import Model

        if self.environment == "model":
            return executor.InProcess(Model(campaign.Incumbents(records), seed))
        from cudal2gen.launch import gpu
        from cudal2gen.tuner import on_gpu

        # Raises here, before a process is started, where torch or the device is missing.
        card = gpu.connect(self.device)
        if not card.environment.gpu:
            note(f"{card.facts.text} has no records of its own: trials are stored under its name, no record is written")
        connect = partial(on_gpu.connect, self.device, campaign.Incumbents(records), seed)
        return executor.Worker(connect, self.timeout, on_gpu.build)

    def _ray(self, records: Sequence[Record], seed: int) -> Executor:
        """On a Ray cluster's GPUs, or, for the model environment, on its CPUs."""
        from cudal2gen.tuner import campaign, on_gpu, ray_executor
        from cudal2gen.tuner.environment import Model

        incumbents = campaign.Incumbents(records)
        try:
            if self.environment == "model":
                model = partial(Model, incumbents, seed)
                return ray_executor.RayExecutor(model, self.address, resource="CPU", seconds=self.timeout)
            return ray_executor.RayExecutor(
                partial(on_gpu.connect, 0, incumbents, seed),  # the one GPU that Ray shows to the worker
                self.address,
                ray_executor.compiled,
                seconds=self.timeout,
                keep=ray_executor.keep_verdicts,
            )
        except ImportError:
            raise MissingTool("--executor ray needs Ray: pip install 'cudal2gen[ray]'") from None


@dataclass(frozen=True)
class Reward:
    """What learning proposers are rewarded for."""

    alpha: Annotated[
        float, typer.Option(min=0, help="Reward: t_ref / t - alpha * largest error - beta * length of the source.")
    ] = 0.01
    beta: Annotated[float, typer.Option(min=0, help="Reward: cost of a character of the source.")] = 0.0
    lower_bound: Annotated[
        bool, typer.Option("--lower-bound", help="Reward: the lower end of the speed's 95 % interval, not its median.")
    ] = False

    @property
    def settings(self) -> reward.Settings:
        """The reward's settings."""
        from cudal2gen.tuner.reward import Settings

        return Settings(self.alpha, self.beta, self.lower_bound)


@dataclass(frozen=True)
class LanguageModel:
    """The server of proposer llm."""

    url: Annotated[
        str, typer.Option("--llm-url", help="For proposer llm: a server of the chat-completions protocol, to /v1.")
    ] = ""
    model: Annotated[str, typer.Option("--llm-model", help="The model's name there.")] = ""
    key: Annotated[
        str, typer.Option("--llm-key", metavar="VARIABLE", help="The environment variable that holds the key.")
    ] = "CUDAL2GEN_LLM_KEY"
    seconds: Annotated[float, typer.Option("--llm-timeout", min=0.1, help="Seconds for an answer.")] = 120.0
    most_tokens: Annotated[
        int, typer.Option("--llm-max-tokens", min=1, help="Tokens of an answer, its reasoning included.")
    ] = 8192
    temperature: Annotated[
        float | None, typer.Option("--llm-temperature", min=0, max=2, help="Without it the server's default.")
    ] = None
    token_budget: Annotated[
        int | None,
        typer.Option("--llm-budget", metavar="TOKENS", min=1, help="Tokens in and out of all starts of a run."),
    ] = None
    prices: Annotated[
        tuple[float, float], typer.Option("--llm-prices", help="Per million tokens in and out: cost is shown.")
    ] = (0.0, 0.0)
    transcript: Annotated[
        Path | None, typer.Option("--llm-transcript", help="File that every exchange is added to.")
    ] = None
    replay: Annotated[
        Path | None, typer.Option("--llm-replay", help="A transcript to take answers from, in place of a server.")
    ] = None

    def file(self, trials: Trials) -> Path:
        """The transcript: beside the trials if none is named."""
        return self.transcript or trials.store.with_name(f"{trials.store.stem}-llm.jsonl")

    def interrupted(self, usage: Usage, trials: Trials, store: Path) -> str:
        """What an interruption leaves stored, and how the run goes on. ``store``: the file of its trials."""
        answers = "" if self.replay else f"; answers are in {self.file(trials)}, after {usage}"
        return f"interrupted: trials are in {store}{answers}; the same command takes them up"

    def connect(self, lessons: Memory, trials: Trials, pool: Sequence[Record], run: str, alone: bool = False) -> Llm:
        """The proposer of a run. Exchanges run beside measurements, which a GPU must not wait for; trials of a model or
        a replay cost nothing, so these wait for each answer. Beside measurements questions show machine code, which is
        built anyway. Raises WrongInput and MissingLibrary."""
        from cudal2gen.tuner import llm

        measured = trials.environment == "gpu"
        return llm.connect(
            self._server, lessons, self.file(trials), self.replay, self.token_budget, pool,
            run=run, alone=alone, beside=measured and self.replay is None,
            evidence=_machine_code() if measured else None,
        )  # fmt: skip

    def chat(self, trials: Trials, run: str) -> Chat:
        """Exchanges of a run of any kind. Raises WrongInput and MissingLibrary."""
        from cudal2gen.tuner import chat

        return chat.connect(self._server, self.file(trials), self.replay, self.token_budget, run)

    @property
    def _server(self) -> Endpoint:
        from cudal2gen.tuner.chat import Endpoint

        return Endpoint.from_environment(
            self.url, self.model, self.key, seconds=self.seconds, max_tokens=self.most_tokens,
            temperature=self.temperature, price_in=self.prices[0], price_out=self.prices[1],
        )  # fmt: skip


def _machine_code() -> Callable[[Record], list[str]]:
    """What a record's machine code shows by the timing model, a line each; without the toolkit, why none."""
    from cudal2gen.tuner.writing import evidence
    from cudal2gen.tuner.writing.modelled import Profiler

    profiler = Profiler()

    def lines(record: Record) -> list[str]:
        try:
            return evidence.lines(record, profiler.profile(record), {})
        except MissingTool as error:
            return [str(error)]

    return lines


def load_policy(file: Path, records: Sequence[Record], acc: Acc, seed: int) -> Policy:
    """The policy of a checkpoint; without one, a policy that imitates published kernels, and its checkpoint."""
    from cudal2gen.tuner import checkpoint
    from cudal2gen.tuner.policy import Policy

    on_one_core()
    if file.is_file():
        return checkpoint.load(file, seed)
    published = catalog.published(records, acc)
    print(f"imitating {len(published)} published kernels, at most half a minute", file=sys.stderr, flush=True)
    policy = Policy(seed)
    policy.imitate(published, 30.0)
    checkpoint.save(policy, file)
    return policy


def on_one_core() -> None:
    """Keeps torch to one core, which is faster for the policy's small network; fails without torch."""
    from cudal2gen.tuner import policy

    try:
        policy.on_one_core()
    except ImportError:
        raise MissingTool(
            "the policy needs torch: pip install 'cudal2gen[tune]', or leave it out of --proposers"
        ) from None
