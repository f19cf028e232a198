"""What surrounds a main loop: the time of a launch, and the rate at which data comes from the L2."""

from __future__ import annotations

from kernelproof.ground.chips import L2_PORT, Rates

LAUNCH_US = 1.6  # of a launch; only the order of magnitude is known, from traces that users published


def l2_share(rates: Rates, sms: int, ctas: int) -> float:
    """Bytes per clock that an SM gets from the L2 while ``ctas`` CTAs lie on ``sms`` SMs.

    SMs with a CTA share the L2's rate; the port of an SM bounds what it gets.
    """
    return min(L2_PORT, rates.l2_bytes * sms / min(sms, ctas))
