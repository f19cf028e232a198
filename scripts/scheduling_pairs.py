"""Writes small kernels for scripts/scheduling.py, in each of which an instruction uses the result of the one before it.

    python scripts/scheduling_pairs.py FOLDER         writes and assembles them, for all architectures

Kernels of real programs seldom have some pairs of a producer and a reader next to each other, for example an addition
of addresses and a load from an indexed constant. Here the kernels have all these pairs. The operands of a pair and the
instruction before it are drawn at random. Nothing else is left to execute between the two instructions of a pair, so
ptxas has to wait for the result by stall counts. No GPU is used.
"""

from __future__ import annotations

import argparse
import random
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernelproof.ground import toolchain
from scripts.latencies import PRODUCERS, READERS

SEED = 31
DRAWS, RARE_DRAWS = 2, 12  # kernels of each pair, and of one with a reader that is rare in programs (``RARE``)
UNIFORM_DRAWS = 24  # kernels of each pair in uniform registers, of which there are fewer producers
PER_FILE = 1000
SMS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
HEAD = """.version 9.0
.target {sm}
.address_size 64
.visible .shared .align 16 .b8 smem[4096];
.const .align 4 .b32 table[64] = {{3, 1, 4, 1, 5, 9, 2, 6}};
"""
# The PTX of a kernel. Lanes load %x, %y and %t from memory, and the parameters %s are the same in all lanes. ptxas can
# fold none of these values.
KERNEL = """.visible .entry k{number}(.param .u64 in, .param .u32 a, .param .u32 b, .param .u32 c, .param .u64 e)
{{
.reg .b32 %x<8>; .reg .b32 %y<8>; .reg .b32 %t<8>; .reg .b32 %r<8>; .reg .b64 %d<8>; .reg .pred %p<8>; .reg .b32 %s<9>;
.reg .b64 %l<4>; .reg .b16 %h<4>; .reg .f64 %w<4>;
ld.param.u64 %d0, [in]; cvta.to.global.u64 %d0, %d0; ld.param.u64 %l0, [e];
ld.param.u32 %s0, [a]; ld.param.u32 %s1, [b]; ld.param.u32 %s2, [c]; mov.u32 %t7, %tid.x;
ld.global.v4.b32 {{%x0, %x1, %x2, %x3}}, [%d0]; ld.global.v4.b32 {{%y0, %y1, %y2, %y3}}, [%d0+16];
ld.global.v4.b32 {{%t0, %t1, %t2, %t3}}, [%d0+32]; setp.ne.s32 %p0, %y3, 7;
{body}
}}
"""
END = "st.global.b32 [%d0+64], {r};"
# More producers of {r} from {x}, beside those of scripts/latencies.py.
MORE_PRODUCERS = {
    "mov": "mov.b32 {r}, {n};",
    "carry": "add.cc.u32 %r6, {x}, %y1; addc.u32 {r}, %y2, %y3;",
    "sum of pairs": "mov.b64 %l1, {{{x}, %y1}}; add.s64 %l1, %l1, %d0; mov.b64 {{%r6, {r}}}, %l1;",
    "low of a wide product": "mad.wide.u32 %l1, {x}, %y1, %d0; mov.b64 {{{r}, %r6}}, %l1;",
    "high of a wide product": "mad.wide.s32 %l1, {x}, %y1, %d0; mov.b64 {{%r6, {r}}}, %l1;",
    "shifted": "shl.b32 {r}, {x}, {m};",
    "shifted right": "shr.s32 {r}, {x}, {m};",
    "with a literal": "add.s32 {r}, {x}, {n};",
    "product with a literal": "mul.lo.s32 {r}, {x}, {n};",
    "float of an integer": "cvt.rn.f32.s32 {r}, {x};",
    "sum with a literal": "add.rn.f32 {r}, {x}, 0f3FC00000;",
    "absolute": "abs.s32 {r}, {x};",
    "most of three": "max.s32 {r}, {x}, %y1; max.s32 {r}, {r}, %y2;",
    "bf16 pair": "cvt.rn.bf16x2.f32 {r}, {x}, %y1;",
    "field": "bfe.u32 {r}, {x}, {m}, 7;",
    "mask": "and.b32 {r}, {x}, 252;",
    "product of halves": "mul.rn.f16x2 {r}, {x}, %y1;",
}
# More readers of %r0.
MORE_READERS = {
    "constant": "and.b32 %r1, %r0, 252; mov.u64 %d1, table; cvt.u64.u32 %d2, %r1; add.s64 %d1, %d1, %d2; "
    "ld.const.b32 %r1, [%d1]; st.global.b32 [%d0+64], %r1;",
    "constant at once": "cvt.u64.u32 %d2, %r0; mov.u64 %d1, table; add.s64 %d1, %d1, %d2; ld.const.b32 %r1, [%d1]; "
    "st.global.b32 [%d0+64], %r1;",
    "pair store": "st.global.v2.b32 [%d0+64], {{%r0, %r0}};",
    "quad store": "st.shared.v4.b32 [smem+16], {{%r0, %y1, %y2, %y3}};",
    "local store": "st.shared.b16 [smem+4], %h0; cvt.u16.u32 %h0, %r0; st.shared.b16 [smem+8], %h0;",
    "atomic": "atom.global.add.u32 %r1, [%d0], %r0; st.global.b32 [%d0+64], %r1;",
    "reduction in memory": "red.global.add.u32 [%d0], %r0;",
    "shared atomic": "atom.shared.exch.b32 %r1, [smem], %r0; st.global.b32 [%d0+64], %r1;",
    "shared atomic address": "atom.shared.exch.b32 %r1, [%r0], %y0; st.global.b32 [%d0+64], %r1;",
    "exponential": "ex2.approx.f32 %r1, %r0; st.global.b32 [%d0+64], %r1;",
    "reciprocal": "rcp.approx.ftz.f32 %r1, %r0; st.global.b32 [%d0+64], %r1;",
    "bits": "popc.b32 %r1, %r0; st.global.b32 [%d0+64], %r1;",
    "leading": "bfind.u32 %r1, %r0; st.global.b32 [%d0+64], %r1;",
    "conversion": "cvt.rzi.s32.f32 %r1, %r0; st.global.b32 [%d0+64], %r1;",
    "double": "cvt.f64.f32 %w0, %r0; st.global.f64 [%d0+64], %w0;",
    "sum of doubles": "mov.b64 %w0, {{%r0, %y1}}; add.rn.f64 %w0, %w0, %w0; st.global.f64 [%d0+64], %w0;",
    "half": "cvt.rn.f16.f32 %h0, %r0; st.global.b16 [%d0+64], %h0;",
    "warp sum": "redux.sync.add.s32 %r1, %r0, -1; st.global.b32 [%d0+64], %r1;",
    "match": "match.any.sync.b32 %r1, %r0, -1; st.global.b32 [%d0+64], %r1;",
    "lane": "shfl.sync.bfly.b32 %r1, %y0, %r0, 31, -1; st.global.b32 [%d0+64], %r1;",
    "vote": "setp.gt.s32 %p1, %r0, 5; vote.sync.ballot.b32 %r1, %p1, -1; st.global.b32 [%d0+64], %r1;",
    "every": "setp.gt.s32 %p1, %r0, 5; vote.sync.all.pred %p2, %p1, -1; selp.b32 %r1, %y0, %y1, %p2; "
    "st.global.b32 [%d0+64], %r1;",
    "barrier": "and.b32 %r1, %r0, 7; bar.sync %r1, 64; st.global.b32 [%d0+64], %y0;",
    "barrier number": "bar.sync %r0, 64; st.global.b32 [%d0+64], %y0;",
    "exit": "setp.lt.s32 %p1, %r0, %y1; @%p1 exit; st.global.b32 [%d0+64], %y0;",
    "guarded sum": "setp.lt.s32 %p1, %r0, %y1; @%p1 add.s32 %y0, %y0, %y2; st.global.b32 [%d0+64], %y0;",
    "guarded shared load": "setp.lt.f32 %p1, %r0, %y1; mov.b32 %r1, %y0; @%p1 ld.shared.b32 %r1, [smem]; "
    "st.global.b32 [%d0+64], %r1;",
    "two predicates": "setp.lt.s32 %p1, %r0, %y1; and.pred %p2, %p1, %p0; @%p2 st.global.b32 [%d0+64], %y0;",
    "loop": "L{number}: add.s32 %r0, %r0, %y1; setp.lt.s32 %p1, %r0, %y2; @%p1 bra L{number}; "
    "st.global.b32 [%d0+64], %r0;",
    "table": "and.b32 %r1, %r0, 1; M{number}: .branchtargets A{number}, B{number}; brx.idx %r1, M{number}; "
    "A{number}: st.global.b32 [%d0+64], %y0; ret; B{number}: st.global.b32 [%d0+64], %y1;",
    "wide addend": "mov.b64 %l1, {{%y1, %r0}}; mad.wide.u32 %l1, %y0, %y2, %l1; st.global.b64 [%d0+64], %l1;",
    "low addend": "mov.b64 %l1, {{%r0, %y1}}; mad.wide.u32 %l1, %y0, %y2, %l1; st.global.b64 [%d0+64], %l1;",
    "clock": "nanosleep.u32 %r0; st.global.b32 [%d0+64], %y0;",
}
HOPPER_READERS = {
    "mbarrier": "mbarrier.arrive.expect_tx.shared.b64 _, [smem], %r0;",
    "mbarrier address": "mbarrier.arrive.shared.b64 _, [%r0];",
    "wait": "mbarrier.try_wait.parity.shared.b64 %p1, [smem], %r0; @%p1 st.global.b32 [%d0+64], %y0;",
    "matrix store": "stmatrix.sync.aligned.m8n8.x2.shared.b16 [smem], {{%r0, %y1}};",
    "matrix store address": "stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r0], {{%y0, %y1}};",
    "bulk copy": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem+64], [%d0], %r0, [smem];",
    "mapped address": "mapa.shared::cluster.u32 %r1, %r0, %y1; st.shared::cluster.b32 [%r1], %y0;",
}
# Producers of {r} from parameters alone, which are the same in all lanes, so that ptxas may use uniform registers.
UNIFORM_PRODUCERS = {
    "sum": "add.s32 {r}, {x}, {y};",
    "bits": "xor.b32 {r}, {x}, {y};",
    "shift": "shl.b32 {r}, {x}, {m};",
    "shift right": "shr.s32 {r}, {x}, {y};",
    "product": "mad.lo.s32 {r}, {x}, {y}, %s2;",
    "selected": "setp.lt.s32 %p2, {x}, {y}; selp.b32 {r}, {y}, {x}, %p2;",
    "least": "min.s32 {r}, {x}, {y};",
    "field": "bfe.u32 {r}, {x}, {m}, 7;",
    "sum with a literal": "add.s32 {r}, {x}, {n};",
}
# Readers of the uniform %s5.
UNIFORM_READERS = {
    "vector sum": "add.s32 %r0, %y0, %s5; st.global.b32 [%d0+64], %r0;",
    "vector product": "mad.lo.s32 %r0, %y0, %s5, %y1; st.global.b32 [%d0+64], %r0;",
    "float product": "mul.rn.f32 %r0, %y0, %s5; st.global.b32 [%d0+64], %r0;",
    "branch": "setp.lt.s32 %p1, %s5, %s1; @%p1 bra L{number}; bar.sync 0; L{number}: st.global.b32 [%d0+64], %y0;",
    "branch on a bit": "and.b32 %s6, %s5, 4; setp.eq.s32 %p1, %s6, 0; @%p1 bra L{number}; bar.sync 0; L{number}: "
    "st.global.b32 [%d0+64], %y0;",
    "loop": "L{number}: bar.sync 0; add.s32 %s5, %s5, %s0; setp.lt.s32 %p1, %s5, %s2; @%p1 bra L{number}; "
    "st.global.b32 [%d0+64], %y0;",
    "guard": "setp.lt.s32 %p1, %s5, %s1; @%p1 st.global.b32 [%d0+64], %y0;",
    "exit": "setp.lt.s32 %p1, %s5, %s1; @%p1 exit; st.global.b32 [%d0+64], %y0;",
    "selected": "setp.lt.s32 %p1, %s5, %s1; selp.b32 %r0, %y0, %y1, %p1; st.global.b32 [%d0+64], %r0;",
    "shared address": "ld.shared.b32 %r0, [%s5]; st.global.b32 [%d0+64], %r0;",
    "global address": "cvt.u64.u32 %d1, %s5; add.s64 %d1, %d1, %d0; ld.global.b32 %r0, [%d1]; "
    "st.global.b32 [%d0+64], %r0;",
    "stored": "st.global.b32 [%d0+64], %s5;",
    "stored in shared memory": "st.shared.b32 [smem], %s5;",
    "lane": "shfl.sync.idx.b32 %r0, %y0, %s5, 31, -1; st.global.b32 [%d0+64], %r0;",
    "float": "cvt.rn.f32.s32 %r0, %s5; st.global.b32 [%d0+64], %r0;",
    "constant": "cvt.u64.u32 %d2, %s5; mov.u64 %d1, table; add.s64 %d1, %d1, %d2; ld.const.b32 %r1, [%d1]; "
    "st.global.b32 [%d0+64], %r1;",
}
HOPPER_UNIFORM_READERS = {
    "mbarrier": "mbarrier.arrive.expect_tx.shared.b64 _, [smem], %s5;",
    "mbarrier address": "mbarrier.arrive.shared.b64 _, [%s5];",
    "wait": "mbarrier.try_wait.parity.shared.b64 %p1, [smem], %s5; @%p1 st.global.b32 [%d0+64], %y0;",
    "copy": "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s5], [%d0], 64, [smem];",
    "tensor copy": "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [smem+128], "
    "[%l0, {{%s5, %s1}}], [smem];",
    "tensor store": "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%l0, {{%s1, %s5}}], [smem];",
}
RARE = frozenset(
    ("constant", "constant at once", "sum of doubles", "barrier number", "table", "wide addend", "low addend", "clock",
     "mbarrier", "mbarrier address", "wait")
)  # fmt: skip


def bodies(sm: str) -> Iterator[str]:
    """The bodies of an architecture's kernels."""
    draw = random.Random(SEED)
    hopper = int(sm.removeprefix("sm_").rstrip("a")) >= 90
    producers = list((PRODUCERS | MORE_PRODUCERS).values())
    for name, reader in (READERS | MORE_READERS | (HOPPER_READERS if hopper else {})).items():
        for producer in producers:
            for _ in range(RARE_DRAWS if name in RARE else DRAWS):
                names = {"n": draw.randrange(1, 200), "m": draw.randrange(1, 9)}
                before = draw.choice(producers).format(x="%t0", r="%r7", **names)
                first = producer.format(x=draw.choice(("%x0", "%x3", "%r7", "%t7")), r="%r0", **names)
                yield f"{before} {first} {reader.replace('{r}', '%r0')}"
    for reader in (UNIFORM_READERS | (HOPPER_UNIFORM_READERS if hopper else {})).values():
        for producer in UNIFORM_PRODUCERS.values():
            for _ in range(UNIFORM_DRAWS):
                names = {"n": draw.randrange(1, 200), "m": draw.randrange(1, 9)}
                sources = draw.sample(("%s0", "%s1", "%s2", "%s4"), 2)
                before = draw.choice(list(UNIFORM_PRODUCERS.values())).format(x="%s1", y="%s2", r="%s4", **names)
                first = producer.format(x=sources[0], y=sources[1], r="%s5", **names)
                yield f"{before} {first} {reader}"


def texts(sm: str) -> Iterator[str]:
    """Yields PTX files, each with up to ``PER_FILE`` kernels of an architecture. With more of them in
    a file, ptxas takes longer for each kernel."""
    kernels = [
        KERNEL.format(number=number, body=body.replace("{{", "{").replace("}}", "}").replace("{number}", str(number)))
        for number, body in enumerate(bodies(sm))
    ]
    for first in range(0, len(kernels), PER_FILE):
        yield HEAD.format(sm=sm) + "".join(kernels[first : first + PER_FILE])


def assemble(sm: str, folder: Path) -> None:
    """Writes the kernels of an architecture as PTX and as cubins."""
    for number, text in enumerate(texts(sm)):
        source = folder / f"pairs{number}.{sm}.ptx"
        source.write_text(text)
        command = [str(toolchain.discover().ptxas), f"-arch={sm}", "-w", "-o", str(source.with_suffix(".cubin"))]
        subprocess.run([*command, str(source)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("folder", type=Path, help="where to write PTX and cubins")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(lambda sm: assemble(sm, options.folder), SMS))


if __name__ == "__main__":
    main()
