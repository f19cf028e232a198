"""Draws programs of warps that synchronise lane by lane, and computes which of their accesses race.

Warps write, read, synchronise, arrive at mbarriers (or count in words of shared memory) and wait for them. Races are
found by a vector clock for each thread.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

# Warps of a program, words of shared memory that they access, and the most mbarriers (8 bytes each, before the words).
WARPS, WORDS, BARRIERS = 3, 64, 24
WORDS_AT = 512  # bytes from the start of shared memory
THREADS = 32 * WARPS
ALL = 0xFFFFFFFF  # the mask of all lanes
# The ways in which lanes arrive at the address {at}, and wait for all {count} arrivals there.
ARRIVE = {
    "mbarrier": "mbarrier.arrive.shared::cta.b64 _, {at};",
    "released": "red.release.cta.shared.add.u32 {at}, 1;",
    "fenced": "fence.acq_rel.cta; {guard} atom.relaxed.cta.shared.add.u32 %x3, {at}, 1;",
}
WAIT = {
    "mbarrier": "mbarrier.try_wait.parity.shared::cta.b64 %Q, {at}, 0; @!%Q bra {label};",
    "released": "ld.acquire.cta.shared.u32 %x3, {at}; setp.ne.u32 %Q, %x3, {count}; @%Q bra {label};",
    "fenced": "ld.relaxed.cta.shared.u32 %x3, {at}; setp.ne.u32 %Q, %x3, {count}; @%Q bra {label}; fence.acq_rel.cta;",
}


@dataclass
class Order:
    """The vector clock of each thread: how many steps of every thread happen before its next one.

    Parameters named ``threads`` are arrays of thread numbers.
    """

    # [thread, other]: the steps of the other thread that happen before the thread's next one.
    known: np.ndarray = field(default_factory=lambda: np.eye(THREADS, dtype=int))
    # Word -> accesses: thread, its step, whether it writes.
    accesses: list[list[tuple[int, int, bool]]] = field(default_factory=lambda: [[] for _ in range(WORDS)])

    def step(self, threads: np.ndarray) -> None:
        """Begins a new step of each of the threads, so that clocks tell what it did before from what it does now."""
        self.known[threads, threads] += 1

    def meet(self, threads: np.ndarray) -> None:
        """Synchronises the threads: each knows what any of them knew."""
        self.known[threads] = self.known[threads].max(axis=0)
        self.step(threads)

    def release(self, threads: np.ndarray) -> np.ndarray:
        """Begins a new step of each of the threads, and returns the clock that their arrivals release: what any of them
        knew before it arrived."""
        clock: np.ndarray = self.known[threads].max(axis=0)
        self.step(threads)
        return clock

    def races(self, thread: int, word: int, writes: bool) -> bool:
        """Whether an earlier access to the word is not ordered before an access by the thread now."""
        return any(
            other != thread and self.known[thread, other] < step and (writes or written)
            for other, step, written in self.accesses[word]
        )

    def access(self, thread: int, word: int, writes: bool) -> None:
        """Stores an access of the thread's current step."""
        self.accesses[word].append((thread, int(self.known[thread, thread]), writes))


def _mask(rng: random.Random, all_lanes: float) -> int:
    """Draws a mask of lanes. With probability ``all_lanes`` it has all of them, otherwise lane 0, one lane, any lanes,
    or all from one lane to another."""
    if rng.random() < all_lanes:
        return ALL
    low, high = sorted((rng.randrange(32), rng.randrange(32)))
    return rng.choice((1, 1 << low, rng.getrandbits(32) or 1, (1 << high + 1) - (1 << low)))


def _guard(mask: int, text: str) -> str:
    """An instruction that only the lanes of a mask execute. Register %u has the number of the lane."""
    test = f"mov.u32 %v, {mask}; shr.u32 %v, %v, %u; and.b32 %v, %v, 1; setp.ne.u32 %P, %v, 0; @%P "
    return text if mask == ALL else test + text


def draw(
    seed: int, right: bool, way: str = "mbarrier", events: int = 80, whole_warps: float = 1, syncs: float = 0.15
) -> tuple[str, bool]:
    """The body of a kernel of ``THREADS`` threads (see ``hopper_ptx``), and whether accesses race. If ``right``, none
    do; otherwise the last access may.

    ``way``: how lanes arrive, a key of ``ARRIVE``. ``events``: how many are drawn. ``whole_warps``: the share of
    ``bar.warp.sync`` by all lanes of a warp. ``syncs``: the share of ``bar.warp.sync`` among events.

    An event is an access (45 %), a ``bar.warp.sync`` (``syncs``), a wait for a barrier (20 %), or an arrival at a new
    barrier (the rest). Events are drawn in an order in which the program may run: a barrier is waited for only after
    all arrivals there, so no wait hangs, and ``Order`` sees each event after those before it. An access that would race
    is left out, except that a wrong program keeps one in ten and ends there.

    Registers: %t is the thread, %u its lane, %n its warp, %s the address of shared memory, and %w collects the words
    that the thread reads, which it stores at the end.
    """
    rng, order, racing = random.Random(seed), Order(), False
    code: list[list[str]] = [[] for _ in range(WARPS)]
    arrived: list[tuple[int, np.ndarray]] = []  # by barrier: how many lanes arrive, and the clock that they release
    for number in range(events):
        warp, kind = rng.randrange(WARPS), rng.random()
        lanes, lines = np.arange(32) + 32 * warp, code[warp]
        if kind < 0.45:
            mask, writes, base, swap = (
                _mask(rng, 0.6),
                rng.random() < 0.5,
                rng.choice((0, 32)),
                rng.choice((0, 0, 1, 31)),
            )
            touched = [(32 * warp + lane, base + (lane ^ swap)) for lane in range(32) if mask >> lane & 1]
            racing = any(order.races(thread, word, writes) for thread, word in touched)
            if racing and (right or rng.random() < 0.9):
                racing = False
                continue
            for thread, word in touched:
                order.access(thread, word, writes)
            lines.append(f"xor.b32 %x0, %u, {swap}; shl.b32 %x0, %x0, 2; add.u32 %x0, %x0, %s;")
            at = f"[%x0+{WORDS_AT + 4 * base}]"
            lines.append(f"mad.lo.u32 %x1, %t, 1000, {number};" if writes else "mul.lo.u32 %w, %w, 3;")
            lines.append(_guard(mask, f"st.shared.u32 {at}, %x1;" if writes else f"ld.shared.u32 %x2, {at};"))
            lines.append("" if writes else "xor.b32 %w, %w, %x2;")
            if racing:
                break
        elif kind < 0.45 + syncs:
            mask = ALL if whole_warps == 1 else _mask(rng, whole_warps)
            lines.append(_guard(mask, f"bar.warp.sync {mask};"))
            order.meet(lanes[[lane for lane in range(32) if mask >> lane & 1]])
        elif kind < 0.8 and len(arrived) < BARRIERS:
            mask = _mask(rng, 0.15)
            some = lanes[[lane for lane in range(32) if mask >> lane & 1]]
            guard = "" if mask == ALL else "@%P"
            lines.append(_guard(mask, ARRIVE[way].format(at=f"[%s+{8 * len(arrived)}]", guard=guard)))
            arrived.append((len(some), order.release(some)))
        elif kind >= 0.8 and arrived:
            which = rng.randrange(len(arrived))
            label = f"wait{number}"
            poll = WAIT[way].format(at=f"[%s+{8 * which}]", count=arrived[which][0], label=label)
            wait = f"{label}: {poll}"
            some = lanes
            if rng.random() < 0.3:
                some = lanes[[rng.randrange(32)]]
                wait = f"setp.ne.u32 %P, %t, {some[0]}; @%P bra over{number}; {wait} over{number}:"
            lines.append(wait)
            order.known[some] = np.maximum(order.known[some], arrived[which][1])
    init = "mbarrier.init.shared::cta.b64 [%s+{}], {};" if way == "mbarrier" else "st.shared.u32 [%s+{}], 0;"
    inits = " ".join(init.format(8 * i, n) for i, (n, _) in enumerate(arrived))
    branches = " ".join(f"setp.eq.u32 %P, %n, {warp}; @%P bra warp{warp};" for warp in range(WARPS))
    bodies = "\n".join(f"warp{warp}: " + "\n".join(lines) + "\nbra out;" for warp, lines in enumerate(code))
    return (
        f"""and.b32 %u, %t, 31; shr.u32 %n, %t, 5; mov.u32 %w, 0; mov.u32 %x2, 0; shl.b32 %a0, %t, 2;
      add.u32 %a0, %a0, %s; setp.lt.u32 %P, %t, {WORDS}; @%P st.shared.u32 [%a0+{WORDS_AT}], 0;
      setp.ne.u32 %P, %t, 0; @%P bra go; {inits} go: bar.sync 0; {branches}
      {bodies}
    out: bar.sync 0; mul.wide.u32 %d0, %t, 4; add.u64 %d0, %d0, %q; st.global.u32 [%d0], %w;""",
        racing,
    )
