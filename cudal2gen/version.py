"""The package's version; packs and Ray workers of another one are refused."""

__version__ = "0.1.0"
