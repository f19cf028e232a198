"""The CTAs of a launch that have not started, which clusterlaunchcontrol.try_cancel may cancel."""

from __future__ import annotations

import numpy as np

from kernelproof.emulator.state.arrays import Array


class CtaQueue:
    """CTAs in the order in which they start: linear numbers, cluster by cluster and by rank. The first ``resident`` fit
    on the device together and always start. A running CTA may cancel later ones and do their work."""

    def __init__(self, ctas: Array, cluster: int, resident: int) -> None:
        self.cluster = cluster
        self.early, self.late = ctas[:resident], ctas[resident:]
        # The number of CTAs that were cancelled, and of requests to cancel.
        self.cancelled = self.requests = 0

    def __len__(self) -> int:
        return len(self.early) + len(self.late)

    def take(self, count: int) -> Array:
        """Start the next CTAs, and return their numbers."""
        early = min(count, len(self.early))
        out = np.concatenate([self.early[:early], self.late[: count - early]])
        self.early, self.late = self.early[early:], self.late[count - early :]
        return out

    def cancel(self) -> int | None:
        """Cancel the next cluster; returns its first CTA, or None if all have started."""
        if not len(self.late):
            return None
        first = int(self.late[0])
        self.late = self.late[self.cluster :]
        self.cancelled += self.cluster
        return first
