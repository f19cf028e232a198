"""Verdicts on built kernels: PTX executed by the emulator, or the binary on a device, on problems that stress it.

- ``problems``: which shapes and inputs a record is executed with, and how its matrices are stored.
- ``emulated``: the emulator's verdict. Its names are also this package's: ``validator.validate`` and its parts.
- ``matrices``, ``device``: the verdict of a device, in guarded memory.
- ``sanitizer``: compute-sanitizer over one launch; ``agreement``: a device against the emulator, bit for bit.
- ``judgement``: a device's verdict, with the sanitizer's and the emulator's answers on request.

``cudal2gen.validator.correctness`` defines a right product.
"""

from cudal2gen.validator.correctness import INPUTS as INPUTS
from cudal2gen.validator.emulated import Execution as Execution
from cudal2gen.validator.emulated import Modes as Modes
from cudal2gen.validator.emulated import execute as execute
from cudal2gen.validator.emulated import place as place
from cudal2gen.validator.emulated import run_case as run_case
from cudal2gen.validator.emulated import summary as summary
from cudal2gen.validator.emulated import validate as validate
from cudal2gen.validator.emulated import validate_all as validate_all
from cudal2gen.validator.problems import Shape as Shape
from cudal2gen.validator.problems import own_shape as own_shape
from cudal2gen.validator.problems import stress_shapes as stress_shapes
