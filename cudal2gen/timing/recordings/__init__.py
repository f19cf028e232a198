"""Reads timings of matrix products that others recorded on GPUs. Users fetch these files; the project has none."""
