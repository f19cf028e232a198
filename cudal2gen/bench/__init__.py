"""Measures kernels and baselines on a GPU.

``protocols`` times all contenders on one problem, ``schedule`` does so for many problems within a time budget, and
``turns`` times several kernels of ours on one problem. ``baselines`` holds the contenders from torch and NVIDIA's
libraries, and ``race`` finds the fastest algorithm that such a library offers. ``check`` compares every timed result
with the fp64 product. ``grid`` builds, checks and times many variants of one record.
"""

from cudal2gen.bench.check import Reference as Reference
from cudal2gen.bench.protocols import MAX_CALLS as MAX_CALLS
from cudal2gen.bench.protocols import Condition as Condition
from cudal2gen.bench.protocols import Settings as Settings
from cudal2gen.bench.protocols import TooGood as TooGood
from cudal2gen.bench.protocols import calls_per_sample as calls_per_sample
from cudal2gen.bench.protocols import measure as measure
from cudal2gen.bench.protocols import prepare as prepare
from cudal2gen.bench.protocols import states as states
from cudal2gen.bench.race import RACE_SETS as RACE_SETS
from cudal2gen.bench.race import race as race
from cudal2gen.bench.schedule import CLASSES as CLASSES
from cudal2gen.bench.schedule import BenchPlan as BenchPlan
from cudal2gen.bench.schedule import RunOutcome as RunOutcome
from cudal2gen.bench.schedule import Stopped as Stopped
from cudal2gen.bench.schedule import TimeLeft as TimeLeft
from cudal2gen.bench.schedule import run as run
from cudal2gen.bench.schedule import stratified as stratified
from cudal2gen.bench.turns import Turns as Turns
from cudal2gen.bench.turns import in_turns as in_turns
from cudal2gen.bench.vendor import autotuned_vendor as autotuned_vendor
