"""The progress of a campaign, for a terminal and for a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from cudal2gen.results.ratios import Ratio
from cudal2gen.tuner.campaign import Standing
from cudal2gen.tuner.race import Race

if TYPE_CHECKING:
    from rich.table import Table

SECONDS = 10.0  # between the lines of a log


def line(standing: Standing, seconds: float) -> str:
    """One line: problems, evaluations, improvements, failures by reason."""
    failures = ", ".join(f"{count} {outcome}" for outcome, count in standing.failures.most_common()) or "no failures"
    return (
        f"{len(standing.races)} of {standing.problems} problems, {standing.evaluations} evaluations in "
        f"{seconds:.0f} s, {len(standing.improved)} improved, {failures}"
    )


def gain(race: Race) -> str:
    """The winner's speedup over the incumbent with its 95 % interval, in words."""
    ratio: Ratio | None = race.gain
    if ratio is None:
        return "no long timing"
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] times the incumbent's speed"


def table(standing: Standing, seconds: float) -> Table:
    """The terminal's view: the last races that ended, those under way, the sums."""
    from rich.table import Table

    view = Table(title=line(standing, seconds), title_justify="left", box=None, pad_edge=False)
    for name in ("problem", "evaluations", "best so far", "by", "failures"):
        view.add_column(name)
    for race in standing.started[-12:]:
        best = min((trial for trial in race.short_trials if trial.measured), key=lambda trial: trial.cost, default=None)
        failures = ", ".join(f"{count} {outcome}" for outcome, count in race.failures.most_common())
        text = gain(race) if race.gain else f"{best.median_us:.2f} us" if best else ""
        view.add_row(race.problem.mnk, str(len(race.evaluations)), text, best.proposer if best else "", failures)
    return view


@contextmanager
def live_view(out: TextIO = sys.stderr) -> Iterator[Callable[[Standing], None]]:
    """A live view on a terminal, else a line every ten seconds."""
    if out.isatty():
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(file=out), refresh_per_second=4, transient=True) as live:
            yield lambda standing: live.update(table(standing, time.monotonic() - standing.begin))
        return
    last = [time.monotonic()]

    def print_line(standing: Standing) -> None:
        if time.monotonic() - last[0] > SECONDS:
            last[0] = time.monotonic()
            print(line(standing, last[0] - standing.begin), file=out, flush=True)

    yield print_line
