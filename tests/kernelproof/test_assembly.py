"""Proves that text which ptxas refuses is an error of a check and of a grade, and that ptxas's answers are cached by
content.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kernelproof.checking import assembly, compilation, plan, supervision
from kernelproof.checking.result import Result
from kernelproof.emulator import RULES
from kernelproof.emulator.state.findings_json import finding_fields
from kernelproof.grading import check_source
from kernelproof.ground import process_tree, toolchain
from tests.kernelproof.emulator.build import stable_file
from tests.kernelproof.emulator.rule_examples import OF_CHECKS, examples

# A kernel with a shared array; TARGET and SHARED are replaced.
PTX = """.version 8.0
.target TARGET
.address_size 64
.visible .entry k(.param .u64 out)
{
.reg .b64 %a; .reg .b32 %r; .reg .f32 %f;
.shared .align 4 .b8 buf[SHARED];
ld.param.u64 %a, [out]; mov.u32 %r, buf; mov.f32 %f, 0f00000000;
BODY
st.global.u32 [%a], %r; ret;
}
"""
# A change of the text, and ptxas's message.
REFUSED = {
    "shared memory": ("", "81920", "too much shared data"),
    "types": ("add.u32 %f, %f, %f;", "64", "Arguments mismatch"),
    "setmaxnreg": ("setmaxnreg.dec.sync.aligned.u32 40;", "64", "not supported on .target 'sm_80'"),
    "wgmma": ("wgmma.fence.sync.aligned;", "64", "not supported on .target 'sm_80'"),
    "wgmma that reads": ("wgmma.commit_group.sync.aligned;", "64", "not supported on .target 'sm_80'"),
}


def text(body: str = "", shared: str = "64", target: str = "sm_80") -> str:
    """A PTX text with this body, shared memory and target."""
    return PTX.replace("BODY", body).replace("SHARED", shared).replace("TARGET", target)


def check_ptx(ptx: str, folder: Path, **fields: str) -> Result:
    """The result of a check that launches a PTX text with an output of one number."""
    source = folder / "kernel.ptx"
    source.write_text(ptx)
    out = plan.argument("out:u32[1]", {})
    launch = plan.LaunchSpec("k", (1,), (128,), arguments=(out,))
    program = plan.CheckPlan(fields.get("device", "sm_80"), kernels=(source,), launches=(launch,), quiet=True)
    return supervision.run(program, "kernel.ptx", 60, 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_check_reports_what_ptxas_refuses(name: str, tmp_path: Path) -> None:
    body, shared, message = REFUSED[name]
    result = check_ptx(text(body, shared), tmp_path)
    (finding,) = (item for item in result.findings.values() if item.kind == assembly.RULE)
    assert message in finding.message
    assert finding.kernel == "k"
    assert finding.line == (9 if body else 0)
    assert result.code == 1


@pytest.mark.parametrize(
    ("body", "gpu"),
    [
        ("wgmma.fence.sync.aligned;", "sm_90a"),
        ("tcgen05.wait::ld.sync.aligned;", "sm_100a"),
        ("fence.proxy.async;", "sm_90a"),
        ("add.u32 %f, %f, %f;", ""),
    ],
)
def test_a_hint_names_the_architecture_that_has_the_instruction(body: str, gpu: str, tmp_path: Path) -> None:
    source = tmp_path / "kernel.ptx"
    source.write_text(text(body).replace(".version 8.0", ".version 8.8"))
    (finding,) = assembly.findings_of(plan.CheckPlan("sm_80", kernels=(source,))).findings
    assert re.findall(r"--gpu (sm_\w+)", finding.hint) == ([gpu] if gpu else [])
    assert finding_fields(finding)["hint"] == finding.hint
    assert gpu or finding.hint == RULES[assembly.RULE].hint


@pytest.mark.slow
def test_what_ptxas_takes_is_clean(tmp_path: Path) -> None:
    assert check_ptx(text("add.u32 %r, %r, %r;"), tmp_path).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_grade_reports_what_ptxas_refuses(name: str) -> None:
    body, shared, message = REFUSED[name]
    verdict = check_source(
        text(body, shared), lambda: np.zeros(1), [{}], buffers={"y": "out:u32[1]"},
        launches=[{"entry": "k", "block": 32, "args": ["y"]}],
    )  # fmt: skip
    assert verdict.rules == {"does-not-compile"}
    assert message in verdict.findings[0].message


@pytest.mark.slow
@pytest.mark.parametrize("rule", sorted(OF_CHECKS))
def test_the_programs_of_the_page_are_as_it_says(rule: str) -> None:
    for number, program in enumerate(examples(rule)):
        library = compilation.library([stable_file(program.code)], [], "sm_80", toolchain.discover())
        result = supervision.run(plan.CheckPlan("sm_80", library, main=("program",), quiet=True), "program.cu", 60, 4)
        findings = [item for item in result.findings.values() if item.is_error]
        assert [item.kind for item in findings] == ([] if number else [rule])
        homes = [home.line for item in findings if (home := item.access.site.home)]
        assert homes == program.marked("here")
        assert RULES[rule].severity == "error"


def test_an_answer_is_stored_by_content(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERNELPROOF_CACHE_DIR", str(tmp_path))
    refused = text("wgmma.fence.sync.aligned;")
    first = assembly.answer_of(refused, "sm_80", foreign=False)
    assert len(first.refusals) == 1
    assert assembly.answer_of(text(), "sm_80", foreign=False) == assembly.PtxasAnswer()

    def fail_if_called(*_arguments: object, **_options: object) -> None:
        raise AssertionError

    monkeypatch.setattr(process_tree, "output", fail_if_called)
    assert assembly.answer_of(refused, "sm_80", foreign=False) == first
    with pytest.raises(AssertionError):
        assembly.answer_of(refused + "\n", "sm_80", foreign=False)


@pytest.mark.parametrize(
    ("ptx", "device"),
    [
        (text().replace(".version 8.0", ".version 99.0"), "sm_80"),  # newer than ptxas
        (text(target="sm_999"), "sm_80"),  # a device that ptxas does not know
    ],
)
def test_what_ptxas_cannot_judge_is_a_note(ptx: str, device: str) -> None:
    answer = assembly.answer_of(ptx, device, foreign=False)
    assert answer.refusals == ()
    assert answer.unable


def test_functions_of_other_files_are_left_to_the_linker() -> None:
    extern = ".extern .func (.param .b32 r) helper (.param .b32 x);\n.visible .entry"
    body = "{ .param .b32 p; .param .b32 q; st.param.b32 [p], %r; call (q), helper, (p); ld.param.b32 %r, [q]; }"
    ptx = text(body).replace(".visible .entry", extern)
    assert assembly.answer_of(ptx, "sm_80", foreign=False) == assembly.PtxasAnswer()


def test_without_ptxas_a_note_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KERNELPROOF_PTXAS", str(tmp_path / "absent"))
    assert "KERNELPROOF_PTXAS" in assembly.answer_of(text(), "sm_80", foreign=False).unable
