"""Half-precision matrix-multiply kernels for NVIDIA GPUs, regenerated from data."""

__version__ = "0.1.0"
