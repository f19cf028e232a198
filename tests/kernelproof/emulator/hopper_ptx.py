"""PTX of small kernels for sm_90a, and functions that launch them, for tests of Hopper's instructions.

A test writes only the body of a kernel. ``entry`` adds a head, registers and two pointers around it: %t is the thread,
%s the start of shared memory, %p the address of x and %q that of y.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernelproof import emulator
from kernelproof.emulator import HOPPER, LaunchResult, Memory
from kernelproof.emulator.hopper.bulk import TensorMap

# The beginning of a text, and of a kernel.
HEAD = """
.version 8.8
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 s[];
"""
REGISTERS = """
  .reg .b32 %t, %u, %v, %w, %s, %bar, %n, %a<8>, %x<8>; .reg .b64 %p, %q, %g, %d<8>; .reg .pred %P, %Q, %E;
  .reg .b16 %h<4>;
  mov.u32 %t, %tid.x; mov.u32 %s, s;
"""


def entry(body: str, params: str = ".param .u64 x, .param .u64 y") -> str:
    """The PTX of a kernel k with this body. Other ``params`` are not loaded into registers."""
    load = "ld.param.u64 %p, [x]; ld.param.u64 %q, [y];" if " x" in params else ""
    return f"{HEAD}.visible .entry k({params}) {{{REGISTERS}{load}\n{body}\n ret;\n}}\n"


def launch(text: str, args: list[Any], memory: Memory, **settings: Any) -> LaunchResult:
    """Launches kernel k of a PTX text: one CTA of 32 threads with 64 KiB of shared memory, unless ``settings``
    differ."""
    settings = {"grid": 1, "block": 32, "shared_bytes": 65536, "device": HOPPER, **settings}
    return emulator.load(text).launch("k", args=args, memory=memory, **settings)


def run_body(body: str, x: np.ndarray, y: np.ndarray, **settings: Any) -> tuple[np.ndarray, LaunchResult]:
    """Launches a body that reads x and writes all of y; returns y, and the result with its reports."""
    memory = Memory()
    out = memory.upload(y, "output")
    result = launch(entry(body), [memory.upload(x), out], memory, **settings)
    return out.download(), result


def tensor_map(
    buffer: Any, dims: tuple[int, ...], pitches: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> bytes:
    """The 128 bytes of a tensor map of fp16 elements, CUDA's type 6. ``dims``, ``box``: extents in elements, innermost
    first; ``pitches``: bytes from one row, plane and so on to the next; ``swizzle``: CUDA's number, 0 for none, 1, 2
    and 3 for 32, 64 and 128 bytes."""
    return TensorMap(6, buffer.address, dims, pitches, box, (1,) * len(dims), 0, swizzle, 0, 0).encode()


def load_kernel(rank: int, nbytes: int) -> str:
    """A kernel that copies a box of ``nbytes`` by TMA to shared memory, waits at an mbarrier, and copies the bytes to
    y. Its parameters: the map, y, and the coordinates of the box."""
    coordinates = ", ".join(f"%a{i}" for i in range(rank))
    reads = " ".join(f"ld.param.u32 %a{i}, [c{i}];" for i in range(rank))
    params = ".param .align 64 .b8 map[128], .param .u64 y, " + ", ".join(f".param .u32 c{i}" for i in range(rank))
    return (
        HEAD
        + f""".visible .entry k({params}) {{ {REGISTERS}
      ld.param.u64 %q, [y]; {reads} add.u32 %bar, %s, {nbytes};
      mov.b64 %d0, map; cvta.param.u64 %d1, %d0;
      setp.ne.u32 %P, %t, 0; @%P bra over;
      prefetch.tensormap [%d1];
      mbarrier.init.shared::cta.b64 [%bar], 1; fence.mbarrier_init.release.cluster;
      mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {nbytes};
      cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint
        [%s], [%d1, {{{coordinates}}}], [%bar], 0;
    over: bar.warp.sync -1;
    again: mbarrier.try_wait.parity.shared::cta.b64 %P, [%bar], 0; @!%P bra again;
      mov.u32 %u, %t;
    more: mad.lo.u32 %v, %u, 4, %s; ld.shared.u32 %w, [%v]; mad.wide.u32 %g, %u, 4, %q; st.global.u32 [%g], %w;
      add.u32 %u, %u, 32; setp.lt.u32 %P, %u, {nbytes // 4}; @%P bra more;
      ret; }}"""
    )


# In a cluster of two CTAs each thread reads what the same thread of the other CTA has stored in its shared memory.
EXCHANGE = """
  mov.u32 %n, %cluster_ctarank; mad.lo.u32 %u, %n, 32, %t; mad.lo.u32 %v, %t, 4, %s;
  st.shared.u32 [%v], %u;
  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
  xor.b32 %x0, %n, 1; mapa.shared::cluster.u32 %x1, %v, %x0;
  ld.shared::cluster.u32 %w, [%x1];
  mad.wide.u32 %g, %u, 4, %q; st.global.u32 [%g], %w;
  barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"""


def exchange(body: str, **settings: Any) -> tuple[np.ndarray, list[str]]:
    """Launches ``EXCHANGE``, or a faulty variant, on a cluster of two CTAs; returns y, and the findings as text."""
    settings = {"grid": 2, "cluster": 2, "check_outputs": False, **settings}
    got, result = run_body(body, np.zeros(1, np.uint32), np.empty(64, np.uint32), **settings)
    return got, [f"{r.kind}: {r.message}" for r in result.reports]


# For each swizzle by name: the bytes of a row that it permutes, and its number in a descriptor of wgmma.
SPAN = {"none": 16, "32": 32, "64": 64, "128": 128}
MODE = {"none": 0, "32": 3, "64": 2, "128": 1}


def descriptor(offset: int, leading: int, stride: int, mode: str) -> int:
    """The descriptor of an operand of wgmma. ``offset``: bytes from the start of ``s``; ``leading`` and ``stride``: the
    byte offsets of the same names in the PTX ISA. All three are stored in units of 16 bytes."""
    # The window's first kilobyte belongs to the system: shared variables start at address 1024.
    return (1024 + offset) >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | MODE[mode] << 62


def wgmma_kernel(n: int, acc: str, kind: str, da: int, db: int, ta: bool, tb: bool, signs: str, registers: bool) -> str:
    """A kernel that copies 32 KiB of x to shared memory, and multiplies by one wgmma of m64nNk16.

    ``da``, ``db``: descriptors of A and B; ``ta``, ``tb``: whether they are transposed; ``signs``: the immediates that
    negate A and B. With ``registers`` A comes from registers, which are loaded from f. The kernel's parameters: x; c,
    the old D; y, the new D; f; and keep, which is 0 if the product replaces D.
    """
    count = n // 2 if acc == "f32" else n // 4
    names = ", ".join(f"%c{i}" for i in range(count))
    loads = "\n".join(f"ld.global.u32 %c{i}, [%d2+{4 * i}];" for i in range(count))
    stores = "\n".join(f"st.global.u32 [%d3+{4 * i}], %c{i};" for i in range(count))
    a = "{%a0, %a1, %a2, %a3}" if registers else str(da)
    trans = f"{int(tb)}" if registers else f"{int(ta)}, {int(tb)}"
    fragments = "\n".join(f"ld.global.u32 %a{i}, [%d4+{4 * i}];" for i in range(4)) if registers else ""
    return (
        HEAD
        + f""".visible .entry k(.param .u64 x, .param .u64 c, .param .u64 y, .param .u64 f, .param .u32 keep) {{
      {REGISTERS} .reg .b32 %c<{count}>; .reg .b64 %A, %B;
      ld.param.u64 %p, [x]; ld.param.u64 %d0, [c]; ld.param.u64 %d1, [y]; ld.param.u64 %d5, [f];
      ld.param.u32 %n, [keep]; setp.ne.u32 %P, %n, 0;
      mov.u32 %u, 0;
    more:
      mad.lo.u32 %v, %t, 16, %u; cvt.u64.u32 %g, %v; add.u64 %g, %g, %p; add.u32 %v, %v, %s;
      ld.global.v4.u32 {{%x0, %x1, %x2, %x3}}, [%g]; st.shared.v4.u32 [%v], {{%x0, %x1, %x2, %x3}};
      add.u32 %u, %u, 2048; setp.lt.u32 %Q, %u, 32768; @%Q bra more;
      fence.proxy.async.shared::cta; bar.sync 0;
      mad.wide.u32 %d2, %t, {4 * count}, %d0; mad.wide.u32 %d3, %t, {4 * count}, %d1; mad.wide.u32 %d4, %t, 16, %d5;
      {loads} {fragments}
      mov.b64 %A, {da}; mov.b64 %B, {db};
      wgmma.fence.sync.aligned;
      wgmma.mma_async.sync.aligned.m64n{n}k16.{acc}.{kind}.{kind}
        {{{names}}}, {a if registers else "%A"}, %B, %P, {signs}, {trans};
      wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
      {stores} ret; }}"""
    )
