"""Launches built kernels: the host launcher, operands, and a CUDA device."""
