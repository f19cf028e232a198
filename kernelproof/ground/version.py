"""The package's version; Ray workers of another one are refused, packs of another ABI (``pack.abi``)."""

__version__ = "0.1.0"
