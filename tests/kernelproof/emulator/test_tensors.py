"""Proves that PyTorch tensors can be arguments of a launch.

Also proves that a kernel can be launched by its short name, which parameters a kernel only reads, and that a thread can
take a lock for its CTA.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import EmulatorError, LaunchRefused, Memory

torch = pytest.importorskip("torch")

# The first lines of every text.
HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"
# Adds 1 to each of 32 bytes, in place.
INCREMENT = """
.visible .entry NAME(.param .u64 x) {
  .reg .b32 %t, %v; .reg .b64 %p, %g;
  ld.param.u64 %p, [x]; mov.u32 %t, %tid.x; cvt.u64.u32 %g, %t; add.u64 %p, %p, %g;
  ld.global.u8 %v, [%p]; add.u32 %v, %v, 1; st.global.u8 [%p], %v; ret; }
"""
# Names of types in torch that the emulator takes.
INTEGERS = ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"]
FLOATS = ["float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


def increment(name: str = "k") -> str:
    """The PTX of a kernel of this name that adds 1 to each of 32 bytes."""
    return INCREMENT.replace("NAME", name)


@pytest.mark.parametrize("kind", INTEGERS + FLOATS)
def test_tensors_of_every_type_are_changed_in_place(kind: str) -> None:
    """The argument is a view from byte 8 on, so the kernel changes bytes 8 to 39 of the whole tensor."""
    whole = torch.zeros(80, dtype=torch.uint8).view(getattr(torch, kind))
    item = whole.element_size()
    view = whole[8 // item :]
    result = emulator.load(HEAD + increment()).launch("k", 1, 32, [view])
    assert result.reports == []
    expected = np.zeros(80, np.uint8)
    expected[8:40] = 1
    assert (whole.view(torch.uint8).numpy() == expected).all()


def test_a_tensor_in_two_arguments_is_one_buffer() -> None:
    """Element 0 is written by the pointer to the tensor, and read by that to its view from element 1 on."""
    text = """.visible .entry k(.param .u64 x, .param .u64 y) {
      .reg .b32 %v; .reg .b64 %p, %q;
      ld.param.u64 %p, [x]; ld.param.u64 %q, [y]; mov.u32 %v, 5; st.global.u32 [%p], %v;
      ld.global.u32 %v, [%q+-4]; add.u32 %v, %v, 1; st.global.u32 [%q], %v; ret; }"""
    x = torch.zeros(4, dtype=torch.int32)
    assert emulator.load(HEAD + text).launch("k", 1, 1, [x, x[1:]]).reports == []
    assert x.tolist() == [5, 6, 0, 0]


def test_findings_name_the_type_that_numpy_lacks() -> None:
    x = torch.zeros(4, 3, dtype=torch.bfloat16)
    loads = emulator.load(HEAD + increment()).launch("k", 1, 32, [x]).reports[0]
    assert loads.place is not None
    assert (loads.kind, loads.place.element, loads.place.index) == ("global-out-of-bounds", "bfloat16", (4, 0))


def test_uploads_of_tensors() -> None:
    memory = Memory()
    x = torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16)
    assert (memory.upload(x).download() == x.view(torch.uint16).numpy()).all()
    assert (memory.upload(torch.arange(6).reshape(2, 3)).download() == np.arange(6).reshape(2, 3)).all()
    with pytest.raises(EmulatorError, match="contiguous"):
        memory.upload(torch.zeros(4, 4).T)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.zeros(8, dtype=torch.complex64), "view_as_real"),
        (lambda: torch.zeros(32, device="meta"), "meta"),
        (lambda: torch.zeros(8, 8).to_sparse(), "to_dense"),
        (lambda: "text", "CPU tensor"),
    ],
)
def test_what_is_no_argument_is_said(make: Any, message: str) -> None:
    with pytest.raises(EmulatorError, match=message):
        emulator.load(HEAD + increment()).launch("k", 1, 32, [make()])


def test_short_names_where_one_kernel_has_them() -> None:
    program = emulator.load(HEAD + "".join(map(increment, ("_Z3onePf", "_Z3twoPf", "_Z3twoPi"))))
    x = torch.zeros(32, dtype=torch.uint8)
    assert program.launch("one", 1, 32, [x]).kernel == "_Z3onePf"
    program.launch("_Z3twoPi", 1, 32, [x])
    assert x.tolist() == [2] * 32
    with pytest.raises(LaunchRefused, match="ambiguous; write one of _Z3twoPf, _Z3twoPi"):
        program.launch("two", 1, 32, [x])
    with pytest.raises(LaunchRefused, match="no kernel 'three'; the file has _Z3onePf"):
        program.launch("three", 1, 32, [x])


# Writes through the pointer y, through y or z, and with LAST also through an address that it loads from ``pointers``.
WRITES = """
.visible .entry k(.param .u64 x, .param .u64 y, .param .u64 z, .param .u64 pointers) {
  .reg .b32 %v; .reg .b64 %x, %p, %q, %g; .reg .pred %P;
  ld.param.u64 %x, [x]; ld.global.u32 %v, [%x]; setp.eq.u32 %P, %v, 0;
  ld.param.u64 %p, [y]; st.global.u32 [%p+4], %v; ld.param.u64 %q, [z]; selp.b64 %g, %p, %q, %P; add.u64 %g, %g, 8;
  atom.global.add.u32 %v, [%g], 1;
  LAST ret; }
"""


def test_parameters_that_are_only_read() -> None:
    """Without LAST they are x and ``pointers``. A store through a loaded address may go anywhere, so none is left."""
    assert emulator.load(HEAD + WRITES.replace("LAST", "")).read_only("k") == {0, 3}
    last = "ld.param.u64 %x, [pointers]; ld.global.u64 %x, [%x]; st.global.u32 [%x], %v;"
    assert emulator.load(HEAD + WRITES.replace("LAST", last)).read_only("k") == set()
    assert emulator.load(HEAD + WRITES.replace("LAST", "red.shared.add.u32 [%v], 1;")).read_only("k") == {0, 3}


# Thread 0 tries to take the lock, and passes the value that it read to the other threads in shared memory. All threads
# repeat this until the value is 0; then thread 0 increments the count.
LOCK = """
.extern .shared .align 16 .b8 s[];
.visible .entry k(.param .u64 lock, .param .u64 count) {
  .reg .b32 %t, %v; .reg .b64 %p, %q; .reg .pred %F, %P;
  ld.param.u64 %p, [lock]; ld.param.u64 %q, [count]; mov.u32 %t, %tid.x; setp.eq.u32 %F, %t, 0;
again:
  bar.sync 0;
  @%F atom.global.acq_rel.gpu.cas.b32 %v, [%p], 0, 1;
  @%F st.shared.u32 [s], %v;
  bar.sync 0;
  ld.shared.u32 %v, [s];
  setp.eq.u32 %P, %v, 1;
  @%P bra again;
  @!%F bra past;
  ld.global.u32 %v, [%q]; add.u32 %v, %v, 1; st.global.u32 [%q], %v;
past:
  bar.sync 0;
  @%F atom.global.acq_rel.gpu.exch.b32 %v, [%p], 0;
  ret; }
"""


def test_a_lock_that_one_thread_takes_for_its_cta() -> None:
    lock, count = (torch.zeros(1, dtype=torch.int32) for _ in range(2))
    result = emulator.load(HEAD + LOCK).launch(
        "k", 12, 64, [lock, count], shared_bytes=16, options=emulator.Options(loop_limit=1000)
    )
    assert result.reports == []
    assert (int(lock), int(count)) == (0, 12)
