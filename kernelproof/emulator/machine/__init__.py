"""Executes a batch of CTAs together: scheduler, barriers, collectives, matrix instructions.

The units of this package exist on every architecture. ``hopper`` and ``blackwell`` add theirs.
"""
