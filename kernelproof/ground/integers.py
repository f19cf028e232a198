"""Defines the integer arithmetic by which grids are computed from sizes."""


def ceil_div(a: int, b: int) -> int:
    """Returns a / b rounded up, for b > 0."""
    return -(-a // b)
