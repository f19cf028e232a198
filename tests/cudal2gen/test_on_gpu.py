"""Proves on a GPU that every path of the templates is right, that adversaries are caught, and that the emulator agrees
bit for bit.

The tests are deselected if torch sees no CUDA device.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cudal2gen.generation import compiler
from cudal2gen.kernel import GPUS, IllegalRecord, Record, revise
from cudal2gen.launch import gpu
from cudal2gen.launch.launcher import LaunchError, OpenKernel
from cudal2gen.launch.operands import Operands
from cudal2gen.results import Case
from cudal2gen.validator import Shape, device, rounding, sanitizer
from cudal2gen.validator.agreement import against_emulator
from cudal2gen.validator.judgement import run_sanitizer
from cudal2gen.validator.matrices import Matrices
from kernelproof import emulator
from kernelproof.ground import toolchain
from kernelproof.ground.element import F16
from tests.cudal2gen.adversaries import FINDINGS, Adversary
from tests.cudal2gen.covering import COVERING
from tests.cudal2gen.paths import PATHS, small
from tests.cudal2gen.test_launcher import GOOD, REFUSED

pytestmark = [pytest.mark.gpu, pytest.mark.torch]


@pytest.fixture(scope="module")
def card() -> gpu.Gpu:
    """The GPU of this machine."""
    return gpu.connect()


@pytest.fixture(scope="module")
def here(card: gpu.Gpu) -> Callable[[Record], Record]:
    """A function that adapts a record to this machine's GPU: its model if that is known, else one of its capability."""
    models = (
        [card.model]
        if card.model in GPUS
        else [name for name in GPUS if GPUS[name].capability.number == card.capability]
    )

    def revise_for_card(record: Record) -> Record:
        if not models:
            pytest.skip(f"no model in GPUS is like {card.model}")
        try:
            return revise(record, gpu=models[0])
        except IllegalRecord as error:
            pytest.skip(str(error))

    return revise_for_card


@pytest.fixture(scope="module", autouse=True)
def _compile_in_one_batch(here: Callable[[Record], Record]) -> None:
    """Compiles the kernels of all paths that this GPU runs, in one batch."""
    legal = []
    for record in PATHS.values():
        try:
            legal.append(here(record))
        except pytest.skip.Exception:
            continue
    compiler.build(legal)


@pytest.fixture
def subject(library: Path, here: Callable[[Record], Record]) -> Callable[[Record], device.BuiltKernel]:
    """A function that builds a record for this GPU. It skips the test if the GPU does not run the record."""

    def built_kernel(record: Record) -> device.BuiltKernel:
        record = here(record)
        return device.BuiltKernel(record, compiler.build([record])[0], library)

    return built_kernel


def try_on_gpu(card: gpu.Gpu, subject: device.BuiltKernel, wrap: Any = lambda kernel, _: kernel) -> Any:
    """The verdict of a kernel on the GPU. ``wrap`` may put an adversary around the opened kernel: it is called with the
    kernel and the function that allocates the GPU's memory."""
    record = subject.record
    return device.validate(
        card, record, subject.artifact.digest, lambda record: wrap(subject.open(card, record), card.empty)
    )


# Every eighth path comes first, so that paths of every kind have been executed when time runs out.
@pytest.mark.parametrize("name", [name for first in range(8) for name in list(PATHS)[first::8]])
def test_every_path_is_right(name: str, card: gpu.Gpu, subject: Any) -> None:
    verdict = try_on_gpu(card, subject(PATHS[name]))
    assert verdict.findings == []
    assert verdict.passed
    assert verdict.deterministic
    assert verdict.on == card.model


# Changes of a record for large problems: by default, with sums in fp32, in slices of k, and with a remainder in each
# size.
SQUARE = {"m": 4096, "n": 4096, "k": 4096}
WIDE = SQUARE | {"bm": 128, "bn": 128, "bk": 32, "mma_repeat": [2, 2, 1], "stages": 4, "c_batch": 4}
LARGE = [
    WIDE,
    WIDE | {"acc": "f32"},
    WIDE | {"split_k": 4},
    WIDE | {"m": 4093, "n": 4091, "k": 4088, "padding": "predicate"},
]
LONGER = {"acc": "f32", "k": 512}  # of the kernel that adversaries launch


@pytest.mark.card
@pytest.mark.parametrize("changes", LARGE, ids=["f16", "f32", "split", "ragged"])
def test_a_large_problem_is_right(changes: dict[str, Any], card: gpu.Gpu, subject: Any) -> None:
    verdict = try_on_gpu(card, subject(small(**changes)))
    assert verdict.findings == []
    assert changes["m"] in {case.m for case in verdict.cases}


@pytest.mark.parametrize("adversary", FINDINGS, ids=lambda adversary: adversary.__name__)
def test_adversaries_are_caught_and_named(adversary: type[Adversary], card: gpu.Gpu, subject: Any) -> None:
    verdict = try_on_gpu(card, subject(small(**LONGER)), adversary)
    findings = {finding.split(": ", 1)[1] for finding in verdict.findings}
    assert any(finding.startswith(FINDINGS[adversary]) for finding in findings), findings


class OnAnotherStream(Adversary):
    """Launches on a stream of its own, for which no other stream waits."""

    def bind(self, operands: Operands) -> Any:
        import torch

        run, side = self.right.bind(operands), torch.cuda.Stream()

        def call() -> None:
            with torch.cuda.stream(side):
                run()

        return call


class OnAnotherStreamThatFollows(Adversary):
    """Launches on a stream of its own that waits for the given one; the given one does not wait for it."""

    def bind(self, operands: Operands) -> Any:
        import torch

        run, side = self.right.bind(operands), torch.cuda.Stream()

        def call() -> None:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(gpu.HOLD_CYCLES)
                run()

        return call


@pytest.mark.card
@pytest.mark.parametrize(
    "adversary", [OnAnotherStream, OnAnotherStreamThatFollows], ids=lambda adversary: adversary.__name__
)
def test_work_on_another_stream_is_caught(adversary: type[Adversary], card: gpu.Gpu, subject: Any) -> None:
    verdict = try_on_gpu(card, subject(small()), adversary)
    card.synchronize()
    assert any("stream-order" in finding for finding in verdict.findings), verdict.findings


# An instruction to leave out of the PTX, and a part of the finding that it causes.
EDITS = {
    "a product left out": (re.compile(r"^\s*mma\.sync.*$", re.MULTILINE), "wrong-value"),
    "a store left out": (re.compile(r"^\s*st\.global.*$", re.MULTILINE), "unwritten-output"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_faulty_binaries_are_caught(edit: str, card: gpu.Gpu, subject: Any, tmp_path: Path) -> None:
    """Each binary is assembled from the kernel's PTX without one instruction."""
    whole = subject(small())
    pattern, finding_text = EDITS[edit]
    directory = tmp_path / whole.artifact.digest
    shutil.copytree(whole.artifact.directory, directory)
    text = (directory / "kernel.ptx").read_text()
    # mma.sync and its operands may take several lines up to the semicolon.
    place = pattern.search(text)
    assert place is not None
    end = text.index(";", place.start()) + 1
    (directory / "kernel.ptx").write_text(text[: place.start()] + text[end:])
    command = [toolchain.discover().ptxas, f"-arch={whole.artifact.ptxas.arch}", directory / "kernel.ptx"]
    subprocess.run([*command, "-o", directory / "kernel.cubin"], check=True)
    verdict = try_on_gpu(card, replace(whole, artifact=compiler.Artifact(directory, whole.artifact.ptxas)))
    assert any(finding_text in finding for finding in verdict.findings), verdict.findings


@pytest.mark.parametrize("name", ["single", "pad", "split_k f32 zsplit", "persistent", "small direct nn"])
def test_a_captured_graph_gives_the_same(name: str, card: gpu.Gpu, subject: Any) -> None:
    kernel = subject(PATHS[name])
    record = kernel.record
    opened = kernel.open(card)
    matrices = Matrices(card.empty, record, record.problem)
    matrices.draw("normal", 1, F16.poisons[0])
    call = opened.bind(matrices.operands)
    call()
    card.wait()
    direct = matrices.d.bits.clone()
    replayed = card.capture([call, call])
    matrices.d.bits.fill_(F16.poisons[0])
    replayed()
    card.wait()
    assert bool((matrices.d.bits == direct).all())
    matrices.draw("normal", 2, F16.poisons[0])
    replayed()
    card.wait()
    assert matrices.findings(F16.poisons[0]) == []
    assert matrices.compare("normal").findings == []


@pytest.mark.card
def test_a_kernel_runs_on_the_current_stream(card: gpu.Gpu, subject: Any) -> None:
    import torch

    kernel = subject(small())
    record = kernel.record
    matrices = Matrices(card.empty, record, record.problem)
    matrices.draw("binary", 1, F16.poisons[0])
    call = kernel.open(card).bind(matrices.operands)
    card.wait()
    side = torch.cuda.Stream()
    card.hold()  # the usual stream is busy, and the other stream must not wait for it
    with torch.cuda.stream(side):
        call()
        side.synchronize()
        with_side = matrices.d.bits.clone()
        side.synchronize()
    card.wait()
    assert not bool((with_side == F16.poisons[0]).any())
    assert matrices.compare("binary").findings == []


@pytest.mark.parametrize(("changes", "arguments", "code", "message"), REFUSED)
def test_the_launcher_refuses_with_the_same_codes(
    changes: dict[str, Any], arguments: dict[str, Any], code: int, message: str, card: gpu.Gpu, subject: Any
) -> None:
    it = subject(small(**changes))
    with (
        OpenKernel(it.library, it.artifact.directory, it.record.launch_options, card.runtime_library) as kernel,
        pytest.raises(LaunchError, match=message) as caught,
    ):
        kernel.launch(**(GOOD | arguments))
    assert caught.value.code == code


# A fact of the file kernel.launch, and a value that does not fit the kernel.
FACTS = [("smem_bytes", "300000"), ("entry", "no_such_kernel"), ("threads", "2048"), ("threads", "96")]
# More threads than __launch_bounds__ allow: CUDA's documentation does not name the error. The runtime may call it an
# invalid value, an invalid configuration or a launch out of resources.
UNDOCUMENTED = {("threads", "96"): {1, 9, 701}}


@pytest.mark.card
@pytest.mark.parametrize(("fact", "value"), FACTS)
def test_the_runtime_refuses_what_the_emulators_does(
    fact: str, value: str, card: gpu.Gpu, subject: Any, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """The file kernel.launch does not fit its kernel. The test's report has the error codes of both as properties."""
    it = subject(small())
    directory = tmp_path / "kernel"
    shutil.copytree(it.artifact.directory, directory)
    facts = (directory / "kernel.launch").read_text()
    (directory / "kernel.launch").write_text(re.sub(rf"\b{fact}=\S+", f"{fact}={value}", facts))

    def refusal(runtime: Path, matrices: Matrices) -> int:
        operands = matrices.operands
        tensors = (operands.a, operands.b, operands.d)
        pointers = [number for tensor in tensors for number in (tensor.data_ptr(), tensor.stride(0))]
        with pytest.raises(LaunchError) as caught, OpenKernel(it.library, directory, {}, runtime) as kernel:
            kernel.launch(*pointers, it.record.m, it.record.n, it.record.k)
        return caught.value.code

    from tests.cudal2gen.emulated import EmulatedDevice

    with EmulatedDevice(it.record) as emulated:
        claimed = refusal(emulator.runtime_path(), Matrices(emulated.empty, it.record, it.record.problem))
    code = refusal(card.runtime_library, Matrices(card.empty, it.record, it.record.problem))
    record_property("the device's cudaError", code)
    record_property("the emulator's cudaError", claimed)
    assert claimed in UNDOCUMENTED.get((fact, value), {claimed})
    assert code in UNDOCUMENTED.get((fact, value), {claimed})
    card.wait()


@pytest.fixture
def small_launch(card: gpu.Gpu, subject: Any) -> sanitizer.SingleLaunch:
    """A launch of a small kernel, for sanitizers."""
    it = subject(small())
    shape = Shape(64, 96, 320)
    return sanitizer.launch_of(it.record, shape, it.artifact.directory, it.library, card.runtime_library)


# A case for each tool that ran, and each tool's answer by its name.
Sanitized = tuple[list[Case], dict[str, str]]
SANITIZERS = 12  # at the same time; each is a process that mostly waits


@pytest.fixture(scope="module")
def answers(card: gpu.Gpu, library: Path, here: Callable[[Record], Record]) -> dict[str, Future[Sanitized]]:
    """The answers of compute-sanitizer for paths that are legal here, by name. Many processes run concurrently."""
    kernels = {}
    for name in COVERING:
        try:
            kernels[name] = here(PATHS[name])
        except pytest.skip.Exception:
            continue
    artifacts = compiler.build(list(kernels.values()))
    pool = ThreadPoolExecutor(SANITIZERS)
    return {
        name: pool.submit(run_sanitizer, card, device.BuiltKernel(record, artifact, library), 0)
        for (name, record), artifact in zip(kernels.items(), artifacts, strict=True)
    }


@pytest.mark.card
@pytest.mark.parametrize("name", COVERING)
def test_compute_sanitizer_finds_nothing(name: str, answers: dict[str, Future[Sanitized]]) -> None:
    if name not in answers:
        pytest.skip("not legal on this GPU")
    cases, tools = answers[name].result()
    ran = {tool: answer for tool, answer in tools.items() if not answer.startswith(sanitizer.NOT_RUN)}
    if not ran:
        pytest.skip(str(tools))
    assert set(ran.values()) == {sanitizer.CLEAN}, cases


@pytest.mark.card
def test_compute_sanitizer_finds_a_short_d(small_launch: sanitizer.SingleLaunch) -> None:
    answer, findings = sanitizer.check(replace(small_launch, missing_d=64 * 96), "memcheck")
    if answer.startswith(sanitizer.NOT_RUN):
        pytest.skip(answer)
    assert len(findings) == 1
    assert "write" in findings[0]


@pytest.mark.card
def test_the_sanitizers_process_runs_alone(
    small_launch: sanitizer.SingleLaunch, capsys: pytest.CaptureFixture[str]
) -> None:
    sanitizer.run(small_launch)
    assert capsys.readouterr().out == f"{sanitizer.STARTED}\n"


ROUNDED = ("single", "small direct")  # a path of each family for the A100


@pytest.mark.parametrize("acc", ["f16", "f32"])
@pytest.mark.parametrize("family", ROUNDED)
def test_the_emulator_bit_for_bit(family: str, acc: str, card: gpu.Gpu, subject: Any) -> None:
    cases, lines = against_emulator(card, subject(revise(PATHS[family], acc=acc)))
    print(rounding.markdown(lines))
    for line in lines:
        print(line.model_dump_json())
    assert [case.findings for case in cases if not case.passed] == []


def test_the_published_criterion_is_computed(card: gpu.Gpu, subject: Any) -> None:
    class Matmul:
        name = "torch.matmul"

        detail = ""

        def prepare(self, problem: Any, race: Any) -> None: ...

        def bind(self, operands: Operands) -> Any:
            return lambda: operands.d.copy_(operands.a @ operands.b.T)

    it = subject(small(acc="f32"))
    shape = Shape(64, 64, 256)
    case = device.accuracy_case(card, it.record, it.open(card), Matmul(), shape)
    assert case.passed, case.findings
    assert 0 < case.max_error < 0.1


def test_the_device_tells_what_it_is(card: gpu.Gpu) -> None:
    environment, reading = card.environment, card.reading()
    assert environment.gpu == card.model or card.model not in GPUS
    assert environment.sms > 0
    assert environment.l2_bytes > 1 << 20
    assert reading.sm_mhz > 0
    assert reading.temperature_c > 0
    assert all(isinstance(reason, str) for reason in reading.throttle)


def test_records_of_another_capability_are_refused(card: gpu.Gpu) -> None:
    other = next(name for name, facts in GPUS.items() if facts.capability.number[0] != card.capability[0])
    with pytest.raises(gpu.GpuError, match="choose --gpu"):
        card.check(revise(small(), gpu=other))
