"""Proves on an emulated device that right kernels pass, and that every adversary is caught and its fault named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from cudal2gen import bench, cli, results, validator
from cudal2gen.bench import baselines
from cudal2gen.generation import catalog, compiler
from cudal2gen.kernel import Record, revise
from cudal2gen.launch import gpu
from cudal2gen.launch.operands import Operands
from cudal2gen.results import Verdict
from cudal2gen.validator import Shape, agreement, device, rounding, sanitizer
from cudal2gen.validator.matrices import GUARD, GuardedMatrix, Matrices
from kernelproof.ground.element import F16
from tests.cudal2gen.adversaries import FINDINGS, AccumulatesInHalf, Adversary, ChangesItsInput
from tests.cudal2gen.emulated import OTHER_STREAM, EmulatedDevice
from tests.cudal2gen.paths import PATHS, small

pytestmark = pytest.mark.torch

# Names in ``PATHS`` of the kernels that pass on the emulated device.
EMULATED = ["single", "nn", "single f32", "zsplit", "persistent", "predicate nn", "pad", "split_k f32 zsplit"]
EMULATED += ["baked k nn persistent", "small direct predicate", "small direct split_k", "small direct baked"]
EMULATED += ["wgmma direct, any n", "wgmma cluster split 4 f16 nn", "once split 2"]
EMULATED += ["fused multistage direct, ragged", "fused once split", "batched fused split", "grouped fused direct"]
EMULATED += ["fused once gated split", "fused multistage aux, ragged", "fused multistage gated, padded by its caller"]


def try_kernel(record: Record, library: Path, wrap: Any = lambda kernel, _: kernel, **options: Any) -> Verdict:
    """The verdict on a record's kernel, wrapped by ``wrap``, on the emulated device."""
    artifact = compiler.build([record])[0]
    with EmulatedDevice(record) as card:

        def opened(record: Record) -> Any:
            return wrap(card.open(record, artifact, library), card.empty)

        return device.validate(card, record, artifact.digest, opened, **options)


@pytest.mark.slow
@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", EMULATED)
def test_right_kernels_pass(name: str, library: Path) -> None:
    record = PATHS[name]
    verdict = try_kernel(record, library)
    assert verdict.findings == []
    assert verdict.passed
    assert verdict.deterministic
    assert verdict.on == "emulated"
    assert {case.inputs for case in verdict.cases} >= {"binary", "integers", "normal", "special"}
    own = {case.inputs for case in verdict.cases if f"{case.m}_{case.n}_{case.k}" == record.mnk}
    assert own >= {"binary", "integers", "normal", "special"}, "its own problem, unpadded"
    assert {(shape.m, shape.n, shape.k, shape.swizzle_stride) for shape in validator.stress_shapes(record)} <= {
        (case.m, case.n, case.k, case.swizzle_stride) for case in verdict.cases
    }
    assert "order on its stream" in {case.compared for case in verdict.cases}


@pytest.mark.parametrize("adversary", FINDINGS, ids=lambda adversary: adversary.__name__)
def test_adversaries_are_caught_and_named(adversary: type[Adversary], library: Path) -> None:
    record = small(acc="f32", k=512)
    verdict = try_kernel(record, library, adversary)
    assert not verdict.passed
    findings = {finding.split(": ", 1)[1] for finding in verdict.findings}
    assert any(finding.startswith(FINDINGS[adversary]) for finding in findings), findings
    if adversary is AccumulatesInHalf:
        wrong = {case.inputs for case in verdict.cases if case.findings}
        assert wrong == {"normal"}, "what no 0/1 test can see"


def test_a_kernel_of_the_other_accumulator_is_caught(library: Path) -> None:
    """The kernel is no wrapper but the library's own fp16 kernel under the fp32 record's name."""
    honest, swapped = small(acc="f32", k=512), small(k=512)
    artifact = compiler.build([swapped])[0]
    with EmulatedDevice(honest) as card:
        verdict = device.validate(card, honest, artifact.digest, lambda _: card.open(swapped, artifact, library))
    assert {case.inputs for case in verdict.cases if case.findings} == {"normal"}
    assert all("wrong-value" in finding for finding in verdict.findings)


def test_work_on_another_stream_is_caught(library: Path) -> None:
    record = small()
    artifact = compiler.build([record])[0]
    with EmulatedDevice(record) as card:
        verdict = device.validate(
            card, record, artifact.digest, lambda record: card.open(record, artifact, library, lambda: OTHER_STREAM)
        )
        assert card.holds == 1
    assert any("stream-order: not between its neighbours on the stream" in finding for finding in verdict.findings)
    assert any("unwritten-output: " in finding for finding in verdict.findings)


def test_work_that_comes_before_its_stream_is_caught(library: Path) -> None:
    """If the device is so fast that D is always ready, only the order of streams shows the fault."""

    class Early(Adversary):
        """Works on another stream while its own is held, and so sees older values."""

        def bind(self, operands: Operands) -> Any:
            run, holds = self.right.bind(operands), card.holds

            def call() -> None:
                if card.holds == holds:
                    run()
                else:
                    operands.d.fill_(float("nan"))

            return call

    record = small()
    artifact = compiler.build([record])[0]
    with EmulatedDevice(record) as card:
        verdict = device.validate(
            card, record, artifact.digest, lambda record: Early(card.open(record, artifact, library), card.empty)
        )
    assert len(verdict.findings) == 1
    assert "stream-order" in verdict.findings[0]


def test_bits_that_change_from_run_to_run_are_recorded(library: Path) -> None:
    """Changing bits are a fact and no fault, since a kernel that is right within its bound may add in any order."""
    record = small(acc="f32")
    artifact = compiler.build([record])[0]

    class Wavers(Adversary):
        def bind(self, operands: Operands) -> Any:
            run = self.right.bind(operands)
            odd = len(binds) % 2
            binds.append(1)

            def call() -> None:
                run()
                normal = bool((operands.a.frac() != 0).any())
                if odd and normal and not operands.a.isnan().any():
                    operands.d.view(torch.int16)[0, 0] ^= 1

            return call

    binds: list[int] = []
    shape = Shape(64, 64, 256)
    with EmulatedDevice(record) as card:
        contender = Wavers(card.open(record, artifact, library), card.empty)
        case, same = device.run_case(card, record, contender, shape, "normal")
        assert (case.passed, same) == (True, False)
        case, same = device.run_case(card, record, contender, shape, "binary")
        assert (case.passed, same) == (True, True)


class Exact:
    """A baseline with the fp64 product, or one that differs from it by ``off``."""

    name, detail = "cublaslt-autotuning-tn", ""

    def __init__(self, off: float = 0.0, absent: str = "") -> None:
        self.off, self.absent = off, absent

    def prepare(self, problem: Any, race: Any) -> None: ...

    def bind(self, operands: Operands) -> Any:
        if self.absent:
            raise gpu.Absent(self.absent)
        return lambda: operands.d.copy_(operands.a.double() @ operands.b.double().T + self.off)


@pytest.mark.slow
def test_the_published_criterion(library: Path) -> None:
    as_good = try_kernel(small(acc="f32"), library, baseline=lambda _: Exact())
    assert as_good.passed, as_good.findings
    case = as_good.cases[-1]
    assert case.compared == "largest error against fp32, at most that of cublaslt-autotuning-tn"
    assert case.allowed is not None
    assert 0 < case.max_error <= case.allowed
    worse = try_kernel(small(), library, baseline=lambda _: Exact())
    assert not worse.passed
    assert "less-accurate: " in worse.findings[0]
    assert try_kernel(small(), library, baseline=lambda _: Exact(off=1.0)).passed
    wrong = try_kernel(small(), library, ChangesItsInput, baseline=lambda _: Exact())
    assert "less-accurate" not in str(wrong.findings), "what is wrong is not measured"
    absent = try_kernel(small(), library, baseline=lambda _: Exact(absent="no tensor cores"))
    assert absent.passed
    assert absent.tools == {"baseline": "not run: no tensor cores"}


def test_another_order_of_fp16_sums_is_no_less_accurate() -> None:
    """Two kernels round equally often at different points, so either may have the larger error."""

    class Backwards(Exact):
        def bind(self, operands: Operands) -> Any:
            from tests.cudal2gen.vendor import product

            def call() -> None:
                a, b = operands.a.numpy()[:, ::-1], operands.b.numpy()[:, ::-1].T
                operands.d.copy_(torch.from_numpy(product(a, b, 64)))

            return call

    class Forwards(Exact):
        def bind(self, operands: Operands) -> Any:
            from tests.cudal2gen.vendor import product

            return lambda: operands.d.copy_(torch.from_numpy(product(operands.a.numpy(), operands.b.numpy().T, 64)))

    record = small()
    with EmulatedDevice(record) as card:
        shapes = [Shape(64, 64, k) for k in (64, 128, 192, 256, 320)]
        cases = [device.accuracy_case(card, record, Forwards(), Backwards(), shape) for shape in shapes]
    assert [case.findings for case in cases if case.findings] == []
    assert any(case.max_error > (case.allowed or 0.0) for case in cases), "by chance"


def test_what_is_refused_is_a_finding(library: Path) -> None:
    record = small()
    artifact = compiler.build([record])[0]
    with EmulatedDevice(record) as card:
        case, _ = device.run_case(card, record, card.open(record, artifact, library), Shape(40, 32, 64), "binary")
    assert not case.passed
    assert "launch-refused: the tile does not divide the problem" in case.findings[0]
    crowded = small(bm=64, bn=64, stages=4)
    with EmulatedDevice(crowded) as card:
        card.session.device = card.session.device.__class__(smem_optin_bytes=48 * 1024)
        built = compiler.build([crowded])[0]
        verdict = device.validate(card, crowded, built.digest, lambda record: card.open(record, built, library))
    assert [case.findings[0][:15] for case in verdict.cases] == ["launch-refused:"]


def test_after_a_devices_error_nothing_else_is_tried(library: Path) -> None:
    record = small()
    artifact = compiler.build([record])[0]
    with EmulatedDevice(record) as card:
        waits = []

        def wait() -> None:
            waits.append(1)
            if len(waits) > 4:
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nhints")

        card.wait = wait  # type: ignore[method-assign]
        verdict = device.validate(card, record, artifact.digest, lambda record: card.open(record, artifact, library))
    assert len(verdict.cases) == 2
    assert verdict.cases[0].passed
    assert verdict.cases[1].findings == ("device-error: CUDA error: an illegal memory access was encountered",)


def test_a_guarded_matrix_tells_where_it_was_written() -> None:
    def empty(*shape: int) -> Any:
        return torch.empty(shape, dtype=torch.float16)

    matrix = GuardedMatrix(empty, F16, "D", 4, 6, 8, F16.canary)
    matrix.matrix.fill_(1.0)
    assert list(matrix.changes()) == []
    matrix.keep()
    matrix.matrix[2, 3] = 2.0
    assert list(matrix.changes()) == ["input-changed: 1 of 24 elements, first at row 2, column 3 of D"]
    matrix.matrix[2, 3] = 1.0
    matrix.matrix.as_strided((1,), (1,), GUARD - 1).fill_(0)
    matrix.matrix.as_strided((1,), (1,), GUARD + 6).fill_(0)
    matrix.matrix.as_strided((1,), (1,), GUARD + 32).fill_(0)
    assert [finding.split(",")[-1] for finding in matrix.changes()] == [
        " column 4095 before D",
        " column 0 after D",
        " column 0 between rows of D",
    ]


def test_a_guarded_batch_tells_which_product_was_written() -> None:
    def empty(*shape: int) -> Any:
        return torch.empty(shape, dtype=torch.float16)

    matrix = GuardedMatrix(empty, F16, "D", 4, 6, 8, F16.canary, count=3, gap=5)
    matrix.matrix.fill_(1.0)
    assert matrix.matrix.shape == (3, 4, 6)
    assert list(matrix.changes()) == []
    matrix.keep()
    matrix.matrix[1, 2, 3] = 2.0
    assert list(matrix.changes()) == ["input-changed: 1 of 72 elements, first at product 1, row 2, column 3 of D"]
    matrix.matrix[1, 2, 3] = 1.0
    for place in (GUARD + 6, GUARD + 32, GUARD + 3 * 37):
        matrix.matrix.as_strided((1,), (1,), place).fill_(0)
    assert [finding.split(",")[-1] for finding in matrix.changes()] == [
        " column 0 after D",
        " column 0 between rows of D",
        " column 0 between products of D",
    ]


class FirstProductOnly(Adversary):
    """Computes one product of a batch, and stores it as all of them."""

    def bind(self, operands: Operands) -> Any:
        alone = {name: tensor[:1] for name, tensor in operands.inputs.items()}
        run = self.right.bind(replace(operands, **alone, d=operands.d[:1]))

        def call() -> None:
            run()
            operands.d[1:] = operands.d[0]

        return call


class BetaTwice(Adversary):
    """Adds beta C twice."""

    def bind(self, operands: Operands) -> Any:
        return self.right.bind(replace(operands, beta=2 * operands.beta))


class EndsLate(Adversary):
    """Computes the first row of each group with the previous group's B."""

    def bind(self, operands: Operands) -> Any:
        operands.ends.add_(1)
        return self.right.bind(operands)


class WritesRowOfNoGroup(Adversary):
    """Writes a row that belongs to no group."""

    def bind(self, operands: Operands) -> Any:
        run = self.right.bind(operands)

        def call() -> None:
            run()
            operands.d[-1] = 1.0

        return call


class AuxOfD(Adversary):
    """Stores D in aux, instead of the input of its activation."""

    def bind(self, operands: Operands) -> Any:
        run = self.right.bind(operands)

        def call() -> None:
            run()
            operands.aux.copy_(operands.d)

        return call


class AuxElsewhere(Adversary):
    """Does not write the last row of aux."""

    def bind(self, operands: Operands) -> Any:
        run = self.right.bind(operands)

        def call() -> None:
            last = operands.aux[-1].clone()
            run()
            operands.aux[-1].copy_(last)

        return call


class WritesPastAux(Adversary):
    """Stores one column past the end of aux."""

    def bind(self, operands: Operands) -> Any:
        run, (m, n) = self.right.bind(operands), operands.aux.shape

        def call() -> None:
            run()
            operands.aux.as_strided((m, n + 1), operands.aux.stride())[:, n] = 1.0

        return call


class HalvesSwapped(Adversary):
    """Activates the wrong half of each pair of columns."""

    def bind(self, operands: Operands) -> Any:
        b = operands.b.clone().view(-1, 2, 8, operands.b.shape[-1])
        swapped = self.empty(*operands.b.shape).copy_(b.flip(1).reshape(operands.b.shape))
        return self.right.bind(replace(operands, b=swapped))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "adversary", "finding"),
    [
        ("fused direct aux split", AuxOfD, "wrong-value"),
        ("fused direct aux split", AuxElsewhere, "unwritten-output"),
        ("fused direct aux split", WritesPastAux, "between rows of aux"),
        ("fused once gated", HalvesSwapped, "wrong-value"),
        ("grouped fused direct", EndsLate, "wrong-value"),
        ("grouped fused direct", WritesRowOfNoGroup, "after the last group of D"),
        ("batched once", FirstProductOnly, "first at product 1, row 0, column 0"),
        ("fused multistage split", BetaTwice, "wrong-value"),
    ],
)
def test_faults_of_batches_and_fusions_are_caught(
    name: str, adversary: type[Adversary], finding: str, library: Path
) -> None:
    record = PATHS[name]
    artifact = compiler.build([record])[0]
    shapes = validator.stress_shapes(record)
    shape = next(each for each in shapes if each.batch > 1 or not record.batched or 0 < sum(each.groups) < each.m)
    with EmulatedDevice(record) as card:
        wrong = adversary(card.open(record, artifact, library), card.empty)
        case, _ = device.run_case(card, record, wrong, shape, "integers")
    assert any(finding in text for text in case.findings), case.findings


def test_every_adversary_is_right_but_for_its_fault(library: Path) -> None:
    """Every adversary would pass a check of one fresh product with 0 and 1."""
    record = small(acc="f32")
    artifact = compiler.build([record])[0]
    for adversary in set(FINDINGS) - {ChangesItsInput}:
        with EmulatedDevice(record) as card:
            contender: gpu.Contender = adversary(card.open(record, artifact, library), card.empty)
            matrices = Matrices(card.empty, record, record.problem)
            matrices.draw("binary", 0, 0)
            contender.bind(matrices.operands)()
            if adversary.__name__ not in ("WritesPartOfD", "ReadsPastItsRows"):
                wrong = matrices.compare("binary").wrong
                assert wrong <= record.n, adversary


@pytest.mark.slow
def test_slices_reach_the_launcher(library: Path) -> None:
    record = revise(small(raster="zsplit", swizzle_stride=48, n=160))
    verdict = try_kernel(record, library)
    assert {case.swizzle_stride for case in verdict.cases} == {48, 32}


def test_work_of_another_stream_shows_when_the_device_is_waited_for(library: Path) -> None:
    """The tests above rely on this property of the emulated device."""
    record = small()
    artifact = compiler.build([record])[0]
    with EmulatedDevice(record) as card:
        matrices = Matrices(card.empty, record, record.problem)
        matrices.draw("binary", 0, F16.poisons[0])
        card.open(record, artifact, library, lambda: OTHER_STREAM).bind(matrices.operands)()
        assert "unwritten-output: 4096 of 4096" in matrices.findings(F16.poisons[0])[0]
        card.synchronize()
        assert matrices.findings(F16.poisons[0]) == []
        assert matrices.compare("binary").findings == []


def no_vendor(card: object, contender: Any, problem: object) -> None:
    """Stands in for the timing of a vendor's product on a machine without a GPU."""
    raise gpu.Absent(f"{contender.name} needs a GPU")


class TestTheCommand:
    """Tests of ``validate --on gpu``, with the emulated device instead of a GPU."""

    @pytest.fixture
    def small_catalog(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A catalog of three records. Returns the folder of results."""
        monkeypatch.setenv("CUDAL2GEN_RESULTS", str(tmp_path / "results"))
        monkeypatch.setenv("CUDAL2GEN_CATALOG", str(tmp_path / "kernels.jsonl"))
        catalog.save([small(), small(acc="f32"), small(bn=64, m=128, n=128)], tmp_path / "kernels.jsonl")
        return tmp_path / "results"

    @pytest.fixture
    def card(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedDevice]:
        """The device that the command opens, without a vendor's library."""
        with EmulatedDevice(small()) as card:
            monkeypatch.setattr(gpu, "connect", lambda index: card)
            monkeypatch.setattr(bench.vendor, "prepare", no_vendor)
            monkeypatch.setattr(baselines, "_check_vendor", lambda: None)
            yield card

    @pytest.mark.slow
    def test_verdicts_are_stored_under_the_devices_name(self, small_catalog: Path, card: EmulatedDevice) -> None:
        first = CliRunner().invoke(cli.app, ["validate", "--all", "--on", "gpu"])
        assert (first.exit_code, first.exception) == (0, None)
        assert first.stdout.startswith("2 records, 2 kernels executed in ")
        assert first.stdout.endswith(": 2 right, 0 wrong\n")
        assert {on for _, on in results.latest()} == {"emulated"}
        again = CliRunner().invoke(cli.app, ["validate", "--changed", "--on", "gpu"])
        assert "0 kernels executed in 0 cases, 2 had a verdict" in again.stdout
        assert card.checked == 4, "each record, each time"

    @pytest.mark.slow
    def test_roundings_are_stored_and_tabled(self, small_catalog: Path, card: EmulatedDevice) -> None:
        done = CliRunner().invoke(
            cli.app, ["validate", "--mnk", "64_64_256", "--acc", "f32", "--on", "gpu", "--also", "emulator"]
        )
        assert done.exit_code == 0
        assert "equality with the emulator, max error 0" in done.stdout
        lines = results.roundings()
        assert {(line.k, line.inputs) for line in lines} == {
            (k, inputs) for k in (64, 256, 2048) for inputs in ("binary", "integers", "normal", "cancelling")
        }
        assert (small_catalog / "rounding.md").read_text() == rounding.markdown(lines)

    def test_a_tool_that_does_not_run_is_said(
        self, small_catalog: Path, card: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sanitizer, "program", lambda: None)
        done = CliRunner().invoke(cli.app, ["validate", "--mnk", "64_64_256", "--on", "gpu", "--also", "sanitizer"])
        assert done.exit_code == 0
        assert "  memcheck: not run: compute-sanitizer is not installed\n" in done.stdout
        (verdict,) = results.latest().values()
        assert set(verdict.tools) == {"memcheck", "racecheck", "baseline"}
        assert verdict.tools["baseline"] == "not run: cublaslt-autotuning-tn needs a GPU"

    def test_a_trial_needs_no_vendors_library(
        self, small_catalog: Path, card: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail_as_missing() -> None:
            raise gpu.GpuError("nvmath is missing")

        monkeypatch.setattr(baselines, "_check_vendor", fail_as_missing)
        done = CliRunner().invoke(cli.app, ["validate", "--mnk", "64_64_256", "--on", "gpu"])
        assert (done.exit_code, "  baseline: not run: nvmath is missing\n" in done.stdout) == (0, True)

    def test_a_tools_finding_is_a_wrong_kernel(
        self, small_catalog: Path, card: EmulatedDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def check(launch: sanitizer.SingleLaunch, tool: str, *_: object) -> tuple[str, list[str]]:
            return ("2 errors", ["2 errors, first: a race"]) if tool == "racecheck" else ("0 errors", [])

        monkeypatch.setattr(sanitizer, "check", check)
        done = CliRunner().invoke(cli.app, ["validate", "--mnk", "64_64_256", "--on", "gpu", "--also", "sanitizer"])
        assert done.exit_code == 1
        assert "found: 64_96_320 ones: racecheck: 2 errors, first: a race" in done.stdout
        assert "compute-sanitizer memcheck, max error 0\n" in done.stdout

    def test_a_broken_device_ends_it_after_storing(self, small_catalog: Path, card: EmulatedDevice) -> None:
        def wait() -> None:
            raise RuntimeError("CUDA error: unspecified launch failure")

        card.wait = wait  # type: ignore[method-assign]
        done = CliRunner().invoke(cli.app, ["validate", "--all", "--on", "gpu"])
        assert done.exit_code == 1
        assert "error: the device has stopped over hgemm_sm80_multistage" in done.stderr
        (verdict,) = results.latest().values()
        assert verdict.cases[0].findings == ("device-error: CUDA error: unspecified launch failure",)

    @pytest.mark.parametrize(
        ("arguments", "code", "message"),
        [
            (["--on", "tpu"], 2, "'tpu'"),
            (["--also", "sanitizer"], 2, "--also sanitizer: needs --on gpu"),
        ],
    )
    def test_wrong_options(self, arguments: list[str], code: int, message: str) -> None:
        done = CliRunner().invoke(cli.app, ["validate", "--mnk", "64_64_64", *arguments])
        assert done.exit_code == code
        assert message in done.stderr


def test_a_device_that_differs_from_the_emulator_is_told(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = small()
    subject = device.BuiltKernel(record, compiler.build([record])[0], library)
    right = agreement.product

    def off(*arguments: Any) -> Any:
        d = right(*arguments).copy()
        d[3, 4] += np.float16(0.25)
        return d

    monkeypatch.setattr(agreement, "product", off)
    monkeypatch.setattr(agreement, "LENGTHS", (64,))
    with EmulatedDevice(record) as card:
        cases, lines = agreement.against_emulator(card, subject)
    assert [case.findings for case in cases] == [("differs-from-emulator: 1 of 1024 elements",)] * 2
    assert [line.differing for line in lines] == [1 / 1024] * 4


def test_which_lengths_are_compared() -> None:
    assert agreement.lengths(small()) == [64, 256, 2048]
    assert agreement.lengths(small(split_k=3)) == [192, 256, 2048]
    assert agreement.lengths(small(bake=["k"], k=192)) == [192]
    assert agreement.lengths(PATHS["odd k-tile"]) == [48, 288, 2064]
    assert agreement.lengths(PATHS["once split 2"]) == [128, 256, 384]
    assert agreement.lengths(PATHS["once one warp f16"]) == [64]


@pytest.mark.slow
def test_launch_options_reach_the_device_and_the_verdict(library: Path) -> None:
    record = PATHS["wgmma"]
    artifact = compiler.build([record])[0]
    opened = []
    with EmulatedDevice(record) as card:

        def open_kernel(record: Any) -> Any:
            opened.append(record.launch_options)
            return card.open(record, artifact, library)

        verdict = device.validate(card, record, artifact.digest, open_kernel)
    assert verdict.passed, verdict.findings
    expected = [record.launch_options | options for options in record.other_options]
    assert len(expected) == 3
    assert all(options in opened for options in expected)
    stored = [case.options for case in verdict.cases if case.options]
    assert all(options in stored for options in record.other_options)
