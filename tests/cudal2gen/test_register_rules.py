"""Proves that the register rules of sm90_wgmma and sm120_mma agree with ptxas.

Records just within a rule compile without spills, and records one step beyond it spill.
"""

from __future__ import annotations

from typing import Any

import pytest

from cudal2gen.generation import compiler
from cudal2gen.generation.compiler import BuildError
from cudal2gen.kernel import Problem, Sm90Wgmma, Sm120Mma
from tests.cudal2gen.strategies import WARPS, WGMMA
from tests.draws import draw_part

pytestmark = pytest.mark.slow

# Registers of the producer and of consumers, as setmaxnreg sets them.
WIDE, TIGHT, THREE_CONSUMERS = [40, 232], [24, 240], [32, 160]


def sm90_fields(bm: int, bn: int, registers: list[int] | None = WIDE, **changes: Any) -> dict[str, Any]:
    """The fields of a record of sm90_wgmma, by default with two consumers. ``registers``: those of the producer and of
    consumers; None for no setmaxnreg."""
    fields = {"bm": bm, "bn": bn, "atom_n": bm if changes.get("swap_ab") else bn, "registers": registers, "stages": 3}
    return fields | {"consumers": 2} | changes


PINGPONG: dict[str, Any] = {"schedule": "pingpong"}
DIRECT: dict[str, Any] = {"epilogue": "direct"}
# Legal points, and illegal points one step beyond the same rule.
LEGAL: list[dict[str, Any]] = [
    sm90_fields(256, 192),
    sm90_fields(256, 208, TIGHT),
    sm90_fields(256, 208, TIGHT, layout="nn"),
    sm90_fields(128, 256, None),
    sm90_fields(256, 256, None, acc="f16"),
    sm90_fields(192, 192, THREE_CONSUMERS, consumers=3),
    sm90_fields(192, 256, THREE_CONSUMERS, consumers=3, atom_n=128),
    sm90_fields(128, 192, **PINGPONG),
    sm90_fields(128, 208, TIGHT, **PINGPONG),
    sm90_fields(128, 208, TIGHT, cluster=[2, 2], **PINGPONG),
    sm90_fields(192, 128, **PINGPONG),
    sm90_fields(192, 128, cluster=[4, 1], **PINGPONG),
    sm90_fields(128, 384, atom_n=192),
    sm90_fields(128, 384, atom_n=192, cluster=[1, 4]),
    sm90_fields(256, 208, TIGHT, acc="f16", **PINGPONG),
    sm90_fields(128, 208, None, consumers=1),
    sm90_fields(64, 128, None, consumers=1, min_blocks=2),
    sm90_fields(256, 192, [32, 232], cluster=[2, 2]),
    sm90_fields(256, 208, TIGHT, cluster=[2, 1]),
    sm90_fields(256, 160, TIGHT, cluster=[2, 1], layout="nn"),
    sm90_fields(128, 240, [32, 232], cluster=[2, 2], layout="nn", acc="f16", bk=128, stages=2),
    sm90_fields(256, 176, **DIRECT),
    sm90_fields(144, 256, swap_ab=True, **DIRECT),
    sm90_fields(256, 192, split_k=2, reduce="workspace"),
    sm90_fields(256, 192, split_k=2, reduce="cluster", **DIRECT),
]
SPILLING: list[dict[str, Any]] = [
    sm90_fields(256, 208),
    sm90_fields(256, 224, TIGHT),
    sm90_fields(256, 144, None),
    sm90_fields(256, 224, TIGHT, atom_n=112),
    sm90_fields(128, 224, TIGHT, **PINGPONG),
    sm90_fields(192, 144, TIGHT, **PINGPONG),
    sm90_fields(128, 448, atom_n=224, stages=2),
    sm90_fields(256, 224, TIGHT, acc="f16", **PINGPONG),
    sm90_fields(128, 256, None, consumers=1),
    sm90_fields(128, 128, None, consumers=1, min_blocks=2),
    sm90_fields(128, 240, TIGHT, cluster=[2, 2], layout="nn", acc="f16", bk=128, stages=2),
    sm90_fields(256, 192, **DIRECT),
    sm90_fields(160, 256, swap_ab=True, **DIRECT),
]
# Points at which ptxas refuses to compile, because one wgmma needs more registers than a thread has.
FATAL: list[dict[str, Any]] = [
    sm90_fields(192, 208, THREE_CONSUMERS, consumers=3),
    sm90_fields(128, 112, [24, 104], min_blocks=2),
]


def unchecked_record(fields: dict[str, Any]) -> Sm90Wgmma:
    """A record of sm90_wgmma with these fields, whose rules were not checked."""
    whole = WGMMA | fields
    whole |= {name: tuple(whole[name]) for name in ("cluster", "registers") if whole[name] is not None}
    problem = Problem(**{name: whole.pop(name) for name in Problem.model_fields if name in whole})
    return Sm90Wgmma.model_construct(problem=problem, **whole)


def register_rules(record: Sm90Wgmma | Sm120Mma) -> list[str]:
    """The broken rules that are about registers. Others, such as that of shared memory, are none of ptxas's."""
    return [rule for rule in record.violations() if "registers" in rule]


def sm120_record(cols: int, rows: int = 128, registers: list[int] | None = WIDE, **changes: Any) -> Sm120Mma:
    """A record of sm120_mma whose rules were not checked.

    ``rows``, ``cols``: its tile, before ``swap_ab`` exchanges them. With ``registers`` it has two consumers in
    pingpong, with None one consumer and no setmaxnreg.
    """
    swap_ab = changes.get("swap_ab", False)
    schedule_fields = {"schedule": "pingpong", "consumers": 2} if registers else {"consumers": 1}
    whole = WARPS | {"bm": cols if swap_ab else rows, "bn": rows if swap_ab else cols, **DIRECT, **schedule_fields}
    whole |= {"registers": registers and tuple(registers), **changes}
    problem = Problem(**{name: whole.pop(name) for name in Problem.model_fields if name in whole})
    return Sm120Mma.model_construct(problem=problem, **whole)


SWAPPED: dict[str, Any] = {"swap_ab": True}
RESIDUAL: dict[str, Any] = {"fusion": "residual"}
# Records of the family for sm_120 whose accumulators just fit the registers.
LEGAL_WARPS = [
    sm120_record(192),
    sm120_record(208, registers=TIGHT, layout="nn"),
    sm120_record(192, **SWAPPED),
    sm120_record(208, registers=None),
    sm120_record(160, **RESIDUAL),
    sm120_record(96, **RESIDUAL, **SWAPPED),
]
# Such records with larger tiles, which spill.
SPILLING_WARPS = [
    sm120_record(224),
    sm120_record(240, registers=None),
    sm120_record(192, **RESIDUAL),
    sm120_record(192, d="f32", **SWAPPED),
    sm120_record(128, **RESIDUAL, **SWAPPED),
]
# A wide tile takes ptxas seconds: ``make test`` takes some points of each side, ``make thorough`` all.
WITHIN, BEYOND = draw_part(LEGAL, 4), draw_part(SPILLING, 3)
WARPS_WITHIN, WARPS_BEYOND = draw_part(LEGAL_WARPS, 2), draw_part(SPILLING_WARPS, 2)
BUILT_AHEAD = [*map(unchecked_record, [*WITHIN, *BEYOND]), *WARPS_WITHIN, *WARPS_BEYOND]


@pytest.mark.parametrize("fields", WITHIN, ids=str)
def test_what_the_rules_allow_is_clean(fields: dict[str, Any]) -> None:
    record = unchecked_record(fields)
    assert register_rules(record) == []
    assert compiler.build([record])[0].ptxas.findings == []


@pytest.mark.parametrize("fields", BEYOND, ids=str)
def test_what_the_rules_refuse_spills(fields: dict[str, Any]) -> None:
    record = unchecked_record(fields)
    assert register_rules(record) != []
    findings = compiler.build([record])[0].ptxas.findings
    assert any("spills" in finding for finding in findings), findings


@pytest.mark.parametrize("record", WARPS_WITHIN, ids=lambda record: record.name)
def test_what_the_rules_of_warps_allow_is_clean(record: Sm120Mma) -> None:
    assert register_rules(record) == []
    assert compiler.build([record])[0].ptxas.findings == []


@pytest.mark.parametrize("record", WARPS_BEYOND, ids=lambda record: record.name)
def test_what_the_rules_of_warps_refuse_spills(record: Sm120Mma) -> None:
    assert register_rules(record) != []
    findings = compiler.build([record])[0].ptxas.findings
    assert any("spills" in finding for finding in findings), findings


def test_an_overfull_accumulator_serialises_wgmma() -> None:
    """ptxas warns with C7512 that it waits after each wgmma."""
    findings = compiler.build([unchecked_record(SPILLING[0])])[0].ptxas.findings
    assert any("C7512" in finding and "serialized" in finding for finding in findings), findings


@pytest.mark.parametrize("fields", FATAL, ids=str)
def test_an_instruction_beyond_the_entry_registers_is_fatal(fields: dict[str, Any]) -> None:
    record = unchecked_record(fields)
    assert any("of one wgmma" in rule for rule in register_rules(record))
    with pytest.raises(BuildError, match="C7602"):
        compiler.build([record])


def test_the_register_pool_is_a_rule_of_its_own() -> None:
    """ptxas does not check the register pool, and a kernel that exceeds it would wait forever."""
    assert any("wait forever" in rule for rule in register_rules(unchecked_record(sm90_fields(128, 256, [40, 240]))))
    assert register_rules(unchecked_record(sm90_fields(128, 256, TIGHT))) == []
