"""Emulates device, shared and local memory, and detects races.

Every access leaves a tag, which says which thread accessed these bytes last, and when. At the next access to the same
bytes, clocks decide whether the tagged access happens before it. If not, that is a race. The model is that of the PTX
ISA, "Memory Consistency Model".
"""
