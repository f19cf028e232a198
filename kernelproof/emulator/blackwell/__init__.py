"""The units of sm_100: tensor memory and its instructions, pairs of CTAs, cluster launch control."""
