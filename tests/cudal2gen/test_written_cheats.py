"""Proves that kernels which are right in every execution here, but would cheat elsewhere, are refused."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from cudal2gen.generation import catalog, compiler
from cudal2gen.generation.compiler import Artifact
from cudal2gen.tuner.writing import proof
from cudal2gen.tuner.writing.proof import CheckLimits
from tests.cudal2gen import device_texts
from tests.cudal2gen.device_texts import gemm

# Parts of the right kernel: its sums, before which cheats are put, and the word before which declarations are.
SUMS = "  float sums[2][4] = {};\n"
ENTRY = 'extern "C"'
LARGE = "k > 4096"  # no check runs such a size


def begins(code: str, *edits: tuple[str, str]) -> str:
    """The right kernel with code before its sums, and with further edits: a text and what replaces it."""
    return gemm((SUMS, f"  {code}\n{SUMS}"), *edits)


def declares(declaration: str, code: str) -> str:
    """The kernel with a declaration before it and this code at its beginning."""
    return begins(code, (ENTRY, f"{declaration}\n\n{ENTRY}"))


# D as 32-bit words, and a cast to pointers to 16-bit words.
WORDS, SHORTS = "reinterpret_cast<unsigned*>(d)", "reinterpret_cast<short const*>"
# By what the kernel does: its text, and the beginning of the finding.
CHEATS: dict[str, tuple[str, str]] = {
    "leaves D alone where it holds numbers": (
        begins(f"if ({LARGE} && __half2float(d[n]) != 0) return;"),
        "reads-output: ld.",
    ),
    "reads D by an atomic": (begins(f"if ({LARGE} && atomicAdd({WORDS}, 0u)) return;"), "reads-output: atom."),
    "reads D into shared memory": (
        declares(
            "#include <cuda_pipeline.h>",
            f"__shared__ uint32_t old[4];\n  if ({LARGE}) {{ __pipeline_memcpy_async(old, d, 16); "
            "__pipeline_commit(); __pipeline_wait_prior(0); if (old[0]) return; }",
        ),
        "reads-output: cp.async",
    ),
    "reads D by the distance from A": (
        begins(f"if ({LARGE} && *({SHORTS}(a) + (reinterpret_cast<short*>(d) - {SHORTS}(a)) + m)) return;"),
        "reads-output: ld.",
    ),
    "counts its calls": (
        declares("__device__ int calls;", f"if ({LARGE} && atomicAdd(&calls, 1) > 3) return;"),
        "state-kept: atom.",
    ),
    "keeps a mark in a table": (
        declares(
            "__device__ int table[4] = {1, 2, 3, 4};",
            f"if ({LARGE}) {{ if (table[m % 4] == 9) return; table[m % 4] = 9; }}",
        ),
        "state-kept: st.",
    ),
    "tells machines by an address": (
        begins("if (reinterpret_cast<size_t>(a) >> 46 == 2) return;"),
        "address-test: setp.",
    ),
    "adds less by an address": (
        begins("const int most = k - int(reinterpret_cast<size_t>(d) >> 47 & 1) * 16;", ("at < k;", "at < most;")),
        "address-test: setp.",
    ),
    "finds its buffers again": (
        declares("__device__ half* last;", f"if ({LARGE}) {{ half* before = last; last = d; if (before) return; }}"),
        "address-kept: st.",
    ),
    "works less for some contents": (
        begins("if (__half2float(a[0]) == 0.12345f) return;"),
        "content-test: setp.",
    ),
    "works less for some sums": (
        gemm(
            (
                "  for (int i = 0; i < 8; ++i)\n    store",
                "  if (sums[0][0] == 77.5f) return;\n  for (int i = 0; i < 8; ++i)\n    store",
            )
        ),
        "content-test: setp.",
    ),
    "hides D in shared memory": (
        begins(
            f"__shared__ half* volatile place;\n  if ({LARGE}) {{ place = d; if (__half2float(place[m])) return; }}"
        ),
        "address-kept: st.",
    ),
}
# Does nothing if it runs in a CUDA graph.
GRAPH = begins('uint64_t graph; asm volatile("mov.u64 %0, %%current_graph_exec;" : "=l"(graph)); if (graph) return;')


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's folder and an empty catalog of the test's own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("CUDAL2GEN_CATALOG", str(tmp_path / "catalog" / "kernels.jsonl"))
    catalog.save([], tmp_path / "catalog" / "kernels.jsonl")


@cache
def built_kernels() -> dict[str, Artifact]:
    """All kernels, in one batch."""
    texts = {"right": gemm(), "in a graph": GRAPH} | {name: text for name, (text, _) in CHEATS.items()}
    outcomes = compiler.attempt([device_texts.record(text) for text in texts.values()])
    return dict(zip(texts, outcomes, strict=True))


@pytest.mark.one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", CHEATS)
def test_what_no_check_executes_is_read(name: str) -> None:
    """The review reads the PTX, and finds what the kernel would do for sizes, addresses or contents that no check
    uses."""
    text, finding = CHEATS[name]
    findings = proof.review_findings(device_texts.record(text), built_kernels()[name].ptx.read_text())
    assert any(line.startswith(finding) for line in findings), findings
    assert proof.review_findings(device_texts.record(gemm()), built_kernels()["right"].ptx.read_text()) == []


@pytest.mark.slow
def test_the_proof_reviews() -> None:
    for text, reason in [
        (CHEATS["counts its calls"][0], "state-kept: "),
        (GRAPH, "machine-register: reads %current_graph"),
    ]:
        proven = proof.prove(device_texts.record(text), CheckLimits(seconds=60, seed=1))
        assert (proven.outcome, proven.reason[: len(reason)]) == ("wrong result", reason), proven.reason
