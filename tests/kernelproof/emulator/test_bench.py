"""Measures the emulator: at most 25 ms with hazards for 256^3 (70 ms with TMA), 100 ms to parse and translate."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.emulator import Memory, Options
from tests.kernelproof.emulator import hopper
from tests.kernelproof.emulator.build import compile_file
from tests.kernelproof.emulator.gemm import SHARED_BYTES


@pytest.mark.parametrize("hazards", [True, False])
@pytest.mark.parametrize("kernel", ["gemm_f32", "gemm_f16"])
def test_run(benchmark: Any, kernel: str, hazards: bool) -> None:
    program = emulator.load(compile_file("multistage", ".ptx"))
    memory = Memory()
    a = memory.upload(np.ones((256, 256), np.float16))
    d = memory.upload(np.empty((256, 256), np.float16), "output")

    def launch() -> None:
        result = program.launch(
            kernel,
            (2, 2),
            128,
            [a, a, d, 256, 256, 256],
            memory=memory,
            shared_bytes=SHARED_BYTES,
            options=Options(hazards=hazards),
        )
        assert result.reports == []

    benchmark.pedantic(launch, rounds=20, warmup_rounds=2)
    assert (d.download() == 256).all()


def test_parse_and_translate(benchmark: Any) -> None:
    text = compile_file("multistage", ".ptx").read_text()
    kernel = benchmark.pedantic(lambda: emulator.load(text).compiled("gemm_f32"), rounds=5, warmup_rounds=1)
    body = text.split(".entry gemm_f32")[1].split(".entry")[0]
    opcodes = [(opcode, n) for block in kernel.block_opcodes for opcode, n in block.items()]
    for opcode in ("mma.sync", "ldmatrix.sync", "cp.async.cg"):
        assert sum(n for name, n in opcodes if name.startswith(opcode)) == body.count(opcode) > 0


@pytest.mark.parametrize("hazards", [True, False])
@pytest.mark.parametrize("entry", ["tn_f32_1x1", "nn_f16_2x2"])
def test_run_of_tma_and_wgmma(benchmark: Any, entry: str, hazards: bool) -> None:
    options = Options(hazards=hazards, counters=True)
    run = benchmark.pedantic(lambda: hopper.gemm(entry, (256, 256, 256), options=options), rounds=10, warmup_rounds=2)
    assert (run.code, run.exact, run.session.reports) == (0, True, [])
    counters = run.session.launches[0].counters
    assert counters is not None
    assert counters.wgmma_flops == 2 * 256**3
