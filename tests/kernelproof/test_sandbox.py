"""Proves that attacks by graded texts, and by clients of the MCP server, reach nothing outside of the sandbox.

The targets that are planted outside are a file, a variable, a process and listening sockets (``Trap``).
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kernelproof.checking import compilation, plan
from kernelproof.grading import Limits, Verdict, check_source
from kernelproof.ground import places, process_tree, sandbox, toolchain
from kernelproof.ground.errors import Failure, UserError, WrongInput
from kernelproof.mcp_server import answers
from kernelproof.mcp_server.requests import Request
from tests import processes

SECRET = "a5d1c0ffee"  # the content of the planted file, variable and process
ATTACKS = Path(__file__).parent / "hosts" / "attacks.cu"
# Attacks that have no effect, so that the program continues and its result is right.
VAIN = [
    "none", "read a file", "read accounts", "list the disk", "read by the root of a process",
    "read by the folder of a process", "read by a link", "read by a hard link", "read an open file", "read a variable",
    "read all variables", "read the first variables", "read variables of all", "read commands of all", "see the parent",
    "read the parent's memory", "trace the parent", "kill the parent", "kill the parent's group",
    "connect to the network", "send to the network", "bring the network up", "connect to a socket's file",
    "connect to a socket's name", "write a file", "write by a shell", "make folders", "change a file", "remove a file",
    "rename a file", "change rights", "change the package", "change Python", "change the system", "change the cache",
    "change the kernel's settings", "restart the machine", "rename the machine", "open devices", "make a device",
    "type on the terminal", "mount", "remount", "change the root", "become root", "enter namespaces", "nest namespaces",
    "leave a daemon", "kill all others", "kill the first process", "print for ever", "fill a file",
    "make files for ever",
]  # fmt: skip
# Attacks that end the program.
ENDS = ["answer with garbage", "close all files", "exit", "exit at once", "abort", "kill itself", "crash"]
# Attacks that a limit of time, memory or processes ends.
EXCESSES = [
    "answer in part",
    "loop for ever", "sleep for ever", "stop itself", "fork for ever", "make threads for ever", "fill the memory",
    "fill the memory by children",
]  # fmt: skip
LARGE = ["fill the disk"]  # has no effect outside, like those of VAIN, but takes long
# All attacks.
NAMES = [*VAIN, *ENDS, *EXCESSES, *LARGE]


@dataclass
class Trap:
    """The targets of attacks that are files or sockets.

    ``folder`` has the file ``secret`` and the socket ``s``. ``stream`` and ``datagrams`` listen at ``port``, ``file``
    at ``s``, and ``name`` at the abstract address ``hidden``.
    """

    folder: Path
    stream: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    datagrams: socket.socket = field(default_factory=lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    file: socket.socket = field(default_factory=lambda: socket.socket(socket.AF_UNIX))
    name: socket.socket = field(default_factory=lambda: socket.socket(socket.AF_UNIX))

    def __post_init__(self) -> None:
        (self.folder / "secret").write_text(SECRET)
        self.datagrams.bind(("127.0.0.1", self.port))
        self.file.bind(str(self.folder / "s"))
        self.name.bind(f"\0{self.hidden_socket}")
        for end in (self.file, self.name):
            end.listen()
        for end in self.ends:
            end.settimeout(0)

    @property
    def port(self) -> int:
        """The port of the sockets for TCP and UDP."""
        return int(self.stream.getsockname()[1])

    @property
    def hidden_socket(self) -> str:
        """The name of the Unix socket without a file."""
        return f"doors-{self.port}"

    @property
    def ends(self) -> tuple[socket.socket, ...]:
        """All listening sockets."""
        return self.stream, self.file, self.name, self.datagrams

    def check_untouched(self) -> None:
        """Fails if an attack reached a target."""
        assert sorted(path.name for path in self.folder.iterdir()) == ["s", "secret"]
        assert (self.folder / "secret").read_text() == SECRET
        assert (self.folder / "secret").stat().st_mode & 0o777
        for end in self.ends:
            with pytest.raises(BlockingIOError):
                end.recv(1) if end is self.datagrams else end.accept()
        assert not (places.PACKAGE / "canary").exists()
        assert not Path(sys.prefix, "canary").exists()
        assert not (places.user_cache() / "canary").exists()


@pytest.fixture(scope="module")
def trap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trap]:
    """What a sandboxed program must not reach: files, sockets, a process and a variable, until the tests have ended."""
    # Children get the variable when they start, so the system shows it among the initial variables of all of them.
    os.environ["DOORS_SECRET"] = SECRET
    holder = subprocess.Popen(["sleep", "600", SECRET])
    planted = Trap(tmp_path_factory.mktemp("outside"))
    yield planted
    holder.kill()
    holder.wait()
    del os.environ["DOORS_SECRET"]
    for end in planted.ends:
        end.close()


# Why this machine has no sandbox; empty if it has one.
OBSTACLE = sandbox.namespace_obstacle()
pytestmark = pytest.mark.skipif(bool(OBSTACLE), reason=f"no namespaces: {OBSTACLE}")


def definitions(trap: Trap) -> str:
    """The macros that tell a program where the trap is."""
    texts = {
        "OUTSIDE": str(trap.folder), "SECRET": SECRET, "SOCKET": str(trap.folder / "s"),
        "SOCKET_NAME": trap.hidden_socket,
        "PARENT": str(os.getpid()), "PACKAGE": str(places.PACKAGE), "PREFIX": sys.prefix,
        "CACHE": str(places.user_cache()),
    }  # fmt: skip
    lines = [f'#define {name} "{text}"' for name, text in texts.items()]
    names = ", ".join(f'"{name}"' for name in NAMES)
    return "\n".join([*lines, f"#define PORT {trap.port}", f"#define NAMES {names}", ""])


def grade_attack(text: str, attack: str = "none", seconds: float = 30.0, gib: float = 2.0) -> Verdict:
    """The verdict on a program that makes one of ``NAMES``, and then doubles x. ``seconds``, ``gib``: its limits of
    time and of memory."""
    call = {"function": "run", "args": ["x", NAMES.index(attack)]}
    return check_source(
        text, lambda x: 2 * x, [{"n": 64}], buffers={"x": "in:f32[n]", "y": "out:f32[n]"}, call=call, run_host=True,
        kinds=("normal",), limits=Limits(seconds=seconds, gib=gib, places=1),
    )  # fmt: skip


@pytest.fixture(scope="module")
def program(trap: Trap) -> str:
    """The CUDA text of all attacks, with the trap's places."""
    return definitions(trap) + ATTACKS.read_text()


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("attack", VAIN)
def test_an_attack_of_host_code_is_in_vain(attack: str, program: str, trap: Trap) -> None:
    with (trap.folder / "secret").open() as file:
        os.set_inheritable(file.fileno(), True)
        verdict = grade_attack(program, attack)
    if attack == "leave a daemon":
        time.sleep(1)
    # The sandbox has its own /tmp, so an attack changes a cache there only for itself.
    if attack != "change the cache" or not places.user_cache().is_relative_to("/tmp"):
        assert (verdict.outcome, verdict.findings) == ("right", [])
    trap.check_untouched()


@pytest.mark.slow
@pytest.mark.parametrize("attack", ENDS)
def test_host_code_that_ends_its_process_is_wrong(attack: str, program: str, trap: Trap) -> None:
    verdict = grade_attack(program, attack)
    assert (verdict.outcome, verdict.rules) == ("wrong", {"host-failure"})
    trap.check_untouched()


@pytest.mark.slow
@pytest.mark.parametrize("attack", EXCESSES)
def test_host_code_beyond_its_limits_is_ended_with_all_that_it_started(attack: str, program: str, trap: Trap) -> None:
    verdict = grade_attack(program, attack, seconds=2.0, gib=0.5)
    assert verdict.outcome == "wrong"
    assert verdict.rules <= {"time-limit", "host-failure"}
    trap.check_untouched()
    assert not [pid for pid in process_tree.session(os.getpid()) if pid != os.getpid() and runs_attacks(pid)]


def runs_attacks(pid: int) -> bool:
    """Whether a process has opened a compiled program, as those of ``attacks.cu`` have."""
    try:
        return f"{places.user_cache() / 'check'}/" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("attack", LARGE)
def test_host_code_fills_its_own_disk_only(attack: str, program: str, trap: Trap) -> None:
    assert grade_attack(program, attack).outcome == "right"
    trap.check_untouched()


@pytest.mark.slow
def test_constructors_of_a_library_run_within_the_walls(program: str, trap: Trap) -> None:
    assert grade_attack("#define CONSTRUCTED\n" + program).outcome == "right"
    trap.check_untouched()


# Texts that read files while they are compiled. {} is a file in another folder.
INCLUSIONS = [
    '#include "{}"', "#include <{}>", '# /**/ include "{}"', '%:include "{}"', '??=include "{}"', '#inc\\\nlude "{}"',
    '#import "{}"', '#include_next "{}"', '#define F "{}"\n#include F', '#embed "{}"', '/* */ #include "{}"',
    '#if __has_include("{}")\n#error found\n#endif', "#if __has_include(<{}>)\n#error found\n#endif",
    '#define H(x) __has_include(x)\n#if H("{}")\n#endif', '#include "../../../../../..{}"',
    "#include <../../../../../..{}>", '\ufeff#include "{}"', '#include/**/"{}"',
    'R"(\n#include "{}"\n)"', "#\tinclude\t\"{}\"", '#\\\r\ninclude "{}"', '#if __has_embed("{}")\n#endif',
]  # fmt: skip


@pytest.mark.parametrize("text", INCLUSIONS)
def test_a_text_that_reads_a_file_is_refused(text: str, trap: Trap) -> None:
    source = text.replace("{}", str(trap.folder / "secret")) + "\n__global__ void f(float* y) {}\n"
    launch = {"entry": "f", "grid": 1, "block": 1, "args": ["y"]}
    verdict = check_source(source, lambda: None, [{"n": 1}], buffers={"y": "out:f32[n]"}, launches=[launch])
    assert verdict.rules == {"outside-file"}
    with pytest.raises(WrongInput, match="is not allowed here"):
        answers.run(request(trap.folder, source=source))


# Texts that exhaust the time or the stack of their reader.
BOMBS = {
    "comments": "#" + "/**/" * 200 + "x",
    "launches": f"cuda = '{'f<<<a>>>(' * 3000}'\nload_inline('x', '', cuda)",
    "nesting": "load_inline(" + "-" * 200_000 + "1)",
    "brackets": "load_inline(" + "[" * 150 + "1" + "]" * 150 + ")",
    "sums": "load_inline('x', '', " + "+".join(["'a'"] * 50_000) + ")",
}


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_text_that_takes_long_to_read_is_no_right_one(bomb: str) -> None:
    launch = {"entry": "f", "grid": 1, "block": 1, "args": ["y"]}
    start = time.perf_counter()
    try:
        outcome = check_source(
            BOMBS[bomb], lambda: None, [{"n": 1}], buffers={"y": "out:f32[n]"}, launches=[launch],
            limits=Limits(compile_s=2),
        ).outcome  # fmt: skip
    except WrongInput:
        outcome = "wrong"
    assert outcome == "wrong"
    assert time.perf_counter() - start < 20


def request(root: Path, **fields: object) -> Request:
    """A request with these roots and fields, of a launch of one block."""
    launches = fields.pop("launches", [plan.LaunchEntry(entry="f", block=1)])
    return Request(launches=launches, seconds=5, gib=1, roots=[root], **fields)  # type: ignore[arg-type]


# The same without rules of texts. The compiler itself must not see the file, and its messages must not reveal it.
READERS = [
    '#include "{}"', '#define F "{}"\n#include F', '# 1 "{}" 1\n!', '#line 1 "{}"\n!', '#pragma GCC dependency "{}"\n!',
    '#include __FILE__ "{}"', '#include "/proc/self/environ"', '#include "/proc/1/environ"',
    '#include "/proc/1/root{}"', '#include "/proc/self/cwd/secret"', '#include "/dev/stdin"\n!',
    '#if __has_include("{}")\n#include "{}"\n#else\n!\n#endif',
]  # fmt: skip
# Directives by which an assembler reads a file.
ASSEMBLED = ['.incbin \\"{}\\"', '.include \\"{}\\"']


@pytest.mark.slow
@pytest.mark.parametrize("text", READERS)
def test_a_compiler_sees_and_tells_nothing_of_other_files(
    text: str, trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trap.folder)
    source = compilation.text_file(
        text.replace("{}", str(trap.folder / "secret")) + "\n__global__ void f() {}\n", ".cu"
    )
    with pytest.raises(Failure) as failure:
        compilation.ptx(source, [], "sm_80", toolchain.discover(), 60, foreign=())
    assert SECRET not in str(failure.value)
    trap.check_untouched()


@pytest.mark.parametrize("text", ASSEMBLED)
def test_an_assembler_sees_nothing_of_other_files(text: str, trap: Trap) -> None:
    lines = 'asm("{}");\nint main() {{ return 0; }}\n'.format(text.replace("{}", str(trap.folder / "secret")))
    with pytest.raises(Failure) as failure:
        compilation.library([compilation.text_file(lines, ".cpp")], [], "sm_80", toolchain.discover(), 60, foreign=())
    assert SECRET not in str(failure.value)


@pytest.mark.slow
def test_headers_of_the_folders_that_are_named_are_read(trap: Trap, tmp_path: Path) -> None:
    (tmp_path / "right.h").write_text("const int n = 5;\n")
    (tmp_path / "planted.h").symlink_to(trap.folder / "secret")
    (tmp_path / "folder").symlink_to(trap.folder)
    tools = toolchain.discover()
    right = compilation.text_file('#include "right.h"\n__global__ void f(int* x) { *x = n; }\n', ".cu")
    for way in ([f"-I{tmp_path}"], ["-I", str(tmp_path)], [f"-isystem={tmp_path}"]):
        assert ".entry" in compilation.ptx(right, way, "sm_80", tools, foreign=()).read_text()
    for name in ("planted.h", "folder/secret"):
        wrong = compilation.text_file(f'#include "{name}"\n__global__ void f() {{}}\n', ".cu")
        with pytest.raises(Failure) as failure:
            compilation.ptx(wrong, [f"-I{tmp_path}"], "sm_80", tools, foreign=())
        assert SECRET not in str(failure.value)


# File names that clients send to the server. {} is the folder outside, and {name} its last part.
OUTSIDE = [
    "{}/secret", "{}", "../{name}/secret", "./../{name}/secret", "link", "folder/secret", "chain", "/etc/passwd",
    "/proc/self/environ", "/proc/self/root{}/secret", "/proc/self/cwd/../{name}/secret", "/dev/stdin", "/dev/zero", "/",
    "inner/../../{name}/secret", "{}/missing", "//etc/passwd", "/proc/1/fd/0",
]  # fmt: skip


@pytest.fixture
def root(tmp_path: Path, trap: Trap, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The server's folder, with links that lead out of it, next to a link to the folder outside."""
    (tmp_path / trap.folder.name).symlink_to(trap.folder)
    folder = tmp_path / "root"
    (folder / "inner").mkdir(parents=True)
    (folder / "link").symlink_to(trap.folder / "secret")
    (folder / "folder").symlink_to(trap.folder)
    (folder / "chain").symlink_to("link")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("door", ["path", "buffer", "argument", "headers"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_files_outside_of_the_roots_are_refused(name: str, door: str, root: Path, trap: Trap) -> None:
    """``door``: the part of a request that has the name."""
    name = name.replace("{}", str(trap.folder)).replace("{name}", trap.folder.name)
    launch = plan.LaunchEntry(entry="f", block=1, args=[f"in:u8[4]={name}"] if door == "argument" else [])
    fields: dict[str, object] = {"path": name} if door == "path" else {"source": "__global__ void f() {}"}
    fields |= {"buffers": {"b": f"in:u8[4]={name}"}} if door == "buffer" else {}
    fields |= {"nvcc_args": f"-I{name}"} if door == "headers" else {}
    with pytest.raises(WrongInput, match="is not below the folders"):
        answers.run(request(root, launches=[launch], **fields))


@pytest.mark.slow
def test_files_below_the_roots_are_read(root: Path) -> None:
    np.save(root / "inner" / "x.npy", np.full(4, 7, np.uint8))
    (root / "inner" / "n.h").write_text("const int n = 7;\n")
    (root / "f.cu").write_text(
        '#include "inner/n.h"\n'
        'extern "C" __global__ void f(const unsigned char* x, int* y) { y[x[3] == n ? 0 : 9] = 1; }\n'
    )
    for name in ("inner/x.npy", str(root / "inner" / "x.npy"), "../root/inner/../inner/x.npy"):
        launch = plan.LaunchEntry(entry="f", block=1, args=[f"in:u8[4]={name}", "out:i32[1]"])
        document = answers.answer(request(root, path="f.cu", nvcc_args="-Iinner", launches=[launch]))
        assert (document["outcome"], document["notes"]) == ("clean", [])


@pytest.mark.slow
def test_a_text_that_names_another_source_reads_nothing_of_it(root: Path) -> None:
    """PTX names its source files, from which findings read names of variables."""
    fifo = root / "fifo"
    os.mkfifo(fifo)
    for name in ("/dev/zero", str(fifo)):
        text = (
            f'.version 8.0\n.target sm_80\n.address_size 64\n.file 1 "{name}"\n.visible .entry f(.param .u64 x) {{\n'
            ".reg .u64 %rd<2>;\n.reg .u32 %r<2>;\nld.param.u64 %rd1, [x];\n.loc 1 1 0\nmov.u32 %r1, 0;\n"
            "st.global.u32 [%rd1+4096], %r1;\nret;\n}\n"
        )
        launch = plan.LaunchEntry(entry="f", block=1, args=["out:i32[1]"])
        document = answers.answer(request(root, source=text, launches=[launch]))
        assert "global-out-of-bounds" in [finding["rule"] for finding in document["findings"]]


@pytest.mark.slow
def test_a_program_within_walls_is_limited_and_its_end_is_told() -> None:
    def end(*words: str, **limits: object) -> tuple[int, str]:
        """The exit code and output of a command in a sandbox with these limits. A signal's code is 128 plus its
        number."""
        box = sandbox.Sandbox()._replace(**limits)  # type: ignore[arg-type]
        done = subprocess.run(sandbox.command(box, words), capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    assert end("sh", "-c", "echo $HOME; exit 7") == (7, "/tmp\n")
    assert end("sh", "-c", "kill -9 $$")[0] == 137
    assert end("sh", "-c", "kill -9 1; echo on") == (0, "on\n")
    assert end("no such program")[0] == sandbox.CANNOT_CONFINE
    code, text = end("yes", output_bytes=1000)
    assert (code, len(text) < 100_000) == (sandbox.EXCESS, True)
    assert end("sh", "-c", "while :; do :; done", cpu_s=1)[0] == 137
    assert end("sh", "-c", "head -c 3000000 /dev/zero > /tmp/x; wc -c < /tmp/x", file_mib=1)[1].split()[-1] == "1048576"
    assert end("python3", "-c", "b = bytes(1 << 30)", gib=0.5)[0] == 1
    assert end("sh", "-c", "sleep 100 & echo out")[1] == "out\n"


@pytest.mark.parametrize("inner_is_writable", [False, True])
def test_a_program_sees_what_it_may_read_and_changes_what_it_may_write(tmp_path: Path, inner_is_writable: bool) -> None:
    """A readable folder, one inside it, a writable one, a readable file, a link to a folder, and what is hidden."""
    outer, inner, written, hidden = (tmp_path / name for name in ("outer", "outer/inner", "written", "hidden"))
    for folder in (outer, inner, written, hidden):
        folder.mkdir()
        (folder / "file").write_text("content")
    (tmp_path / "single").write_text("content")
    (tmp_path / "link").symlink_to(hidden if inner_is_writable else outer)
    shown = (outer, tmp_path / "single", tmp_path / "missing", *(() if inner_is_writable else (tmp_path / "link",)))
    writable = (written, inner) if inner_is_writable else (written,)
    box = sandbox.Sandbox(tuple(map(str, shown)), tuple(map(str, writable)))
    files = [
        outer / "file",
        inner / "file",
        written / "file",
        tmp_path / "single",
        tmp_path / "link/file",
        hidden / "file",
    ]
    script = "\n".join(
        f'cat "{file}" >/dev/null 2>&1; printf $?; (echo changed > "{file}") 2>/dev/null; echo -n $?" "'
        for file in files
    )
    done = subprocess.run(sandbox.command(box, ("sh", "-c", script)), capture_output=True, text=True, check=False)
    is_shown = [True, True, True, True, not inner_is_writable, False]
    is_changed = [False, inner_is_writable, True, False, False, False]
    answers = done.stdout.split()
    assert [answer[0] == "0" for answer in answers] == is_shown
    assert [answer[1:] == "0" for answer in answers] == is_changed
    assert [file.read_text() == "changed\n" for file in files] == is_changed


def test_a_daemon_of_a_program_is_of_its_session(tmp_path: Path) -> None:
    """This also holds without a sandbox: a daemon in a new session is found while its parent lives."""
    program = "import os, time\nif os.fork() == 0:\n    os.setsid()\nelse:\n    print('', flush=True)\ntime.sleep(60)"
    with process_tree.started([sys.executable, "-c", program]) as process:
        assert process.stdout is not None
        process.stdout.readline()
        members = process_tree.session(process.pid)
        assert len(members) == 3
        assert all(processes.is_running(pid) for pid in members)
    processes.wait_until(lambda: not any(processes.is_running(pid) for pid in members), processes.END_S)


def test_variables_of_the_start_are_erased_from_memory() -> None:
    """These are the variables with which a program was started, which the system continues to show."""
    statement = (
        "import os\nfrom kernelproof.ground import sandbox\nsandbox.erase_variables(KEPT='kept')\n"
        "print(open('/proc/self/environ').read().strip('\\0'), sorted(set(os.environ) - {'LC_CTYPE'}))\n"
        "print(os.popen('echo $DOORS_SECRET$KEPT').read())"
    )
    variables = {"DOORS_SECRET": SECRET, "PATH": os.environ["PATH"], "PYTHONPATH": str(places.PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", statement], env=variables, capture_output=True, text=True, check=True)
    assert SECRET not in done.stdout
    assert done.stdout.split() == ["['KEPT',", "'PATH']", "kept"]


@pytest.mark.slow
def test_walls_that_cannot_be_built_are_said(monkeypatch: pytest.MonkeyPatch, trap: Trap) -> None:
    monkeypatch.setattr(sandbox, "namespace_obstacle", lambda: "unshare: Operation not permitted")
    launch = {"entry": "f", "grid": 1, "block": 1, "args": ["y"]}
    verdict = check_source(
        'extern "C" __global__ void f(float* y) { *y = 1; }', lambda: np.ones(1), [{"n": 1}], launches=[launch],
        buffers={"y": "out:f32[n]"},
    )  # fmt: skip
    assert any("unshare: Operation not permitted" in remark for remark in verdict.remarks)
    (outside,) = [trap.folder / "secret"]
    source = compilation.text_file(f'#include "{outside}"\n__global__ void f() {{}}\n', ".cu")
    with pytest.raises(UserError) as failure:
        compilation.ptx(source, [], "sm_80", toolchain.discover(), 60, foreign=())
    assert not re.search(SECRET, str(failure.value))
