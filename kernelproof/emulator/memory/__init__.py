"""Device memory, shared memory, and who touched them last."""
