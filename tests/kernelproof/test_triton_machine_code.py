"""Proves that Triton's kernels are right in machine code of sm_80, which ptxas assembles from their PTX."""

from __future__ import annotations

import pytest

from kernelproof import emulator

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
from kernelproof.triton_emulation import backend  # noqa: E402
from tests.kernelproof import test_triton_emulation as kernels  # noqa: E402
from tests.kernelproof.emulator.build import assemble  # noqa: E402


@pytest.fixture(autouse=True)
def from_cubins(monkeypatch: pytest.MonkeyPatch) -> list[emulator.Program]:
    """The programs that were executed."""
    torch.manual_seed(0)
    programs: list[emulator.Program] = []

    def program(image: bytes) -> emulator.Program:
        programs.append(emulator.load(assemble(image.decode())))
        return programs[-1]

    monkeypatch.setattr(backend, "_program", program)
    return programs


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_layer_norm_with_locks(kind: torch.dtype, from_cubins: list[emulator.Program]) -> None:
    kernels.test_layer_norm_forward_and_backward_with_locks(kind)
    assert [program.module.kernels[name].machine_code for program in from_cubins for name in program.kernels] == [
        True
    ] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_matmul(kind: torch.dtype) -> None:
    kernels.test_matmul_of_odd_sizes_in_grouped_order("sm_80", kind)


@pytest.mark.slow
def test_matmul_by_descriptors_of_the_host() -> None:
    kernels.test_matmul_by_descriptors_of_the_host("sm_80", torch.float16)


@pytest.mark.slow
def test_attention() -> None:
    kernels.test_attention("sm_80", torch.float16)
