"""Verifies and measures on a borrowed H100 or H200, in three calls of under ten minutes.

    python3 scripts/gpu_day.py prepare         on any machine: kernels and wheels into build/gpu_day/, then the plan
    python3 scripts/gpu_day.py budget          prints the plan: seconds of each step, bytes carried, files brought back
    python3 scripts/gpu_day.py call 1          on the card, then 2 and 3; results in results/, or in --out DIR
    python3 scripts/gpu_day.py adopt FILE      afterwards: puts the records that ``tune`` improved into the catalog
    python3 scripts/gpu_day.py rehearse        runs all calls here: emulated device, stand-in clock, small problems

A call needs Python with PyTorch for CUDA 13, and nothing else: it unpacks the wheels and kernels that ``prepare`` left
in build/gpu_day/. H100 and H200 run the same kernels; a call finds out which card is there, and every step works under
its name. Each call starts from the files in results/ and leaves their continuations in --out, so a later call finishes
what an earlier one could not. A step that fails or runs out of time ends alone, and the next one starts. Clocks and
other settings of the card stay as they are.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LUGGAGE = ROOT / "build" / "gpu_day"
# Folders and a file of the luggage.
KERNELS, WHEELS, VERSIONS = "kernels", "wheels", "toolchain.json"
CARDS = ("h100", "h200")  # both run the same kernels; the catalog has records of the H200
PUBLISHED = "published"  # the folder of the luggage for `scripts.race_published CHECKOUT --build-only --built`

CALL_SECONDS = 570  # of the 600 s of a call; the rest is for unpacking and for packing results
# The limits of the lent machine: seconds of all calls, bytes carried there, and files that come back.
DAY_SECONDS = 25 * 60
LUGGAGE_BYTES = 64 << 20
MAX_FILES, FILE_BYTES = 8, 16 << 20
RESERVE_SECONDS = 15  # what a step takes beyond its --budget: start, compilation check, last measurement
GRACE_SECONDS = 5  # between the request to end a step and killing it
CARD_SECONDS = 90  # for finding out the card: PyTorch is read from disk for the first time
SAMPLE = 60  # number of problems of the smaller benchmarks
EVALUATIONS, REHEARSED_EVALUATIONS = 24, 2  # evaluations of a problem by ``tune``, on the card and in a rehearsal
REHEARSED_SECONDS = 2.0  # --budget of each step of a rehearsal, by the stand-in clock
PATIENCE = 10  # a rehearsal may take this many times the seconds of the card, because a busy machine emulates it
LOSERS = 24  # number of problems that ``tune`` gets
SMALL = ((64, 64, 64), (128, 64, 128))  # problems of a rehearsal

# Packages for a machine that has PyTorch, pytest, hypothesis, rich, jinja2 and ninja. typer is pinned too, since the
# CLI uses its internals.
PACKAGES = (
    "typer", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions", "nvidia-cutlass",
    "nvmath-python", "cuda-core>=0.5,<2", "cuda-pathfinder>=1.5.1",
)  # fmt: skip
# The wheels are for this Python, and for Linux with one of these glibc.
PYTHON = "3.12"
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28, 31, 34)))

# The variable that names the versions with which the prebuilt kernels were compiled.
PREBUILT = "CUDAL2GEN_PREBUILT"
PACKS = "cudal2gen_*.whl"  # `cudal2gen pack` replaces the name in --out, as pip wants a wheel's own
# Files of a day: the steps that ended, their output, records that lose to the vendor, and improved ones.
JOURNAL, LOG, LOSING, TUNED = "gpu_day.jsonl", "gpu_day.log", "losing.jsonl", "tuned.jsonl"
REST = "log_and_report.tar.xz"  # the log, the report, and the smallest stores if there are more than MAX_FILES


@dataclass(frozen=True)
class Step:
    """One command of a call: a verb of cudal2gen, or ``-m`` with a module. It is ended after ``seconds``."""

    name: str
    call: int
    seconds: int
    line: str
    purpose: str
    compiles: bool = False  # whether it builds new kernels, with the machine's own nvcc

    def budget(self, most: float) -> float:
        """The seconds that the step may measure if it is ended after ``most`` seconds."""
        return max(1.0, min(self.seconds, most) - RESERVE_SECONDS)

    def command(self, out: Path, gpu: str, budget: float, small: bool = False) -> list[str]:
        """The command line for a card. ``out``: the folder of results. ``small``: whether this is a rehearsal."""
        line = self.line.format(
            out=out, gpu=gpu, budget=f"{budget:g}s",
            evaluations=REHEARSED_EVALUATIONS if small else EVALUATIONS,
            products="--mnk 64_64_64 --mnk 33_64_128" if small else "",
        )  # fmt: skip
        words = shlex.split(line)
        return [sys.executable, *([] if words[0] == "-m" else ["-m", "cudal2gen"]), *words]


# Options of most commands of the plan.
RECORD_OPTIONS = "--gpu {gpu} --acc"
PLAN = (
    Step("doctor", 1, 15, "doctor", "what the machine has"),
    Step(
        "first verdict", 1, 30, f"validate --mnk 64_64_64 {RECORD_OPTIONS} f32 --on gpu", "one kernel from end to end",
    ),
    Step(
        "first timing", 1, 30, f"bench --mnk 64_64_64 {RECORD_OPTIONS} f32 --budget {{budget}}", "every baseline once",
    ),
    Step(
        "verdicts f32", 1, 100, f"validate --changed {RECORD_OPTIONS} f32 --on gpu", "all f32 kernels right",
    ),
    Step(
        "operators race", 1, 45, "-m scripts.race_operators --out {out} --budget {budget} {products}",
        "cudal2gen.matmul tunes itself from a pack, and is never slower than torch.matmul",
    ),
    Step(
        "tests", 1, 200, '-m pytest -svm gpu -p no:cacheprovider tests/cudal2gen/test_on_gpu.py -k "not sanitizer"',
        "paths of the templates, adversaries, streams, graphs, refusals",
    ),
    Step("verdicts f16", 1, 90, f"validate --changed {RECORD_OPTIONS} f16 --on gpu", "the same for f16"),
    Step(
        "bits", 1, 30, f"validate --sample 8 {RECORD_OPTIONS} f32 --on gpu --also emulator",
        "how many elements the emulator rounds as the card does",
    ),
    Step(
        "bench f32", 2, 510, f"bench --all {RECORD_OPTIONS} f32 --budget {{budget}}",
        "1000 shapes against every baseline",
    ),
    Step("bench f16", 3, 100, f"bench --all {RECORD_OPTIONS} f16 --budget {{budget}}", "as many of all classes as fit"),
    Step(
        "A100 records", 3, 40, f"bench --sample {SAMPLE} {RECORD_OPTIONS} f32 --where records=a100 --budget {{budget}}",
        "what mma.sync kernels are worth on this card",
    ),
    Step(
        "host protocols", 3, 50,
        f"bench --sample {SAMPLE} {RECORD_OPTIONS} f32 --timing protocol=offline+server --timing seconds=0.4 "
        "--budget {budget}",
        "the modes of the CUDA-L2 paper",
    ),
    Step(
        "losers", 3, 10, f"-m scripts.gpu_day losers {{gpu}} {{out}}/{LOSING}", "what loses most against cuBLASLt",
    ),
    Step(
        "tune", 3, 65,
        f"tune --problems {{out}}/{LOSING} {RECORD_OPTIONS} f32 "
        "--evaluations {evaluations} --budget {budget}",
        "faster records for these problems", compiles=True,
    ),
    Step("tuned records", 3, 5, f"-m scripts.gpu_day tuned {{out}}/{TUNED}", "the catalog's improvements travel home"),
    Step("sanitizer", 3, 70, "-m pytest -svm gpu -p no:cacheprovider tests/cudal2gen/test_on_gpu.py -k sanitizer",
         "compute-sanitizer on one small problem per path"),
    Step(
        "operators", 3, 45,
        '-m pytest -svm gpu -p no:cacheprovider tests/cudal2gen/test_operators_on_gpu.py -k "not never_slower"',
        "cudal2gen.matmul in eager mode, graphs and torch.compile",
    ),
    Step(
        "published", 3, 50, f"-m scripts.race_published --built build/{LUGGAGE.name}/{PUBLISHED} --out {{out}} "
        "--warmup-seconds 1 --budget {budget}",
        "published CUDA-L2 kernels in turns with ours, if some were compiled",
    ),
    Step("report", 3, 15, "report --out {out}/report.html", "tables and pictures of all that"),
)  # fmt: skip


def exceeded_limits(plan: Sequence[Step] = PLAN) -> list[str]:
    """The limits that a plan exceeds, as sentences; empty if it fits."""
    faults = []
    for call in sorted({step.call for step in plan}):
        if (total := sum(step.seconds for step in plan if step.call == call)) > CALL_SECONDS:
            faults.append(f"call {call}: its steps take {total} s, of {CALL_SECONDS}")
    if (total := sum(step.seconds for step in plan)) > DAY_SECONDS:
        faults.append(f"all calls take {total} s, of {DAY_SECONDS}")
    return faults


def budget_table(luggage: Path = LUGGAGE) -> str:
    """The plan as a table: seconds of each step, bytes carried, files brought back."""
    rows = ["| call | step | s | purpose |", "|---|---|---|---|"]
    rows += [f"| {step.call} | {step.name} | {step.seconds} | {step.purpose} |" for step in PLAN]
    for call in (1, 2, 3):
        rows.append(f"| {call} | all | {sum(step.seconds for step in PLAN if step.call == call)} | of {CALL_SECONDS} |")
    rows.append(f"| | | {sum(step.seconds for step in PLAN)} | of {DAY_SECONDS} |")
    carried = sum(path.stat().st_size for path in luggage.rglob("*") if path.is_file()) if luggage.is_dir() else 0
    tree = sum((ROOT / name).stat().st_size for name in _tracked_files())
    rows += [
        "",
        f"carried: {carried / 2**20:.1f} MiB in {luggage} and {tree / 2**20:.1f} MiB of the repository, of "
        f"{LUGGAGE_BYTES >> 20}" + ("" if carried else "; run `python3 scripts/gpu_day.py prepare` first"),
        f"brought back: at most {MAX_FILES} files of {FILE_BYTES >> 20} MiB",
    ]
    return "\n".join(rows)


def _tracked_files() -> list[str]:
    """The files of the repository, which travel with every call."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def prepare(
    luggage: Path = LUGGAGE,
    environment: Mapping[str, str] = os.environ,
    wheels: bool = True,
    steps: Sequence[Step] = PLAN,
) -> None:
    """Compiles and packs every kernel of the steps, makes a pack of each card's candidates, and fetches the wheels that
    the card's machine lacks."""
    luggage.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, "pack", str(luggage / f"{KERNELS}.tar.xz"), *(step.name for step in steps)]
    variables = dict(environment) | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=variables, cwd=ROOT, check=True)
    for wheel in luggage.glob(PACKS):
        wheel.unlink()
    for gpu in CARDS:
        candidates = ["pack", "--gpu", gpu, "--candidates", "--out", str(luggage / f"cudal2gen-{gpu}.whl")]
        subprocess.run([sys.executable, "-m", "cudal2gen", *candidates], env=variables, cwd=ROOT, check=True)
    if wheels:
        fetch_wheels(luggage / WHEELS)


def pack(archive: Path, steps: Sequence[str]) -> None:
    """Compiles every kernel of the steps in the build directory, and packs them with the versions of their compiler."""
    from cudal2gen.cli.selection import Selection
    from cudal2gen.generation import compiler
    from cudal2gen.launch.gpu import STAND_IN
    from kernelproof.ground import toolchain
    from tests.cudal2gen.on_gpu_kernels import kernels, nearest_records

    records = Selection(everything=True, gpu="h200", acc="any").records()
    records += nearest_records("h200")
    if "A100 records" in steps:
        records += Selection(sample=SAMPLE, gpu="h200", acc="f32").records("a100")
    if {"tests", "sanitizer"} & {*steps}:
        records += kernels()
    folders = {artifact.directory for artifact in compiler.build(records)}
    folders |= {compiler.launcher().parent, compiler.torch_launcher().parent}
    versions = json.dumps(toolchain.discover().versions).encode()
    # The archive of a rehearsal need not be small.
    pack_kernels(sorted(folders), versions, archive, preset=0 if STAND_IN in os.environ else 6)
    print(f"{len(folders)} folders of kernels, {archive.stat().st_size / 2**20:.1f} MiB packed")


def fetch_wheels(folder: Path) -> None:
    """Fetches the packages that the card's machine lacks, in the versions of constraints.txt, for its Python."""
    shutil.rmtree(folder, ignore_errors=True)
    target = ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    for platform in PLATFORMS:
        target += ["--platform", platform]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *constraints, *target, "-d", str(folder)]
    subprocess.run([*command, *PACKAGES], check=True)


def pack_kernels(folders: Sequence[Path], versions: bytes, archive: Path, preset: int = 6) -> None:
    """Packs folders of kernels into one file, with the versions of their compiler. Equal kernels give equal bytes.
    ``preset``: that of xz."""
    files = [
        (f"{folder.name}/{path.name}", path.read_bytes()) for folder in folders for path in sorted(folder.iterdir())
    ]
    with tarfile.open(archive, "w:xz", preset=preset) as packed:
        for name, content in [(VERSIONS, versions), *files]:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))


def unpack(luggage: Path, scratch: Path) -> dict[str, str]:
    """Puts wheels and kernels into a scratch folder; returns the environment in which steps find them."""
    site, kernels = scratch / "site", scratch / KERNELS
    for wheel in sorted((luggage / WHEELS).glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)
    kernels.mkdir(parents=True, exist_ok=True)
    if (archive := luggage / f"{KERNELS}.tar.xz").is_file():
        with tarfile.open(archive) as packed:
            packed.extractall(kernels, filter="data")
    for wheel in sorted(luggage.glob(PACKS)):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(scratch / "packs" / wheel.stem)
    packs = [str(path.parent) for path in sorted((scratch / "packs").rglob("pack.json"))]
    return {
        "CUDAL2GEN_BUILD_DIR": str(kernels),
        PREBUILT: str(kernels / VERSIONS),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{site}",
        "PYTHONUNBUFFERED": "1",
        "CUDAL2GEN_PACK": os.pathsep.join(packs),
    }


class Journal:
    """The outcome of each step as a line of JSON, and all output, in the folder of results."""

    def __init__(self, out: Path) -> None:
        self.out = out
        out.mkdir(parents=True, exist_ok=True)

    def note(self, **row: object) -> None:
        """Adds a line of JSON with these keys."""
        with (self.out / JOURNAL).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def show(self, text: str) -> None:
        """Prints a text, and adds it to the log."""
        print(text, flush=True)
        with (self.out / LOG).open("a") as file:
            file.write(text + "\n")


def card_of(environment: Mapping[str, str]) -> str:
    """The model of this machine's card, as a process in the steps' environment finds it. Empty if it is none of
    ``CARDS``; the process then prints why."""
    command = [sys.executable, "-m", "scripts.gpu_day", "card"]
    try:
        process = subprocess.run(
            command,
            cwd=ROOT,
            env=dict(environment),
            stdout=subprocess.PIPE,
            text=True,
            timeout=CARD_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"error: the card's model was not found out in {CARD_SECONDS} s", file=sys.stderr)
        return ""
    return process.stdout.split()[-1] if process.returncode == 0 else ""


def print_card() -> int:
    """Prints the model of this machine's card; returns the exit code."""
    from cudal2gen.launch import gpu
    from kernelproof.ground.errors import UserError

    try:
        card = gpu.connect()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    if card.model not in CARDS:
        print(f"error: this is {card.name}; the plan and its kernels are for {' and '.join(CARDS)}", file=sys.stderr)
        return 2
    print(card.model)
    return 0


def run_call(
    number: int,
    gpu: str,
    out: Path,
    environment: Mapping[str, str],
    plan: Sequence[Step] = PLAN,
    seconds: float = CALL_SECONDS,
    small: bool = False,
) -> int:
    """Runs the steps of one call on a card, each in a process group of its own; returns how many of them failed.

    A step may take its own seconds and those that earlier steps left over. ``small``: whether this is a rehearsal.
    """
    journal, begin, planned, failures = Journal(out), time.monotonic(), 0.0, 0
    for step in [step for step in plan if step.call == number]:
        spent = time.monotonic() - begin
        remaining = seconds - spent - GRACE_SECONDS
        most = min(step.seconds + max(0.0, planned - spent), remaining)  # ``planned``: seconds of all earlier steps
        planned += step.seconds
        if remaining < GRACE_SECONDS:
            journal.show(f"== {step.name}: not started, {seconds - spent:.0f} s of the call are left")
            journal.note(step=step.name, call=number, gpu=gpu, exit=None, seconds=0.0, left=step.line)
            failures += 1
            continue
        journal.show(f"== {step.name}: {step.purpose} (at most {most:.0f} s)")
        start = time.monotonic()
        variables = {name: value for name, value in environment.items() if not (step.compiles and name == PREBUILT)}
        budget = REHEARSED_SECONDS if small else step.budget(most)
        code = run_step(step.command(out, gpu, budget, small), variables, most, out / LOG)
        took = time.monotonic() - start
        state = "done" if code == 0 else "out of time" if code is None else f"exit {code}"
        journal.show(f"== {step.name}: {state} after {took:.1f} s")
        undone = "" if code == 0 else step.line
        journal.note(step=step.name, call=number, gpu=gpu, exit=code, seconds=round(took, 1), left=undone)
        failures += code != 0
    return failures


def run_step(command: Sequence[str], environment: dict[str, str], seconds: float, log: Path) -> int | None:
    """Runs a command and copies its output to the screen and the log; returns its exit code, None if time ran out."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout:
        copier = subprocess.Popen(["tee", "-a", str(log)], stdin=process.stdout)
    try:
        code: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
        _end(process)
    try:
        copier.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:  # a process of the step outlives it and keeps the pipe
        copier.kill()
        copier.wait()
    return code


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks a process group to end, so that it stores what it has, and kills what is left of it."""
    for signal_number, patience in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, GRACE_SECONDS)):
        try:
            os.killpg(process.pid, signal_number)
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def rehearse(out: Path, card: str = "H100", calls: Sequence[int] = (1, 2, 3), left_out: Collection[str] = ()) -> int:
    """Runs calls against an emulated device, on small problems of the catalog; returns how many steps failed.

    Kernels are packed and unpacked, and results travel from call to call, as on the day. ``card``: a class of
    tests/cudal2gen/rehearsal.py. ``left_out``: names of steps that are not run. The checkout's stores stay as they are.
    """
    from cudal2gen.generation import catalog

    scratch = Path(tempfile.mkdtemp(prefix="gpu-rehearsal-"))
    luggage, small = scratch / "luggage", scratch / "kernels.jsonl"
    patient = [replace(step, seconds=PATIENCE * step.seconds) for step in PLAN if step.name not in left_out]
    shutil.copytree(ROOT / "results", scratch / "results")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "CUDAL2GEN_CATALOG": str(small),
        "CUDAL2GEN_RESULTS": str(scratch / "results"),  # read while packs are made; each call below sets its own
        "CUDAL2GEN_CACHE_DIR": str(scratch / "cache"),  # has the lock that lets one process use a device
        "CUDAL2GEN_GPU": f"tests.cudal2gen.rehearsal:{card}",
    }
    records = catalog.load(ROOT / "configs" / "kernels.jsonl", ["h200", "a100"])
    catalog.save([record for record in records if (record.m, record.n, record.k) in SMALL], small)
    prepare(luggage, environment, wheels=False, steps=[step for step in patient if step.call in calls])
    failures, before = 0, scratch / "nothing"
    for number in calls:
        results = out / f"call-{number}"
        copy_stores(before, results)
        unpacked = unpack(luggage, scratch / f"machine-{number}")
        variables = environment | unpacked | {"CUDAL2GEN_RESULTS": str(results)}
        seconds = PATIENCE * CALL_SECONDS
        failures += run_call(number, card_of(variables), results, variables, patient, seconds, small=True)
        for fault in prepare_return(results):
            print(f"too much to bring back: {fault}")
            failures += 1
        before = results
    shutil.rmtree(scratch, ignore_errors=True)
    return failures


def write_losers(gpu: str, path: Path) -> None:
    """Writes the problems that lose most against cuBLASLt's fastest candidates on this card, as a list for ``tune``."""
    from cudal2gen import results
    from cudal2gen.report.aims import BASELINE

    stored = results.measurements()
    rows = [
        row for row in stored.latest()
        if (row.protocol, row.acc, row.gpu, stored.environments[row.environment].gpu) == ("device", "f32", gpu, gpu)
    ]  # fmt: skip
    lowest: dict[Any, float] = {}  # by problem, in the worse state of the L2
    for row, ratio in zip(rows, results.speedups(rows, BASELINE), strict=True):
        if ratio is not None:
            lowest[row.problem] = min(ratio.value, lowest.get(row.problem, ratio.value))
    worst = sorted(lowest, key=lowest.__getitem__)[:LOSERS]
    path.write_text("".join(problem.model_dump_json() + "\n" for problem in worst))
    print(f"{len(worst)} of {len(lowest)} measured problems in {path}")


def write_tuned(path: Path) -> None:
    """Adds the catalog's tuned records to a file, because the catalog itself stays on the card's machine."""
    from cudal2gen.generation import catalog

    records = {record.key: record for record in catalog.load(path)} if path.is_file() else {}
    records |= {record.key: record for record in catalog.load() if record.origin.structure == "tuned"}
    if records:
        catalog.save(records.values(), path)
    print(f"{len(records)} tuned records in {path}")


def adopt(path: Path) -> None:
    """Puts the records of a file into the catalog."""
    from cudal2gen.generation import catalog

    for record in catalog.load(path):
        print(f"{record.gpu} {record.mnk} {record.name}: written to {catalog.put(record)}")


def copy_stores(source: Path, out: Path) -> None:
    """Copies the stores that an earlier call left in ``source`` to ``out``, uncompressed, so that this call continues
    them."""
    out.mkdir(parents=True, exist_ok=True)
    with suppress(FileNotFoundError), tarfile.open(source / REST) as packed:
        stores = [entry for entry in packed if entry.name.endswith(".jsonl") and entry.name != LOSING]
        packed.extractall(out, stores, filter="data")
    for path in sorted(source.glob("*.jsonl")) + sorted(source.glob("*.jsonl.xz")):
        target = out / path.name.removesuffix(".xz")
        if path.suffix == ".xz":
            target.write_bytes(lzma.decompress(path.read_bytes()))
        elif target != path:
            shutil.copyfile(path, target)


def prepare_return(out: Path) -> list[str]:
    """Makes the folder of results small enough to be brought back: at most ``MAX_FILES`` files of ``FILE_BYTES``.

    Stores that are unchanged from results/ are removed. Other files, and the smallest stores if there are too many, are
    packed into ``REST``, and large stores are compressed. Returns the limits that are exceeded all the same, as texts.
    """
    stores = [path for path in out.glob("*.jsonl") if path.name != LOSING]
    for path in [path for path in stores if _same(path, ROOT / "results" / path.name)]:
        stores.remove(path)
        path.unlink()
    most_stores = MAX_FILES - 1 - len(list(out.glob("*.jsonl.xz")))  # one more file is REST
    sent = sorted(stores, key=lambda path: -path.stat().st_size)[:most_stores]
    left_out = [path for path in sorted(out.iterdir()) if path.is_file() and path not in sent and path.suffix != ".xz"]
    if left_out:
        with tarfile.open(out / REST, "w:xz", preset=6) as packed:
            for path in left_out:
                packed.add(path, path.name)
                path.unlink()
    for path in sorted(sent):
        if path.stat().st_size > FILE_BYTES:
            path.with_name(path.name + ".xz").write_bytes(lzma.compress(path.read_bytes(), preset=2))
            path.unlink()
    files = [path for path in out.rglob("*") if path.is_file()]
    faults = [f"{path.name}: {path.stat().st_size} bytes" for path in files if path.stat().st_size > FILE_BYTES]
    return faults + ([f"{len(files)} files, of {MAX_FILES}"] if len(files) > MAX_FILES else [])


def _same(path: Path, other: Path) -> bool:
    """Whether the other file exists and has the same content."""
    return other.is_file() and path.read_bytes() == other.read_bytes()


def parser() -> argparse.ArgumentParser:
    """The command line. Verbs without help are steps of a call."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = options.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("prepare", help="compile the plan's kernels and fetch wheels into build/gpu_day/")
    packing = verbs.add_parser("pack", help="the kernels alone, into one file")
    packing.add_argument("file", type=Path)
    packing.add_argument(
        "steps", nargs="*", default=[step.name for step in PLAN], help="pack only the kernels of these steps"
    )
    verbs.add_parser("budget", help="print the plan and what it needs")
    rehearsal = verbs.add_parser("rehearse", help="run all calls here, against an emulated device")
    rehearsal.add_argument("--out", type=Path, help="folder for results, by default a temporary one")
    rehearsal.add_argument("--card", choices=("H100", "H200"), default="H100", help="default H100")
    call = verbs.add_parser("call", help="run one call, on the card")
    call.add_argument("number", type=int, choices=(1, 2, 3))
    call.add_argument("--out", type=Path, default=ROOT / "results", help="folder for results, default results/")
    call.add_argument("--seconds", type=float, default=CALL_SECONDS, help="end the call after so many seconds")
    verbs.add_parser("card")
    losing = verbs.add_parser("losers")
    losing.add_argument("gpu")
    losing.add_argument("file", type=Path)
    verbs.add_parser("tuned").add_argument("file", type=Path)
    verbs.add_parser("adopt", help="put tuned records into the catalog").add_argument("file", type=Path)
    return options


def run_here(number: int, out: Path, seconds: float) -> int:
    """Runs one call on this machine's card; returns the exit code."""
    begin = time.monotonic()
    copy_stores(ROOT / "results", out)
    scratch = Path(tempfile.mkdtemp(prefix="gpu-day-"))
    environment = os.environ | unpack(LUGGAGE, scratch) | {"CUDAL2GEN_RESULTS": str(out)}
    gpu = card_of(environment)
    print(f"card: {gpu or 'none'}, after {time.monotonic() - begin:.0f} s", flush=True)
    failures = run_call(number, gpu, out, environment, seconds=seconds - (time.monotonic() - begin)) if gpu else 1
    shutil.rmtree(scratch, ignore_errors=True)
    # Only a separate folder is prepared for its way back, so the repository's own results are not packed.
    for fault in prepare_return(out) if out != ROOT / "results" else ():
        print(f"too much to bring back: {fault}")
    return 1 if failures else 0


def main() -> int:
    """Runs the command; returns the exit code."""
    arguments = parser().parse_args()
    match arguments.verb:
        case "rehearse":
            with tempfile.TemporaryDirectory() as folder:
                return 1 if rehearse((arguments.out or Path(folder)).resolve(), arguments.card) else 0
        case "call":
            return run_here(arguments.number, arguments.out.resolve(), arguments.seconds)
        case "card":
            return print_card()
        case "losers":
            write_losers(arguments.gpu, arguments.file)
        case "pack":
            pack(arguments.file, arguments.steps)
        case "tuned" | "adopt":
            {"tuned": write_tuned, "adopt": adopt}[arguments.verb](arguments.file)
        case "prepare" | "budget":
            if arguments.verb == "prepare":
                prepare()
            print(budget_table())
            return 0 if not exceeded_limits() else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
