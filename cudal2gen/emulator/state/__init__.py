"""What a launch is to every unit of the machine: findings, clocks, counters."""
