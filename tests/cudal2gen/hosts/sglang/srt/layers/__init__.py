"""Stands in for SGLang 0.5.23, with the parts that our plugin uses or replaces."""
