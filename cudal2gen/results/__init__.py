"""Stores what was measured and proved about kernels, in append-only files of JSON lines.

``rows`` defines the kinds of rows (verdicts, measurements, trials, ...), ``storage`` reads and appends them, ``ratios``
computes speedups with their intervals, and ``choice`` decides by measurements which kernel to use.
"""

from cudal2gen.results.rows import BATCHED as BATCHED
from cudal2gen.results.rows import DERIVED as DERIVED
from cudal2gen.results.rows import EPILOGUE as EPILOGUE
from cudal2gen.results.rows import EXCEEDED as EXCEEDED
from cudal2gen.results.rows import GROUPED as GROUPED
from cudal2gen.results.rows import IN_MACHINE_CODE as IN_MACHINE_CODE
from cudal2gen.results.rows import IN_PTX as IN_PTX
from cudal2gen.results.rows import INCUMBENT as INCUMBENT
from cudal2gen.results.rows import KERNEL as KERNEL
from cudal2gen.results.rows import L2 as L2
from cudal2gen.results.rows import MIN_US as MIN_US
from cudal2gen.results.rows import NEUTRAL as NEUTRAL
from cudal2gen.results.rows import ON_OPERANDS as ON_OPERANDS
from cudal2gen.results.rows import UNFUSED as UNFUSED
from cudal2gen.results.rows import Algorithm as Algorithm
from cudal2gen.results.rows import Case as Case
from cudal2gen.results.rows import Conditions as Conditions
from cudal2gen.results.rows import Effort as Effort
from cudal2gen.results.rows import Environment as Environment
from cudal2gen.results.rows import Extent as Extent
from cudal2gen.results.rows import Line as Line
from cudal2gen.results.rows import MachineCode as MachineCode
from cudal2gen.results.rows import Measurement as Measurement
from cudal2gen.results.rows import Outcome as Outcome
from cudal2gen.results.rows import ProblemRow as ProblemRow
from cudal2gen.results.rows import Products as Products
from cudal2gen.results.rows import ProtocolName as ProtocolName
from cudal2gen.results.rows import Rounding as Rounding
from cudal2gen.results.rows import Ruling as Ruling
from cudal2gen.results.rows import Source as Source
from cudal2gen.results.rows import Timing as Timing
from cudal2gen.results.rows import Trial as Trial
from cudal2gen.results.rows import Verdict as Verdict
from cudal2gen.results.rows import exceeds as exceeds
from cudal2gen.results.rows import executed as executed
from cudal2gen.results.rows import executed_in as executed_in
from cudal2gen.results.rows import rivals as rivals
from cudal2gen.results.rows import speedup as speedup
from cudal2gen.results.rows import speedups as speedups
from cudal2gen.results.rows import stored_b as stored_b
from cudal2gen.results.storage import START as START
from cudal2gen.results.storage import LineStart as LineStart
from cudal2gen.results.storage import Measurements as Measurements
from cudal2gen.results.storage import algorithms as algorithms
from cudal2gen.results.storage import append as append
from cudal2gen.results.storage import end_of as end_of
from cudal2gen.results.storage import latest as latest
from cudal2gen.results.storage import lines as lines
from cudal2gen.results.storage import measurements as measurements
from cudal2gen.results.storage import read as read
from cudal2gen.results.storage import roundings as roundings
from cudal2gen.results.storage import rulings as rulings
from cudal2gen.results.storage import store as store
from cudal2gen.results.storage import trials as trials
from cudal2gen.results.storage import verdict as verdict
