"""A plugin of pytest: tests launch CUDA kernels on the emulated GPU, and fail by what it finds.

``plugin`` has the hooks and imports nothing of this package until a test asks for it; ``emulation`` is the fixture
``cuda_emulator``; ``arrays`` lends NumPy arrays and tensors to kernels.
"""
