"""Launches every kernel of the corpus once, with arguments that this script makes.

    python -m scripts.corpus_launches FOLDER        with PTX as scripts/corpus.py reads it

Each launch has two CTAs. A parameter from which an address is computed is a buffer of 4 MiB of zeros. All other
parameters are 256, or 1.0 for a float; larger ones consist of words of 256. What such a kernel expects is not known, so
its findings are counted and prove nothing about it. The run shows whether the emulator executes the instructions to the
end, and for how many kernels it cannot, with the reason.
"""

from __future__ import annotations

import signal
import struct
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import typer

from kernelproof.emulator import EmulatorError, LaunchRefused, Memory, Options, Program, PtxError, load
from kernelproof.emulator.frontend.ptx import Function
from scripts.corpus import MANIFEST, ptx_of, sources

BUFFER_BYTES = 1 << 22  # size of the buffer behind each pointer
NUMBER = 256  # the value of every other parameter
SHARED_BYTES = 16384  # dynamic shared memory of a CTA
# Most backward branches of a batch of CTAs, and most seconds of processor time for a kernel: with an argument of 256, a
# loop may never end.
LOOP_LIMIT, SECONDS = 2_000, 5


class Run(NamedTuple):
    """The result of a launch. ``ending``: "ended", "not ended", "refused: .." or the text of an error. ``rules``: the
    rules that the launch violated."""

    repository: str
    path: str
    entry: str
    ending: str
    rules: tuple[str, ...] = ()


class OutOfTimeError(Exception):
    """The kernel has used up its processor time."""


def _out_of_time(*_: object) -> None:
    """Handles the alarm by ending the launch that is running: it raises OutOfTimeError there."""
    raise OutOfTimeError


def parameters(program: Program, kernel: str, memory: Memory) -> list[bytes]:
    """The bytes of each parameter, made up for a kernel; see the module's docstring."""
    function: Function = program.module.kernels[kernel]
    # The byte offsets, in the parameter space, of the words from which addresses are computed.
    offsets = {offset for origins in program.compiled(kernel).origins.values() for offset in origins}
    pointers = {offset for offset in offsets if isinstance(offset, int)}
    arguments = []
    for parameter, start in zip(function.params, function.offsets, strict=True):
        one = {"f32": struct.pack("<f", 1), "f64": struct.pack("<d", 1), "f16": b"\0\x3c"}.get(parameter.kind)
        # A parameter of fewer than four bytes has ones in place of words of NUMBER.
        content = bytearray(one or NUMBER.to_bytes(4, "little") * (parameter.size // 4) or b"\1" * parameter.size)
        if parameter.kind.endswith("64") and parameter.kind != "f64":
            content = bytearray(NUMBER.to_bytes(8, "little"))
        # Each pointer within the parameter, which may be a structure, gets a buffer of its own.
        for offset in sorted(pointers & set(range(start, start + parameter.size - 7))):
            buffer = memory.upload(np.zeros(BUFFER_BYTES, np.uint8), "inout", name=f"parameter at {offset}")
            content[offset - start : offset - start + 8] = struct.pack("<Q", buffer.address)
        arguments.append(bytes(content))
    return arguments


def launch(program: Program, kernel: str) -> tuple[str, tuple[str, ...]]:
    """Launches a kernel; returns ``ending`` and ``rules`` of a Run."""
    memory = Memory(1 << 32)
    function = program.module.kernels[kernel]
    block = function.attributes.get("reqntid") or function.attributes.get("maxntid") or (128,)
    signal.signal(signal.SIGVTALRM, _out_of_time)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        arguments = parameters(program, kernel, memory)
        options = Options(loop_limit=LOOP_LIMIT)
        result = program.launch(
            kernel, 2, block, arguments, memory=memory, shared_bytes=SHARED_BYTES, options=options, cooperative=True
        )
    except OutOfTimeError:
        return "not ended", ()
    except LaunchRefused as error:
        return f"refused: {error}", ()
    except (EmulatorError, PtxError) as error:
        # The emulator may wrap the exception of the alarm in an internal error.
        return "not ended" if "OutOfTimeError" in str(error) else str(error), ()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    rules = tuple(sorted({report.kind for report in result.reports if report.is_error}))
    return ("not ended" if "runaway" in rules or "deadlock" in rules else "ended"), rules


def runs(source: dict[str, object], ptx: Path) -> list[Run]:
    """Launches the entries of one source."""
    program = load(ptx)
    source_file = str(source["repository"]), str(source["path"])
    entries = source["entries"]
    assert isinstance(entries, list)
    return [Run(*source_file, entry, *launch(program, entry)) for entry in entries]


def main(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="PTX files, as OWNER+NAME/PATH.TARGET.ptx")],
    jobs: Annotated[int, typer.Option(help="processes", min=1)] = 1,
    every: Annotated[int, typer.Option(metavar="N", help="every N-th source", min=1)] = 1,
) -> None:
    """Launches the corpus. The exit code is 1 if the emulator itself fails."""
    compiled = [source for source in list(sources(MANIFEST))[::every] if ptx_of(folder, source).exists()]
    results: list[Run] = []
    with ProcessPoolExecutor(jobs) as pool:
        for part in pool.map(runs, compiled, [ptx_of(folder, source) for source in compiled]):
            results += part
            for run in part:
                print(run.repository, run.path, run.entry, run.ending, ",".join(run.rules), flush=True)
    endings = Counter(run.ending if run.ending in ("ended", "not ended") else "cannot be launched" for run in results)
    print(f"{len(results)} kernels: {', '.join(f'{count} {ending}' for ending, count in endings.most_common())}; "
          f"{sum(run.ending == 'ended' and not run.rules for run in results)} ended without findings")  # fmt: skip
    if any("internal error" in run.ending for run in results):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
