"""Defines the options and files that verbs of the tuner (``tune``, ``write``, ``export``) share.

``Trials`` says where trials run and where they are stored. ``LanguageModel`` connects to a language model's server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cudal2gen import places
from cudal2gen.cli import tuner_settings
from cudal2gen.cli.tuner_settings import SettingsFile, TunerSettings
from cudal2gen.kernel import Problem, Record
from kernelproof.ground.command_line.messages import note, refuse
from kernelproof.ground.errors import MissingTool, installation

if TYPE_CHECKING:
    from cudal2gen.results import Source
    from cudal2gen.tuner.environment import Replay
    from cudal2gen.tuner.executor import Executor
    from cudal2gen.tuner.language_model.chat import Chat
    from cudal2gen.tuner.language_model.server import Endpoint
    from cudal2gen.tuner.language_model.transcript import Usage
    from cudal2gen.tuner.llm_proposer import LlmProposer
    from cudal2gen.tuner.memory import Memory

ModelServer = Annotated[
    str,
    typer.Option(
        "--llm",
        metavar="NAME@URL",
        help="Language model: its name at a chat-completions server, whose URL ends in /v1. write takes several, "
        "separated by commas.",
    ),
]
RECORDINGS = "github.com/AlnisM/autoheuristic-datasets, unpacked"


@dataclass(frozen=True)
class Trials:
    """The options that say where trials run and where they are stored."""

    chosen: Annotated[
        Literal["gpu", "model"],
        typer.Option(
            "--environment",
            help="gpu: measure. model: ask an analytic model with hidden terms, without a GPU; its gains never enter "
            "the catalog.",
        ),
    ] = "gpu"
    file: Annotated[
        Path | None, typer.Option("--trials", metavar="FILE", help="File of trials to continue, in place of the store.")
    ] = None
    recordings: Annotated[
        tuple[Path, ...],
        typer.Option(
            "--recordings",
            metavar="PATH",
            help=f"Recorded trials: files of trials (*.jsonl), or AutoHeuristic's files ({RECORDINGS}). Repeatable.",
        ),
    ] = ()
    device: int = 0  # CUDA's index of the card, from --gpu
    settings_file: SettingsFile = None

    @cached_property
    def settings(self) -> TunerSettings:
        """The settings file's content. Raises WrongInput."""
        return tuner_settings.load(self.settings_file)

    @property
    def environment(self) -> Source:
        """Where the times of trials come from: recordings if any are named, otherwise ``chosen``."""
        return "replay" if self.recordings else self.chosen

    @property
    def store(self) -> Path:
        """The file of trials. Trials of a model and of recordings are kept apart from measured ones."""
        from cudal2gen import results

        if self.file is not None:
            return self.file
        if self.environment == "gpu":
            return results.store("trials")
        name = "modelled-trials.jsonl" if self.environment == "model" else "replayed-trials.jsonl"
        return places.build_dir() / "tuner" / name

    @property
    def transcript(self) -> Path:
        """The file that records the exchanges with a language model; by default it lies beside the trials."""
        return self.settings.llm.transcript or self.store.with_name(f"{self.store.stem}-llm.jsonl")

    def replay(self, admits: Callable[[Problem], bool]) -> Replay:
        """The recorded trials of the problems that ``admits``. Ends the command if other options contradict."""
        from cudal2gen.tuner import recorded
        from cudal2gen.tuner.environment import Replay

        if self.chosen == "model" or self.settings.search.ray:
            refuse(
                "--recordings: recorded trials are searched on this machine and without other trials; leave out "
                "--environment model and search.ray"
            )
        return Replay(recorded.trials(self.recordings, admits))

    def executor(self, records: Sequence[Record], seed: int) -> Executor:
        """The executor for the environments gpu and model. ``records``: the catalog, whose kernels are the incumbents.
        Ends the command if a device or Ray is missing."""
        return self._ray(records, seed) if self.settings.search.ray else self._local(records, seed)

    def _local(self, records: Sequence[Record], seed: int) -> Executor:
        """The executor on this machine. Measurements run in a separate process, since a kernel that hangs can only be
        stopped by ending its process."""
        from cudal2gen.tuner import campaign, executor
        from cudal2gen.tuner.environment import ModelEnvironment

        if self.environment == "model":
            return executor.InProcess(ModelEnvironment(campaign.Incumbents(records), seed))
        from cudal2gen.launch import gpu
        from cudal2gen.tuner import on_gpu

        # Raises here, before a process is started, if torch or the device is missing.
        card = gpu.connect(self.device)
        if not card.environment.gpu:
            note(f"{card.facts.text} has no records of its own: trials are stored under its name, no record is written")
        connect = partial(on_gpu.connect, self.device, campaign.Incumbents(records), seed)
        return executor.Worker(connect, self.settings.search.batch_seconds, on_gpu.build)

    def _ray(self, records: Sequence[Record], seed: int) -> Executor:
        """The executor on a Ray cluster: on its GPUs, or on its CPUs for the model environment."""
        from cudal2gen.tuner import campaign, on_gpu, ray_executor
        from cudal2gen.tuner.environment import ModelEnvironment

        incumbents, seconds = campaign.Incumbents(records), self.settings.search.batch_seconds
        address = self.settings.search.ray
        try:
            if self.environment == "model":
                model = partial(ModelEnvironment, incumbents, seed)
                return ray_executor.RayExecutor(model, address, resource="CPU", seconds=seconds)
            return ray_executor.RayExecutor(
                partial(on_gpu.connect, 0, incumbents, seed),  # the one GPU that Ray shows to the worker
                address,
                ray_executor.compiled,
                seconds=seconds,
                keep=ray_executor.keep_verdicts,
            )
        except ImportError:
            raise MissingTool(f"search.ray in --settings needs Ray: {installation('ray')}") from None


@dataclass(frozen=True)
class LanguageModel:
    """The language model of a run. ``server``: its name and address, NAME@URL. ``trials``: the options of the run."""

    server: str
    trials: Trials

    def interruption(self, usage: Usage, store: Path) -> str:
        """The message after an interruption: what is stored, and how to resume. ``store``: the file of trials."""
        answers = "" if self.trials.settings.llm.replay else f"; answers are in {self.trials.transcript}, after {usage}"
        return f"interrupted: trials are in {store}{answers}; the same command continues from there"

    def cost(self, usage: Usage) -> str:
        """A line that says what the exchanges cost and where they are recorded."""
        return f"llm: {usage}; transcript: {self.trials.settings.llm.replay or self.trials.transcript}"

    def proposer(self, lessons: Memory, pool: Sequence[Record], run: str, alone: bool = False) -> LlmProposer:
        """The proposer of a run. Raises WrongInput and MissingLibrary.

        ``lessons``: notes for its questions. ``pool``: records among which similar problems are found. ``run``: the
        run's name in the transcript. ``alone``: no other proposer takes part in the search.

        A GPU must not wait for answers, so exchanges run while it measures. Trials of a model or of recordings cost
        nothing, so they wait for each answer. If trials are measured, questions also show machine code, because the
        kernels are built anyway.
        """
        from cudal2gen.tuner.llm_proposer import LlmProposer

        measured = self.trials.environment == "gpu"
        return LlmProposer(
            self.chat(run), lessons, pool, alone=alone,
            in_background=measured and self.trials.settings.llm.replay is None,
            evidence=_code_describer() if measured else None,
        )  # fmt: skip

    def chat(self, run: str) -> Chat:
        """The connection over which a run asks the model. ``run``: the run's name in the transcript. Raises WrongInput
        and MissingLibrary."""
        from cudal2gen.tuner.language_model import chat

        settings = self.trials.settings.llm
        return chat.connect(
            self._endpoint, self.trials.transcript, settings.replay, settings.token_budget, run, settings.problem_tokens
        )

    @property
    def _endpoint(self) -> Endpoint:
        """The server that NAME@URL and the settings describe."""
        from cudal2gen.tuner.language_model.server import Endpoint

        name, _, url = self.server.rpartition("@")
        settings = self.trials.settings.llm
        return Endpoint.from_environment(
            url, name, settings.key, seconds=settings.seconds, max_tokens=settings.max_tokens,
            temperature=settings.temperature, reasoning_effort=settings.reasoning_effort,
            extra_body=settings.extra_body, stream=settings.stream, price_in=settings.price_in,
            price_out=settings.price_out,
        )  # fmt: skip


def _code_describer() -> Callable[[Record], list[str]]:
    """A function that describes a record's machine code in lines, for questions to the model.

    If the CUDA toolkit is missing, the only line says so.
    """
    from cudal2gen.tuner.writing import evidence
    from cudal2gen.tuner.writing.modelled import Profiler

    profiler = Profiler()

    def lines(record: Record) -> list[str]:
        try:
            return evidence.lines(record, profiler.profile(record), {})
        except MissingTool as error:
            return [str(error)]

    return lines
