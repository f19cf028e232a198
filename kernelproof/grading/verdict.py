"""Defines the result of a grade: whether a source is right, which rules it breaks, and the evidence for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

from kernelproof.grading import rules

Evidence = int | float | str | bool | list[int] | list[str] | dict[str, int] | None


class Finding(BaseModel):
    """A broken rule.

    ``kernel`` is the kernel that breaks it, if it is a single one, and ``shape`` the problem size that shows it.
    ``evidence``: values by name; docs/kernelproof/grading.md lists them for each rule. ``hint`` and ``page`` are
    those of the rule.
    """

    model_config = ConfigDict(frozen=True)
    rule: str
    message: str
    kernel: str = ""
    shape: dict[str, int] = {}
    evidence: dict[str, Evidence] = {}
    hint: str = ""
    page: str = ""

    @classmethod
    def of(
        cls, rule: str, message: str, kernel: str = "", shape: Mapping[str, int] | None = None, **evidence: Evidence
    ) -> Finding:
        """Make a finding with the hint and the page of its rule."""
        return cls(
            rule=rule, message=message, kernel=kernel, shape=dict(shape or {}), evidence=evidence,
            hint=rules.rule(rule).hint, page=rules.page(rule),
        )  # fmt: skip


class CountedKernel(BaseModel):
    """A kernel, as it ran in the first call of the largest shape.

    ``ctas`` counts the CTAs of all launches together, ``instructions`` the executions per warp. ``flops`` is an upper
    bound of the kernel's floating-point operations; ``mma_flops`` is the part of it that tensor cores execute.
    """

    name: str
    launches: int = 0
    ctas: int = 0
    instructions: int = 0
    flops: int = 0
    mma_flops: int = 0


class Verdict(BaseModel):
    """The grade of a source.

    - ``right``: all shapes and inputs were executed and compared, and no rule is broken.
    - ``outcome`` also distinguishes a wrong source from one that could not be checked; ``not_checked`` says why.
    - ``remarks`` are no errors: benign findings, lints, and checks that were left out.
    - ``kernels``: those that ran. ``shapes``: the stated ones, then the drawn ones. ``device``: the emulated GPU.
    - ``calls``: how often the launches were executed. ``seconds``: how long the grade took.
    - ``floor_us``: the least time in microseconds that the GPU needs for each stated shape, if a GPU is named.
    """

    version: Literal[1] = 1
    right: bool
    outcome: Literal["right", "wrong", "not checked"]
    findings: list[Finding] = []
    not_checked: list[str] = []
    remarks: list[str] = []
    kernels: list[CountedKernel] = []
    shapes: list[dict[str, int]] = []
    calls: int = 0
    device: str = ""
    floor_us: list[float] = []
    seconds: float = 0.0

    @property
    def rules(self) -> set[str]:
        """The ids of the broken rules."""
        return {finding.rule for finding in self.findings}

    def __bool__(self) -> bool:
        return self.right

    def __str__(self) -> str:
        lines = [
            f"{self.outcome}: {len(self.shapes)} shapes, {self.calls} calls on {self.device}, {self.seconds:.1f} s"
        ]
        lines += [f"error[{item.rule}]: {item.message}" for item in self.findings]
        lines += [f"not checked: {reason}" for reason in self.not_checked]
        return "\n".join([*lines, *(f"note: {text}" for text in self.remarks)])
