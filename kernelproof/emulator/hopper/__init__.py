"""Models the units that sm_90 adds: clusters, mbarriers, bulk copies (TMA), wgmma and setmaxnreg.

Asynchronous work takes effect as late as the PTX ISA allows. The data of a copy lands when the first thread has waited
for it. The operands of a copy or matrix product count as being read until its group has been waited for.
"""
