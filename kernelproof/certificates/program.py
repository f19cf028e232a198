"""Translates a kernel's basic blocks to Python text, which the emulator's own instructions generate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import CodeType

from kernelproof.certificates.facts import NotCertified
from kernelproof.certificates.traffic import Traffic
from kernelproof.emulator.frontend.emitter import Emitter, EmitterFacts
from kernelproof.emulator.frontend.flow.blocks import Block
from kernelproof.emulator.frontend.flow.graph import build
from kernelproof.emulator.frontend.flow.loops import bits, immediate_postdominators, natural_loops
from kernelproof.emulator.frontend.instructions import facts
from kernelproof.emulator.frontend.parser import parse
from kernelproof.emulator.frontend.ptx import Instr
from kernelproof.emulator.frontend.registers import registers
from kernelproof.emulator.frontend.translate import NAMESPACE, Layout, lazy_registers
from kernelproof.emulator.host.cuda import LaunchRefused
from kernelproof.emulator.host.launch_limits import check_launch, device_for
from kernelproof.emulator.state.launch_state import Geometry
from kernelproof.emulator.state.mangled import plain_name
from kernelproof.emulator.state.sites import Site
from kernelproof.ground.errors import WrongInput, brief, printable


@dataclass
class Piece:
    """A block's code. ``text``: its lines. ``sources``: for each line the instruction from which it comes.
    ``condition``: the variable by which the block branches at its end; None if it does not branch. ``negated``: it
    branches where that variable is false."""

    code: CodeType
    text: tuple[str, ...]
    sources: list[Instr]
    condition: str | None
    negated: bool


class Program:
    """A parsed kernel: the one with a name or, without a name, the only one of a file. ``scope``: the names that its
    text uses besides registers and units. ``offsets``, ``widths``: of its parameters, in bytes. ``traffic``: the
    accesses of the runs since the last ``forget_traffic``. Raises NotCertified, WrongInput for a name that is not that
    of one kernel, and PtxError."""

    def __init__(self, ptx: str, kernel: str = "") -> None:
        module = parse(ptx)
        self.name = _name(list(module.kernels), kernel)
        function = module.kernels[self.name]
        self.graph = build(module, function)
        if any(ins.base == "clusterlaunchcontrol" for ins in self.graph.instructions()):
            raise NotCertified("tiles that are claimed by cluster launch control are not covered")
        self.layout = Layout(module, self.graph)
        self.function, self.target = function, module.target
        self.offsets = function.offsets
        self.widths = [param.size for param in function.params]
        blackwell = self.graph.blackwell
        self.clusters = blackwell or any(map(_is_of_cluster, self.graph.instructions()))
        # Registers of a tcgen05.ld are checked where they are used; ``accumulators`` checks those of wgmma.
        lazy = lazy_registers(self.graph) if blackwell else set[str]()
        names = EmitterFacts(
            self.graph.kinds, set(), lazy, set(self.graph.kinds), set(), self.layout.symbols, self.clusters,
            polls=False, origins={}, machine_code=False,
        )  # fmt: skip
        self.scope: dict[str, object] = dict(NAMESPACE)
        self.emitter = Emitter(names, self.scope)
        self.pieces = [self._piece(block) for block in self.graph.blocks]
        self.forget_traffic()

    def forget_traffic(self) -> None:
        """Begin anew to collect accesses."""
        self.traffic = Traffic(self.emitter.sites)

    def check_launch(self, block: tuple[int, int, int], shared_bytes: int) -> None:
        """Raise NotCertified if CUDA refuses a CTA with these threads and this much dynamic shared memory."""
        device = device_for(self.target)
        geometry = Geometry((1, 1, 1), block, shared_bytes)
        try:
            check_launch(self.function, geometry, self.layout.shared_static, shared_bytes, device, False)
        except LaunchRefused as error:
            raise NotCertified(f"no launch by the contract succeeds: {error}") from None

    @property
    def blocks(self) -> list[Block]:
        """The blocks of the program's graph."""
        return self.graph.blocks

    def _piece(self, block: Block) -> Piece:
        """Translate a block."""
        e = self.emitter
        e.lines = []
        sources: list[Instr] = []
        for ins in block.all():
            e.current, e.guard, e.indent = ins, None, ""
            form = facts(ins)
            if form is None:
                raise e.fail()
            if ins.guard is not None:
                e.guard = e.predicate(ins.guard).text
            form.emit(e, ins)
            if ins is block.last and block.end == "wait":
                e.line(e.waiting)
            sources += [ins] * (len(e.lines) - len(sources))
        condition = e.variable(block.cond.name) if block.cond is not None else None
        code = compile("\n".join(e.lines), f"<block {block.index}>", "exec")
        return Piece(code, tuple(e.lines), sources, condition, bool(block.cond and block.cond.negated))

    def live(self, block: int) -> list[str]:
        """The registers that are live at the start of a block, in ascending order."""
        return sorted(name for name in self.graph.live_in[block] if name in self.graph.kinds)

    @cached_property
    def loops(self) -> dict[int, set[int]]:
        """Head of a loop -> the loop's blocks."""
        return {head: set(bits(body)) for head, body in natural_loops(self.graph.blocks)[0].items()}

    @cached_property
    def joins(self) -> list[int | None]:
        """For each block its immediate postdominator: the first block through which all paths from it lead. None if
        there is none."""
        return immediate_postdominators(self.graph.blocks)

    def loaded(self, block: int) -> int:
        """How many bytes a thread loads from global memory in a block, without cp.async."""
        total = 0
        for ins in self.graph.blocks[block].instrs:
            if ins.base == "ld" and "global" in ins.parts:
                count = 4 if "v4" in ins.parts else 2 if "v2" in ins.parts else 1
                total += count * int(ins.parts[-1][1:]) // 8
        return total

    def products(self, block: int) -> int:
        """How many mma a block has."""
        return sum(ins.base == "mma" for ins in self.graph.blocks[block].instrs)


def place_of(ins: Instr) -> str:
    """Where an instruction is, in words: its PTX line and text, and its line of CUDA where the PTX names it."""
    source = f" ({Site(frames=ins.frames).source})" if ins.frames else ""
    return f"PTX line {ins.line}: {' '.join(ins.text.split())[:120]}{source}"


def _name(kernels: list[str], name: str) -> str:
    """The kernel with a name or a plain name, or the only one if the name is empty. Raises WrongInput if that is not
    one kernel."""
    named = [each for each in kernels if not name or name in (each, plain_name(each))]
    if len(named) == 1:
        return named[0]
    found = f"{', '.join(named)}; name one of them" if named else ", ".join(map(plain_name, kernels)) or "no kernel"
    raise WrongInput(f"kernel={brief(printable(name))!r}: the file has {found}")


def _is_of_cluster(ins: Instr) -> bool:
    """Whether an instruction has to do with other CTAs of a cluster."""
    multicast = any(part.startswith("multicast") for part in ins.parts)
    special = any(name.startswith("%cluster") for op in ins.operands for name in registers(op))
    return multicast or special or ins.base == "mapa" or ins.parts[:2] == ("barrier", "cluster")
