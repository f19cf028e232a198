"""Proves that mutants of built kernels are noticed by the checks, or are equivalent.

A mutant is a change of one instruction of the PTX. ``make test`` takes a few kernels of plain products of fp16, and
every fifth of their mutants of each kind, or every tenth if a kernel has more than ``MANY``. It also takes every second
fault that is planted in the rendered CUDA of groups, gated pairs, aux and A (k,m). ``make thorough`` takes all kernels,
mutants and faults, and also kernels that compute more or claim tiles.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from cudal2gen.generation import compiler
from cudal2gen.generation.compiler import Artifact
from cudal2gen.generation.renderer import render
from cudal2gen.validator import run_case, stress_shapes
from cudal2gen.validator.problems import thorough_shape
from kernelproof.emulator import ARITHMETIC, Mutant
from tests.cudal2gen.faulty import Faulty
from tests.cudal2gen.mutation import TEXT_FAULTS, TextFault, candidates, equivalence, survivors, text_faults
from tests.cudal2gen.paths import PATHS
from tests.draws import THOROUGH, draw_few_by_key, draw_part, draw_part_by_key

pytestmark = pytest.mark.slow

# One kernel of every family, prefetch kind, epilogue, raster, padding and layout. ``make test`` takes every tenth of a
# family, the first included, and executes one in four of these.
MUTATED = draw_part_by_key(lambda name: PATHS[name].family, [
    "single",
    "single one stage",
    "single_intra_tile",
    "none bk 16",
    "none one stage",
    "multi",
    "pingpong",
    "staggered",
    "nn f32 global",
    "staged with 16 bytes",
    "direct",
    "zsplit",
    "persistent",
    "predicate",
    "split_k",
    "small direct",
    "small direct split_k",
    "wgmma pingpong 2x1 nn",
    "wgmma 2x2",
    "wgmma workspace",
    "wgmma stream",
    "wgmma n80",
    "wgmma rests of two instructions",
    "wgmma rests, pingpong",
    "wgmma padded",
    "wgmma cluster split 8 swapped",
    "once padded",
    "once split 2",
    "tensor nn, narrow boxes",
    "tensor pair nn f16",
    "nt ragged",
    "wgmma nt two rows 1x2",
    *(["tensor claimed pair"] if THOROUGH else []),
], 10)  # fmt: skip

MANY = 100  # if a kernel has more mutants, a smaller share of them is executed

# Kernels that compute more: fused kernels, batches, bf16 and fp32 output, in every family.
EXTENDED_KERNELS = [
    "fused direct d split",
    "fused multistage direct, ragged",
    "fused wgmma swapped, any n",
    "batched wgmma",
    "fused wgmma cluster",
    "batched zsplit split",
    "fused once split",
    "fused direct ragged",
    "fused wgmma any n",
    "multistage d split persistent",
    "wgmma d swapped",
    "batched once",
    "fused wgmma f16",
    "fused multistage staged, wide",
    "multistage bf16 nn ragged",
]

# By kernel: fewer than one in this many mutants may be equivalent. The share is larger if few mutants are drawn. A
# cluster that sums one tile has a redundant end: the producer's warps only keep the barriers' count, and the other
# warps of the CTA wait for the same readers.
MAX_EQUIVALENT = (
    dict.fromkeys(MUTATED, 8 if THOROUGH else 6)
    | {"wgmma cluster split 8 swapped": 7}
    # A thread of these kernels does little on its own except waits, fences and products.
    | {name: 3 for name in MUTATED if name.startswith("tensor")}
)

# Faults of texts, each with a path. ``make thorough`` plants each in every kernel of groups, gated pairs, aux or an A
# (k,m) whose text has it; ``make test`` plants every second one, in one kernel of the first family that has it.
SMALL_FIRST = ("sm80_direct", "sm80_multistage", "sm90_small", "sm90_wgmma", "sm100_tcgen05", "sm120_mma")
PLANTED = draw_few_by_key(
    lambda case: case[1].before,
    [
        (name, fault)
        for name, record in sorted(PATHS.items(), key=lambda item: SMALL_FIRST.index(item[1].family))
        if record.grouped or record.fusion.gate or record.fusion.aux or not record.along_k.a
        for fault in text_faults(render(record))
    ],
    1,
)
FAULTY = draw_part(PLANTED, 2)

BUILT_AHEAD = [
    *(PATHS[name] for name in [*MUTATED, *(EXTENDED_KERNELS if THOROUGH else [])]),
    *(Faulty(PATHS[name], fault.before, fault.after) for name, fault in FAULTY),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", MUTATED)
def test_every_mutant_is_noticed_or_equivalent(name: str, library: Path) -> None:
    mutants = candidates(PATHS[name], built_kernel(name).ptx.read_text())
    assert len(mutants) >= 50
    executed = draw_part_by_key(lambda mutant: mutant.kind, mutants, 10 if len(mutants) > MANY else 5)
    reasons = count_reasons(name, library, executed)
    print(f"\n{name}: {len(executed)} of {len(mutants)} mutants, {dict(reasons)}")
    assert reasons.total() < len(executed) / MAX_EQUIVALENT[name], "most mutants must be real faults"


@pytest.mark.thorough
@pytest.mark.parametrize("name", EXTENDED_KERNELS)
def test_every_mutant_of_what_computes_more_is_noticed_or_equivalent(name: str, library: Path) -> None:
    mutants = candidates(PATHS[name], built_kernel(name).ptx.read_text())
    assert {mutant.kind for mutant in mutants} & ARITHMETIC
    executed = draw_few_by_key(mutant_class, mutants, 1)
    reasons = count_reasons(name, library, executed)
    print(f"\n{name}: {len(executed)} of {len(mutants)} mutants, {dict(reasons)}")
    assert reasons.total() < len(executed) / 3


def test_every_fault_has_a_kernel() -> None:
    assert {fault.before for _, fault in PLANTED} == {before for each in TEXT_FAULTS.values() for before, _ in each}


@pytest.mark.parametrize(("name", "fault"), FAULTY, ids=[f"{name}: {fault.fault}" for name, fault in FAULTY])
def test_a_faulty_text_is_noticed(name: str, fault: TextFault, library: Path) -> None:
    record, artifact = PATHS[name], Faulty(PATHS[name], fault.before, fault.after).build()
    shape = thorough_shape(record, stress_shapes(record))
    case, _ = run_case(record, artifact, library, shape, "normal", hazards=False)
    assert not case.passed


def mutant_class(mutant: Mutant) -> tuple[str, ...]:
    """The class of a mutant, of which one is executed: its kind, for arithmetic also its opcode, and for ``nudge`` and
    ``first`` also its operand."""
    if mutant.kind in ("nudge", "first"):
        return mutant.kind, mutant.name
    return mutant.kind, mutant.name.split()[1] if mutant.kind in ARITHMETIC else ""


def built_kernel(name: str) -> Artifact:
    """The compiled kernel of a path."""
    return compiler.build([PATHS[name]])[0]


def count_reasons(name: str, library: Path, executed: list[Mutant]) -> Counter[str]:
    """How often each reason explains why a mutant in ``executed`` survives. Fails if a survivor has no known reason."""
    record, artifact = PATHS[name], built_kernel(name)
    ptx = artifact.ptx.read_text()
    reasons, unexplained = Counter[str](), []
    for mutant in survivors(record, artifact, library, executed):
        if (reason := equivalence(record, mutant, ptx)) is not None:
            reasons[reason] += 1
        else:
            unexplained.append(f"{mutant.name}: {ptx.splitlines()[mutant.line - 1].strip()}")
    assert unexplained == []
    return reasons
