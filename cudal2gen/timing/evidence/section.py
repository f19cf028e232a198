"""Makes the report's section about the timing model from the output of ``cudal2gen model --json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from kernelproof.ground.errors import WrongInput
from kernelproof.ground.pages import Section, Table

PARTS = {
    "speedups": "Published speedups of CUDA-L2: rank correlation with [vendor's modelled time / ours]",
    "choices": "Published choices: share of legal candidates that the model takes for faster",
    "recorded": "Recorded timings of Triton: how much slower than the best tile the model's choice is, and its order "
    "of tiles",
    "tiles": "Published H100 configurations: how often the model's choice has the tile",
    "vendors": "Recorded timings, taken apart: order of speedups over cuBLAS with true and modelled times",
}
COLUMNS = ("data", "figure", "problems", "value", "95 %", "target", "baselines")


class Finding(NamedTuple):
    """A figure of the model, with the same figure of its baselines.

    ``part``: a key of ``PARTS``. ``subject``: the data. ``figure``: the name of the number, such as ``top-1 regret``.
    ``problems``: how many there are. ``low`` and ``high``: the 95 % bootstrap interval of ``value`` over problems.
    ``target``: what the value should reach, such as ``<= 0.10``; None for none. ``baselines``: the same figure of
    simpler predictors, by their names.
    """

    part: str
    subject: str
    figure: str
    problems: int
    value: float
    low: float
    high: float
    target: str | None
    baselines: dict[str, float]

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells of a table's row, under ``COLUMNS``."""
        baselines = ", ".join(f"{name} {value:.3f}" for name, value in self.baselines.items())
        span = f"{self.low:.3f} to {self.high:.3f}"
        return (self.subject, self.figure, str(self.problems), f"{self.value:.3f}", span, self.target or "", baselines)


def load(path: Path) -> list[Finding]:
    """The findings in a file. Raises WrongInput if the file has none."""
    try:
        return TypeAdapter(list[Finding]).validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise WrongInput(
            f"{path}: {error.strerror if isinstance(error, OSError) else 'holds no figures of a validation'}: write "
            "them by cudal2gen model --json"
        ) from None


def tables(rows: Sequence[Finding]) -> tuple[Table, ...]:
    """A table for each part that has findings."""
    return tuple(
        Table(title, COLUMNS, tuple(row.cells for row in rows if row.part == part))
        for part, title in PARTS.items()
        if any(row.part == part for row in rows)
    )


def section(rows: Sequence[Finding]) -> Section:
    """The section: how well the timing model predicts what others measured."""
    text = (
        "Predictions of the timing model are compared with measurements that others published: the order of problems "
        "(speedups), of candidates (choices, tiles) and of recorded tiles (recorded). Intervals are 95 % bootstraps "
        "over problems. Baselines are simpler predictors of the same figure."
    )
    return Section("validation", "The timing model against others' measurements", (text,), (), tables(rows))
