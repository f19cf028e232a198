"""A batch of CTAs that execute together: scheduler, barriers, collectives, matrix instructions.

The units of this floor exist on every architecture; ``hopper`` and ``blackwell`` add theirs.
"""
