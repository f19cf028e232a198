"""Proves that each planted fault of a tcgen05 kernel is reported by its rule, in both orders of events."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cudal2gen.generation import compiler
from cudal2gen.generation.compiler import Artifact
from cudal2gen.validator import Shape, run_case
from tests.cudal2gen.paths import PATHS

# A kernel for a pair of CTAs.
PAIR = PATHS["tensor pair nn f16"]
# A problem of whole tiles, and one whose tiles exceed the matrix.
SHAPES = (Shape(256, 64, 128), Shape(253, 123, 312))
ALWAYS = "setp.eq.u32 p, 0, 0;"  # sets the predicate of a wait in place of the wait
BUILT_AHEAD = [PAIR]


def without(pattern: str, by: str = "") -> Callable[[str], str]:
    """A change of a PTX text that replaces all matches of a pattern, by nothing unless ``by`` is given."""
    return lambda text: re.sub(pattern, by, text)


def last(pattern: str, by: str = "") -> Callable[[str], str]:
    """A change of a PTX text that replaces the last match of a pattern."""

    def edit(text: str) -> str:
        *_, match = re.finditer(pattern, text)
        return text[: match.start()] + match.expand(by) + text[match.end() :]

    return edit


def change_before_load(pattern: str, by: str = "") -> Callable[[str], str]:
    """A change of a PTX text that replaces the last match before the first load from tensor memory."""

    def edit(text: str) -> str:
        at = text.index("tcgen05.ld")
        return last(pattern, by)(text[:at]) + text[at:]

    return edit


# By fault: the change of the PTX, and the rule or one of the rules that report it.
FAULTS: dict[str, tuple[Callable[[str], str], str | tuple[str, ...]]] = {
    "loads are not awaited": (without(r"tcgen05\.wait::ld[^;]*;"), "tensor-memory-registers"),
    "the end of products is not told": (last(r"tcgen05\.commit[^;]*;"), "deadlock"),
    "products are not awaited": (
        change_before_load(r"mbarrier\.try_wait[^;]*;", ALWAYS),
        ("tensor-memory-race", "uninitialised-tensor-memory"),  # found after the first product, or before it
    ),
    "no fence before loads": (change_before_load(r"tcgen05\.fence::after_thread_sync;"), "tensor-memory-race"),
    "operands are not awaited": (
        lambda text: (
            last(r"mbarrier\.try_wait[^;]*;", ALWAYS)(text[: text.index("tcgen05.mma")])
            + text[text.index("tcgen05.mma") :]
        ),
        "in-flight",
    ),
    "the first product adds": (
        lambda text: re.sub(r"setp\.ne\.b32 p, %r\d+, 0;(\s*tcgen05\.mma)", rf"{ALWAYS}\1", text, count=1),
        "uninitialised-tensor-memory",
    ),
    "columns are kept": (without(r"tcgen05\.dealloc[^;]*;"), "tensor-memory-allocation"),
    "columns are asked for without the right to": (
        without(r"(tcgen05\.alloc[^;]*;)([\s\S]*?)(tcgen05\.relinquish[^;]*;)", r"\3\2\1"),
        "tensor-memory-allocation",
    ),
    "columns are given back while the peer reads": (
        last(r"barrier\.cluster\.arrive\.relaxed\.aligned;([\s\S]*?)barrier\.cluster\.wait\.acquire\.aligned;", r"\1"),
        "tensor-memory-race",
    ),
    "products of one CTA": (without(r"tcgen05\.mma\.cta_group::2", "tcgen05.mma.cta_group::1"), "tcgen05-group"),
}


@pytest.fixture(scope="module")
def artifact() -> Artifact:
    """The compiled kernel of ``PAIR``."""
    return compiler.build([PAIR])[0]


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("adverse", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported_by_its_rule(fault: str, adverse: bool, artifact: Artifact, tmp_path: Path) -> None:
    edit, rule = FAULTS[fault]
    directory = tmp_path / artifact.digest
    shutil.copytree(artifact.directory, directory)
    faulty, text = Artifact(directory, artifact.ptxas), artifact.ptx.read_text()
    assert edit(text) != text
    faulty.ptx.write_text(edit(text))
    for shape in SHAPES:
        case = run_case(PAIR, faulty, compiler.launcher(), shape, "binary", adverse=adverse)[0]
        assert any(finding.startswith(rule) for finding in case.findings), (shape, case.findings)


@pytest.mark.slow
def test_a_verdict_demands_the_fence_before_accumulators_are_freed(artifact: Artifact, tmp_path: Path) -> None:
    """The fence matters if a cluster has more tiles than accumulators. Loads have ended by then, so no result depends
    on it."""
    faulty = Artifact(shutil.copytree(artifact.directory, tmp_path / artifact.digest), artifact.ptxas)
    text = artifact.ptx.read_text()
    first = text.index("tcgen05.fence::before_thread_sync;")
    assert first < text.rindex("tcgen05.fence::before_thread_sync;"), "the other one is at the end"
    faulty.ptx.write_text(text[:first] + text[first:].replace("tcgen05.fence::before_thread_sync;", "", 1))
    shape = Shape(256, 8 * PAIR.bn, 64)
    right, wrong = (run_case(PAIR, kernel, compiler.launcher(), shape, "binary")[0] for kernel in (artifact, faulty))
    assert right.passed
    assert [finding.split(":")[0] for finding in wrong.findings] == ["benign, tcgen05-fence"]
