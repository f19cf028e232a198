"""What every unit of the emulated machine knows: lanes, clocks, findings, counters, the launch and its options.

This is the lowest floor: it imports nothing else of the emulator.
"""
