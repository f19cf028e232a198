"""The instructions that the machine knows: one decorated function each."""
