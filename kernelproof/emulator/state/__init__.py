"""State that every unit of the machine uses: findings, clocks, counters."""
