"""The command line of ``cudal2gen``.

Each module defines some of the program's commands, called verbs. A verb parses its options, calls the packages that do
the work, and prints the result; it holds no logic of its own.
"""

from __future__ import annotations

# Importing a module registers its verbs; the program's help lists them in this order.
# isort: off
from cudal2gen.cli import records as records
from cudal2gen.cli import building as building
from cudal2gen.cli import validating as validating
from cudal2gen.cli import proving as proving
from cudal2gen.cli import trying as trying
from cudal2gen.cli import measuring as measuring
from cudal2gen.cli import profiling as profiling
from cudal2gen.cli import tuning as tuning
from cudal2gen.cli import writing as writing
from cudal2gen.cli import learning as learning
from cudal2gen.cli import choosing as choosing
from cudal2gen.cli import packing as packing
from cudal2gen.cli import modelling as modelling
from cudal2gen.cli import machine as machine

# isort: on
from cudal2gen.cli.program import app as app
from cudal2gen.cli.program import main as main
