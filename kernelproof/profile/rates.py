"""States what a cubin does not show: the time of a launch, and the rate at which an SM gets data from the L2."""

from __future__ import annotations

from kernelproof.ground.chips import L2_PORT, Rates

LAUNCH_US = 1.6  # time of a launch; only its order of magnitude is known, from traces that users published


def l2_share(rates: Rates, sms: int, ctas: int) -> float:
    """Bytes per clock that an SM gets from the L2 while ``ctas`` CTAs run on ``sms`` SMs.

    The total rate of the L2 (``rates.l2_bytes`` times all SMs) is divided among the SMs that have a CTA, up to
    ``L2_PORT`` for each.
    """
    return min(L2_PORT, rates.l2_bytes * sms / min(sms, ctas))
