"""An environment whose records hang or end the process, depending on their stages."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from cudal2gen.kernel import Problem, Record
from cudal2gen.results import KERNEL, Effort, Timing, Trial
from cudal2gen.tuner.environment import trial_of


class Hanging:
    """Records with two stages hang, those with three end the process, and others get a trial."""

    name, on = "model", "a script"

    def evaluate(self, problem: Problem, records: Sequence[Record], effort: Effort = "short") -> list[Trial]:
        """Trials of the records that neither hang nor end the process, of 5 us each."""
        for record in records:
            if record.ring_steps == 2:
                time.sleep(60)  # longer than the tests wait
            if record.ring_steps == 3:
                os._exit(3)
        timings = (Timing(contender=KERNEL, calls=1, event_us=(5.0,), error=0.0),)
        return [trial_of(self, problem, record, effort, "measured", timings=timings) for record in records]
