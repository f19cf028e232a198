"""The command line of ``kernelproof``.

``program`` defines the program itself. Each other module defines some of its commands, which are called verbs. A verb
parses its options, calls the package that does the work, and prints the result.
"""

from __future__ import annotations

# Verbs are registered in the order in which --help lists them.
# isort: off
from kernelproof.cli import checking as checking
from kernelproof.cli import grading as grading
from kernelproof.cli import proving as proving
from kernelproof.cli import profiling as profiling
from kernelproof.cli import mcp as mcp

# isort: on
from kernelproof.cli.program import app as app
from kernelproof.cli.program import main as main
