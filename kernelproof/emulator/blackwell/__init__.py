"""Models the units that sm_100 adds: tensor memory, tcgen05 instructions, pairs of CTAs, cluster launch control."""
