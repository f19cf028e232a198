"""Keeps the state that all units of the emulated machine share: lanes, clocks, findings, counters, launch and options.

This is the lowest package: it imports nothing else of the emulator.
"""
