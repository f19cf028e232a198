"""The units of sm_100: tensor memory, tcgen05 products and copies, pairs of CTAs, cluster launch control."""
