"""The units of sm_100: tensor memory and what works on it, pairs of CTAs, cluster launch control."""
