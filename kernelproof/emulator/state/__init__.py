"""State that all units of the emulated machine share: lanes, clocks, findings, counters, the launch and its options.

This is the lowest package: it imports nothing else of the emulator.
"""
