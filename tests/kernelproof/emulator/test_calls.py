"""Proves barriers of the grid, calls by address, votes in both spellings, and which calls are refused with a
message."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelproof import emulator
from kernelproof.emulator import Memory
from kernelproof.emulator.frontend.ptx import PtxError
from kernelproof.emulator.host.launch_limits import device_for
from kernelproof.emulator.state.reports import EmulatorError
from tests.kernelproof.emulator.build import compile_file


def program() -> emulator.Program:
    """The compiled file ``calls``, which has this module's kernels."""
    return emulator.load(compile_file("calls", ".ptx"))


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_grid_barrier(rounds: int) -> None:
    memory, blocks = Memory(), 6
    start = np.arange(0, 10 * blocks, 10, dtype=np.int32)
    x, y = memory.upload(start, "inout"), memory.upload(np.zeros(blocks, np.int32), "inout")
    for _ in range(2):
        x.bytes()[:] = start.view(np.uint8)
        result = program().launch("ring", blocks, 64, [x, y, np.int32(rounds)], memory=memory, cooperative=True)
        assert result.reports == []
        got = (y if rounds % 2 else x).download()
        assert got.tolist() == [int(start[(i - rounds) % blocks]) + rounds for i in range(blocks)]


def test_calls_by_address() -> None:
    rng = np.random.default_rng(2)
    memory = Memory()
    which, a, b = rng.integers(0, 3, 70), rng.integers(-99, 99, 70), rng.integers(-99, 99, 70)
    inputs = [memory.upload(values.astype(np.int32)) for values in (which, a, b)]
    out = memory.upload(np.zeros(70, np.int32), "output")
    result = program().launch("choose", 1, 70, [*inputs, out], memory=memory)
    assert result.reports == []
    assert (out.download() == np.choose(which, [a + b, a - b, a * b])).all()


def test_a_call_of_no_function_traps() -> None:
    memory = Memory()
    which = np.zeros(32, np.int32)
    which[5] = 3
    inputs = [memory.upload(values) for values in (which, which, which)]
    out = memory.upload(np.zeros(32, np.int32), "output")
    result = program().launch("choose", 1, 32, [*inputs, out], memory=memory, check_outputs=False)
    assert [(r.kind, r.threads) for r in result.reports] == [("trap", (5,))]


def test_virtual_functions() -> None:
    memory = Memory()
    out = memory.upload(np.zeros(40, np.int32), "output")
    result = program().launch("areas", 1, 40, [out], memory=memory)
    assert result.reports == []
    assert out.download().tolist() == [i * i * (6 if i % 3 else 1) for i in range(40)]


# Declarations for texts of kernels, with a function that calls itself without end.
HEAD = """.version 8.6\n.target sm_80\n.address_size 64
.extern .func (.param .b64 r) malloc (.param .b64 n);
.extern .func (.param .b32 r) cudaLaunchDeviceV2 (.param .b64 a, .param .b64 b);
.func (.param .b32 r) deeper (.param .b32 n) { .reg .b32 %a; ld.param.b32 %a, [n];
  { .param .b32 p; st.param.b32 [p], %a; .param .b32 q; call (q), deeper, (p); ld.param.b32 %a, [q]; }
  st.param.b32 [r], %a; ret; }
"""


def kernel(body: str) -> emulator.Program:
    """A kernel with this body, in which %t is the thread, and %a is stored at the end."""
    return emulator.load(f"""{HEAD}.visible .entry k(.param .u64 x) {{
      .reg .b32 %t, %a, %b, %c, %d; .reg .f32 %f<9>; .reg .b64 %p, %q; .reg .pred %P;
      ld.param.u64 %p, [x]; mov.u32 %t, %tid.x; mad.wide.u32 %p, %t, 4, %p;
      {body} st.global.u32 [%p], %a; ret; }}""")


def parts(sizes: tuple[int, ...], access: str, kind: str, width: int) -> str:
    """Accesses to the parameter ``p`` in vectors of these sizes, of the registers %e0 and so on in order."""
    lines, first = "", 0
    for size in sizes:
        names = ", ".join(f"%e{first + n}" for n in range(size))
        value, vector = (names, "") if size == 1 else (f"{{{names}}}", f".v{size}")
        place = f"[p+{first * width}]"
        operands = f"{place}, {value}" if access == "st" else f"{value}, {place}"
        lines, first = lines + f"{access}.param{vector}.{kind} {operands}; ", first + size
    return lines


SIZES = st.sampled_from([(1, 1, 1, 1), (2, 2), (2, 1, 1), (1, 1, 2), (4,)])


@settings(max_examples=20)
@given(st.sampled_from(["u8", "s8", "b16", "u16", "s16", "b32", "s32", "f32", "b64", "s64"]), SIZES, SIZES,
       st.lists(st.integers(0, 127), min_size=4, max_size=4))  # fmt: skip
def test_a_function_gets_what_its_caller_stores(
    kind: str, stored: tuple[int, ...], loaded: tuple[int, ...], values: list[int]
) -> None:
    """Four elements are stored and loaded in other groups; the function returns one number that is made of all."""
    width = int(kind[1:]) // 8
    register = f".b{max(16, 8 * width)}"
    if width == 8 and 4 in stored + loaded:
        return  # a vector has at most 16 bytes
    sums = "".join(
        f"cvt.u32.u{register[2:]} %x, %e{n}; and.b32 %x, %x, 127; mad.lo.u32 %s, %s, 128, %x; " if width != 4 else
        f"mov.b32 %x, %e{n}; mad.lo.u32 %s, %s, 128, %x; " for n in range(4)
    )  # fmt: skip
    program = emulator.load(f""".version 8.0\n.target sm_80\n.address_size 64
      .func (.param .b32 r) f (.param .align 16 .b8 p[32]) {{
        .reg {register} %e<4>; .reg .b32 %x, %s;
        {parts(loaded, "ld", kind, width)} mov.u32 %s, 0; {sums} st.param.b32 [r], %s; ret; }}
      .visible .entry k(.param .u64 x) {{ .reg {register} %e<4>; .reg .b32 %a; .reg .b64 %o;
        ld.param.u64 %o, [x];
        {"".join(f"mov{register} %e{n}, {value}; " for n, value in enumerate(values))}
        {{ .param .align 16 .b8 p[32]; {parts(stored, "st", kind, width)}
           .param .b32 q; call (q), f, (p); ld.param.b32 %a, [q]; }}
        st.global.u32 [%o], %a; ret; }}""")
    memory = Memory()
    out = memory.upload(np.zeros(1, np.uint32), "output")
    assert program.launch("k", 1, 1, [out], memory=memory).reports == []
    assert int(out.download()[0]) == sum(value << 7 * (3 - n) for n, value in enumerate(values))


@pytest.mark.parametrize(("target", "kinds"), [("sm_80", []), ("sm_90", ["grid-dependency"])])
def test_dependent_launches_overlap_from_sm_90_on(target: str, kinds: list[str]) -> None:
    memory = Memory()
    out = memory.upload(np.zeros(32, np.int32), "output")
    device = device_for(target)
    result = kernel("mov.u32 %a, 3;").launch("k", 1, 32, [out], memory=memory, overlapping=True, device=device)
    assert [r.kind for r in result.reports] == kinds


@pytest.mark.parametrize("opcode", ["vote.sync.ballot.b32", "vote.ballot.sync.b32"])
@pytest.mark.parametrize("lanes", ["WARP_SZ", "32"])
def test_votes_and_the_warp_size(opcode: str, lanes: str) -> None:
    memory = Memory()
    out = memory.upload(np.zeros(64, np.uint32), "output")
    body = f"rem.u32 %b, %t, 3; setp.eq.u32 %P, %b, 0; {opcode} %a, %P, -1; add.u32 %a, %a, {lanes};"
    result = kernel(body).launch("k", 1, 64, [out], memory=memory)
    assert result.reports == []
    want = [sum(1 << i for i in range(32) if (warp * 32 + i) % 3 == 0) + 32 for warp in range(2)]
    assert out.download().tolist() == [want[i // 32] for i in range(64)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("tex.1d.v4.f32.f32 {%f1, %f2, %f3, %f4}, [%p, {%f5}];", "textures and surfaces are not modelled: tex.1d"),
        ("suld.b.1d.b32.trap {%a}, [%p, {%t}];", "textures and surfaces are not modelled: suld.b"),
        (
            "{ .param .b64 n; st.param.b64 [n], 8; .param .b64 r; call (r), malloc, (n); }",
            "device malloc is not modelled",
        ),
        (
            "{ .param .b64 n; .param .b64 m; .param .b32 r; call (r), cudaLaunchDeviceV2, (n, m); }",
            "dynamic parallelism",
        ),
        ("{ .param .b32 n; st.param.b32 [n], 8; .param .b32 r; call (r), deeper, (n); }", "recursive call of deeper"),
        ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%a}, {%a}, {%a}, {%a};", "mma.sync.aligned.m8n8k4"),
    ],
)
def test_refused_in_words(body: str, words: str) -> None:
    memory = Memory()
    out = memory.upload(np.zeros(32, np.uint32), "output")
    with pytest.raises((PtxError, EmulatorError), match=words) as error:
        kernel(body).launch("k", 1, 32, [out], memory=memory)
    assert "line" in str(error.value)
