"""A stand-in for vLLM: what our plugin meets, as it is at 9c9de631."""
