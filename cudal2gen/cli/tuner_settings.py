"""Reads the settings file of the tuner's verbs.

It is a TOML file for limits, weights and prices that most runs leave at their defaults, so that they need no options of
their own on the command line.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cudal2gen.kernel import explain
from kernelproof.ground.errors import WrongInput, reading

if TYPE_CHECKING:
    from cudal2gen.tuner.reward import RewardWeights

SettingsFile = Annotated[
    Path | None, typer.Option("--settings", metavar="FILE", help="TOML file with rarely changed settings.")
]


class _Table(BaseModel):
    """A table of the file. An unknown field is an error; otherwise a misspelt one would silently have no effect."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class SearchSettings(_Table):
    """``[search]``: how trials are run."""

    patience: int | None = Field(
        default=None, ge=1, description="End a problem after so many trials without an improvement."
    )
    batch_seconds: float = Field(default=300.0, ge=1, description="Seconds after which a batch of trials is ended.")
    ray: str = Field(
        default="", description="Measure on a Ray cluster: its host:port, or local to start one on this machine."
    )


class RewardSettings(_Table):
    """``[reward]``: what written kernels and the exported training data are rewarded for."""

    alpha: float = Field(default=0.01, ge=0, description="Weight of the largest error.")
    beta: float = Field(default=0.0, ge=0, description="Cost of a character of the source.")
    lower_bound: bool = Field(default=False, description="Speed is the lower end of its 95 % interval, not its median.")

    @property
    def weights(self) -> RewardWeights:
        """The settings as the tuner takes them."""
        from cudal2gen.tuner.reward import RewardWeights

        return RewardWeights(self.alpha, self.beta, self.lower_bound)


class LlmSettings(_Table):
    """``[llm]``: limits, costs and files of the exchanges with a language model."""

    key: str = Field(default="CUDAL2GEN_LLM_KEY", description="Environment variable that holds the server's key.")
    seconds: float = Field(default=900.0, ge=0.1, description="Seconds for an answer.")
    max_tokens: int = Field(default=32768, ge=1, description="Tokens of an answer, its reasoning included.")
    temperature: float | None = Field(
        default=None, ge=0, le=2, description="Sent if set; otherwise the server's default."
    )
    reasoning_effort: str = Field(default="", description="Sent if set, such as low or high.")
    extra_body: dict[str, Any] = Field(default={}, description="Further fields of each request.")
    stream: bool = Field(default=True, description="Ask for a stream, which no proxy cuts for silence.")
    token_budget: int | None = Field(default=None, ge=1, description="Tokens in and out of a run, over all its starts.")
    problem_tokens: int | None = Field(default=None, ge=1, description="Tokens in and out of a problem in a run.")
    price_in: float = Field(default=0.0, ge=0, description="Price of a million tokens in.")
    price_out: float = Field(default=0.0, ge=0, description="Price of a million tokens out.")
    transcript: Path | None = Field(default=None, description="File of all exchanges; by default beside the trials.")
    replay: Path | None = Field(default=None, description="Transcript to take the answers from, in place of a server.")


class WritingSettings(_Table):
    """``[write]``: limits of kernels that a language model writes."""

    kernels: int = Field(default=3, ge=1, le=16, description="Kernels of an answer.")
    trajectories: int = Field(default=1, ge=1, description="Sessions of each problem, which draw differently.")
    at_once: int = Field(default=64, ge=1, description="Sessions at a time, of all problems.")
    check_seconds: float = Field(default=120.0, ge=1, description="Seconds for each check of a written kernel.")


class TunerSettings(_Table):
    """The whole file. A missing table or field has its default."""

    search: SearchSettings = SearchSettings()
    reward: RewardSettings = RewardSettings()
    llm: LlmSettings = LlmSettings()
    write: WritingSettings = WritingSettings()


def load(path: Path | None) -> TunerSettings:
    """The settings that a file contains; without a file, the defaults. Raises WrongInput."""
    if path is None:
        return TunerSettings()
    with reading(path):
        text = path.read_text(encoding="utf-8")
    try:
        return TunerSettings.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise WrongInput(f"{path}: {error}; write TOML, such as [search] and below it patience = 16") from None
    except ValidationError as error:
        unknown = [".".join(map(str, item["loc"])) for item in error.errors() if item["type"] == "extra_forbidden"]
        if unknown:
            raise WrongInput(f"{path}: no settings {', '.join(unknown)}; there are {', '.join(names())}") from None
        raise WrongInput(f"{path}: {explain(error)}") from None


def names() -> list[str]:
    """All fields of the file, as ``table.field``."""
    return [
        f"{table}.{field}"
        for table, settings in TunerSettings.model_fields.items()
        for field in type(settings.default).model_fields
    ]
