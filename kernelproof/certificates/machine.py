"""Executes a kernel's text for one CTA whose threads are known and whose problem is not, on words and elements.

The text calls units of the emulator, such as its memory. Here they are methods of the machine, with the same
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernelproof.certificates import abstract
from kernelproof.certificates.cells import UNKNOWN, Cells, Kind, Kinds, unknown
from kernelproof.certificates.contract import Contract, Tile
from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.global_places import PARTIALS, GlobalPlaces
from kernelproof.certificates.polynomials import ZERO, Lanes, same_everywhere
from kernelproof.certificates.products import Products
from kernelproof.certificates.program import Program, place_of
from kernelproof.certificates.reductions import Terms, fetched, kept_places, shuffled
from kernelproof.certificates.shared_memory import Contents, SharedMemory
from kernelproof.certificates.slices import SlabContents, Workspace
from kernelproof.certificates.words import Word
from kernelproof.emulator.machine.tensor import Shape
from kernelproof.emulator.memory.atomics import AtomicKind
from kernelproof.emulator.memory.shared import WINDOW_START
from kernelproof.emulator.state.arrays import Mask
from kernelproof.emulator.state.scopes import Scope, scope_of
from kernelproof.ground.chips import WARP

NUMBER = "number"  # the kind of numbers that are stored to shared memory, as opposed to elements
MOST_STEPS = 1_000_000  # limit on the instructions of a machine's runs; a loop that ends needs far fewer


@dataclass
class State:
    """The state of a CTA between two blocks. ``block``: the next one. ``slab``: what the CTA has stored to its slab of
    the workspace. ``written``: (rows, cols) of each store to D, without the parts that depend on the problem."""

    block: int
    registers: dict[str, Any]
    shared: Contents
    slab: SlabContents
    written: list[tuple[Lanes, Lanes]] = field(default_factory=list)

    def stored_the_same(self, other: State) -> bool:
        """Whether no store to D or to the workspace lies between this state and another one of the same run."""
        return len(self.written) == len(other.written) and self.slab.same(other.slab)

    def copied(self) -> State:
        return State(
            self.block, dict(self.registers), self.shared.copied(), self.slab.copied(), list(self.written)
        )  # fmt: skip


class Machine(GlobalPlaces):
    """Runs a kernel's blocks for the problems of a contract. Methods raise NotCertified for what cannot be proven."""

    def __init__(self, program: Program, contract: Contract, kinds: Kinds) -> None:
        self.program, self.contract, self.kinds = program, contract, kinds
        self.facts, self.lanes = contract.facts, contract.lanes
        self.all_lanes = np.arange(self.lanes)
        self.memory = SharedMemory(contract.shared_bytes + program.layout.shared_static, WINDOW_START)
        output = contract.type_of("D")
        operands = contract.type_of("A")
        self.products = Products(kinds, operands, output)
        self.slices = Workspace(contract.slices)
        self.written: list[tuple[Lanes, Lanes]] = []
        self.steps = 0
        self.scope = program.scope | dict.fromkeys("MZTJP", self) | {"m": None}
        self.scope |= abstract.names(self.lanes, self.units(), output)
        self.scope |= abstract.conversions(program.scope, operands, output)

    def units(self) -> dict[str, dict[str, Callable[..., Any]]]:
        """The methods of each unit that the text calls. Units that are not listed are the machine itself."""
        return {
            "G": {"load": self.global_load, "store": self.global_store, "fence": self.fence},
            "Q": {"apply": self.count},
            "S": {"load": self.shared_load, "store": self.shared_store},
            "H": {"load": self.load_matrices},
            "I": {"lanes": self.lanes_of, "constant": self.constant},
            "W": {"shfl": self.shuffle},
        }

    # --- running

    def start(self) -> State:
        """The state in which a CTA begins."""
        return State(0, {}, Contents.empty(self.memory.elements), Workspace(self.contract.slices).contents)

    def run(self, state: State, *stops: int) -> State | None:
        """The state in which one of the blocks ``stops`` is reached (again), or None after the end. The given state
        stays as it is.

        Raises NotCertified, which names the instruction.
        """
        state = state.copied()
        self.enter(state)
        block: int | None = state.block
        while True:
            assert block is not None
            block = self._next(block, state.registers)
            if block is None:
                self.finish()
                return None
            if block in stops:
                state.block = block
                return state

    def enter(self, state: State) -> None:
        """Go on from a state, which changes from now on."""
        self.memory.state, self.written, self.slices.contents = state.shared, state.written, state.slab

    def _end_of(self, block: int, registers: dict[str, Any]) -> str:
        """Execute a block and return how it ends: ``exit``, ``cond`` for a branch by a predicate, or another word where
        one block follows. Raises NotCertified after too many instructions and at an indexed branch."""
        node, piece = self.program.blocks[block], self.program.pieces[block]
        if node.end == "exit":
            return node.end
        self._execute(block, registers)
        self.steps += len(piece.sources)
        if self.steps > MOST_STEPS:
            raise NotCertified(f"no end within {MOST_STEPS} instructions")
        if node.end == "switch":
            raise NotCertified("an indexed branch is not covered")
        return node.end

    def _next(self, block: int, registers: dict[str, Any]) -> int | None:
        """Execute a block, and return the one that follows, or None at the kernel's end."""
        node, piece = self.program.blocks[block], self.program.pieces[block]
        end = self._end_of(block, registers)
        if end != "cond":
            return None if end == "exit" else node.targets[0]
        taken = self._taken(piece.condition, registers) != piece.negated
        running = self.active(self.scope["m"])  # type: ignore[arg-type]
        assert running is not None
        if (taken[running] == taken[running[0]]).all():
            return node.targets[0 if taken[running[0]] else 1]
        return self._sides(block, taken, registers)

    def _sides(self, block: int, taken: Lanes, registers: dict[str, Any]) -> int:
        """Run both sides of a branch, each for its lanes, to the block at which they meet."""
        join = self.program.joins[block]
        if join is None:
            raise NotCertified("the threads of a CTA take different branches to its end")
        all_running = self.scope["m"]
        masks = [side if all_running is None else side & all_running for side in (taken, ~taken)]
        sides = []
        for target, mask in zip(self.program.blocks[block].targets, masks, strict=True):
            self.scope["m"] = mask
            mine = dict(registers)
            at: int | None = target
            while at != join:
                if at is None:
                    raise NotCertified("some threads of a CTA end, and others not")
                at = self._next(at, mine)
            sides.append(mine)
        self.scope["m"] = all_running
        for register in self.program.live(join):
            name = self.program.emitter.variable(register)
            values = [side.get(name) for side in sides]
            if values[0] is not values[1]:
                registers[name] = self._met(registers.get(name), values, masks)
            elif values[0] is not None:
                registers[name] = values[0]
        return join

    def _met(self, before: Any, values: list[Any], masks: list[Lanes]) -> Any:
        """Merge the values that a register has on the sides of a branch; UNKNOWN if they cannot be merged."""
        if before is None and any(value is None for value in values):
            return UNKNOWN
        met = values[0] if before is None else before
        try:
            for value, mask in zip(values, masks, strict=True):
                if value is not met:
                    met = abstract.select(mask, value, met)
        except NotCertified:
            return UNKNOWN
        return met

    def _execute(self, block: int, registers: dict[str, Any]) -> None:
        """Execute the text of a block. Raises NotCertified, which names the instruction."""
        piece = self.program.pieces[block]
        try:
            exec(piece.code, self.scope, registers)
        except Exception as error:
            trace = error.__traceback__
            line = 0
            while trace is not None:
                if trace.tb_frame.f_code is piece.code:
                    line = trace.tb_lineno
                trace = trace.tb_next
            ins = piece.sources[line - 1]
            where = place_of(ins)
            if isinstance(error, NotCertified):
                error.where = error.where or where
                if error.refuted is not None and not error.extents:
                    error.extents = self._extents(error.refuted)
                raise
            if not isinstance(error, AttributeError | TypeError | ValueError | NameError | ArithmeticError):
                raise
            raise NotCertified(f"this use of {ins.op} is not covered: {error}", where) from error

    def _extents(self, names: dict[str, int]) -> dict[str, tuple[int, int]]:
        """Rows and columns of each operand, for these values of names."""
        at = self.facts.evaluated
        return {x.name: (at(x.rows, names), at(x.cols, names)) for x in self.contract.matrices}

    def _taken(self, condition: str | None, registers: dict[str, Any]) -> Lanes:
        """A predicate in every lane."""
        values = np.asarray(registers[condition or ""])
        if values.dtype != bool:
            raise NotCertified("a branch by a predicate that is not known")
        return np.broadcast_to(values, (self.lanes,))

    def finish(self) -> None:
        """Check what a CTA has done when it, or its item of work, ends."""
        self.check_landed()
        self.slices.finish()
        tile = self.contract.tile
        if tile is None or not self.contract.writes:
            if self.written:
                raise NotCertified("a CTA without a tile of its own writes to D")
            return
        if not self.written:
            raise NotCertified("a CTA ends without writing its tile of D")
        first_row, first_col = int(tile.row.constant), int(tile.col.constant)
        rows = np.concatenate([rows.reshape(-1) for rows, _ in self.written]) - first_row
        cols = np.concatenate([cols.reshape(-1) for _, cols in self.written]) - first_col
        if rows.min() < 0 or cols.min() < 0 or rows.max() >= tile.rows or cols.max() >= tile.cols:
            raise NotCertified("a CTA writes outside of its tile of D")
        counts = np.bincount(rows * tile.cols + cols, minlength=tile.rows * tile.cols)
        if (counts != 1).any():
            raise NotCertified(
                f"{int((counts == 0).sum())} elements of a tile of D are not written, "
                f"{int((counts > 1).sum())} more than once"
            )

    def check_landed(self) -> None:
        """Check that no copy to shared memory is pending."""
        state = self.memory.state
        if state.open or any(len(group) for group in state.groups):
            raise NotCertified("a CTA ends while copies to its shared memory are pending")

    def active(self, m: Mask) -> Lanes | None:
        """The lanes that execute an instruction; None for none."""
        if m is None:
            return self.all_lanes
        mask = np.asarray(m)
        if mask.dtype != bool:
            raise NotCertified("a predicate that is not known")
        mask = np.broadcast_to(mask, (self.lanes,))
        return np.flatnonzero(mask) if mask.any() else None

    def quotient(self, values: Any, divisor: Any, *_: Any) -> Any:
        """Check that the divisor of a quotient or remainder is not zero, and return ``values``, the result."""
        if isinstance(divisor, np.ndarray) and not divisor.all():
            raise NotCertified("a division by zero")
        return values

    # --- values: the batch, constants, special registers, parameters

    @property
    def size(self) -> int:
        """The number of lanes."""
        return self.lanes

    def constant(self, what: Any, width: int = 4) -> Any:
        """A parameter at a byte offset, or a special register of the whole grid."""
        if isinstance(what, str):
            return self._special(what)
        parameter = self.contract.parameters.get(what)
        if parameter is None or parameter[1] != 8 * width:
            raise NotCertified(f"the parameter at byte {what} has no meaning in the contract")
        return Word(parameter[0], parameter[1], self.facts)

    def load(self, address: Any, size: int, m: Any, _site: int) -> Any:
        """ld.param at an address in a register, which must be known and the same in all lanes."""
        places = np.unique(self._number(address))
        if len(places) > 1 or m is not None:
            raise NotCertified("lanes load different parameters")
        return self.constant(int(places[0]), size)

    def lanes_of(self, name: str) -> Any:
        """A special register that varies between threads or CTAs."""
        x, y, _ = self.contract.block or (self.lanes, 1, 1)
        numbers = {"%laneid": (1, WARP), "%tid.x": (1, x), "%tid.y": (x, y), "%tid.z": (x * y, self.lanes)}
        if name in numbers:
            step, count = numbers[name]
            return (self.all_lanes // step % count).astype("u4")
        return self._special(name)

    def _special(self, name: str) -> Word:
        """A special register that has a value in the contract."""
        value = self.contract.special.get(name)
        if value is None:
            raise NotCertified(f"{name} has no meaning in the contract")
        return Word(value, 32, self.facts)

    # --- global memory

    def global_load(self, address: Any, size: int, m: Mask, site: int, *_: int) -> Cells:
        """ld.global of elements of an operand, or of partial sums. They are unknown in lanes that do not load."""
        lanes = self.active(m)
        if lanes is None:
            return unknown(self.lanes, size // 2, 2)
        matrix, place = self._elements_at(address, size, False, lanes, site)
        if matrix.name == PARTIALS:
            return self.slices.load(self._slab(place), self._all_lanes(place).cols)
        cells, kind = self._register_of(place, lanes), self.kinds[place.one_kind]
        if self.contract.is_product or kind is None:
            return cells
        return Terms.of_elements(cells, kind, np.isin(self.all_lanes, lanes), self.contract.step)

    def global_store(self, address: Any, value: Any, size: int, m: Mask, site: int, *_: int) -> None:
        """st.global of complete sums to D, or of partial sums to the workspace."""
        lanes = self.active(m)
        if lanes is None:
            return
        if not isinstance(value, Cells):
            raise NotCertified("what is stored to D is not a sum of products")
        matrix, place = self._elements_at(address, size, True, lanes, site)
        value = value.of_lanes(lanes)
        tile = self.contract.tile
        if tile is None:
            raise NotCertified("a CTA without a tile of its own writes to D")
        if isinstance(value, Terms):
            value.check_stored(place, self.kinds[place.one_kind], tile, self.contract.sum_end)
            self.written.append((place.rows, place.cols))
            return
        kind = self.whole_sum(value, matrix.name, matrix.width, tile)
        if matrix.name == PARTIALS:
            self.slices.store(self._slab(place), self._all_lanes(place).cols, value)
            return
        target = self.kinds[place.one_kind]
        same = target is not None and kind.row.equals(target.row) and kind.col.equals(target.col)
        if not same or (value.rows != place.rows).any() or (value.cols != place.cols).any():
            raise NotCertified("D gets the sum of another element")
        self.written.append((place.rows, place.cols))

    def whole_sum(self, value: Cells, destination: str, width: int, tile: Tile) -> Kind:
        """The kind of the elements of ``value``, which are stored to ``destination`` (a name for messages). Raises
        NotCertified unless they are complete sums of the CTA's tile, each of ``width`` bytes."""
        kind = self.kinds[value.one_kind]
        if kind is None or kind.summed is None or value.width != width:
            raise NotCertified(f"what is stored to {destination} is not a sum of products of its type")
        end = self.contract.sum_end
        if kind.summed.beyond or not kind.summed.done.equals(end):
            raise NotCertified(f"{destination} gets the sum up to k = {kind.summed.done}, not to {end}")
        # Kinds have the varying parts of row and col only. Callers check the constants, which are elements' offsets.
        if not (kind.row.equals(tile.row.varying) and kind.col.equals(tile.col.varying)):
            raise NotCertified(f"a CTA stores sums from ({kind.row}, {kind.col}) on, not of its own tile")
        return kind

    def shuffle(self, mode: str, value: Any, lane: Any, clamp: Any, members: Any, m: Mask, site: int) -> Any:
        """shfl.sync: the values of the source lanes, and a mask of the lanes whose source was in range."""
        source, inside = shuffled(mode, self.lanes, [self._number(x) for x in (lane, clamp, members)], m, site)
        if isinstance(value, Cells):
            return value.of_lanes(source), inside
        return np.broadcast_to(self._number(value), (self.lanes,))[source], inside

    def fence(self, m: Mask, scope: Scope, acquire: bool, release: bool, _sequential: bool, restricted: bool) -> None:
        """A fence. Only one of the whole device that acquires and releases orders partial sums."""
        self._together(m)
        if scope == Scope.GPU and acquire and release and not restricted:
            self.slices.fence()

    def count(self, kind: AtomicKind, address: Any, value: Any, _compared: Any, m: Mask, *_: int) -> Any:
        """atom.inc: one thread counts its CTA, and the last of a tile's CTAs returns the counter to zero. Returns the
        number of CTAs that were counted before."""
        lanes = self.active(m)
        if lanes is None or len(lanes) != 1 or (kind.op, kind.kind) != ("inc", "u32") or kind.space == "shared":
            raise NotCertified("an atomic that does not count a CTA by one of its threads")
        if Scope.GPU not in (scope_of(kind.read), scope_of(kind.write)):
            raise NotCertified("an atomic that counts a CTA for a part of the device only")
        highest = self.slices.highest
        if isinstance(value, Word | Cells) or int(np.broadcast_to(value, self.lanes)[lanes[0]]) != highest:
            raise NotCertified(f"a counter that does not return to zero after {highest}")
        return Word(self.slices.arrive(self.counter(address, lanes)), 32, self.facts)

    # --- shared memory

    def shared_places(self, address: Any, size: int, lanes: Lanes, site: int) -> Lanes:
        """The indices of the elements of shared memory that lanes access, shape (lanes, elements of a lane). Addresses
        must be known. ``site``: of the instruction."""
        if isinstance(address, Word):
            if not address.poly.is_constant:
                raise NotCertified(f"an address of shared memory depends on the problem: {address.poly}")
            address = np.broadcast_to(np.asarray(address.number().constant), (self.lanes,))
        own = np.broadcast_to(address, (self.lanes,))[lanes].astype(np.int64)
        self.program.traffic.shared(site, own, lanes, size)
        return self.memory.places(own, size)

    def shared_load(self, address: Any, size: int, m: Mask, site: int, *_: int) -> Any:
        """ld.shared of elements, of a value that was stored as one, or of a byte that is a number."""
        lanes = self.active(m)
        if lanes is None:
            raise NotCertified("no lane of a CTA executes a load from shared memory")
        cells = self.memory.read(self.shared_places(address, size, lanes, site), lanes)
        kept = self.kinds.kept_by(cells.one_kind)
        if kept is not None:
            return fetched(kept, cells, lanes, self.lanes)
        if size > 1:
            return self._register_of(cells, lanes)
        kind = self.kinds[cells.one_kind]
        if kind is None or kind.source != NUMBER:
            raise NotCertified("a byte of shared memory that is no number that was stored")
        return self._register_of(cells, lanes).cols[:, 0].astype("u1")

    def shared_store(self, address: Any, value: Any, size: int, m: Mask, site: int, *_: int) -> None:
        """st.shared of elements of 16 bits, of sums of A's elements, or of a byte that is a number."""
        lanes = self.active(m)
        if lanes is None:
            return
        if isinstance(value, np.ndarray) and size == 1:
            numbers = np.broadcast_to(value, (self.lanes,)).astype("u1").astype(np.int64)[:, None]
            kind = self.kinds.number(Kind(NUMBER, ZERO, ZERO))
            value = Cells(np.full_like(numbers, kind), np.zeros_like(numbers), numbers, 2)
        if isinstance(value, Terms):
            value = kept_places(self.kinds.keep(value), self.lanes, size)
        if not isinstance(value, Cells) or value.width != 2:
            raise NotCertified("what is stored to shared memory are not elements of 16 bits")
        self.memory.write(self.shared_places(address, size, lanes, site), lanes, value.of_lanes(lanes))

    def issue(self, target: Any, source: Any, size: int, count: Any, m: Mask, site: int, *_: int) -> None:
        """cp.async. Lanes that copy 0 bytes write zeros and read nothing. Zeros belong to no operand, so they are
        unknown here."""
        lanes = self.active(m)
        if lanes is None:
            return
        copied = np.broadcast_to(size if count is None else self._number(count), (self.lanes,))[lanes]
        if not np.isin(copied, (0, size)).all():
            raise NotCertified("copies of a part of a vector are not covered")
        copying, cells = lanes[copied == size], unknown(len(lanes), size // 2, 2)
        if len(copying):
            cells = self._register_of(self._elements_at(source, size, False, copying, site)[1], copying).of_lanes(lanes)
        self.memory.copy(self.shared_places(target, size, lanes, site), lanes, cells)

    def _number(self, value: Any) -> Lanes:
        """A number in every lane, which must be known."""
        if isinstance(value, Word):
            if not value.poly.is_constant:
                raise NotCertified(f"a number that depends on the problem: {value.poly}")
            value = value.number().constant
        number = np.asarray(value)
        if number.dtype.kind not in "iu":
            raise NotCertified("a number that is not known")
        return number

    def commit(self, m: Mask) -> None:
        """cp.async.commit_group."""
        self._together(m)
        self.memory.commit()

    def wait(self, most: int, m: Mask) -> None:
        """cp.async.wait_group: all groups but the last ``most`` have landed."""
        self._together(m)
        self.memory.wait(most)

    def wait_all(self, m: Mask) -> None:
        """cp.async.wait_all."""
        self._together(m)
        self.memory.commit()
        self.memory.wait(0)

    def _together(self, m: Mask) -> None:
        """Check that all lanes execute an instruction."""
        lanes = self.active(m)
        if lanes is None or len(lanes) != self.lanes:
            raise NotCertified("some threads of a CTA execute it, and others not")

    def sync(self, number: Any, count: Any, m: Mask, *_: int) -> None:
        """bar.sync, of all threads of the CTA."""
        self._together(m)
        if not same_everywhere(np.atleast_1d(self._number(number))):
            raise NotCertified("threads wait at different barriers")
        if np.any(np.asarray(count)) and np.any(np.asarray(count) != self.lanes):
            raise NotCertified("a barrier of a part of a CTA's threads is not covered")
        self.memory.barrier()
        self.slices.barrier()

    # --- matrices

    def load_matrices(self, address: Any, matrices: int, m: Mask, site: int, transpose: bool) -> list[Cells]:
        """ldmatrix: lane l gets elements 2 * (l % 4) and the next of row l / 4 of each matrix."""
        self._together(m)
        return [self.memory.read(each, None) for each in self.matrix_places(address, matrices, transpose, site)]

    def matrix_places(self, address: Any, matrices: int, transpose: bool, site: int) -> Lanes:
        """The places that ldmatrix and stmatrix access: the two elements of each lane, shape (matrices, lanes, 2)."""
        # Lanes 8 i to 8 i + 7 of a warp have the addresses of the 8 rows of its matrix i. Shape (warps, matrices,
        # rows, columns).
        warps = self.lanes // WARP
        lanes = self.all_lanes[self.all_lanes % WARP < 8 * matrices]
        at = self.shared_places(address, 16, lanes, site).reshape(warps, matrices, 8, 8)
        if transpose:
            at = at.transpose(0, 1, 3, 2)
        return np.ascontiguousarray(at.transpose(1, 0, 2, 3)).reshape(matrices, self.lanes, 2)

    def mma(self, shape: Shape, a: tuple[Any, ...], b: tuple[Any, ...], c: tuple[Any, ...], m: Mask, *_: int) -> Any:
        self._together(m)
        return self.products.multiply(shape, a, b, c)
