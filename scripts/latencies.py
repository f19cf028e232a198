"""Finds the fixed latencies of instructions, as ptxas knows them, for kernelproof/sass/latencies.json.

    python scripts/latencies.py                    by the installed ptxas, for all architectures
    python scripts/latencies.py --build FOLDER     also reads the kernels of a build folder, which have more pairs
    python scripts/latencies.py --sm sm_90a        one architecture; prints the table

No scoreboard guards the result of an instruction of fixed latency: ptxas delays its reader by stall counts. In each
kernel here the instruction after a producer needs its result, so ptxas cannot move another one between them. The sum of
the stall counts from the producer to the reader is then the latency in cycles. The least distance over all kernels
counts, because other waits may be longer. No GPU is used.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from kernelproof.ground import toolchain
from kernelproof.sass import Function, Graph, Instruction, disassemble
from kernelproof.sass.banks import EVEN
from kernelproof.sass.latencies import TABLE, producer_key, role
from kernelproof.sass.pipes import MMA, WARPGROUP, Pipe, pipe_use
from kernelproof.sass.registers import access

# The architectures for which PTX is compiled.
SMS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
# Opcodes that wait for more than their own operands, so their distance to a producer says nothing of its latency.
WAITS = frozenset(("DEPBAR", "BAR", "WARPGROUP", "WARPSYNC", "MEMBAR", "ERRBAR", "CGAERRBAR"))
LONGEST = 13  # the longest latency of a producer that is no MMA: of a predicate to a branch
KERNELS = 300  # number of kernels of a build folder, first by digest
# The beginning of a PTX text.
HEAD = """.version 9.0
.target {sm}
.address_size 64
.visible .shared .align 16 .b8 smem[1024];
"""
# A kernel whose ``body`` computes a result and then reads it. Before that it loads operands %x, %y and %t, a predicate
# and parameters, so that ptxas knows none of their values.
KERNEL = """.visible .entry k{number}(.param .u64 in, .param .u32 a, .param .u32 b, .param .u32 c)
{{
.reg .b32 %x<8>; .reg .b32 %y<8>; .reg .b32 %t<8>; .reg .b32 %r<8>; .reg .b64 %d<8>; .reg .pred %p<8>; .reg .b32 %s<8>;
ld.param.u64 %d0, [in]; cvta.to.global.u64 %d0, %d0;
ld.param.u32 %s0, [a]; ld.param.u32 %s1, [b]; ld.param.u32 %s2, [c];
ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%d0]; ld.global.v4.b32 {{%y0, %y1, %y2, %y3}}, [%d0+16];
ld.global.v4.b32 {{%t0, %t1, %t2, %t3}}, [%d0+32]; setp.ne.s32 %p0, %y3, 7;
{body}
}}
"""
# PTX that computes {r} from {x}, %y1 and %y2, by the name of the SASS instruction that it often becomes.
PRODUCERS: dict[str, str] = {
    "iadd3": "add.s32 {r}, {x}, %y1; add.s32 {r}, {r}, %y2;",
    "lop3": "lop3.b32 {r}, {x}, %y1, %y2, 0x1b;",
    "shf": "shf.l.wrap.b32 {r}, {x}, %y1, %y2;",
    "lea": "shl.b32 {r}, {x}, 3; add.s32 {r}, {r}, %y1;",
    "sel": "selp.b32 {r}, {x}, %y1, %p0;",
    "prmt": "prmt.b32 {r}, {x}, %y1, %y2;",
    "imad": "mad.lo.s32 {r}, {x}, %y1, %y2;",
    "imad.hi": "mad.hi.u32 {r}, {x}, %y1, %y2;",
    "isetp": "setp.lt.s32 %p2, {x}, %y1; selp.b32 {r}, %y2, %y0, %p2;",
    "fsetp": "setp.lt.f32 %p2, {x}, %y1; selp.b32 {r}, %y2, %y0, %p2;",
    "plop3": "setp.lt.s32 %p2, {x}, %y1; xor.pred %p2, %p2, %p0; selp.b32 {r}, %y2, %y0, %p2;",
    "imnmx": "min.s32 {r}, {x}, %y1;",
    "fmnmx": "min.f32 {r}, {x}, %y1;",
    "fadd": "add.rn.f32 {r}, {x}, %y1;",
    "fmul": "mul.rn.f32 {r}, {x}, %y1;",
    "ffma": "fma.rn.f32 {r}, {x}, %y1, %y2;",
    "hadd2": "add.rn.f16x2 {r}, {x}, %y1;",
    "hfma2": "fma.rn.f16x2 {r}, {x}, %y1, %y2;",
    "f2fp": "cvt.rn.f16x2.f32 {r}, {x}, %y1;",
    "hmma.16816": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{{r}, %r5, %r6, %r7}}, {{{x}, %x1, %x2, %x3}}, "
    "{{%y0, %y1}}, {{%y0, %y1, %y2, %y3}};",
    "hmma.16816.f16": "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {{{r}, %r5}}, {{{x}, %x1, %x2, %x3}}, "
    "{{%y0, %y1}}, {{%y0, %y1}};",
    "hmma.1688": "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {{{r}, %r5, %r6, %r7}}, {{{x}, %x1}}, {{%y0}}, "
    "{{%y0, %y1, %y2, %y3}};",
    "imma.16832": "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {{{r}, %r5, %r6, %r7}}, {{{x}, %x1, %x2, %x3}}, "
    "{{%y0, %y1}}, {{%y0, %y1, %y2, %y3}};",
}
END = "st.global.b32 [%d0+64], {r};"  # stores a result, so that ptxas does not remove the code that computes it
# Other readers of %r0.
READERS: dict[str, str] = {
    "store": END,
    "store address": "cvt.u64.u32 %d1, %r0; add.s64 %d1, %d1, %d0; st.global.b32 [%d1], %y0;",
    "load address": "ld.shared.b32 %r1, [%r0]; st.global.b32 [%d0+64], %r1;",
    "shared store": "st.shared.b32 [smem+4], %r0;",
    "shared address": "st.shared.b32 [%r0], %y0;",
    "matrices": "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{%r1, %r2, %r3, %r4}}, [%r0]; add.s32 %r1, %r1, %r2; "
    "st.global.b32 [%d0+64], %r1;",
    "copy": "cp.async.cg.shared.global [%r0], [%d0], 16; cp.async.wait_all;",
    "wide": "mad.wide.s32 %d1, %r0, %y1, %d0; ld.global.b32 %r1, [%d1]; st.global.b32 [%d0+64], %r1;",
    "branch": "setp.lt.s32 %p1, %r0, %y1; @%p1 bra L{number}; bar.sync 0; L{number}: st.global.b32 [%d0+64], %y0;",
    "guard": "setp.lt.s32 %p1, %r0, %y1; @%p1 st.global.b32 [%d0+64], %y0;",
    "shuffle": "shfl.sync.idx.b32 %r1, %r0, %y1, 31, 0xffffffff; st.global.b32 [%d0+64], %r1;",
    "operand b": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%r1, %r5, %r6, %r7}}, {{%x0, %x1, %x2, %x3}}, "
    "{{%r0, %y1}}, {{%y0, %y1, %y2, %y3}}; st.global.b32 [%d0+64], %r1;",
    "sums": "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{%r1, %r5, %r6, %r7}}, {{%x0, %x1, %x2, %x3}}, "
    "{{%y0, %y1}}, {{%r0, %y1, %y2, %y3}}; st.global.b32 [%d0+64], %r1;",
}
# Bodies that compute with kernel parameters, which ptxas does in uniform registers if all readers allow it.
UNIFORM = (
    "add.s32 %s3, %s0, %s1; xor.b32 %s4, %s3, %s2; shl.b32 %s5, %s4, 4; add.s32 %s6, %s5, %s0; "
    "ld.shared.b32 %r1, [%s6]; st.global.b32 [%d0+64], %r1;",
    "mad.lo.s32 %s3, %s0, %s1, %s2; setp.lt.s32 %p1, %s3, %s0; selp.b32 %s4, %s1, %s2, %p1; add.s32 %r0, %y0, %s4; "
    "st.global.b32 [%d0+64], %r0;",
    "shr.s32 %s3, %s0, 31; add.s32 %s4, %s3, %s1; setp.ge.s32 %p1, %s4, %s2; @%p1 bra L{number}; bar.sync 0; "
    "L{number}: st.global.b32 [%d0+64], %y0;",
    "shl.b32 %s3, %s0, 4; add.s32 %s4, %s3, %s1; mov.u32 %t4, smem; add.s32 %s5, %s4, %t4; add.s32 %t5, %s5, %y1; "
    "ld.shared.b32 %r1, [%t5]; add.s32 %r2, %r1, %s3; st.global.b32 [%d0+64], %r2;",
)
# The next MMA reads all results of an MMA, as its sums or as A. A single result would first be moved to another
# register.
PRODUCT = "mma.sync.aligned.{kind} {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}};"
# Products, and the registers of A, of B and of the sums in each thread.
SHAPES = (
    ("m16n8k16.row.col.f32.f16.f16.f32", 4, 2, 4),
    ("m16n8k16.row.col.f16.f16.f16.f16", 4, 2, 2),
    ("m16n8k8.row.col.f32.f16.f16.f32", 2, 1, 4),
    ("m16n8k32.row.col.s32.s8.s8.s32", 4, 2, 4),
)
WIDE = "mad.wide.s32 %d1, %y0, 4, %d0; "  # a producer whose result is a pair of registers, an address


def chains() -> Iterator[str]:
    """Kernel bodies in which an MMA, a store or a load reads all registers of a result."""
    for kind, a, b, c in SHAPES:

        def group(kind: str, count: int) -> str:
            return ", ".join(f"%{kind}{number}" for number in range(count))

        parts = {"kind": kind, "a": group("x", a), "b": group("y", b), "c": group("y", c), "d": group("r", c)}
        last = END.format(r="%t0")
        yield PRODUCT.format(**parts) + PRODUCT.format(**parts | {"c": group("r", c), "d": group("t", c)}) + last
        if c >= a:
            yield PRODUCT.format(**parts) + PRODUCT.format(**parts | {"a": group("r", a), "d": group("t", c)}) + last
    yield WIDE + "st.global.b32 [%d1], %y3;"
    yield WIDE + "ld.global.b32 %r1, [%d1]; " + END.format(r="%r1")


def bodies() -> Iterator[str]:
    """The bodies of all kernels: each producer with each reader, and with itself as its reader."""
    for producer in PRODUCERS.values():
        first = producer.format(x="%x0", r="%r0")
        for reader in READERS.values():
            yield f"{first} {reader}".replace("{r}", "%r0")
        for reader in PRODUCERS.values():
            yield f"{first} {reader.format(x='%r0', r='%r1')} {END.format(r='%r1')}"
    yield from UNIFORM
    yield from chains()


def compiled_kernels(sm: str, ptxas: Path, folder: Path) -> list[Function]:
    """The kernels, assembled for an architecture."""
    text = HEAD.format(sm=sm) + "".join(
        KERNEL.format(number=number, body=body.replace("{number}", str(number)).replace("{{", "{").replace("}}", "}"))
        for number, body in enumerate(bodies())
    )
    source, cubin = folder / f"{sm}.ptx", folder / f"{sm}.cubin"
    source.write_text(text)
    subprocess.run([str(ptxas), f"-arch={sm}", "-o", str(cubin), str(source)], check=True)
    return disassemble(cubin)


def distances(function: Function) -> Iterator[tuple[str, str, int]]:
    """Triples: a producer of fixed latency, how the first reader uses its result, and the cycles between them."""
    for block in Graph(function).blocks:
        codes = block.instructions
        for at, producer in enumerate(codes):
            pending = access(producer).writes
            if (
                not pending
                or producer.control.write_barrier is not None
                or not _has_fixed_latency(producer, function.sm)
            ):
                continue
            cycles = 0
            for before, reader in zip(codes[at:], codes[at + 1 :], strict=False):
                if reader.control.waits or reader.name in WAITS:
                    break  # it may wait longer than the stall counts say
                cycles += before.control.stall
                accessed = access(reader)
                if (used := accessed.reads & pending) and not _uses_half_pair(producer, reader, used):
                    yield producer_key(producer), role(reader, used, function.sm), cycles
                pending &= ~(accessed.reads | accessed.writes)
                if not pending:
                    break


def _has_fixed_latency(producer: Instruction, sm: str) -> bool:
    """Whether an instruction's latency is fixed. Those of warpgroups and of tcgen05 are waited for by other means."""
    pipe = pipe_use(producer, sm).pipe
    tensor = producer.name in MMA and producer.name not in WARPGROUP and not producer.name.startswith("UTC")
    return pipe in (Pipe.ALU, Pipe.FMA, Pipe.FP16, Pipe.UNIFORM) or tensor


def _uses_half_pair(producer: Instruction, reader: Instruction, used: int) -> bool:
    """Whether only half of a register pair is used: the low half of a wide product comes earlier, and the high half of
    a wide addend may come later."""
    if "WIDE" in producer.modifiers and used.bit_length() != access(producer).writes.bit_length():
        return True
    wide = "WIDE" in reader.modifiers or "HI" in reader.modifiers
    return reader.name == "IMAD" and wide and not used & EVEN


def table(functions: Iterable[Function]) -> dict[str, dict[str, int]]:
    """The least distance in cycles of any pair, by producer and by role of the reader."""
    least: dict[str, dict[str, int]] = {}
    for function in functions:
        for producer, reader, cycles in distances(function):
            if cycles > LONGEST and producer.split(".")[0] not in MMA:
                continue  # other instructions stand between these
            readers = least.setdefault(producer, {})
            readers[reader] = min(cycles, readers.get(reader, cycles))
    return {producer: dict(sorted(readers.items())) for producer, readers in sorted(least.items())}


def tables(sms: Sequence[str], build: Path | None = None) -> dict[str, dict[str, dict[str, int]]]:
    """The table of each architecture, from kernels that this script compiles and from those of a build folder."""
    tools = toolchain.discover()
    cubins = sorted(build.glob("*/kernel.cubin"))[:KERNELS] if build else []
    built = [function for cubin in cubins for function in disassemble(cubin)]
    with TemporaryDirectory() as folder:
        return {
            sm: table(
                [
                    *compiled_kernels(sm, tools.ptxas, Path(folder)),
                    *(function for function in built if function.sm == sm),
                ]
            )
            for sm in sms
        }


def to_json(toolkits: Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]]) -> str:
    """JSON with a line for each producer."""
    text = json.dumps(toolkits, indent=1)
    return re.sub(r"\{([^{}]*)\}", lambda match: "{" + " ".join(match.group(1).split()) + "}", text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--sm", choices=SMS, help="print the table of one architecture")
    parser.add_argument("--build", type=Path, help="a build folder, whose kernels the same ptxas assembled")
    options = parser.parse_args()
    if options.sm:
        print(json.dumps(tables([options.sm], options.build), indent=1))
        return
    toolkits = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
    toolkits[toolchain.discover().nvcc_version] = tables(SMS, options.build)
    TABLE.write_text(to_json(toolkits))


if __name__ == "__main__":
    main()
