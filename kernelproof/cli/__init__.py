"""The command line: verbs that compose the rooms below, and nothing else."""

from __future__ import annotations

# Verbs are registered in the order in which --help lists them.
# isort: off
from kernelproof.cli import checking as checking
from kernelproof.cli import grading as grading
from kernelproof.cli import profiling as profiling
from kernelproof.cli import mcp as mcp

# isort: on
from kernelproof.cli.program import app as app
from kernelproof.cli.program import main as main
