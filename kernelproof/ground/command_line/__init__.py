"""What the commands of both packages share: options in groups, messages and exit codes, signals, streams, tables."""
