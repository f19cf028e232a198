"""Simulates how busy a GPU is while a language model writes kernels, by the number of concurrent sessions.

    python scripts/writing_time.py > table.md

As in ``writing.crew``, a session asks a question and waits 60 s on average for the answer. The answer's kernels are
proven on the machine's cores, and the right ones are timed on the one GPU, first come first served. Then the session
asks again. Nothing is measured: times are drawn, log-normal with a deviation of 0.5, and the seconds of a proof and of
a timing are guesses.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import deque
from typing import NamedTuple

from kernelproof.ground.pages import grid

ANSWER_S, PROOF_S, TIMING_S = 60.0, 6.0, 1.5  # mean seconds of an answer, of a kernel's proof and of its timing
DEVIATION = 0.5  # standard deviation of the logarithms of these times
KERNELS, RIGHT, ROUNDS = 3, 0.6, 20  # kernels of an answer; the share that is right; answers of a session


class SimulatedRun(NamedTuple):
    """How long a run took, in hours, and the share (0 to 1) of that time for which the GPU was busy."""

    hours: float
    busy: float


def simulate(problems: int, at_once: int, cores: int, seed: int = 0) -> SimulatedRun:
    """Simulates a run with one session for each problem, of which at most ``at_once`` are concurrent."""
    generator = random.Random(seed)

    # A log-normal time with this mean.
    def drawn(mean: float) -> float:
        return mean * generator.lognormvariate(-(DEVIATION**2) / 2, DEVIATION)

    # The times in seconds at which something of a session ends: its "answer", the "proof" of a kernel, or its "timing".
    events: list[tuple[float, int, str]] = []
    # By session: the kernels of the present answer that have not ended, and the answers that are still to come.
    kernels, rounds = [KERNELS] * problems, [ROUNDS] * problems
    # Sessions whose next kernel waits for a core, and for the GPU. A session has one kernel under way at a time.
    to_prove, to_time = deque[int](), deque[int]()
    proving, timing, gpu_busy, now = 0, False, 0.0, 0.0
    begun = min(at_once, problems)
    for session in range(begun):
        heapq.heappush(events, (drawn(ANSWER_S), session, "answer"))
    while events:
        now, session, ended = heapq.heappop(events)
        # The session joins a queue: to prove the first kernel of its answer, to time a kernel that was proven right, or
        # to prove its next kernel.
        if ended == "answer":
            to_prove.append(session)
        elif ended == "proof":
            proving -= 1
            (to_time if generator.random() < RIGHT else to_prove).append(session)
        else:
            timing = False
            to_prove.append(session)
        if ended != "answer" and to_prove and to_prove[-1] == session:  # its kernel was wrong, or has been timed
            kernels[session] -= 1
            if not kernels[session]:
                # The answer has no further kernel. The session asks again, or the next session takes its place.
                to_prove.pop()
                kernels[session], rounds[session] = KERNELS, rounds[session] - 1
                if not rounds[session] and begun < problems:
                    session, begun = begun, begun + 1
                if rounds[session]:
                    heapq.heappush(events, (now + drawn(ANSWER_S), session, "answer"))
        while to_prove and proving < cores:
            proving += 1
            heapq.heappush(events, (now + drawn(PROOF_S), to_prove.popleft(), "proof"))
        if to_time and not timing:
            timing, seconds = True, drawn(TIMING_S)
            gpu_busy += seconds
            heapq.heappush(events, (now + seconds, to_time.popleft(), "timing"))
    return SimulatedRun(now / 3600, gpu_busy / now)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--cores", type=int, default=16)
    options = parser.parse_args()
    rows = []
    for at_once in (1, 8, 16, 32, 64, 128):
        run = simulate(options.problems, at_once, options.cores)
        rows.append([at_once, f"{run.hours:.1f}", f"{run.busy:.0%}"])
    print(grid(["sessions at a time", "hours", "GPU busy"], rows))


if __name__ == "__main__":
    main()
