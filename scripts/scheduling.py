"""Finds how ptxas makes an instruction wait for the registers of earlier ones, for kernelproof/sass/scheduling.json.

    python scripts/scheduling.py FOLDER...          reads the cubins in folders: ptxas's own, unmodified output
    python scripts/scheduling.py FOLDER... --add    adds what they show to the stored facts, which other cubins showed

An opcode needs a scoreboard for its result if ptxas ever gives it one, and reads operands late if ptxas ever gives it a
scoreboard for operands. Neither holds if the corpus has an instruction of this opcode whose register is accessed
without a wait. For opcodes of fixed latency the least distance on any path from a producer to a reader is the bound. No
GPU is used.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from kernelproof.ground import toolchain
from kernelproof.ground.errors import WrongInput
from kernelproof.sass import Function, access, disassemble
from kernelproof.sass.in_flight import NEVER, DependencyKind, InFlight
from kernelproof.sass.pipes import WARPGROUP
from kernelproof.sass.registers import UNIFORM, VECTOR
from kernelproof.sass.scheduling import ANY, REGULAR_PIPES, TABLE, SchedulingFacts, latency_column, latency_row

FOLLOWED = 40  # cycles for which results are followed; the longest latency is that of an MMA
LEAST_SUPPORT = 3  # a kind of producer counts if at least this many pairs have its least distance
SUPPORT, ENOUGH = 20, 500  # a bound counts if at least SUPPORT of at least ENOUGH pairs have it
Distances = dict[tuple[str, str], Counter[int]]  # kind of producer and role of the reader -> cycles
Studies = dict[str, "Study"]  # by architecture
Row = dict[str, Any]  # the facts of an architecture, as scheduling.json has them


class Study:
    """The facts about an architecture that cubins show.

    ``results``: opcodes that take a scoreboard for their result; ``operands`` and ``uniform``: those that take a
    scoreboard for vector or uniform operands.
    """

    def __init__(self) -> None:
        self.results: set[str] = set()
        self.operands: set[str] = set()
        self.uniform: set[str] = set()
        # Accesses without a wait: opcode, and "result", "operand" or "uniform".
        self.unguarded: set[tuple[str, str]] = set()
        self.distances: Distances = defaultdict(Counter)
        self.functions = 0
        self.instructions = 0

    def merge(self, other: Study) -> None:
        """Adds what another study of the same architecture has found."""
        self.results |= other.results
        self.operands |= other.operands
        self.uniform |= other.uniform
        self.unguarded |= other.unguarded
        self.functions += other.functions
        self.instructions += other.instructions
        for key, cycles in other.distances.items():
            self.distances[key] += cycles

    def note_scoreboards(self, function: Function) -> None:
        """Notes which opcodes take scoreboards in a function."""
        self.functions += 1
        self.instructions += len(function.instructions)
        for instruction in function.instructions:
            reads, writes = access(instruction)
            if instruction.guard in NEVER:
                continue
            if instruction.control.write_barrier is not None and writes:
                self.results.add(instruction.name)
            if instruction.control.read_barrier is not None:
                if reads & VECTOR:
                    self.operands.add(instruction.name)
                elif reads & UNIFORM:
                    self.uniform.add(instruction.name)

    def note_accesses(self, function: Function, facts: SchedulingFacts) -> None:
        """Notes the distances in cycles from producers to readers, and the opcodes whose registers are accessed without
        a wait. ``facts``: the opcodes that take scoreboards."""
        flight = InFlight(function, facts, lambda _: FOLLOWED)
        for dependency in flight.dependencies():
            earlier, later = flight.code[dependency.earlier], flight.code[dependency.later]
            if dependency.kind is DependencyKind.FIXED:
                if earlier.name == "R2UR" and not dependency.registers & UNIFORM:
                    continue  # its predicate is there sooner than the uniform register, whose bound is wanted
                column = latency_column(earlier, later, dependency.registers, function.sm)
                self.distances[latency_row(earlier, function.sm), column][dependency.cycles] += 1
            elif dependency.kind is not DependencyKind.OPERAND:
                self.unguarded.add((earlier.name, "result"))
            elif dependency.registers & VECTOR:
                self.unguarded.add((earlier.name, "operand"))
            else:
                self.unguarded.add((earlier.name, "uniform"))


def functions(cubin: Path) -> list[Function]:
    """The functions of a cubin; none if it cannot be read: a corpus may have foreign files."""
    try:
        return disassemble(cubin)
    except WrongInput:
        return []


def scoreboard_studies(cubin: Path) -> Studies:
    """For each architecture in a cubin, the opcodes that take scoreboards."""
    studies: Studies = defaultdict(Study)
    for function in functions(cubin):
        studies[function.sm.rstrip("af")].note_scoreboards(function)
    return studies


def access_studies(known: Mapping[str, Study], cubin: Path) -> Studies:
    """Studies of the unguarded accesses and the distances in a cubin, by architecture. ``known``: the studies of all
    cubins, which say which opcodes take scoreboards."""
    studies: Studies = defaultdict(Study)
    for function in functions(cubin):
        sm = function.sm.rstrip("af")
        study = known[sm]
        opcodes = frozenset(study.results), frozenset(study.operands), frozenset(study.uniform)
        studies[sm].note_accesses(function, SchedulingFacts(function.sm, *opcodes, {}))
    return studies


def latencies(distances: Distances) -> dict[str, dict[str, int]]:
    """The bounds by kind of producer and role of the reader.

    The entry ``ANY`` is for roles without a bound of their own. It is one cycle less than the shortest distance seen
    for this producer, since a role that was not seen may be read sooner.

    Roles have bounds of their own only for producers of a whole pipe; a single opcode has too few readers of each role.
    """
    by_producer: dict[str, dict[str, Counter[int]]] = defaultdict(dict)
    for (producer, role), cycles in distances.items():
        by_producer[producer][role] = cycles
    table = {}
    for producer, roles in sorted(by_producer.items()):
        all_cycles = sum(roles.values(), Counter[int]())  # how often each distance occurs, over all roles
        least = min(all_cycles)
        if all_cycles[least] < LEAST_SUPPORT or producer.split(".")[0] in WARPGROUP:
            continue  # too rare, or sums of a warpgroup, which are waited for by other means
        bounds = {
            role: min(cycles)
            for role, cycles in sorted(roles.items())
            if producer in REGULAR_PIPES and cycles[min(cycles)] >= SUPPORT and cycles.total() >= ENOUGH
        }
        table[producer] = bounds | {ANY: least - 1}
    return table


def combine(old: Row, found: Row, study: Study) -> Row:
    """The facts of an architecture that hold for two corpora: ``old``, those that are stored, and ``found``, those of
    ``study``.

    An opcode that is accessed without a wait in either corpus needs none. An opcode that ``old`` does not list is not
    added, since it may have been accessed without a wait there. Of two bounds the lower one holds, and so does a
    shorter distance, however rare.
    """
    uses = {"scoreboards": "result", "late": "operand", "late_uniform": "uniform"}
    opcodes = {
        name: " ".join(opcode for opcode in old[name].split() if (opcode, use) not in study.unguarded)
        for name, use in uses.items()
    }
    table: dict[str, dict[str, int]] = {}
    for producer in sorted(old["latencies"].keys() | found["latencies"].keys()):
        rows = [row for row in (old["latencies"].get(producer), found["latencies"].get(producer)) if row]
        shortest = {
            role: min(cycles) for (name, role), cycles in study.distances.items() if name == producer and role != ANY
        }
        roles = sorted({role for row in rows for role in row} - {ANY})
        table[producer] = {
            role: min(*(row[role] for row in rows if role in row), shortest.get(role, FOLLOWED)) for role in roles
        } | {ANY: min(row[ANY] for row in rows)}
    return {**opcodes, "latencies": table}


def merge(studies: Studies, found: Studies) -> None:
    """Adds the studies of one cubin to those of all."""
    for sm, study in found.items():
        studies[sm].merge(study)


def cubins(folders: Iterable[Path]) -> Iterator[Path]:
    """The cubins in folders, at any depth."""
    for folder in folders:
        yield from sorted(folder.rglob("*.cubin"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("folders", type=Path, nargs="+", help="folders with cubins, searched to any depth")
    parser.add_argument("--add", action="store_true", help="keep the stored facts that the cubins do not contradict")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    files = list(cubins(options.folders))
    studies: Studies = defaultdict(Study)
    with ProcessPoolExecutor(options.processes) as pool:
        for found in pool.map(scoreboard_studies, files, chunksize=8):
            merge(studies, found)
        for found in pool.map(partial(access_studies, dict(studies)), files, chunksize=8):
            merge(studies, found)
    store(studies, json.loads(TABLE.read_text()) if options.add else {"corpus": {}, "facts": {}})


def store(studies: Studies, old: dict[str, Any]) -> None:
    """Writes the table: what ``studies`` and the facts of ``old`` show together."""
    corpus, facts = dict(old["corpus"]), dict(old["facts"])
    for sm, study in studies.items():
        facts[sm] = combine(facts[sm], row(study), study) if sm in facts else row(study)
        before = map(int, re.findall(r"\d+", corpus.get(sm, "0 0")))
        functions, instructions = map(sum, zip(before, (study.functions, study.instructions), strict=True))
        corpus[sm] = f"{functions} functions, {instructions} instructions"
    written = {
        "ptxas": toolchain.discover().nvcc_version,
        "corpus": dict(sorted(corpus.items())),
        "facts": dict(sorted(facts.items())),
    }
    text = json.dumps(written, indent=1)
    # Each innermost object is put on one line.
    TABLE.write_text(re.sub(r"\{([^{}]*)\}", lambda match: "{" + " ".join(match.group(1).split()) + "}", text) + "\n")


def row(study: Study) -> Row:
    """The facts of an architecture as they are stored."""

    def guarded(opcodes: set[str], register_use: str) -> str:
        return " ".join(sorted(opcode for opcode in opcodes if (opcode, register_use) not in study.unguarded))

    return {
        "scoreboards": guarded(study.results, "result"),
        "late": guarded(study.operands, "operand"),
        "late_uniform": guarded(study.uniform, "uniform"),
        "latencies": latencies(study.distances),
    }


if __name__ == "__main__":
    main()
