"""States the version of the distribution, which both packages share."""

__version__ = "0.1.0"
