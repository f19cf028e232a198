"""Defines problems and records: a ``Problem`` is a product to compute, and a record is a kernel that computes it.

A record belongs to a kernel family and cannot change; it is one line of ``configs/kernels.jsonl``. Each legality rule
is written once, in the ``violations`` of its family. The catalog, the CLI, the tuner and the tests apply the rules by
validating a record. Sizes named ``bm``, ``bn`` and ``bk`` are in elements, ``*_bytes`` in bytes; sizes always come in
the order m, n, k. Only this file lists the families.
"""

from __future__ import annotations

from cudal2gen.kernel.cuda_source import LAUNCH_FIELDS as LAUNCH_FIELDS
from cudal2gen.kernel.cuda_source import CudaSource as CudaSource
from cudal2gen.kernel.cuda_source import as_text as as_text
from cudal2gen.kernel.editing import Edit as Edit
from cudal2gen.kernel.editing import edit as edit
from cudal2gen.kernel.editing import in_family as in_family
from cudal2gen.kernel.fieldset import Fieldset as Fieldset
from cudal2gen.kernel.fieldset import fieldset as fieldset
from cudal2gen.kernel.fieldset import spell as spell
from cudal2gen.kernel.fitting import Difference as Difference
from cudal2gen.kernel.fitting import Fit as Fit
from cudal2gen.kernel.fitting import fit as fit
from cudal2gen.kernel.fitting import fit_fields as fit_fields
from cudal2gen.kernel.mma_sync import MmaSyncKernel as MmaSyncKernel
from cudal2gen.kernel.problem import SIZE_CLASSES as SIZE_CLASSES
from cudal2gen.kernel.problem import Acc as Acc
from cudal2gen.kernel.problem import Layout as Layout
from cudal2gen.kernel.problem import Problem as Problem
from cudal2gen.kernel.problem import SizeClass as SizeClass
from cudal2gen.kernel.problem import aligned as aligned
from cudal2gen.kernel.record import STRUCTURES as STRUCTURES
from cudal2gen.kernel.record import Fields as Fields
from cudal2gen.kernel.record import Origin as Origin
from cudal2gen.kernel.record import Record as Record
from cudal2gen.kernel.schema import IllegalRecord as IllegalRecord
from cudal2gen.kernel.schema import IllegalValue as IllegalValue
from cudal2gen.kernel.schema import explain as explain
from cudal2gen.kernel.serving import Use as Use
from cudal2gen.kernel.sm80_direct import Sm80Direct as Sm80Direct
from cudal2gen.kernel.sm80_multistage import Prefetch as Prefetch
from cudal2gen.kernel.sm80_multistage import Sm80Multistage as Sm80Multistage
from cudal2gen.kernel.sm90_small import Sm90Small as Sm90Small
from cudal2gen.kernel.sm90_wgmma import Sm90Wgmma as Sm90Wgmma
from cudal2gen.kernel.sm100_tcgen05 import Sm100Tcgen05 as Sm100Tcgen05
from cudal2gen.kernel.sm120_mma import Sm120Mma as Sm120Mma
from cudal2gen.kernel.spelling import FAMILIES as FAMILIES
from cudal2gen.kernel.spelling import parse as parse
from cudal2gen.kernel.spelling import register
from cudal2gen.kernel.spelling import revise as revise
from cudal2gen.kernel.suggestions import unknown_field as unknown_field
from cudal2gen.kernel.work import CtaWork as CtaWork
from kernelproof.ground.chips import GPUS as GPUS
from kernelproof.ground.chips import REGISTERS_SM as REGISTERS_SM
from kernelproof.ground.chips import REGISTERS_THREAD as REGISTERS_THREAD
from kernelproof.ground.integers import ceil_div as ceil_div
from kernelproof.ground.schema import spelled as spelled

for family in (Sm80Multistage, Sm80Direct, Sm90Wgmma, Sm90Small, Sm100Tcgen05, Sm120Mma, CudaSource):
    register(family)

of_text = CudaSource.of_text
