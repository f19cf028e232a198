"""Executes compiled CUDA kernels on the CPU, and reports what is wrong with them.

The emulator runs the PTX of any kernel, through the kernel's own unmodified host launcher if it has one. It computes
the kernel's results and finds races, wrong addresses, missing waits and fences, and deadlocks. It needs NumPy and the
standard library. Host launchers also need a C compiler once, for the stand-in CUDA runtime. A launch without host
code::

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

CPU tensors of PyTorch (also of bfloat16 and fp8) may be arguments, and a kernel's plain name suffices::

    program.launch("vectorAdd", grid=4, block=256, args=[x, y, total, 1000]).reports

A launch through a host launcher, which is a shared library built by ``nvcc -shared -Xcompiler -fPIC -cudart none``::

    program = emulator.load(Path("gemm.ptx"), launcher=Path("gemm.so"))
    with emulator.session(memory=memory, device=emulator.Device(sm_count=4)) as s:
        code = program.call("launch", a, b, d, m, n, k)  # any extern "C" function of the launcher; here a cudaError_t
    s.reports, s.launches[0].counters, s.refusals, s.errors

``Session`` and ``SessionPolicy`` say what is checked, what ends a launch and where findings go. A launcher that opens
the runtime library itself must open ``emulator.runtime_path()``. In a session, its
``cudaLibraryLoadFromFile("DIR/kernel.cubin")`` loads ``DIR/kernel.ptx``, unless the session's policy asks for machine
code.

**Findings.** A finding violates one of ``RULES``, and ``Report.severity`` says how bad that is. A read of undefined
memory, or of data that has not arrived, is an error only if the value reaches memory: the launch is executed again with
other values, and the results are compared. An instruction that the emulator does not support raises UnknownInstruction.

**What is modelled.** The values of all instructions that nvcc emits for GEMM kernels of sm_80 and its relatives, of
sm_90a and of sm_100a. Lockstep with divergence. Barriers, mbarriers, clusters, fences (of the async proxy, too),
atomics and flags between warps and CTAs. Copies by cp.async and TMA, whose data lands as late as the PTX ISA allows.
Groups of wgmma and of bulk stores, tensor memory and tcgen05, setmaxnreg, programmatic dependent launch.

**What is not modelled.** ptxas, caches and time; the order in which tensor cores round; hardware's own errors of
approximate functions, which are exact or, with ``Options.environment``, drawn within PTX's bounds; tensor maps with
im2col, interleave or element strides; tcgen05 of other kinds than f16; textures; dynamic parallelism. Order is kept per
warp: a release by one lane may also cover accesses of the warp's other lanes, so some of their races are not found.

**The parts.** Imports go strictly down: ``state`` < ``arithmetic`` < ``memory`` < ``machine`` < ``hopper`` <
``blackwell`` < ``frontend`` < ``machine_code`` < ``host``.

- ``state``: state that all units share: lanes, clocks, findings, counters, options.
- ``arithmetic``: integers, floats and conversions as PTX defines them.
- ``memory``: device, shared and local memory, and the last accesses to them.
- ``machine``: schedules a batch of CTAs, with the units that sm_80 has (``AmpereBatch``).
- ``hopper``: the units that sm_90 adds (``HopperBatch``).
- ``blackwell``: the units that sm_100 adds, tensor memory and its products (``BlackwellBatch``).
- ``frontend``: translates a kernel's PTX to a Python function; the registration of an instruction has its facts.
- ``machine_code``: lowers the machine code of a cubin to instructions of the front end.
- ``host``: programs, sessions, and the stand-in CUDA runtime.

``emulator.mutants`` makes mutants of a PTX text, to test a checker that is built on this package. ``emulator.parse``
parses a PTX text to kernels with their instructions (``Instr``) and operands.
"""

from kernelproof.emulator.frontend.emitter import UnknownInstruction
from kernelproof.emulator.frontend.mutate import Mutant, mutants
from kernelproof.emulator.frontend.mutation_operators import ARITHMETIC
from kernelproof.emulator.frontend.parser import parse
from kernelproof.emulator.frontend.ptx import Imm, Instr, Operand, PtxError, Reg, Sym
from kernelproof.emulator.host.cuda import LaunchRefused
from kernelproof.emulator.host.policy import SessionHooks, SessionPolicy
from kernelproof.emulator.host.program import Program, load
from kernelproof.emulator.host.session import Session, session
from kernelproof.emulator.host.standin import runtime_path
from kernelproof.emulator.machine_code.lowering import UnknownMachineCode
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
    "Imm",
    "Instr",
    "LaunchRefused",
    "LaunchResult",
    "Memory",
    "Mutant",
    "Operand",
    "Options",
    "Participant",
    "Place",
    "Program",
    "PtxError",
    "Reg",
    "Report",
    "RoundingName",
    "Session",
    "SessionHooks",
    "SessionPolicy",
    "Severity",
    "Site",
    "Sym",
    "UnknownInstruction",
    "UnknownMachineCode",
    "by_cause",
    "findings_document",
    "load",
    "mutants",
    "parse",
    "runtime_path",
    "session",
]
