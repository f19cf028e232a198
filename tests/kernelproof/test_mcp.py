"""Proves that the MCP server answers calls within its limits, and that the examples of its guide work.

The server runs in a process of its own, as a client starts it.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kernelproof.checking.plan import LaunchEntry
from kernelproof.emulator import RULES
from kernelproof.ground.errors import WrongInput
from kernelproof.mcp_server import answers, pages
from kernelproof.mcp_server.requests import Request
from tests.draws import THOROUGH
from tests.packages import require

anyio = require("anyio")
mcp = require("mcp")
# The guide whose examples run, and the server's limit of a call in seconds.
GUIDE = Path(__file__).parents[2] / "docs" / "kernelproof" / "skill.md"
SECONDS = 8
# A kernel that takes days, in a program whose host code does not compile.
ENDLESS = """
__global__ void wait(int *x) { for (long i = 0; i < 1l << 40; ++i) atomicAdd(x, 1); }
int main() { return not_declared(); }
"""
# A tool and its arguments -> whether the call failed, and its document or text.
Call = Callable[..., Awaitable[tuple[bool, Any]]]


def run_on_server(calls: Callable[[Call], Awaitable[None]], root: Path = GUIDE.parent) -> None:
    """Run calls on a new server. A call returns whether it failed, and its document or text."""

    async def run() -> None:
        variables = {name: os.environ[name] for name in ("PYTHONPATH", "KERNELPROOF_CACHE_DIR") if name in os.environ}
        command = ["-m", "kernelproof", "mcp", "--seconds", str(SECONDS), "--memory", "2", "--root", str(root)]
        parameters = mcp.StdioServerParameters(command=sys.executable, args=command, env=variables)
        async with mcp.Client(mcp.stdio_client(parameters)) as client:

            async def call(name: str, **arguments: object) -> tuple[bool, Any]:
                result = await client.call_tool(name, arguments)
                return result.is_error, result.structured_content if not result.is_error else result.content[0].text

            await calls(call)

    anyio.run(run)


def examples() -> list[tuple[list[str], dict[str, Any]]]:
    """The guide's calls: tool, outcome and rules, and the arguments."""
    blocks = re.findall(r"```json (.+?)\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    return [(words.split(), json.loads(text)) for words, text in blocks]


@pytest.mark.slow
def test_the_examples_of_the_guide_answer_what_it_says() -> None:
    assert [words[0] for words, _ in examples()] == ["check", "check", "explain", "check", "count"]

    async def calls(call: Call) -> None:
        for (tool, *expected), arguments in examples():
            failed, answer = await call(tool, **arguments)
            assert not failed, answer
            if tool == "explain":
                assert answer["result"].startswith(f"# {expected[0]}\n")
                assert answer["result"].count("```cuda") == 3
                continue
            rules = answer["rules"] if tool == "count" else [finding["rule"] for finding in answer["findings"]]
            assert [answer["outcome"], *rules] == expected
            if rules:
                (finding,) = answer["findings"]
                assert (finding["access"]["home"]["file"], finding["access"]["home"]["line"]) == ("kernel.cu", 4)
                assert finding["other"]["home"]["line"] == 3
                assert len(finding["access"]["threads"]) == 8
            if tool == "check":
                assert answer["target"] == "kernel.cu"
            if tool == "count":
                (kernel,) = answer["kernels"]
                counters = kernel["counters"]
                assert f"`st.shared conflicts` are {counters['st.shared conflicts']}:" in GUIDE.read_text()
                assert (counters["ld.global bytes"], counters["ld.global sectors"]) == (4096, 128)

    run_on_server(calls)


def test_what_a_client_leaves_out_is_what_a_request_leaves_out() -> None:
    """All CTAs run, in the usual order, on a device that the kernels determine. Only the server sets limits."""
    from kernelproof.mcp_server.server import _Tools

    optional = {name: field.default for name, field in Request.model_fields.items() if not field.is_required()}
    assert optional["sample"] == 0
    assert not any(optional.values())
    for tool in (_Tools.check, _Tools.count):
        defaults = {name: item.default for name, item in inspect.signature(tool).parameters.items()}
        assert defaults.pop("seconds") is None
        for name in defaults.keys() - {"self", "launches"}:
            assert defaults[name] == optional[name], (tool, name)


@pytest.mark.slow
def test_limits_and_bad_input_end_a_call_and_not_the_server(tmp_path: Path) -> None:
    launch = {"entry": "wait", "block": 32, "args": ["inout:i32[1]=zeros"]}
    file = tmp_path / "wait.cu"
    file.write_text(ENDLESS.replace("int main", "#ifdef __CUDACC__\n#else\nint main") + "#endif\n")

    async def calls(call: Call) -> None:
        failed, answer = await call("check", path=str(file), launches=[launch], seconds=2)
        assert not failed
        assert (answer["outcome"], answer["findings"]) == ("not checked", [])
        assert answer["ending"].startswith("did not end within 2 s: launch 1 of wait, grid 1, ran for ")
        assert answer["ending"].endswith("; seconds gives it longer, sample=N runs only N CTAs of a grid")
        failed, answer = await call("check", source=ENDLESS, launches=[launch])
        assert failed
        assert 'identifier "not_declared" is undefined' in answer
        for arguments, message in (
            ({}, "give source"),
            ({"path": str(file), "nvcc_args": "-I/etc"}, "/etc is not below the folders that this server reads"),
            ({"source": '%:include "/etc/hosts"'}, "is not allowed here; put the text into source"),
            ({"path": str(tmp_path)}, "neither .cu nor .ptx"),
            ({"path": str(tmp_path / "no.cu")}, "no.cu: No such file"),
            ({"path": str(file), "device": "sm_12"}, "sm_12: expected one of"),
            ({"path": str(file), "nvcc_args": "-Xcompiler -fplugin=x.so"}, "'-Xcompiler' is not allowed"),
            ({"path": str(file), "launches": [{**launch, "entry": "other"}]}, "no kernel other; there are wait"),
            ({"path": str(file), "launches": [{**launch, "args": ["f32"]}]}, "argument 'f32': write "),
            ({"path": str(file), "launches": [{**launch, "threads": 5}]}, "threads"),
            ({"path": str(file), "launches": []}, "at least 1"),
        ):
            failed, answer = await call("check", **{"launches": [launch], **arguments})
            assert failed, arguments
            assert message in answer
            assert "Traceback" not in answer
        failed, answer = await call("explain", subject="nothing")
        assert failed
        assert "no rule in 'nothing'" in answer

    run_on_server(calls, tmp_path)


def test_pages_of_a_report() -> None:
    for rule in RULES:
        assert pages.pages(rule).startswith(f"# {rule}\n")
    report = "error: trap in f at x.cu:3: a cluster of registers\nbenign: shared-race in g\n"
    assert re.findall(r"^# (.*)", pages.pages(report), re.MULTILINE) == ["trap", "shared-race"]
    document = json.dumps({"findings": [{"rule": rule} for rule in ("in-flight", "in-flight", *list(RULES)[:5])]})
    text = pages.pages(document)
    assert re.findall(r"^# (.*)", text, re.MULTILINE) == ["in-flight", *list(RULES)[:3]]
    assert text.endswith(f"Also named: {', '.join(list(RULES)[3:5])}\n")
    with pytest.raises(WrongInput, match="no rule in 'a cluster of registers'"):
        pages.pages("a cluster of registers")


def test_an_answer_names_a_text_without_a_file_by_the_name_of_kernels(tmp_path: Path) -> None:
    """A file that was named keeps its name, and options are those of a request in either case."""
    text, path = "__global__ void unique() {}", tmp_path / "own.cu"
    path.write_text(text)
    launches = [LaunchEntry(entry="unique", block=1)]
    limits: dict[str, Any] = {"seconds": 1, "gib": 1, "roots": [tmp_path], "launches": launches}
    sent, named = Request(source=text, **limits), Request(path=str(path), **limits)
    stored = answers._file(sent)
    assert stored.read_text() == text
    assert answers._file(named) == path
    message = f"{stored}:1 and {path}:1, with --timeout"
    assert answers._in_words_of_requests(message, sent) == f"kernel.cu:1 and {path}:1, with seconds"
    assert answers._in_words_of_requests(message, named) == f"{stored}:1 and {path}:1, with seconds"
    for wrong in (Request(**limits), Request(source=text, path=str(path), **limits)):
        with pytest.raises(WrongInput):
            answers._file(wrong)


def test_options_choose_device_code_only(tmp_path: Path) -> None:
    def options(word: str) -> str:
        launch = LaunchEntry(entry="f", block=1)
        return Request(launches=[launch], nvcc_args=word, seconds=1, gib=1, roots=[tmp_path]).options()

    for word in ("-DN=5", "-std=c++20", "--use_fast_math", "-O2", "-arch=sm_90a", f"-I{tmp_path}"):
        assert options(word) == word
    for word in ("-I/usr/include", "-Xcompiler x", "-ccbin=x", "--run", "-o x", "x.cu", "-include x", "-", "'"):
        with pytest.raises(WrongInput, match=r"nvcc_args|not below"):
            options(word)


@pytest.mark.slow
def test_the_guide_is_a_skill_and_the_sdk_is_optional() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "kernelproof", "mcp", "--skill"], capture_output=True, text=True, check=True
    )
    assert printed.stdout == GUIDE.read_text()
    assert re.match(r"---\nname: [a-z-]{1,64}\ndescription: .{1,1024}\n---\n\n# ", printed.stdout)
    statement = (
        "import sys; sys.modules['mcp'] = None; from kernelproof.cli import main; sys.argv = ['x', 'mcp']; main()"
    )
    missing = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=False)
    assert (missing.returncode, missing.stdout) == (3, "")
    assert "pip install '.[mcp]'" in missing.stderr


# A kernel that counts in a loop up to LIMIT, and stores each number at the thread's place.
PTX = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry store(.param .u64 p)
{
    .reg .u64 %rd<4>;
    .reg .u32 %r<4>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [p];
    cvta.to.global.u64 %rd2, %rd1;
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd3, %r1, 4;
    add.u64 %rd2, %rd2, %rd3;
LOOP:
    st.global.u32 [%rd2], %r1;
    setp.eq.u32 %p1, %r1, LIMIT;
    @%p1 bra LOOP;
    ret;
}
"""


CLIENTS = 8 if THOROUGH else 2


@pytest.mark.slow
def test_clients_at_once(tmp_path: Path) -> None:
    """Each client gets its own answers, even if others send endless kernels, huge texts and buffers."""
    right, endless = PTX.replace("LIMIT", "77"), PTX.replace("LIMIT", "0").replace("add.u64 %rd2", "add.u64 %rd1")
    answers: dict[int, list[tuple[bool, Any]]] = {}

    async def client(number: int) -> None:
        command = ["-m", "kernelproof", "mcp", "--seconds", "60", "--memory", "2", "--root", str(tmp_path)]
        parameters = mcp.StdioServerParameters(command=sys.executable, args=command, env=None)
        launch = {"entry": "store", "block": 32, "args": ["out:i32[32]"]}
        async with mcp.Client(mcp.stdio_client(parameters)) as connected:

            async def call(**arguments: object) -> None:
                result = await connected.call_tool("check", arguments)
                document = result.content[0].text if result.is_error else result.structured_content
                answers[number].append((result.is_error, document))

            answers[number] = []
            if number % 2:
                await call(source=endless, launches=[launch], seconds=1)
                await call(source="// " + "x" * (1 << 20) + right, launches=[launch])
            else:
                await call(source=right, launches=[{**launch, "args": ["out:i32[100000000000]"]}])
                await call(source="(" * (1 << 18), launches=[launch])
            await call(source=right, launches=[launch])

    async def run() -> None:
        async with anyio.create_task_group() as group:
            for number in range(CLIENTS):
                group.start_soon(client, number)

    anyio.run(run)
    for number, (first, second, last) in answers.items():
        assert last[0] is False, number
        assert last[1]["outcome"] == "clean", last
        if number % 2:
            assert first[1]["outcome"] != "clean", "its second or the limit of a loop's iterations ends it"
            assert second[1]["outcome"] == "clean"
        else:
            assert first[0] or first[1]["outcome"] == "not checked"
            assert second[0]
