"""Keeps the CTAs of a launch that have not started, some of which clusterlaunchcontrol.try_cancel may cancel."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.state.arrays import Array


class CtaQueue:
    """CTAs in the order in which they start: linear numbers, cluster by cluster and by rank. The first ``resident`` fit
    on the device together and always start. A running CTA may cancel later ones and do their work."""

    def __init__(self, ctas: Array, cluster: int, resident: int) -> None:
        self.cluster = cluster
        self.resident_ctas, self.later_ctas = ctas[:resident], ctas[resident:]
        # The number of CTAs that were cancelled, and of requests to cancel.
        self.cancelled = self.requests = 0

    def __len__(self) -> int:
        return len(self.resident_ctas) + len(self.later_ctas)

    def take(self, count: int) -> Array:
        """Start the next CTAs, and return their numbers."""
        started = min(count, len(self.resident_ctas))
        out = np.concatenate([self.resident_ctas[:started], self.later_ctas[: count - started]])
        self.resident_ctas, self.later_ctas = self.resident_ctas[started:], self.later_ctas[count - started :]
        return out

    def cancel(self) -> int | None:
        """Cancel the next cluster; returns its first CTA, or None if all have started."""
        if not len(self.later_ctas):
            return None
        first = int(self.later_ctas[0])
        self.later_ctas = self.later_ctas[self.cluster :]
        self.cancelled += self.cluster
        return first
