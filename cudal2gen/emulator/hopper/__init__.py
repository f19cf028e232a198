"""What sm_90 adds: clusters, mbarriers, bulk copies, wgmma."""
