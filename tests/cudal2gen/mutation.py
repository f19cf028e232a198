"""Mutates built kernels, finds the mutants that the validator does not notice, and explains those that are
equivalent."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

from cudal2gen import validator
from cudal2gen.generation import catalog
from cudal2gen.generation.compiler import Artifact
from cudal2gen.kernel import Sm80Multistage, Sm90Wgmma, Sm100Tcgen05, Sm120Mma, ceil_div
from cudal2gen.validator import emulated
from cudal2gen.validator.problems import thorough_shape
from kernelproof.emulator import ARITHMETIC, Mutant, mutants

# Remarks that none of our kernels has: they neither exit in the middle of a phase nor leave out a fence of tcgen05.
TELLING_REMARKS = ("lint", "benign, tcgen05-fence")
# The families whose kernels wait at mbarriers.
MBARRIER_FAMILIES = (Sm90Wgmma, Sm100Tcgen05, Sm120Mma)
LOOP_ROOM = 1000  # instead of ten thousand, so that an endless mutant takes a second or less
# Reasons why a mutant behaves like the kernel.
NO_EMPTY_SLICE = "the launcher refuses fewer k-steps than slices, so no slice is empty"
ZERO_FILL = "a copy beyond the last k-tile is zero fill, into a stage that nobody reads, and lands before the epilogue"
# What names of mutants of asynchronous instructions contain; and instructions that touch memory or end a path.
ASYNCHRONOUS = re.compile(r"narrow|relax|mbarrier|wgmma|bulk|cluster|fence|setmaxnreg|tcgen05|griddep|bar\.|mapa")
TOUCHES_MEMORY = re.compile(
    r"^(@!?%p\d+\s+)?(ld\.(?!param)|st\.|cp\.|ldmatrix|atom|red\.|bar|membar|fence|bra|ret|exit)"
)
# A copy's inline assembly has its own predicate. The line before the copy sets it from a register.
COPY_PREDICATE = re.compile(r"setp\.ne\.b32 p, (%r\d+), 0;")
# A copy of 16 bytes, of which a register says how many are read.
ZERO_FILLED = re.compile(r"\], 16, %r\d+;")


# Faults of a rendered text with groups, gated pairs or an A (k,m): before and after, for each family that differs.
TEXT_FAULTS: dict[str, tuple[tuple[str, str], ...]] = {
    "a group begins a row late": (("gemm.m) : 0;", "gemm.m) + 1 : 0;"),),
    "groups are counted off by one": (("ends + group - 1", "ends + group"),),
    "B is the next group's": (
        ("gemm.b += group *", "gemm.b += (group + 1) *"),
        ("gemm.groups.b ? work.group : 0", "gemm.groups.b ? work.group + 1 : 0"),
    ),
    "every group has the first bias": (("gemm.fused.bias += group * gemm.groups.bias;", ""),),
    "halves of a pair swapped": (
        ("activation(z.x) * other.x", "activation(other.x) * z.x"),
        ("activation(z.y) * z.w", "activation(z.w) * z.y"),
    ),
    "A (k,m) is read as (m,k)": (
        ("p, 1, 1, 1, 1;", "p, 1, 1, 0, 1;"),
        ("kXAcross = 1,", "kXAcross = 0,"),
        (
            "row_lda = lane % 8 + lane / 16 * 8, col_lda = warp_m * 2 + lane / 8 % 2",
            "row_lda = lane % 16, col_lda = warp_m * 2 + lane / 16",
        ),
    ),
    "a k-tile of A begins at the next column": (
        ("row_a = first * kBK + CopyA::row()", "row_a = first * kBK + 1 + CopyA::row()"),
        ("full, work.row, step * kBK", "full, work.row, step * kBK + 1"),
    ),
    "blocks of k overlap": (("kChunkBytes + block * 16 * Width", "kChunkBytes + block * 8 * Width"),),
    "aux of the other half": (
        ("row, col + 8, other", "row, col, other"),
        ("x = col + e / 2 * 8", "x = col + (1 - e / 2) * 8"),
    ),
}


class TextFault(NamedTuple):
    """A fault of a record's rendered text: ``before`` stands in it once, and ``after`` in the faulty one."""

    fault: str
    before: str
    after: str


def text_faults(text: str) -> list[TextFault]:
    """The faults of ``TEXT_FAULTS`` whose ``before`` is in a rendered text."""
    return [
        TextFault(fault, before, after)
        for fault, spellings in TEXT_FAULTS.items()
        for before, after in spellings
        if text.count(before) == 1
    ]


# Further reasons: why a predicate always holds, and others.
ALWAYS_TRUE = ("the predicate is the constant 1", "the launcher refuses k < 1, so the first k-tile is always copied")
ELEMENTS_AS_VECTORS = "the path element by element stores what the vector path stores"
COUNTER_BESIDE = "every CTA counts in the counter beside its tile's, which is zero before and after the launch alike"
NO_MEMORY = "what changed places with the barrier or fence touches no memory"


def candidates(record: catalog.Record, ptx: str) -> list[Mutant]:
    """The mutants of a kernel that are worth executing.

    For kernels with mbarriers these are only mutants of asynchronous instructions. Mutants of arithmetic are added if
    it differs from that of one plain product of fp16. Removing a copy's predicate that is always true is no fault, nor
    is moving a barrier after the arithmetic that follows it.
    """
    hopper = isinstance(record, MBARRIER_FAMILIES)
    return [
        mutant
        for mutant in mutants(ptx, arithmetic=computes_more(record))
        if not hopper or mutant.kind in ARITHMETIC or ASYNCHRONOUS.search(mutant.name)
        if not _is_harmless(record, mutant)
        if mutant.kind not in ("unguard", "swap") or equivalence(record, mutant, ptx) not in (*ALWAYS_TRUE, NO_MEMORY)
    ]


def _is_harmless(record: catalog.Record, mutant: Mutant) -> bool:
    """Whether a change of an argument or a quotient changes no result: tensor maps hold what Hopper kernels do not read
    from arguments, and a share of sums that begins too early only repeats what another CTA stores."""
    if not isinstance(record, MBARRIER_FAMILIES):
        return False
    return mutant.kind == "nudge" or (mutant.kind == "first" and " div" in mutant.name and not record.batched)


def computes_more(record: catalog.Record) -> bool:
    """Whether a kernel computes anything but one plain product of fp16, so that its arithmetic is worth mutants."""
    return bool(record.fusion or record.batched or (record.ab, record.d) != ("f16", "same"))


def survivors(
    record: catalog.Record, artifact: Artifact, library: Path, executed: Iterable[Mutant]
) -> Iterator[Mutant]:
    """The mutants of a kernel that survive all problems that stress the record.

    A kernel with mbarriers is executed, in both orders of warpgroups, on few of these problems: on those with the most
    work, with the longest sums (which go round the ring), with other launch options, and with several products. If a
    CTA holds the sums of several tiles, the problem with the most tiles is added.
    """
    shapes = validator.stress_shapes(record)
    thorough = thorough_shape(record, shapes)
    if isinstance(record, MBARRIER_FAMILIES):
        most = max(shapes, key=lambda shape: shape.m * shape.n * shape.k)
        longest = max(shapes, key=lambda shape: shape.k)
        products = [shape for shape in shapes if shape.products]
        options = next(shape for shape in shapes if shape.options)
        alternating = [max(shapes, key=lambda shape: shape.ctas(record))] if record.tiles_at_once > 1 else []
        shapes = list(dict.fromkeys([most, thorough, longest, options, *alternating, *products]))
    with TemporaryDirectory() as scratch:
        directory = Path(scratch) / artifact.digest
        shutil.copytree(artifact.directory, directory)
        mutated = Artifact(directory, artifact.ptxas)
        # Most mutants are noticed with a small problem.
        smallest_first = sorted(shapes, key=lambda shape: shape.m * shape.n * shape.k)
        runs = [(shape, run) for shape in smallest_first for run in _runs(record, shape == thorough)]
        with mock.patch.object(emulated, "LOOP_ROOM", LOOP_ROOM):
            assert all(_passes(record, mutated, library, *run) for run in runs), "the kernel itself passes"
            for mutant in executed:
                mutated.ptx.write_text(mutant.text)
                if all(_passes(record, mutated, library, *run) for run in runs):
                    yield mutant


def _runs(record: catalog.Record, thorough: bool) -> list[dict[str, Any]]:
    """The options of a problem's executions: inputs, and whether hazards and an adverse order are checked. As in a
    verdict, inexact sums need more kinds of inputs, on the thorough problem only."""
    runs: list[dict[str, Any]] = [{"inputs": "binary"}, {"inputs": "integers", "hazards": False}]
    if isinstance(record, MBARRIER_FAMILIES):
        runs = [{"inputs": "binary"}, {"inputs": "binary", "adverse": True}]
    if thorough and computes_more(record):
        kinds = ("integers", "normal", "special") if isinstance(record, MBARRIER_FAMILIES) else ("normal", "special")
        runs += [{"inputs": inputs, "hazards": False} for inputs in kinds]
    return runs


def _passes(
    record: catalog.Record, artifact: Artifact, library: Path, shape: validator.Shape, run: dict[str, Any]
) -> bool:
    """Whether a mutant passes one execution without a remark that would give it away."""
    case = validator.run_case(record, artifact, library, shape, **run)[0]
    return case.passed and not any(remark.startswith(TELLING_REMARKS) for remark in case.remarks)


def equivalence(record: catalog.Record, mutant: Mutant, ptx: str) -> str | None:
    """Why a mutant behaves like the kernel for all arguments that the launcher accepts; None if no reason is known."""
    lines = [line.strip() for line in ptx.splitlines()]
    at = mutant.line - 1
    if mutant.kind == "nudge":
        return _reason_alignment_only(lines, at) or _reason_counter_beside(lines, at)
    if mutant.kind in ARITHMETIC:
        return _reason_of_zero(mutant, lines, at)
    following = [line for line in lines[at + 1 :] if line and not line.startswith((".loc", "//", "$"))]
    if mutant.kind == "swap" and not TOUCHES_MEMORY.match(following[0]):
        return NO_MEMORY
    if mutant.kind == "swap" and lines[at] == "fence.acq_rel.gpu;" and following[0].startswith("bar.sync"):
        return "the barrier brings all writes before the arriving thread's own fence, which still precedes its atomic"
    if mutant.kind == "swap" and "fence.mbarrier_init" in lines[at] and following[0].startswith("bar.sync"):
        return "the barrier orders the initialisation, and every thread executes the fence before it goes on"
    if mutant.kind == "swap" and "fence.proxy.async" in lines[at] and following[0].startswith("bar.warp.sync"):
        return "the thread that copies executes the fence after the warp's barrier, between all writes and its copy"
    if mutant.kind in ("swap", "drop") and _is_first_barrier_after_loop(record, lines, at):
        return "the loop's last barrier is after all reads of the last k-tile; later reads are of fragments beyond k"
    if mutant.kind in ("skip", "once") and _more_waits_follow(following):
        return "warps hand stages back in order: when the last one is back, so are those before"
    if mutant.kind == "drop" and "commit_group" in mutant.name and "cp.async.wait_group" not in ptx:
        return "every wait is a wait_all, which waits for copies that no group holds, too"
    if mutant.kind == "drop" and lines[at].startswith("bar.sync") and _is_read_only_by_the_vote(lines, at):
        return "since the reduction's last barrier, shared memory was touched to read the vote only"
    if isinstance(record, Sm100Tcgen05) and (reason := _reason_in_tensor_memory(mutant, lines, at, following)):
        return reason
    if (
        isinstance(record, Sm100Tcgen05)
        and record.claims_tiles
        and (reason := _reason_in_claims(record, mutant, lines, at))
    ):
        return reason
    if mutant.kind not in ("compare", "never", "unguard"):
        return _reason_at_the_end(record, mutant, lines, at) if isinstance(record, Sm90Wgmma) else None
    if mutant.kind == "unguard" and (active := COPY_PREDICATE.match(lines[at - 1])):
        return _reason_without_predicate(record, lines, at, active.group(1))
    compared = _comparison(lines, at)
    if re.match(r"setp\.(lt|gt|ge)\.s32\s+%p\d+, %r\d+, [01];", compared) and _derives_from_k(lines, compared):
        return "the launcher refuses k < 1, so the branch for no k-tiles is never taken"
    last = re.match(r"setp\.gt\.s32\s+%p\d+, %r\d+, (\d+);", compared)
    if last and int(last.group(1)) >= record.cluster_ctas - 1 and _operand_is(lines, compared, "%cluster_ctarank"):
        return "no rank in the cluster is higher, so the branch is never taken"
    if compared.startswith("setp.ge.s32") and _operand_is(lines, compared, "%ctaid.x"):
        return "the launcher starts no more CTAs than there is work, so the first item always exists"
    if re.match(r"setp\.lt\.s32\s+%p\d+, %r\d+, 1;", compared) and mutant.kind == "never" and "atom.global" in ptx:
        return NO_EMPTY_SLICE
    skipped = _skipped_lines(lines, at)
    if compared.startswith("setp.ge.s32") and "atom.global" in ptx and any("mma.sync" in line for line in skipped):
        return NO_EMPTY_SLICE
    copies = [line for line in skipped if "cp.async.cg" in line]
    copies += _controlled_copies(lines, at) if mutant.kind == "compare" else []
    if copies and all(ZERO_FILLED.search(line) for line in copies):
        return ZERO_FILL
    if _leads_to_elements(lines, at):
        return ELEMENTS_AS_VECTORS
    return None


def _reason_alignment_only(lines: list[str], at: int) -> str | None:
    """Why an argument may be larger: only its low bits matter, which choose between vectors and single elements."""
    registers, uses = [lines[at].split(",")[0].split()[-1]], list[str]()
    while registers:
        register = re.escape(registers.pop())
        for line in lines:
            if re.search(rf"{register}\b", line) and not re.match(rf"\S+\s+{register},", line):
                uses.append(line)
                if line.startswith(("add.s64", "or.b64", "or.b32")):
                    registers.append(line.split(",")[0].split()[-1])
    masks = r"(and\.b(64|32)\s+\S+, \S+, (1|3|7|15);|add\.s64|or\.b(64|32))"
    return ELEMENTS_AS_VECTORS if uses and all(re.match(masks, line) for line in uses) else None


def _reason_counter_beside(lines: list[str], at: int) -> str | None:
    """Why an argument may be larger: every CTA uses the counter next to its tile's, which also is zero, and is also
    returned to zero."""
    registers, reached = [lines[at].split(",")[0].split()[-1]], set[str]()
    while registers:
        register = registers.pop()
        for line in lines:
            if re.search(rf"{re.escape(register)}\b", line) and not re.match(rf"\S+\s+{re.escape(register)},", line):
                name = line.split()[0]
                reached.add(name)
                if name in ("cvta.to.global.u64", "add.s64", "mad.lo.s64"):
                    registers.append(line.split(",")[0].split()[-1])
    counted = {"cvta.to.global.u64", "add.s64", "mad.lo.s64", "atom.global.inc.u32"}
    return COUNTER_BESIDE if "atom.global.inc.u32" in reached and reached <= counted else None


def _reason_of_zero(mutant: Mutant, lines: list[str], at: int) -> str | None:
    """Why a mutant of arithmetic makes no difference: an operand is zero."""
    source = lines[at].rstrip("}").rstrip(" ;").split(",")[-1].strip()
    while source.startswith("%") and (
        moved := re.match(r"mov\.\w+\s+\S+, (\S+);", _definition(lines, lines[at], source))
    ):
        source = moved[1]
    if source == "0f00000000":
        if mutant.kind in ("retype", "truncate"):
            return "zero is zero in every type"
        if mutant.kind in ("addend", "twice") and lines[at].startswith("add."):
            return "nothing is added"
    return None


def _reason_in_tensor_memory(mutant: Mutant, lines: list[str], at: int, following: list[str]) -> str | None:
    """Why a mutant of a tcgen05 instruction, or of the end of such a kernel, behaves like the kernel."""
    adds = COPY_PREDICATE.match(lines[at - 1])
    if mutant.kind == "keep" and adds and re.search(r", 1;$", _definition(lines, lines[at - 1], adds.group(1))):
        return ALWAYS_TRUE[0]
    after = "tcgen05.fence::after_thread_sync"
    rest = [line for line in following if ASYNCHRONOUS.search(line)]
    if mutant.kind in ("drop", "swap") and lines[at].startswith(after):
        products = list(takewhile(lambda line: not line.startswith("tcgen05.mma"), rest))
        if after + ";" in products and not any(line.startswith("tcgen05.ld") for line in products):
            return "another one follows before the first product"
        if mutant.kind == "swap" and not TOUCHES_MEMORY.match(following[0]) and "tcgen05" not in following[0]:
            return NO_MEMORY
        if rest[0].startswith("tcgen05.dealloc"):
            return "tcgen05.dealloc needs no fence after a barrier"
    before = [line for line in lines[:at] if ASYNCHRONOUS.search(line) or line.startswith("tcgen05")]
    if lines[at].startswith("tcgen05.fence::before_thread_sync") and _has_only_the_end(rest):
        return "tcgen05.dealloc needs no fence after a barrier"
    if lines[at].startswith("bar.warp.sync") and before[-1].startswith("tcgen05.fence::before_thread_sync"):
        return "tcgen05.wait::ld is of the whole warp: all lanes' loads are over when the first one arrives"
    if lines[at].startswith("bar.sync") and rest[0].startswith("barrier.cluster.arrive"):
        return "the cluster's barrier that follows is of all its threads"
    if lines[at].startswith("tcgen05.fence::before_thread_sync") and following[0].startswith("bar.warp.sync"):
        return "the fence still precedes the arrival" if mutant.kind == "swap" else None
    if lines[at].startswith("barrier.cluster.wait") and following[0].startswith("bar.sync"):
        return "two barriers of all threads follow each other" if mutant.kind == "swap" else None
    if mutant.kind in ("skip", "once", "parity") and _has_only_the_end(_straight_path(lines, _loop_end(lines, at) + 1)):
        return "what still arrives there comes before the other CTA's storing warps are at the cluster's barrier"
    return None


def _reason_in_claims(record: Sm100Tcgen05, mutant: Mutant, lines: list[str], at: int) -> str | None:
    """Why a mutant of the code that hands tiles to the CTAs of a cluster behaves like the kernel."""
    waits, arrives = "try_wait" in lines[at], "mbarrier.arrive" in lines[at]
    if mutant.kind in ("skip", "once") and _last_word(lines, at, r"\[(%r\d+)\]") == str(record.smem_bytes - 16):
        return "it throttles claims and orders no accesses: test_claims.py shows how many tiles a cluster holds"
    if mutant.kind == "narrow" and waits:
        accesses = takewhile(lambda line: "try_wait" not in line, lines[_loop_end(lines, at) :])
        if not any(re.match(r"ld\.(?!param)", line) for line in accesses):
            return "nothing is read before the next wait: it is permission to go on, for which CTA scope does"
    if mutant.kind == "narrow" and arrives:
        last_wait = max(i for i in range(at) if "try_wait" in lines[i])
        if not any(re.match(r"st\.|red\.|cp\.", line) for line in lines[last_wait:at]):
            return "nothing is written since the last wait: it hands a slot back, for which CTA scope does"
    if mutant.kind in ("narrow", "own") and _is_first_cta(record, lines, at):
        place = at if not arrives else max(i for i in range(at) if lines[i].startswith("mapa"))
        if waits or _last_word(lines, place, r"(%r\d+);$") == "0":
            return "the thread that claims and that which multiplies for a pair are of the first CTA"
    return None


def _last_word(lines: list[str], at: int, register: str) -> str:
    """The last operand of the instruction that defines a register in a line; "" if the line has no register."""
    named = re.search(register, lines[at])
    return _definition(lines, lines[at], named[1]).rstrip(";").split(" ")[-1] if named else ""


def _is_first_cta(record: Sm100Tcgen05, lines: list[str], at: int) -> bool:
    """Whether a line is executed by the thread that claims, or by the one that multiplies for all CTAs of a cluster:
    such a line stands between two elections."""
    elections = [-1, *(i for i, line in enumerate(lines) if line.startswith("elect.sync")), len(lines)]
    first = max(i for i in elections if i <= at)
    role = "\n".join(lines[first : min(i for i in elections if i > at)])
    return "clusterlaunchcontrol.try_cancel" in role or (
        "tcgen05.mma" in role and record.pair and record.cluster_ctas == 2
    )


def _loop_end(lines: list[str], at: int) -> int:
    """The index of the backward branch of the loop that contains a try_wait."""
    return next(i for i in range(at, len(lines)) if re.match(r"@!?%p\d+\s+bra", lines[i]))


def _has_only_the_end(path: list[str]) -> bool:
    """Whether only barriers and the deallocation of tensor memory follow."""
    rest = [line for line in path if ASYNCHRONOUS.search(line)]
    return bool(rest) and all(re.match(r"bar\.|barrier\.cluster|tcgen05\.(fence|dealloc)", line) for line in rest)


def _is_first_barrier_after_loop(record: catalog.Record, lines: list[str], at: int) -> bool:
    """Whether a line is the first barrier after the main loop of a kernel that reads each k-block's fragments one block
    ahead."""
    last = max((i for i in range(at) if lines[i].startswith("mma.sync")), default=at)
    single = isinstance(record, Sm80Multistage) and record.prefetch.kind == "single"
    return single and last < at and [i for i in range(last, at + 1) if lines[i].startswith("bar.sync")] == [at]


def _reason_at_the_end(record: Sm90Wgmma, mutant: Mutant, lines: list[str], at: int) -> str | None:
    """Why a mutant of the code after the last wgmma, or at the end of a producer's warp, behaves like the kernel."""
    before = [line for line in lines[:at] if line and not line.startswith((".loc", "//"))]
    rest = _straight_path(lines, at + 1)
    if lines[at].startswith("bar.warp.sync") and before[-1].endswith(":") and rest[0].startswith("barrier.cluster"):
        return "lanes meet where their paths join, and the cluster's barrier passes on what each of them has done"
    if mutant.kind != "drop":
        return None
    if lines[at].startswith("barrier.cluster.arrive") and _has_only_barriers(rest):
        label = max(i for i, line in enumerate(before) if line.endswith(":"))
        if any(line.startswith("barrier.cluster.arrive") for line in [*before[label:], *rest[1:]]):
            return "warps that leave count as arrived at all later barriers of the cluster, and these only arrive"
    if lines[at].startswith("barrier.cluster.wait") and rest[:1] == ["ret;"]:
        ends = [i for i, line in enumerate(lines) if line.startswith("barrier.cluster.wait")]
        if any(i != at and _straight_path(lines, i + 1)[0] == "ret;" for i in ends):
            return "other warps of the CTA wait, so that its shared memory outlives its readers"
    last_wait = next((i for i in range(at, -1, -1) if lines[i].startswith("wgmma.wait_group")), at)
    ended = lines[last_wait].endswith(" 0;") and not any("wgmma.mma" in line for line in lines[last_wait:])
    if lines[at].startswith("mbarrier.arrive") and ended and not getattr(record.launch, "persistent", 1):
        return "the grid has a CTA for every item, so that no copy waits for the last stage"
    between = [line for line in lines[last_wait + 1 : at] if ASYNCHRONOUS.search(line)]
    if lines[at] == "bar.sync 1, 128;" and ended and all(line.startswith("mbarrier.arrive") for line in between):
        return "a wait for wgmma covers what all warps of the only warpgroup read, and nothing else touches the stages"
    return None


def _straight_path(lines: list[str], at: int) -> list[str]:
    """The statements from a line on up to the next conditional branch, without unconditional branches."""
    path: list[str] = []
    while at < len(lines):
        line = lines[at]
        at += 1
        if target := re.match(r"bra(?:\.uni)?\s+(\S+);", line):
            at = lines.index(target.group(1) + ":")
        elif line and not line.startswith((".loc", "//", "$")):
            path.append(line)
            if re.match(r"ret;|exit;|@", line):
                break
    return path


def _has_only_barriers(path: list[str]) -> bool:
    """Whether a path has only barriers of the cluster before the kernel's end."""
    return path[-1] == "ret;" and all(line.startswith("barrier.cluster") for line in path[:-1])


def _more_waits_follow(following: list[str]) -> bool:
    """Whether only other waits follow a wait until the thread exits, as in the producer's drain."""
    rest = list(takewhile(lambda line: not re.match(r"ret;|exit;|bra", line), following))
    later = [line for line in rest if ASYNCHRONOUS.search(line)]
    return bool(later) and all("try_wait" in line for line in later)


def _comparison(lines: list[str], at: int) -> str:
    """The comparison at a line, or the one that decides the branch at that line."""
    branch = re.match(r"@!?(%p\d+)\s+bra", lines[at])
    if branch is None:
        return lines[at]
    defined = rf"\S+\s+{branch.group(1)},"
    return next(lines[i] for i in range(at, -1, -1) if re.match(defined, lines[i]))


def _definition(lines: list[str], before: str, register: str) -> str:
    """The instruction that defines the value of a register at the line ``before``."""
    for line in reversed(lines[: lines.index(before)]):
        if re.match(rf"\S+\s+{re.escape(register)},", line):
            return line
    return ""


def _derives_from_k(lines: list[str], compared: str) -> bool:
    """Whether a comparison's first operand is parameter 8, the kernel's k."""
    return "_param_8]" in _definition(lines, compared, compared.split(",")[1].strip())


def _operand_is(lines: list[str], compared: str, special: str) -> bool:
    """Whether the second operand of a comparison is defined by a special register or parameter, such as
    ``%ctaid.x``."""
    register = compared.split(",")[1].strip()
    return special in _definition(lines, compared, register)


def _skipped_lines(lines: list[str], at: int) -> list[str]:
    """The lines that the branch which depends on this line skips."""
    predicate = re.match(r"(?:@!?|setp\S+\s+)(%p\d+)", lines[at])
    if predicate is None:
        return []
    for i in range(at, len(lines)):
        branch = re.match(rf"@!?{predicate.group(1)}\s+bra(?:\.uni)?\s+(\S+);", lines[i])
        if branch:
            label = branch.group(1) + ":"
            return lines[i + 1 : lines.index(label)] if label in lines[i:] else []
    return []


def _controlled_copies(lines: list[str], at: int) -> list[str]:
    """The copies whose predicate is the result of the comparison at a line."""
    result = lines[at].split(",")[0].split()[-1]
    switch = next((line for line in lines[at:] if re.match(rf"selp\.u32\s+%r\d+, 1, 0, {result};", line)), "")
    register = switch.split(",")[0].split()[-1] if switch else None
    return [
        lines[i + 1] for i, line in enumerate(lines) if (m := COPY_PREDICATE.match(line)) and m.group(1) == register
    ]


def _reason_without_predicate(record: catalog.Record, lines: list[str], at: int, active: str) -> str | None:
    """Why a copy does the same without its predicate, which says that register ``active`` is not zero."""
    value = _definition(lines, lines[at - 1], active)
    if re.match(r"mov\.u32\s+%r\d+, 1;", value):
        return ALWAYS_TRUE[0]
    compared = _definition(lines, value, value.rstrip(";").split(",")[-1].strip())
    if re.match(r"setp\.gt\.s32\s+%p\d+, %r\d+, 0;", compared):
        if _derives_from_k(lines, compared):
            return ALWAYS_TRUE[1]
        if "atom.global" in "\n".join(lines):
            return NO_EMPTY_SLICE
    if ZERO_FILLED.search(lines[at]):
        return ZERO_FILL
    if isinstance(record, Sm80Multistage) and _is_followed_by_rows(record, lines, at):
        return "beyond the last k-tile, a copy of rows that others of the tile follow reads the matrix, for nobody"
    return None


def _is_followed_by_rows(record: Sm80Multistage, lines: list[str], at: int) -> bool:
    """Whether a copy is not that of its tile's last rows. Only the last rows read beyond the matrix, since copies go
    row by row, A first.

    Rows of B in layout nn lie along k, so all rows of a k-tile that does not exist are beyond the matrix.
    """
    rows = [ceil_div(tile, record.threads // cols) for tile, cols in _copy_layout(record)]
    across = [record.bk // record.element.vector // cols for _, cols in _copy_layout(record)]
    group = [i + 1 for i, line in enumerate(lines) if line == lines[at - 1]]
    of_a = rows[0] * across[0]
    place = group.index(at)
    if place < of_a:
        return place // across[0] < rows[0] - 1
    complete = len(group) == of_a + rows[1] * across[1]
    return record.layout == "tn" and complete and (place - of_a) // across[1] < rows[1] - 1


def _copy_layout(record: Sm80Multistage) -> list[tuple[int, int]]:
    """Rows of a tile, and threads along a row in a copy, of A and of B."""
    return [(record.bm, record.copy_cols_a), (record.bn, record.copy_cols_b)]


def _leads_to_elements(lines: list[str], at: int) -> bool:
    """Whether the line decides between a vector store and stores of single elements."""
    predicate = re.match(r"(?:@!?|setp\S+\s+)(%p\d+)", lines[at])
    if predicate is None:
        return False
    names = {predicate.group(1)}
    for line in lines[at:]:
        merged = re.match(r"or\.pred\s+(%p\d+), (%p\d+), (%p\d+);", line)
        if merged and names & set(merged.groups()[1:]):
            names.add(merged.group(1))
        branch = re.match(r"@!?(%p\d+)\s+bra\s+(\S+);", line)
        if branch and branch.group(1) in names:
            target = lines.index(branch.group(2) + ":")
            stores = [item for item in lines[target:] if item.startswith("st.global")]
            return bool(stores) and stores[0].startswith("st.global.u16")
    return False


def _is_read_only_by_the_vote(lines: list[str], at: int) -> bool:
    """Whether shared memory is read only by the vote for the last slice since the previous barrier, so that no race
    follows from removing this one."""
    earlier = max((i for i in range(at) if lines[i].startswith("bar.sync")), default=at)
    touched = [line for line in lines[earlier:at] if ".shared" in line]
    return all(line.startswith("ld.shared.u8") for line in touched) and any("last" in line for line in touched)
