"""Shows the progress of a campaign on a terminal or in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from cudal2gen.results.ratios import Ratio
from cudal2gen.tuner.campaign import CampaignState
from cudal2gen.tuner.search import Search

if TYPE_CHECKING:
    from rich.table import Table

LOG_SECONDS = 10.0  # least time between two lines of a log
ROWS = 12  # most searches that the view on a terminal shows


def line(state: CampaignState, seconds: float) -> str:
    """Problems, evaluations, improvements and failures by outcome, in one line. ``seconds``: since the campaign
    began."""
    failures = ", ".join(f"{count} {outcome}" for outcome, count in state.failures.most_common()) or "no failures"
    return (
        f"{len(state.searches)} of {state.problems} problems, {state.evaluations} evaluations in "
        f"{seconds:.0f} s, {len(state.improved)} improved, {failures}"
    )


def gain(search: Search) -> str:
    """The winner's speedup over the incumbent with its 95 % interval, in words."""
    ratio: Ratio | None = search.gain
    if ratio is None:
        return "no long timing"
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] times the incumbent's speed"


def table(state: CampaignState, seconds: float) -> Table:
    """The view on a terminal: the latest searches, ended or under way, below the sums over all of them."""
    from rich.table import Table

    view = Table(title=line(state, seconds), title_justify="left", box=None, pad_edge=False)
    for name in ("problem", "evaluations", "best so far", "by", "failures"):
        view.add_column(name)
    for search in state.started[-ROWS:]:
        best = min(
            (trial for trial in search.short_trials if trial.measured), key=lambda trial: trial.cost, default=None
        )
        failures = ", ".join(f"{count} {outcome}" for outcome, count in search.failures.most_common())
        text = gain(search) if search.gain else f"{best.median_us:.2f} us" if best else ""
        view.add_row(search.problem.mnk, str(len(search.evaluations)), text, best.proposer if best else "", failures)
    return view


@contextmanager
def live_view() -> Iterator[Callable[[CampaignState], None]]:
    """A context that gives a function to show a state: live on a terminal, else as a line every ten seconds."""
    out = sys.stderr  # read when the campaign begins: a test or a program may have replaced it since the import
    if out.isatty():
        from rich.console import Console
        from rich.live import Live

        with Live(console=Console(file=out), refresh_per_second=4, transient=True) as live:
            yield lambda state: live.update(table(state, time.monotonic() - state.start_time))
        return
    last = [time.monotonic()]

    def print_line(state: CampaignState) -> None:
        if time.monotonic() - last[0] > LOG_SECONDS:
            last[0] = time.monotonic()
            print(line(state, last[0] - state.start_time), file=out, flush=True)

    yield print_line
