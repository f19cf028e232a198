"""States the version of the distribution, which the packages cudal2gen and kernelproof share."""

__version__ = "0.1.0"
