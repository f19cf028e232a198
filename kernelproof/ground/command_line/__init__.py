"""Building blocks of both command lines: groups of options, messages and exit codes, signals, streams and tables."""
