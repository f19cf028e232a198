"""Judges built kernels: the emulator or a GPU executes them on problems that stress them, and the results are checked.

- ``problems``: the shapes and inputs with which a record is executed, and how its matrices are stored.
- ``emulated``, ``emulated_matrices``: the emulator's verdict, with matrices in its memory; this package also exports
  names of ``emulated``, such as ``validator.validate``.
- ``machine_code``: the emulator's verdict on the machine code.
- ``matrices``, ``device``: a device's verdict, with matrices in guarded memory.
- ``sanitizer``: compute-sanitizer on one launch. ``agreement``: compares a device with the emulator, bit for bit.
- ``judgement``: a device's verdict, optionally with the sanitizer and the comparison with the emulator.
- ``correctness``, ``fused``: when a product is right, plain or fused. ``rounding``: models of how tensor cores round.
- ``proofs``: proofs for every problem. ``contracts``, ``ring_contracts``, ``slice_facts``: what these proofs are about.
"""

from cudal2gen.validator.correctness import INPUTS as INPUTS
from cudal2gen.validator.emulated import Execution as Execution
from cudal2gen.validator.emulated import Modes as Modes
from cudal2gen.validator.emulated import execute as execute
from cudal2gen.validator.emulated import run_case as run_case
from cudal2gen.validator.emulated import summary as summary
from cudal2gen.validator.emulated import validate as validate
from cudal2gen.validator.emulated import validate_all as validate_all
from cudal2gen.validator.emulated import verdict_origin as verdict_origin
from cudal2gen.validator.problems import Shape as Shape
from cudal2gen.validator.problems import own_shape as own_shape
from cudal2gen.validator.problems import stress_shapes as stress_shapes
