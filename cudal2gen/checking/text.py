"""Findings and results as people read them."""

from __future__ import annotations

from cudal2gen.checking.findings import Finding, Kernel
from cudal2gen.checking.names import plain

LONGEST_LIST = 8  # threads, grids


def finding(item: Finding) -> str:
    """A finding when it is first seen: what, where, who."""
    lines = [f"{item.severity}: {item.rule}{_where(item)}: {item.message}"]
    lines += [f"    inlined at {place}" for place in item.places[1:]]
    if item.cta is not None:
        threads = ", ".join(map(str, item.threads[:LONGEST_LIST])) + (
            ", ..." if len(item.threads) > LONGEST_LIST else ""
        )
        lines.append(f"    CTA {item.cta}" + (f", threads {threads}" if threads else ""))
    if item.ptx_line:
        lines.append(f"    PTX line {item.ptx_line}: {item.ptx}")
    return "\n".join(lines) + "\n"


def _where(item: Finding) -> str:
    parts = [f" in {plain(item.kernel)}"] if item.kernel else []
    if item.place:
        parts.append(f" at {item.place}")
    return "".join(parts)


def counted(number: int, noun: str) -> str:
    """1 launch, 2 launches."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def kernel_lines(name: str, kernel: Kernel, findings: list[Finding]) -> list[str]:
    """A kernel in the summary."""
    grids = [f"{spelled}{f' x{count}' if count > 1 else ''}" for spelled, count in kernel.grids.items()]
    more = f", {len(grids) - LONGEST_LIST} more" if len(grids) > LONGEST_LIST else ""
    outcome = ", ".join(f"{item.severity} {item.rule} x{item.count}" for item in findings) or "no findings"
    again = f", {kernel.repetitions} repetitions change nothing" if kernel.repetitions else ""
    head = f"{name}: {counted(kernel.launches, 'launch')} in {kernel.seconds:.2f} s{again}; {outcome}"
    lines = [head, f"    grid {', '.join(grids[:LONGEST_LIST])}{more}"]
    if kernel.counters:
        lines.append("    " + ", ".join(f"{name} {value}" for name, value in kernel.counters.items()))
    return lines
