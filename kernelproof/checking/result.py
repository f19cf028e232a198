"""Holds the outcome of a check: what ran, what was found, how the program ended, and what could not be checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kernelproof.checking import text
from kernelproof.checking.findings import Cause, KernelLaunches
from kernelproof.checking.names import demangled, fitted, short_names
from kernelproof.emulator import Report
from kernelproof.emulator.state.causes import grouped
from kernelproof.emulator.state.findings_json import finding_fields
from kernelproof.ground.pages import counted

SCHEMA = 1
LONGEST_NAME = 80  # most characters of a kernel's name in the summary
# Exit codes of ``kernelproof check``.
CLEAN, ERRORS, NOT_CHECKED = 0, 1, 2


@dataclass
class Result:
    """The outcome of a check.

    - ``target``: the program's name; ``device``: that of the emulated GPU.
    - ``findings``: each distinct finding, with its count; ``ordered`` has one per cause. ``expected``: those that the
      user's list accepts.
    - ``kernels``: the launches of each kernel, by its mangled name.
    - ``refusals``: a kernel ("" for host code) and the reason why it could not be checked, with a count.
    - ``unsupported``: CUDA functions that the program called and that returned "not supported".
    - ``program_exit_code``: the program's exit code, -n after signal n, None if a limit ended the program.
    - ``ending``: how the program ended, as the rest of a sentence; empty if it ended by itself with exit code 0.
    - ``limited``: the kernel ("" for host code) that was running when a limit of time or memory ended the program; None
      if no limit was reached.
    - ``seconds``: how long the check took.
    """

    target: str
    device: str
    findings: dict[Cause, Report] = field(default_factory=dict)
    expected: list[Report] = field(default_factory=list)
    kernels: dict[str, KernelLaunches] = field(default_factory=dict)
    refusals: dict[tuple[str, str], int] = field(default_factory=dict)
    unsupported: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    program_exit_code: int | None = None
    ending: str = ""
    limited: str | None = None
    seconds: float = 0.0

    def add(self, finding: Report) -> None:
        """Add a finding, or its count to an earlier one of the same cause."""
        earlier = self.findings.get(finding.cause)
        if earlier is None:
            self.findings[finding.cause] = finding
        else:
            earlier.count += finding.count

    def refuse(self, kernel: str, reason: str) -> None:
        """Count a reason why a kernel, or "" for host code, could not be checked."""
        self.refusals[kernel, reason] = self.refusals.get((kernel, reason), 0) + 1

    @property
    def ordered(self) -> list[Report]:
        """One finding per cause, errors first."""
        return grouped(self.findings.values())

    @property
    def errors(self) -> list[Report]:
        """The errors, one per cause."""
        return [item for item in self.ordered if item.is_error]

    @property
    def code(self) -> int:
        """The exit code: 1 for errors or a failing program, 2 if something could not be checked, 0 otherwise.

        Errors count most: they were found, whatever else remains unchecked. A program that fails after an unsupported
        function may fail because of it, which says nothing about the program.
        """
        if self.errors:
            return ERRORS
        if self.refusals or self.limited is not None or (self.ending and self.unsupported):
            return NOT_CHECKED
        return ERRORS if self.ending else CLEAN

    def document(self) -> dict[str, Any]:
        """The result as JSON; docs/kernelproof/check.md describes the keys."""
        names = short_names(self.kernels)
        return {
            "schema": SCHEMA,
            "target": self.target,
            "device": self.device,
            "outcome": ("clean", "errors", "not checked")[self.code],
            "program_exit_code": self.program_exit_code,
            "ending": self.ending,
            "seconds": round(self.seconds, 3),
            "kernels": [
                {**asdict(kernel), "name": names[name], "full_name": demangled(name), "symbol": name,
                 "seconds": round(kernel.seconds, 4)}
                for name, kernel in self.kernels.items()
            ],
            "findings": [finding_fields(item) for item in self.ordered],
            "expected": [finding_fields(item) for item in self.expected],
            "not_checked": [
                {"kernel": kernel, "reason": reason, "count": count}
                for (kernel, reason), count in self._not_checked.items()
            ],
            "unsupported": self.unsupported,
            "notes": self.notes,
        }  # fmt: skip

    @property
    def _not_checked(self) -> dict[tuple[str, str], int]:
        """The refusals, and the kernel that a limit ended."""
        if self.limited is None:
            return self.refusals
        return {**self.refusals, (self.limited, f"the program {self.ending}"): 1}

    def summary(self) -> str:
        """The last part of the text output: every kernel, what was not checked, notes, and the counts."""
        names = fitted(short_names(self.kernels), LONGEST_NAME)
        lines = []
        for symbol, kernel in self.kernels.items():
            own = [item for item in self.findings.values() if item.kernel == symbol]
            lines += text.kernel_lines(names[symbol], kernel, own)
        lines += [text.others(item) for item in self.ordered if item.also]
        lines += [
            f"not checked: {reason}" + (f" (x{count})" if count > 1 else "")
            for (_, reason), count in self._not_checked.items()
        ]
        if self.unsupported:
            lines.append(f"answered 'not supported': {', '.join(self.unsupported)}")
        lines += [f"note: {note}" for note in self.notes]
        if self.ending and self.limited is None:
            lines.append(f"the program {self.ending}")
        return "\n".join([*lines, self._verdict()])

    def _verdict(self) -> str:
        """The last line of the summary: launches, kernels, device, seconds, and findings by severity."""
        launches = sum(kernel.launches for kernel in self.kernels.values())
        ran = f"{counted(launches, 'launch')} of {counted(len(self.kernels), 'kernel')} on an emulated {self.device}"
        counts = [
            f"{number} benign" if severity == "benign" else counted(number, severity)
            for severity in ("error", "benign", "lint")
            if (number := sum(item.severity == severity for item in self.ordered))
        ]
        if self.expected:
            counts.append(f"{len(self.expected)} expected")
        return f"{ran}, {self.seconds:.1f} s: {', '.join(counts) or 'no findings'}"
