"""PTX text to Python functions over a batch of threads."""
