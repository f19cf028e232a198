"""Lists the rules whose violation is a finding: stable ids, severities, meanings and hints.

A rule's page is ``docs/kernelproof/rules/ID.md``; it begins with the same meaning.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Severity(StrEnum):
    """``error``: a result can be wrong, or the behaviour is undefined. ``benign``: a rule is broken, and no result can
    depend on it. ``lint``: legal, and likely not what was meant."""

    ERROR = "error"
    BENIGN = "benign"
    LINT = "lint"


# The worst first.
SEVERITIES = tuple(Severity)


class Rule(NamedTuple):
    """What is wrong, how severe that is, and how to mend it. An error is benign if its value reaches no memory."""

    severity: Severity
    meaning: str
    hint: str


# Rule -> its meaning, and a hint that says what to do.
_ERRORS = {
    "global-out-of-bounds": (
        "an access that lies outside of every buffer, or outside of the kernel's parameters",
        "compare the index with the number of elements before the access; check grid, strides and the size "
        "that was allocated",
    ),
    "global-misaligned": (
        "an access to global memory whose address is no multiple of its size",
        "use a narrower access, or make base pointer and row stride multiples of the vector's bytes",
    ),
    "shared-out-of-bounds": (
        "an access outside of the CTA's shared memory, or an operand that lies in another space or CTA",
        "compare the offset with the shared memory of the launch (static and dynamic bytes); for an operand "
        "in the wrong space, pass __cvta_generic_to_shared of a __shared__ address",
    ),
    "shared-misaligned": (
        "an access to shared memory whose address is not aligned as the instruction needs it",
        "align the buffer (alignas) and every offset into it to what the instruction needs: 16 bytes for "
        "cp.async, ldmatrix and TMA, 128 and more for swizzled boxes",
    ),
    "local-out-of-bounds": (
        "an access outside of a thread's local memory, or one that is not aligned",
        "an index beyond a per-thread array: bound the index, or size the array for it",
    ),
    "foreign-local": (
        "a pointer to a local variable of one thread, used by another thread",
        "every thread has other memory at a local address: keep what threads share in __shared__ or global "
        "memory, or pass the value itself (__shfl_sync)",
    ),
    "uninitialised-shared": (
        "a read of shared memory that nobody has written",
        "write the words before they are read, zero fill at the edges, and let a barrier stand between",
    ),
    "uninitialised-local": (
        "a read of a per-thread array that the thread has not written, whose value reaches a result",
        "initialise the array where it is declared (= {}), or write every element before the loop that reads them",
    ),
    "uninitialised-register": (
        "a variable that a path uses without a value, which reaches a result",
        "initialise the variable where it is declared, and let every branch assign it",
    ),
    "register-hazard": (
        "machine code that uses a register, or synchronises, before an earlier instruction is done",
        "let the later instruction wait: raise a stall count between the two, or wait for the scoreboard that the "
        "earlier one takes; if a compiler wrote the code, report it",
    ),
    "shuffle-source": (
        "a shuffle that takes the value of a lane that does not execute it, which reaches a result",
        "let all lanes of the member mask execute the shuffle, and keep the source lane among them",
    ),
    "division-by-zero": (
        "an integer division by zero whose quotient or remainder reaches a result",
        "test the divisor before the division; hardware raises nothing and gives any number",
    ),
    "address-space": (
        "a generic address converted to a space in which it does not lie, used for a result",
        "pass a pointer to __shared__ memory to __cvta_generic_to_shared, and to no other space's conversion",
    ),
    "uninitialised-global": (
        "a read of global memory that nobody has written",
        "initialise the buffer (cudaMemset, or the kernel that comes before), or do not read outside of what "
        "was written",
    ),
    "another-buffer": (
        "an access through a pointer into one buffer that lands in another one",
        "the index leaves the buffer by more than the gap after it: compare it with the buffer's own size, and "
        "its sign",
    ),
    "read-only-path": (
        "ld.global.nc (const __restrict__, __ldg) of memory that the same launch writes",
        "read it by a plain load: drop __restrict__ or __ldg where the kernel writes the buffer, or split the launch",
    ),
    "in-flight": (
        "data of an asynchronous copy touched before its wait, or a CTA that exits under one",
        "wait for the copy first: cp.async.wait_group and a barrier, the mbarrier's phase, or "
        "cp.async.bulk.wait_group before the exit",
    ),
    "shared-race": (
        "accesses to shared memory without order",
        "put a barrier that both sides pass between the two accesses: __syncthreads(), or __syncwarp() within a "
        "warp. A ring's stage is refilled only after a barrier that follows its last read",
    ),
    "global-race": (
        "accesses to global memory without order",
        "order the two accesses: __syncthreads() in a CTA, a fence and a flag (or cuda::atomic_ref) between "
        "CTAs, or make both atomic",
    ),
    "stale-read": (
        "a relaxed or volatile load whose result depends on a store that it need not see",
        "fence between the data and the flag where they are written (__threadfence), and after the flag where it is "
        "read; or release the flag and acquire it",
    ),
    "memory-scope": (
        "accesses of several CTAs that only synchronisation of CTA scope orders",
        "widen the scope: .cluster or .gpu instead of .cta on the fence, the atomic or the mbarrier arrival",
    ),
    "unwritten-output": (
        "elements of an output that nobody has written",
        "check that grid and guards cover every element, the edges most of all",
    ),
    "outside-region": (
        "a write outside of the region that an output declares",
        "guard the store by the rows and columns of the problem: it reaches padding or a neighbour's data",
    ),
    "input-modified": (
        "a write to an input",
        "write to the output; an in-place kernel declares the buffer as inout",
    ),
    "barrier-divergence": (
        "a barrier that some of its threads never reach, or that lanes of one warp reach at different instructions",
        "move the barrier out of the branch, or name the threads that arrive (bar.sync id, count)",
    ),
    "barrier-count": (
        "a numbered barrier whose number or count is not allowed, or at which more threads arrive than its count",
        "give every group a number of its own (0 to 15) and as its count all of its threads, whole warps",
    ),
    "matrix-alignment": (
        "a wmma tile whose address is no multiple of a lane's fragment, or whose rows are no multiples of 16 bytes",
        "align the tile's first element to 32 bytes, and pad rows to multiples of 8 halves or 4 floats",
    ),
    "grid-sync": (
        "a barrier of the whole grid in a launch that is not cooperative",
        "launch by cudaLaunchCooperativeKernel: without it no CTA may wait for CTAs that have not started",
    ),
    "deadlock": (
        "threads that wait for each other for ever",
        "look at what the listed phase or barrier lacks: an arrival, expected bytes, or a wait with the other parity",
    ),
    "warp-divergence": (
        "an instruction of whole warps or warpgroups, executed by a part",
        "execute the instruction with all lanes: move it out of the branch, or reconverge with __syncwarp()",
    ),
    "trap": (
        "a trap or a failed assertion",
        "the program stops itself: look at the condition of the assertion",
    ),
    "runaway": (
        "a loop that does not end, or that takes more iterations than the limit allows",
        "a loop that does not end: check its bound and step, and whether the value it polls is written by anybody",
    ),
    "launch-error": (
        "a launch that the emulator cannot execute",
        "mend what the message names; an unknown instruction is one that the emulator does not model",
    ),
    "mbarrier": (
        "an mbarrier that is used against its rules, or whose initialisation is not visible to its users",
        "initialise once with the number of arrivals, put fence.mbarrier_init after it where copies or other CTAs "
        "arrive, and a barrier before others use it; arrive no more often than the count",
    ),
    "mbarrier-overwritten": (
        "an mbarrier whose memory something else has written since its initialisation",
        "give the barrier memory of its own: compare its offset with the buffers beside it, and pass "
        "mbarrier.inval before its memory is used for data",
    ),
    "proxy-fence": (
        "an asynchronous access that follows accesses of threads without a fence.proxy.async between them",
        "put fence.proxy.async after the threads' writes (or reads) and before the asynchronous access, by "
        "the writers, with the barrier after it",
    ),
    "wgmma-registers": (
        "accumulators that are touched while a wgmma uses them, or a missing wgmma.fence",
        "put wgmma.fence before the first wgmma that uses the registers, and wgmma.wait_group before they are touched",
    ),
    "wgmma-descriptor": (
        "wgmma descriptors that differ within a warpgroup",
        "compute the descriptor from values that are the same in the whole warpgroup (__shfl_sync of warp 0's)",
    ),
    "tensor-memory-allocation": (
        "tensor memory that is allocated or given back against the protocol of tcgen05.alloc and .dealloc",
        "allocate a power of two of columns from 32 to 512, no more than the time before and not after "
        "relinquish_alloc_permit; give back every block whole, by the address that its alloc stored, before the exit",
    ),
    "tensor-memory-bounds": (
        "an access to tensor memory that is not allocated, or to lanes that the warp may not touch",
        "compare the columns with those of tcgen05.alloc; warp w touches lanes 32 * (w % 4) and the next 31: add "
        "them to the upper half of the address",
    ),
    "tensor-memory-race": (
        "accesses to tensor memory without order",
        "after tcgen05.mma: tcgen05.commit, a wait for its mbarrier, tcgen05.fence::after_thread_sync; after "
        "tcgen05.ld and .st: their wait, tcgen05.fence::before_thread_sync, a barrier, and the fence after it",
    ),
    "tensor-memory-registers": (
        "a register of tcgen05.ld touched before tcgen05.wait::ld",
        "put tcgen05.wait::ld.sync.aligned between the load and the first use of its registers",
    ),
    "uninitialised-tensor-memory": (
        "a read of tensor memory that nobody has written, whose value reaches a result",
        "let the first tcgen05.mma of a tile have enable-input-d false, and load only the columns that were written",
    ),
    "tcgen05-descriptor": (
        "a descriptor of tcgen05.mma that is not valid",
        "build the fields anew for tcgen05: wgmma's descriptors differ, and M, N and types must be of the kind",
    ),
    "tcgen05-issuer": (
        "tcgen05.mma executed by several threads, or tcgen05.commit by another thread than its products",
        "let one elected thread (elect.sync) issue the products, and the same one commit them",
    ),
    "cluster-launch-control": (
        "a request to cancel a cluster at a time when none is allowed",
        "stop at the first response that says that nothing was cancelled, and let no CTA of the cluster exit before it",
    ),
    "tcgen05-group": (
        "tcgen05 instructions whose cta_group differs within the kernel, or CTA pairs without a cluster",
        "give all tcgen05 instructions of a kernel one cta_group; cta_group::2 needs clusters of an even size",
    ),
    "cluster": (
        "an access to the shared memory of a CTA that may not have started, may have ended, or does not exist",
        "pass the cluster barrier (arrive and wait) before the first access to another CTA's memory, and "
        "again before any CTA exits",
    ),
    "tensor-map": (
        "an address that does not hold a valid tensor map",
        "pass the CUtensorMap that cuTensorMapEncodeTiled filled as a __grid_constant__ parameter, and its "
        "address to the instruction",
    ),
    "tensor-map-fence": (
        "a tensor map that the kernel has written, used without fences of its proxy",
        "release it where it is written (tensormap.cp_fenceproxy, or fence.proxy.tensormap::generic.release), and let "
        "the warp that uses it execute fence.proxy.tensormap::generic.acquire of its address before",
    ),
    "registers": (
        "setmaxnreg that takes more registers than are free, or that the warps of a warpgroup execute differently",
        "raise no more registers than the other warpgroups have given back; all four warps execute setmaxnreg "
        "with one count",
    ),
    "grid-dependency": (
        "an access to global memory before griddepcontrol.wait in a launch that may overlap the one before",
        "execute griddepcontrol.wait (cudaGridDependencySynchronize) before the first access to what the "
        "launch before writes",
    ),
    "stream-race": (
        "work on two streams that touches the same memory without an order",
        "record an event after the first work and let the other stream wait for it (cudaStreamWaitEvent), "
        "synchronise the host in between, or add an edge between the nodes of a graph",
    ),
    "host-race": (
        "an access of host code to memory that work on a stream still uses",
        "synchronise before the access (cudaStreamSynchronize, cudaEventSynchronize, cudaDeviceSynchronize): the call "
        "that gives a copy or a launch returns before that has ended",
    ),
    "host-access": (
        "an access of host code to device memory, or outside of an allocation of CUDA",
        "copy the data to the host first (cudaMemcpy), or allocate it with cudaMallocManaged; hardware would end the "
        "program here",
    ),
    "use-after-free": (
        "an access to memory that was freed",
        "free the memory after its last use, or set the pointer to null where it is freed and look who uses it later",
    ),
    "invalid-free": (
        "a free of memory that was freed before, or that the call cannot free",
        "free each allocation once, by the address that it began at: cudaFree for cudaMalloc and cudaMallocManaged, "
        "cudaFreeHost for cudaMallocHost and cudaHostAlloc",
    ),
    "copy-direction": (
        "a copy whose direction contradicts its pointers",
        "the destination comes first; name the direction that the pointers have, or cudaMemcpyDefault",
    ),
    "does-not-assemble": (
        "PTX that ptxas refuses, so that there is no machine code to run",
        "mend what ptxas names: a limit of the architecture, an instruction that it lacks, or types that do not fit",
    ),
    "launch-refused": (
        "a launch that the CUDA runtime refuses",
        "the kernel never ran: mend what the message names, and check the error that the launch returns",
    ),
    "copy-out-of-bounds": (
        "a copy or fill that leaves its buffer, or whose address is not memory of the device",
        "compare the number of bytes with what was allocated, and the direction of the copy with its pointers",
    ),
}
# Rules about values that PTX does not define. Programs may compute and drop them, so they are findings only if a result
# depends on them.
UNSPECIFIED = frozenset(("uninitialised-register", "shuffle-source", "division-by-zero", "address-space"))
# Rules about races whose reads are executed again with other values, to see whether the value matters.
RACES = frozenset(("shared-race", "memory-scope"))
# All rules about accesses without an order.
UNORDERED = RACES | {"global-race"}
RULES = {
    **{rule: Rule(Severity.ERROR, *texts) for rule, texts in _ERRORS.items()},
    "plain-first-load": Rule(
        Severity.BENIGN,
        "a weak load of what the compare-and-swap after it checks",
        "nothing has to be done; a relaxed load (cuda::atomic_ref, ld.relaxed) says what is meant",
    ),
    "tcgen05-fence": Rule(
        Severity.BENIGN,
        "a fence of tcgen05 that the canonical patterns have, where what it orders is complete in any case",
        "put tcgen05.fence::before_thread_sync before the arrival, tcgen05.fence::after_thread_sync after the wait",
    ),
    "exit-before-barrier": Rule(
        Severity.LINT,
        "threads that exit while others of the CTA go on to a barrier",
        "works because the others exit without another barrier; CUDA's guide requires all threads of the block that "
        "have not exited to reach it: move it out of the branch, or let the others exit after it",
    ),
    "phase-at-exit": Rule(
        Severity.LINT,
        "a CTA that exits in the middle of an mbarrier's phase",
        "legal: check that the missing arrivals are missing on purpose, or wait for the phase before the exit",
    ),
}
