"""The units of sm_90: clusters, mbarriers, bulk copies (TMA), wgmma, setmaxnreg.

Asynchronous work is modelled as late as the hardware may do it: data of a copy lands when somebody has waited for it,
and what a copy or product reads counts as being read until its group has been waited for.
"""
