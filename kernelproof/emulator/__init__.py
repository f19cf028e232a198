"""Execute compiled CUDA kernels on the CPU: their PTX, with their own host launcher, reporting ordering hazards.

NumPy and the standard library only; the stand-in CUDA runtime needs a C compiler once. Explicit launch::

    >>> import numpy as np
    >>> from kernelproof import emulator
    >>> text = '''
    ... .version 8.0
    ... .target sm_80
    ... .address_size 64
    ... .visible .entry twice(.param .u64 x, .param .u64 y) {
    ...   .reg .b32 %r<4>; .reg .b64 %rd<6>;
    ...   ld.param.u64 %rd1, [x];
    ...   ld.param.u64 %rd2, [y];
    ...   mov.u32 %r1, %tid.x;
    ...   mul.wide.u32 %rd3, %r1, 4;
    ...   add.s64 %rd4, %rd1, %rd3;
    ...   add.s64 %rd5, %rd2, %rd3;
    ...   ld.global.u32 %r2, [%rd4];
    ...   shl.b32 %r3, %r2, 1;
    ...   st.global.u32 [%rd5], %r3;
    ...   ret;
    ... }'''
    >>> program = emulator.load(text)
    >>> memory = emulator.Memory()
    >>> x = memory.upload(np.arange(32, dtype=np.uint32), role="input")
    >>> y = memory.upload(np.empty(32, np.uint32), role="output")
    >>> result = program.launch("twice", grid=1, block=32, args=[x, y], memory=memory)
    >>> result.reports
    []
    >>> bool((y.download() == 2 * np.arange(32)).all())
    True
    >>> result = program.launch("twice", grid=1, block=64, args=[x, y], memory=memory)
    >>> [(r.kind, r.line, len(r.threads)) for r in result.reports]
    [('global-out-of-bounds', 13, 32), ('global-out-of-bounds', 15, 32)]

CPU tensors of PyTorch, of bfloat16 and fp8 too, are arguments as they are, and a kernel's plain name suffices::

    program.launch("vectorAdd", grid=4, block=256, args=[x, y, total, 1000]).reports

Through a host launcher (a shared library built by ``nvcc -shared -Xcompiler -fPIC -cudart none``)::

    program = emulator.load(Path("gemm.ptx"), launcher=Path("gemm.so"))
    with emulator.session(memory=memory, device=emulator.Device(sm_count=4)) as s:
        code = program.call("launch", a, b, d, m, n, k)        # any extern "C" function of the launcher; cudaError_t
        comes back
    s.reports, s.launches[0].counters, s.refusals, s.errors

A launcher that opens the runtime itself is given ``emulator.runtime_path()``; inside a session, its
``cudaLibraryLoadFromFile("DIR/kernel.cubin")`` is answered with ``DIR/kernel.ptx``.

What is modelled: the values of all instructions that nvcc emits for GEMM kernels of sm_80 and its relatives, of sm_90a
and of sm_100a; data of cp.async and of bulk copies (TMA) landing as late as allowed; lockstep with divergence;
barriers, mbarriers, clusters, fences (of the asynchronous proxy too), atomics and flags between warps and CTAs; the
groups of wgmma and bulk stores; tensor memory and tcgen05; the registers that setmaxnreg moves; programmatic dependent
launch. A finding breaks one of ``RULES``, which say how severe it is: ``Report.severity``. Reads of what nobody has
written, or of data in flight, are benign unless the value reaches memory: then a second run with other values differs.
An instruction that is not known is an UnknownInstruction error.

What is not: ptxas, caches, timing, the tensor cores' order of rounding, the error of approximate functions; tensor maps
with im2col, interleave or element strides, tcgen05 of other kinds than f16, textures, dynamic parallelism. Clocks are
kept per warp: what one lane passes on covers what its whole warp has done.

Inside, imports go strictly down: ``state`` < ``arithmetic`` < ``memory`` < ``machine`` < ``hopper`` < ``blackwell`` <
``frontend`` < ``host``. ``state`` is what every unit knows (lanes, clocks, findings, counters); ``memory`` is device
and shared memory and who touched them last; ``machine`` schedules a batch of CTAs and composes its units; ``hopper``
adds those of sm_90 in a batch of its own, ``HopperBatch``, ``blackwell`` those of sm_100 (tensor memory and its
products) in ``BlackwellBatch``; ``frontend`` makes a Python function of a kernel's PTX, from facts that stand on the
registration of each instruction; ``host`` has programs, sessions and the stand-in runtime.

``emulator.mutants`` makes mutants of a PTX text, to test a checker that is built on this package.
"""

from kernelproof.emulator.frontend.emitter import UnknownInstruction
from kernelproof.emulator.frontend.mutate import Mutant, mutants
from kernelproof.emulator.frontend.mutation_operators import ARITHMETIC
from kernelproof.emulator.frontend.ptx import PtxError
from kernelproof.emulator.host.cuda import LaunchRefused
from kernelproof.emulator.host.policy import SessionHooks, SessionPolicy
from kernelproof.emulator.host.program import Program, load
from kernelproof.emulator.host.session import Session, session
from kernelproof.emulator.host.standin import runtime_path
from kernelproof.emulator.memory.arena import Buffer, Memory
from kernelproof.emulator.state.counters import Counters
from kernelproof.emulator.state.findings_json import FindingsDocument, findings_document
from kernelproof.emulator.state.launch_state import LaunchResult
from kernelproof.emulator.state.options import HOPPER, Device, Options, RoundingName
from kernelproof.emulator.state.participants import Participant, Place
from kernelproof.emulator.state.reports import EmulatorError, Report, by_cause
from kernelproof.emulator.state.rules import RULES, Severity
from kernelproof.emulator.state.sites import Frame, Site

__all__ = [
    "ARITHMETIC",
    "HOPPER",
    "RULES",
    "Buffer",
    "Counters",
    "Device",
    "EmulatorError",
    "FindingsDocument",
    "Frame",
    "LaunchRefused",
    "LaunchResult",
    "Memory",
    "Mutant",
    "Options",
    "Participant",
    "Place",
    "Program",
    "PtxError",
    "Report",
    "RoundingName",
    "Session",
    "SessionHooks",
    "SessionPolicy",
    "Severity",
    "Site",
    "UnknownInstruction",
    "by_cause",
    "findings_document",
    "load",
    "mutants",
    "runtime_path",
    "session",
]
