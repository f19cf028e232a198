"""The command line: verbs that compose the rooms below, and nothing else."""

from __future__ import annotations

from cudal2gen.cli import (
    building,
    choosing,
    machine,
    measuring,
    records,
    tuning,
    validating,
)
from cudal2gen.cli.program import app as app
from cudal2gen.cli.program import main as main

VERBS = (records, building, validating, measuring, tuning, choosing, machine)  # importing them registers verbs
