"""Executes wgmma on elements known by their origin: which stage a warpgroup reads, and for how long.

A wgmma reads two operands by descriptors, from a stage that its warpgroup holds. It may read until its commit group has
been waited for, so the stage may be handed back only after that. ``accumulators`` shows that no other instruction
touches its registers meanwhile, which does not depend on what they hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from kernelproof.certificates.accumulators import accumulator_tuples
from kernelproof.certificates.cells import UNKNOWN, Cells, Kind, SummedRange
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.pipelines import FIRST_STAGE, Protocol, StageOperand
from kernelproof.certificates.polynomials import ZERO, Lanes
from kernelproof.certificates.role_state import CONSUMER, RoleState
from kernelproof.certificates.shared_memory import ELEMENT
from kernelproof.certificates.sum_sender import SumSender
from kernelproof.certificates.words import Word
from kernelproof.emulator.hopper.pattern import Strides, pattern
from kernelproof.emulator.hopper.tile import WgmmaForm
from kernelproof.emulator.hopper.warpgroup import strides
from kernelproof.emulator.state.arrays import Mask

WARPGROUP, ROWS = 128, 64  # lanes of a warpgroup, and the rows of a wgmma's first operand
_VECTOR = 16  # bytes of the elements whose offsets a ``Pattern`` has
_FIELDS = 0xC00E_3FFF_3FFF_3FFF  # the bits of a descriptor that belong to a field


class Operand(NamedTuple):
    """Rows of A or columns of B that a warpgroup multiplies, over 16 k. ``number``: that of their kind. ``places``: the
    offset of each row or column. ``steps``: the offset of each k."""

    number: int
    places: Lanes
    steps: tuple[int, ...]


class WarpgroupMachine(SumSender):
    """The machine of a role whose warpgroups may execute wgmma. Methods raise NotCertified for a product of operands
    that are not in a stage that the warpgroup holds."""

    def units(self) -> dict[str, dict[str, Callable[..., Any]]]:
        """The methods that statements call, by the name of the unit; ``X`` is that of wgmma."""
        # ``accumulators`` checks accesses to registers.
        methods: dict[str, Callable[..., Any]] = {
            "fence": self.order_registers, "commit": self.commit_products, "wait": self.wait_for_products,
            "mma": self.multiply, "read": lambda value, *_: value, "overwrite": lambda *_: None,
            "plain": lambda value: value,
        }  # fmt: skip
        return super().units() | {"X": methods}

    def start(self) -> RoleState:
        """The state in which threads begin, in which accumulators are unknown."""
        state = super().start()
        names = {name for registers in accumulator_tuples(self.program) for name in registers}
        state.registers |= {self.program.emitter.variable(name): UNKNOWN for name in sorted(names)}
        return state

    def order_registers(self, m: Mask) -> None:
        """wgmma.fence: ``accumulators`` checks where it must stand."""
        self._whole_warpgroups(m)

    def commit_products(self, m: Mask, _site: int) -> None:
        """wgmma.commit_group: all products since the last commit become a commit group."""
        self._whole_warpgroups(m)
        track = self.track
        track.reading, track.opened = (*track.reading, track.opened), frozenset()

    def wait_for_products(self, most: int, m: Mask) -> None:
        """wgmma.wait_group: all commit groups but the last ``most`` have read their operands and written their sums."""
        self._whole_warpgroups(m)
        track = self.track
        track.reading = track.reading[max(0, len(track.reading) - most) :]

    def multiply(
        self, form: WgmmaForm, d: tuple[Any, ...], a: Any, b: Any, keep: Any, m: Mask, _site: int
    ) -> list[Cells]:  # fmt: skip
        """wgmma.mma_async: the registers of D, as they are when the products have been waited for."""
        self._whole_warpgroups(m)
        self._check_form(form)
        left, right = (
            self._operands(value, rows, rows_contiguous)
            for value, rows, rows_contiguous in ((a, ROWS, form.m_major_a), (b, form.n, form.n_major_b))
        )
        rows, cols = (self.kinds[each[0].number] for each in (left, right))
        if rows is None or cols is None or {rows.source, cols.source} != {"A", "B"}:
            raise NotCertified("a wgmma does not multiply A by B")
        if left[0].steps != right[0].steps or not rows.col.equals(cols.col):
            raise NotCertified("the operands A and B of a wgmma have different k")
        places = self._places_of_d(form, left, right, rows.source == "B")
        if rows.source == "B":  # its rows are columns of D
            rows, cols = cols, rows
        before = self._before(d, rows, cols, places) if self._keeps(keep) else SummedRange(ZERO, 0)
        number = self.kinds.number(Kind("sum", rows.row, cols.row, before.plus(rows.col, left[0].steps)))
        self.track.unmet = False  # all lanes of a warp come together here
        all_kinds = np.full(places[0][0].shape, number)
        return [Cells(all_kinds, *at, width_of(form)) for at in places]

    def _whole_warpgroups(self, m: Mask) -> None:
        """Check that whole warpgroups of a consumer execute an instruction."""
        self._together(m)
        threads = self.threads.reshape(-1, WARPGROUP) if self.lanes % WARPGROUP == 0 else None
        if self.role != CONSUMER or threads is None or (threads[:, 0] % WARPGROUP).any():
            raise NotCertified("an instruction of wgmma that is not executed by whole warpgroups of a consumer")

    def _check_form(self, form: WgmmaForm) -> None:
        """Check that a wgmma multiplies the contract's types from shared memory, and does not negate or saturate."""
        contract = self.contract
        operands, output = contract.type_of("A"), contract.type_of("D")
        types = (form.kind_a, form.kind_b) == (operands, operands) and operands in ("f16", "bf16")
        if form.registers or form.sign != 1 or form.saturate or not types:
            raise NotCertified(f"a wgmma that does not multiply {operands} from shared memory as it is")
        if form.acc != "f32" and (form.acc, output) != ("f16", "f16"):
            raise NotCertified(f"a wgmma adds in {form.acc} for a D of {output}")

    def _keeps(self, keep: Any) -> bool:
        """Whether products are added to what the registers of D hold."""
        keeps = np.asarray(keep)
        if keeps.dtype != bool or (keeps != keeps.flat[0]).any():
            raise NotCertified("whether a wgmma adds to its accumulators is not known, or differs between lanes")
        return bool(keeps.flat[0])

    # --- operands

    def _operands(self, descriptors: Any, rows: int, rows_contiguous: bool) -> list[Operand]:
        """The operand of each warpgroup; all have one kind and the same k."""
        numbers = np.broadcast_to(self._bits(descriptors), (self.lanes,)).reshape(-1, WARPGROUP)
        if (numbers != numbers[:, :1]).any():
            raise NotCertified("the threads of a warpgroup have different descriptors of one operand")
        operands = [self._operand(int(each) & (1 << 64) - 1, rows, rows_contiguous) for each in numbers[:, 0]]
        first = operands[0]
        if any(each.number != first.number or each.steps != first.steps for each in operands):
            raise NotCertified("the operands of warpgroups that share a tile differ by more than their rows")
        return operands

    @staticmethod
    def _bits(descriptors: Any) -> Lanes:
        """Descriptors as numbers, which must be known. Their highest bit counts as any other."""
        if isinstance(descriptors, Word):
            descriptors = descriptors.poly.constant if descriptors.poly.is_constant else None
        number = np.asarray(descriptors)
        if number.dtype.kind not in "iu":
            raise NotCertified("a descriptor of a wgmma depends on the problem")
        return number.astype(np.int64)

    def _operand(self, descriptor: int, rows: int, rows_contiguous: bool) -> Operand:
        """The operand that a descriptor names, which must lie in a stage that the role holds."""
        track, protocol = self.track, self.protocol
        if descriptor & ~_FIELDS:
            raise NotCertified(f"a descriptor of a wgmma has bits {descriptor & ~_FIELDS:#x} beside its fields")
        key = strides(descriptor), rows, rows_contiguous
        if key not in protocol.operands:
            protocol.operands[key] = self.named_by(protocol, *key)
        stage, kind, places, steps = protocol.operands[key]
        held = track.held or {}
        if stage not in held or track.arrived:
            raise NotCertified("a wgmma reads a stage that was not waited for, or was handed back")
        track.opened |= {stage}
        return Operand(self._contents(held[stage])(kind), places, steps)

    def named_by(self, protocol: Protocol, fields: Strides, rows: int, rows_contiguous: bool) -> StageOperand:
        """The operand in a CTA's shared memory that the fields of a descriptor name, found by what producers load to
        these places of the ring."""
        named = pattern(fields, rows, rows_contiguous)
        if named.low < 0 or named.high > self.memory.bytes:
            raise NotCertified(f"a product reads bytes {named.low} to {named.high} of {self.memory.bytes}")
        at = named.offsets[:, None] // ELEMENT + np.arange(_VECTOR // ELEMENT)
        # A pattern lists the 16 k of each row; if rows are contiguous, the rows of each k.
        at = at.reshape(16, rows).T if rows_contiguous else at.reshape(rows, 16)
        owners, kinds, places, steps = (x[at] for x in (protocol.owner, protocol.kinds, protocol.rows, protocol.cols))
        if (owners != owners.flat[0]).any() or (kinds != kinds.flat[0]).any() or owners.flat[0] < FIRST_STAGE:
            raise NotCertified("a product reads what is not one operand of one stage")
        if (places != places[:, :1]).any() or (steps != steps[:1]).any():
            raise NotCertified("the elements that a product reads are not 16 k of rows of an operand")
        rows_of = np.ascontiguousarray(places[:, 0])
        # Equal places share one array: registers of D are recognised by which array they have.
        rows_of = protocol.places.setdefault(rows_of.tobytes(), rows_of)
        return StageOperand(
            int(owners.flat[0]) - FIRST_STAGE, int(kinds.flat[0]), rows_of, tuple(steps[0].tolist())
        )  # fmt: skip

    # --- sums

    def _before(self, d: tuple[Any, ...], rows: Kind, cols: Kind, places: list[tuple[Lanes, Lanes]]) -> SummedRange:
        """The k whose products are in the registers of D. These must hold the elements to which A and B belong."""
        numbers = {each.one_kind if isinstance(each, Cells) else 0 for each in d}
        kind = self.kinds[numbers.pop()] if len(numbers) == 1 else None
        if kind is None or kind.summed is None or len(d) != len(places):
            raise NotCertified("a wgmma adds to what is not one kind of sum")
        if not (kind.row.equals(rows.row) and kind.col.equals(cols.row)):
            raise NotCertified("a wgmma adds to the sum of another element of D")
        for each, at in zip(d, places, strict=True):
            same = each.rows is at[0] and each.cols is at[1]
            if not same and not (np.array_equal(each.rows, at[0]) and np.array_equal(each.cols, at[1])):
                raise NotCertified("a wgmma adds to the sum of another element of D")
        return kind.summed

    def _places_of_d(
        self, form: WgmmaForm, left: list[Operand], right: list[Operand], across: bool
    ) -> list[tuple[Lanes, Lanes]]:
        """Rows and columns of each register of D, in its lanes; ``across``: rows of the product are columns of D.

        Layout (PTX ISA): rows are 16 * warp + 8 * half + lane / 4, columns 8 * i + lane % 4 * 2 + j; two elements of 16
        bits share a register.
        """
        arrays = [each.places for each in (*left, *right)]
        key = form.acc, across, *map(id, arrays)
        of_d = self.protocol.of_d
        if key not in of_d:
            rows, cols = (np.stack([each.places for each in side]) for side in (left, right))
            lane, out = np.arange(WARPGROUP), []
            for register in range(form.n // 8 * 2 * len(_pairs(form))):
                column, rest = divmod(register, 2 * len(_pairs(form)))
                half, pair = divmod(rest, len(_pairs(form)))
                row = rows[:, lane // 32 * 16 + 8 * half + lane % 32 // 4].reshape(-1, 1)
                col = np.stack([cols[:, 8 * column + lane % 4 * 2 + j] for j in _pairs(form)[pair]], 2)
                col = col.reshape(len(row), -1)
                row = np.broadcast_to(row, col.shape)
                out.append((col, row) if across else (row, col))
            of_d[key] = out
        return of_d[key]


def _pairs(form: WgmmaForm) -> tuple[tuple[int, ...], ...]:
    """Which of two neighbouring columns each register has."""
    return ((0, 1),) if form.acc == "f16" else ((0,), (1,))


def width_of(form: WgmmaForm) -> int:
    """Bytes of a sum."""
    return 2 if form.acc == "f16" else 4
