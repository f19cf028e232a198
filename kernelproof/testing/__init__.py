"""Provides a pytest plugin: tests launch CUDA kernels on the emulated GPU, and fail if it finds an error.

``plugin`` has pytest's hooks, and imports nothing else of this package until a test needs it. ``emulation`` is the
fixture ``cuda_emulator``. ``arrays`` lends NumPy arrays and tensors to kernels.
"""
