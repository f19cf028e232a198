"""Timings of matrix products that others recorded on real GPUs: files that users fetch, never part of the project."""
