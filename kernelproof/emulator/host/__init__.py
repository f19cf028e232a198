"""Programs, sessions, and the stand-in CUDA runtime."""
