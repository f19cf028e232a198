"""A stand-in for vLLM: what our plugin meets, as it is in 0.33.0."""
