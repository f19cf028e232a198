"""Stands in for vLLM 0.33.0, with the parts that our plugin uses or replaces."""
