"""The units of sm_90: clusters, mbarriers, bulk copies, wgmma."""
