"""A batch of CTAs in lockstep: scheduler, barriers, collectives, matrix instructions."""
