"""Proves that solutions of public benchmarks are judged in the sandbox, by their values and by what ran."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kernelproof.emulator import Device
from kernelproof.grading import Limits
from kernelproof.grading.benchmarks import recognition, wire
from kernelproof.grading.benchmarks.task import task
from kernelproof.grading.verdict import Verdict
from kernelproof.ground.chips import GPUS
from kernelproof.ground.errors import WrongInput
from tests.kernelproof.grading import solutions

# The files of a task of GPU MODE.
FILES = {"task.yml": solutions.TASK, "reference.py": solutions.GPU_MODE, "task.py": "input_t = tuple",
         "utils.py": solutions.UTILS}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a benchmark's reference and solutions."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "model.py").write_text(solutions.REFERENCE)
    (tmp_path / "func_forward.py").write_text(solutions.FUNCTIONAL)
    return tmp_path


def verdict_of(solution: str, reference: Path) -> Verdict:
    """The verdict on a solution, by the reference of any of the benchmarks."""
    pytest.importorskip("torch")
    from kernelproof.grading.benchmarks.judgement import check_solution

    return check_solution(solution, reference, limits=Limits(compile_s=200))


def solution_with_call(text: str) -> str:
    """The honest solution with another call of its kernel."""
    assert solutions.CALL in solutions.HONEST
    return solutions.HONEST.replace(solutions.CALL, text)


# --- files are read as text ---


def test_formats_are_recognised_by_what_a_text_defines() -> None:
    assert recognition.format_of_reference(solutions.REFERENCE) == "KernelBench"
    assert recognition.format_of_reference(solutions.GPU_MODE) == "GPU MODE"
    assert "load_inline" in recognition.names("try:\n    from a import load_inline\nexcept ImportError:\n    x = 1")
    for text in ("x = 1", "class Model: pass", "def f(:", "\0", "(" * 500):
        with pytest.raises(WrongInput):
            recognition.format_of_reference(text)


def test_a_task_of_gpu_mode_has_shapes_tolerances_and_neighbours(folder: Path) -> None:
    for path in (folder, folder / "task.yml", folder / "reference.py"):
        read = task(path, solutions.TRITON)
        assert read.format == "GPU MODE"
        assert read.cases == ({"size": 31}, {"size": 4096})
        assert (read.relative, read.absolute) == (1e-3, 1e-3)
        assert set(read.modules) == {"task.py", "utils.py", "reference.py"}
    assert task(folder / "func_forward.py", "#include <x>").format == "robust-kbench"
    assert task(folder / "model.py", solutions.HONEST).format == "KernelBench"


# A module whose integer sizes are constants, some of them computed from others.
SIZED = """
M = 256 * 8
N, K = 1024, 512 * (2 + 2)
L = M // 2
eps = 1e-5
flag = True
stride = 2
shape = (3, 4)

def get():
    return M, N, K, L, stride, 256 * 8
"""


def test_sizes_are_constants_of_a_module_and_what_they_are_computed_from() -> None:
    pytest.importorskip("torch")
    from kernelproof.grading.benchmarks import problems

    stated = problems.constants(ast.parse(SIZED))
    assert stated == {"M": 2048, "N": 1024, "K": 2048, "stride": 2}
    case = {"M": 64, "N": 32, "K": 16, "stride": 2}
    assert problems.execute_text(SIZED, "sized", stated, case).get() == (64, 32, 16, 32, 2, 2048)
    assert problems.execute_text(SIZED, "sized", stated, stated).get() == (2048, 1024, 2048, 1024, 2, 2048)
    for text in ("M = 10 ** 10 ** 10", "M = -4", "M = 4 - 8", "M = 1 << 90", "M = 3 // 0", "M = 2.0 * 3"):
        assert problems.constants(ast.parse(text)) == {}


@pytest.mark.parametrize(("before", "after", "expected"), [
    ([1.0, 2.0], [1.0, 2.0], False), ([1.0, 2.0], [1.0, 3.0], True), ([1.0, float("nan")], [1.0, float("nan")], False),
    ([1.0, float("nan")], [2.0, float("nan")], True), ([1, 2], [1, 2], False), ([1, 2], [0, 2], True),
])  # fmt: skip
def test_an_input_that_a_call_overwrites_counts_as_changed(
    before: list[float], after: list[float], expected: bool
) -> None:
    torch = pytest.importorskip("torch")
    from kernelproof.grading.benchmarks import guest

    assert guest.has_changed(torch.tensor(before), torch.tensor(after)) is expected


# --- messages ---


def test_operators_that_write_several_tensors_in_place_are_the_origin_of_each() -> None:
    torch = pytest.importorskip("torch")
    from kernelproof.grading.benchmarks import ledger

    record = ledger.Ledger()
    first, second, out = torch.ones(8), torch.ones(8), torch.zeros(4, 4)
    with record:
        torch._foreach_mul_([first, second], 2.0)
        torch.mm(torch.ones(4, 4), torch.ones(4, 4), out=out)
    names = [
        [record.operators[number].name for number in record.origins[ledger.address(tensor)].operators]
        for tensor in (first, second, out)
    ]
    assert names == [["_foreach_mul_"], ["_foreach_mul_"], ["mm"]]


def test_messages_arrive_as_they_were_sent() -> None:
    reader, writer = os.pipe()
    rng = np.random.default_rng(1)
    arrays = [wire.Tensor("float32", rng.random((3, 0, 2), np.float32)), wire.Tensor("bool", np.ones((2,), np.uint8)),
              wire.Tensor("bfloat16", np.full((), 0x3F80, np.uint16))]  # fmt: skip
    wire.send(writer, {"a": [1, None]}, arrays)
    message, back = wire.receive(reader)
    assert message == {"a": [1, None]}
    assert [(item.type, item.bits.shape) for item in back] == [(item.type, item.bits.shape) for item in arrays]
    assert back[2].values() == 1.0


@pytest.mark.parametrize("gpu", ["a100", "h200", "b200"])
def test_torch_says_of_the_emulated_gpu_what_the_device_is(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from kernelproof.grading.benchmarks import cuda_face

    chip, device = GPUS[gpu], Device.of(GPUS[gpu])
    cuda = SimpleNamespace(amp=SimpleNamespace())
    fake = SimpleNamespace(cuda=cuda, nn=SimpleNamespace(Module=type("Module", (), {})), amp=SimpleNamespace(),
                           version=SimpleNamespace())  # fmt: skip
    monkeypatch.setattr(cuda_face, "torch", fake)
    monkeypatch.setattr(cuda_face, "OBSTACLES", [])  # rooms are forked from this process
    cuda_face.install(device)
    assert {name for name in vars(cuda) if not hasattr(torch.cuda, name)} == set()
    assert (cuda.is_available(), cuda.is_initialized(), cuda.is_bf16_supported()) == (True, True, True)
    assert list(range(cuda.device_count())) == [cuda.current_device()]
    assert cuda.get_device_capability() == cuda.get_device_capability(0) == device.capability
    assert cuda.get_arch_list() == ["sm_{}{}".format(*device.capability)]
    properties = cuda.get_device_properties(0)
    assert (properties.major, properties.minor) == device.capability
    assert properties.name == cuda.get_device_name() == device.name
    assert (properties.multi_processor_count, properties.L2_cache_size) == (chip.sms, device.l2_bytes)
    assert (properties.warp_size, properties.regs_per_multiprocessor) == (32, 65536)
    shared = [
        properties.shared_memory_per_block, properties.shared_memory_per_block_optin,
        properties.shared_memory_per_multiprocessor,
    ]  # fmt: skip
    # The runtime keeps 1 KiB of each CTA's shared memory.
    assert shared == sorted(shared) == [48 << 10, shared[2] - 1024, device.smem_per_sm_bytes]
    free, total = cuda.mem_get_info()
    assert 0 < free < total == properties.total_memory
    used = (cuda.memory_allocated, cuda.max_memory_allocated, cuda.memory_reserved)
    assert [each() for each in used] == [0, 0, 0]
    for unsupported in ("CUDAGraph", "graph", "make_graphed_callables"):
        with pytest.raises(BaseException, match=unsupported):
            getattr(cuda, unsupported)()
    model = fake.nn.Module()
    assert fake.compile(model) is model is fake.compile()(model) is fake.nn.Module.cuda(model, 0)


@pytest.mark.parametrize("kind", wire.BITS)
def test_bits_of_a_tensor_have_the_numbers_that_torch_gives_them(kind: str) -> None:
    """All patterns of a byte or of 16 bits, and drawn ones of wider types. A bool has 0 and 1."""
    torch = pytest.importorskip("torch")
    dtype = np.dtype(wire.BITS[kind])
    bits = np.random.default_rng(1).integers(0, 256, dtype.itemsize << 16, np.uint8)
    if dtype.itemsize < 4:
        bits = np.arange(1 << 8 * dtype.itemsize, dtype=f"u{dtype.itemsize}").view(np.uint8)
    bits = bits & 1 if kind == "bool" else bits
    elements = torch.from_numpy(bits.copy()).view(getattr(torch, kind)).reshape(2, -1)
    expected = (elements.double() if elements.is_floating_point() else elements.long()).numpy()
    tensor = wire.Tensor(kind, bits.view(dtype).reshape(2, -1))
    with np.errstate(invalid="ignore"):  # signalling NaN become quiet ones
        values = tensor.values()
    np.testing.assert_array_equal(values, expected)
    assert (values.dtype, tensor.is_float) == (expected.dtype, expected.dtype == np.float64)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 8,
        b"\x02\0\0\0\0\0\0\0[]",
        b'\x2e\0\0\0\0\0\0\0{"tensors": [["float32", [1099511627776, 99]]]}',
        b'\x20\0\0\0\0\0\0\0{"tensors": [["float32", [-1]]]}',
        b'\x1e\0\0\0\0\0\0\0{"tensors": [["object", [1]]]}',
        b'\x1f\0\0\0\0\0\0\0{"tensors": [["float32", [4]]]}',
        b"\x05\0\0\0\0\0\0\0{",
    ],
)
def test_what_is_no_message_takes_no_memory(data: bytes) -> None:
    """A message begins with the length of its JSON text in 8 bytes. These have a wrong length, text or tensor."""
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    with pytest.raises(wire.BrokenMessage):
        wire.receive(reader)


# --- verdicts ---


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["honest", *solutions.CHANGES])
def test_honest_solutions_are_right(folder: Path, name: str) -> None:
    verdict = verdict_of(solution_with_call(solutions.CHANGES.get(name, solutions.CALL)), folder / "model.py")
    assert verdict.right, str(verdict)
    assert "scaled_relu" in verdict.kernels[0].name
    assert verdict.calls >= 6
    assert verdict.shapes[0]["features"] < 1024
    assert any("addmm" in remark for remark in verdict.remarks)


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", solutions.CHEATS)
def test_cheats_are_found_by_what_ran(folder: Path, name: str) -> None:
    rule, text = solutions.CHEATS[name]
    verdict = verdict_of(solution_with_call(text), folder / "model.py")
    assert verdict.outcome == "wrong", str(verdict)
    assert rule in verdict.rules, str(verdict)


# Conditions that hold on the emulator alone, and the rule that a kernel breaks which needs one.
READINGS = {
    "(unsigned long long)&shared >> 56 == 1": "environment-dependent", "clock64() < 1000000": "wrong-value",
    "__FILE__[sizeof(__FILE__) - 6] != 'd'": "wrong-value",
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("reading", READINGS)
def test_readings_of_the_machine_make_nothing_right(folder: Path, reading: str) -> None:
    """The kernel works only where it recognises the emulator."""
    text = solutions.HONEST.replace("if (i < n)", "__shared__ int shared; if (i < n)")
    text = text.replace("* 2.f;", f"* ({reading} ? 2.f : 3.f);")
    verdict = verdict_of(text, folder / "model.py")
    assert READINGS[reading] in verdict.rules, str(verdict)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", solutions.UNJUDGED)
def test_what_cannot_run_here_is_not_wrong(folder: Path, name: str) -> None:
    call = solutions.UNJUDGED[name]
    for text in [call] if call.startswith("try") else [call, f"try: {call}\n        except ValueError: pass"]:
        verdict = verdict_of(solution_with_call(text), folder / "model.py")
        assert verdict.outcome == "not checked", str(verdict)


@pytest.mark.slow
def test_a_solution_for_the_stated_shape_alone_is_not_wrong_on_a_smaller_one(folder: Path) -> None:
    """The same fault is wrong in a text that has no size of the stated shape."""
    for size, outcome in (("1024", "not checked"), ("512 * 2", "wrong")):
        call = f"return ext.launch(self.linear(x)) * (x.shape[1] // ({size}))"
        assert verdict_of(solution_with_call(call), folder / "model.py").outcome == outcome
    torch_alone = "return torch.relu(self.linear(x)) * (2 if x.shape[1] < 1024 else 2)"
    assert verdict_of(solution_with_call(torch_alone), folder / "model.py").outcome == "wrong"


# The stated shape has 600 x 10 elements.
SCALED = solutions.REFERENCE.replace("self.linear(x)", "x").replace("= 64", "= 600").replace("= 1024", "= 10")
# Grids of a launch, and the verdict at the stated shape.
GRIDS = {
    "<<<12, 256>>>": "wrong", "<<<(n + 255) / 256, 256>>>": "right",
    "<<<(n == 6 * 1000 ? 24 : 1), 256>>>": "wrong", "<<<(n == 6000 ? 24 : 1), 256>>>": "right",
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS)
def test_launches_are_tried_on_the_stated_shape(folder: Path, monkeypatch: pytest.MonkeyPatch, grid: str) -> None:
    """One launch is too small for the stated shape, and two fit no other one; the text of the last has its size."""
    pytest.importorskip("torch")
    from kernelproof.grading.benchmarks import judgement

    monkeypatch.setattr(judgement, "BUDGET", 10_000)
    monkeypatch.setattr(judgement, "STATED_BUDGET", 100_000)
    (folder / "scaled.py").write_text(SCALED)
    text = solution_with_call("return ext.launch(x)").replace("<<<(n + 255) / 256, 256>>>", grid)
    verdict = verdict_of(text, folder / "scaled.py")
    assert verdict.outcome == GRIDS[grid], str(verdict)
    shapes = [shape["batch"] for shape in verdict.shapes]
    assert shapes[0] < 600
    assert shapes[1:] == ([] if "* 1000" in grid else [600])


@pytest.mark.slow
def test_an_inherited_reference_is_no_solution(folder: Path) -> None:
    text = solutions.REFERENCE + "\nclass ModelNew(Model):\n    pass\n"
    assert {"no-kernel", "library-call"} <= verdict_of(text, folder / "model.py").rules


@pytest.mark.slow
def test_gpu_mode_with_triton(folder: Path) -> None:
    verdict = verdict_of(solutions.TRITON, folder)
    assert verdict.right, str(verdict)
    assert verdict.shapes == [{"size": 31}]
    wrong = solutions.TRITON.replace("mask = i < n", "mask = i < n - 1")
    assert "wrong-value" in verdict_of(wrong, folder).rules
    assert "no-kernel" in verdict_of("def custom_kernel(data):\n    return data[0] + data[1]\n", folder).rules


@pytest.mark.thorough
@pytest.mark.slow
def test_robust_kbench(folder: Path) -> None:
    start, end = solutions.HONEST.index("#include"), solutions.HONEST.index("torch::Tensor by_torch")
    text = solutions.HONEST[start:end] + 'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("forward", &launch); }\n'
    verdict = verdict_of(text, folder / "func_forward.py")
    assert verdict.right, str(verdict)
    assert "wrong-value" in verdict_of(text.replace("* 2.f", "* 2.1f"), folder / "func_forward.py").rules


# Conditions on the content of operands, under which a kernel computes something else.
CONTENT = {
    "a constant in memory": "x[0] == table[n % 2]",
    "neighbouring constants": "x[0] == 0.12345f && x[1] == 0.5f",
    "a limit": "x[0] > 7.5f",
}


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("condition", CONTENT)
def test_conditions_on_the_content_are_met(folder: Path, condition: str) -> None:
    start, end = solutions.HONEST.index("#include"), solutions.HONEST.index("torch::Tensor by_torch")
    text = "__constant__ float table[2] = {0.625f, 0.3125f};\n" + solutions.HONEST[start:end]
    text += 'PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("forward", &launch); }\n'
    text = text.replace("* 2.f;", f"* ({CONTENT[condition]} ? 3.f : 2.f);")
    verdict = verdict_of(text, folder / "func_forward.py")
    assert any("inputs" in item.evidence for item in verdict.findings if item.rule == "wrong-value"), str(verdict)


# A task that seeds every generator that it draws from.
SEEDED = """
import random
import numpy as np
import torch

def get_inputs():
    torch.manual_seed(42)
    random.seed(42)
    np.random.seed(42)
    return [torch.randn(3), torch.tensor(random.random()), torch.tensor(np.random.rand())]

class Model(torch.nn.Module):
    pass
"""


def test_seeds_that_a_reference_sets_do_not_make_its_inputs_known() -> None:
    torch = pytest.importorskip("torch")
    from kernelproof.grading.benchmarks import problems

    problem = problems.KernelBench(SEEDED, {}, {}, 0)
    first, second, again = (problem.inputs(seed) for seed in (17, 18, 17))
    for one, other, same in zip(first, second, again, strict=True):
        assert not torch.equal(one, other)
        assert torch.equal(one, same)


@pytest.mark.slow
def test_without_torch_it_says_so(folder: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\nfrom kernelproof.__main__ import main\n"
        f"sys.argv = ['kernelproof', 'grade', {str(folder / 'func_forward.py')!r}, '--reference', "
        f"{str(folder / 'model.py')!r}]\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "needs torch" in done.stdout + done.stderr
