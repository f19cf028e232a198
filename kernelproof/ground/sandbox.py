"""Walls around programs that nobody here wrote: what a process may see, write, start and use up.

Where the system has user namespaces, such a process sees the named files and folders alone, read-only but for its own
ones, no process outside and no network. Elsewhere, limits and an environment without secrets are all; every process
gets those. ``enter`` confines a forked process; a program is run by this file itself (standard library only), see
``command``.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import select
import signal
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import NamedTuple, NoReturn

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, AT_FDCWD, AT_RECURSIVE = 1, 2, -100, 0x8000
SYS_MOUNT_SETATTR = 442
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CAPABILITY_VERSION = 0x20080522
USER = 1000  # number of the user within; no user there has rights
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ld.so.cache",
    "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom",
)  # fmt: skip
VARIABLES = frozenset(("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"))
STAGE = "/tmp"  # is covered by the new root while it is built
SCRATCH = "/tmp"  # a folder of its own within
SCRATCH_OPTIONS = b"size=1g,nr_inodes=65536,mode=1777"
THREADS = 128  # that processes may have besides their first ones
PRIORITY = 10  # steps below the usual one: what starts processes for ever shall not starve those that end it
CANNOT_CONFINE = 126  # exit code where the walls cannot be built, as a shell's for what it cannot run
EXCESS = 125  # exit code of a program that prints too much


class Sandbox(NamedTuple):
    """What a process gets. ``readable``: files and folders besides the system's programs and libraries; ``writable``:
    folders. Limits: ``cpu_s`` of each process, ``gib`` of address space of each (0: none), ``file_mib`` of each file,
    ``processes`` at a time, ``output_bytes`` printed by a program."""

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    cpu_s: int = 90
    gib: float = 12.0
    file_mib: int = 256
    processes: int = 256
    output_bytes: int = 1 << 20


class Unconfined(OSError):
    """The system refuses a wall: which, and why."""


@cache
def lack() -> str:
    """Why processes of this system cannot be confined by namespaces, as the rest of a sentence; empty if they can."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            _confine(Sandbox())
            os.write(writer, b"+")
        except BaseException as error:
            with suppress(OSError):
                os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    return "" if text == "+" else text or "no answer of a trial"


def environment(**additional: str) -> dict[str, str]:
    """The variables of this process that programs need, and some more; none that could hold a secret."""
    return {name: value for name, value in os.environ.items() if name in VARIABLES} | additional


def command(box: Sandbox, program: Sequence[str]) -> list[str]:
    """The command that runs a program within walls."""
    return [sys.executable, "-I", "-S", __file__, json.dumps([*box, lack() == ""]), *program]


def views_of_python() -> tuple[str, ...]:
    """Folders from which this program's code and installed packages are loaded."""
    installed = {entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))}
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    return (*sorted(installed), sys.prefix, sys.base_prefix, package)


def enter(box: Sandbox, files: Container[int], **kept: str) -> None:
    """Confines this process, a forked one with a single thread, and all that it starts.

    It goes on as a child of itself, whose end becomes its own. Its environment is without secrets but for ``kept``, and
    only ``files``, by their numbers, stay open: others lead nowhere. Raises Unconfined where the system has namespaces
    and refuses a wall.
    """
    confinable = not lack()
    forget(HOME=SCRATCH, TMPDIR=SCRATCH if confinable else "", **kept)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        if number not in files and number != nowhere:  # numbers stay in use: objects that own them may close them yet
            with suppress(OSError):  # the listing's own
                os.dup2(nowhere, number)
    _limit(box)
    os.nice(PRIORITY)
    if confinable:
        _confine(box)


def forget(**kept: str) -> None:
    """Leaves this process no variables but harmless ones and ``kept``, also in the memory from which the system and C
    read those of its start. For a forked process."""
    variables = environment(**kept)
    os.environ.clear()
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start, env_end, behind the two fields that end with the name
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)
    os.environ.update({name: value for name, value in variables.items() if value})


def _limit(box: Sandbox) -> None:
    limits = {
        resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: box.cpu_s, resource.RLIMIT_FSIZE: box.file_mib << 20,
        resource.RLIMIT_NPROC: _threads() + box.processes + THREADS,
    }  # fmt: skip
    if box.gib:
        limits[resource.RLIMIT_AS] = int(box.gib * (1 << 30))
    for kind, most in limits.items():
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def _threads() -> int:
    """Threads that the user has already: the limit counts those too."""
    own, count = os.getuid(), 0
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208
        with suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == own:  # noqa: PTH116
                count += len(os.listdir(f"/proc/{name}/task"))  # noqa: PTH208
    return count


def _confine(box: Sandbox) -> None:
    """Moves this process into namespaces of its own, by a child: this one waits for it, and ends as it does."""
    user, group = os.getuid(), os.getgid()
    folder = os.getcwd()  # noqa: PTH109
    binds, links = _layout(box)
    spaces = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    _call("unshare", spaces)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{USER} {user} 1"), ("gid_map", f"{USER} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(text)
    reader, writer = os.pipe()
    if first := os.fork():
        os.close(writer)
        _mirror(first, reader)
    os.close(reader)
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        with suppress(OSError), open("/proc/sys/kernel/pid_max", "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(str(max(box.processes + THREADS, 301)))  # of this namespace, on newer systems
        _mount(binds, links)
        _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call("capset", (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())
    except OSError as error:
        os.write(writer, f"-{error}".encode())
        os._exit(CANNOT_CONFINE)
    with suppress(OSError):
        os.chdir(folder)
    if second := os.fork():  # the first process of a namespace takes no signals that would end it, so it only waits
        status = None
        while status is None:
            ended, code = os.wait()
            status = code if ended == second else None
        os.write(writer, b"%d" % status)
        os._exit(0)
    os.close(writer)


def _mirror(child: int, reader: int) -> None:
    """Ends as what runs in the namespaces, whose first process tells how; raises Unconfined if it never ran."""
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    if text.startswith("-"):
        raise Unconfined(text[1:])
    if not text:  # the first process was killed, and all others with it
        os.kill(os.getpid(), signal.SIGKILL)
    code = os.waitstatus_to_exitcode(int(text))
    if code < 0:
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _layout(box: Sandbox) -> tuple[list[tuple[str, bool]], dict[str, str]]:
    """Files and folders to show, with whether they are writable, those above others first; and links on the way."""
    links: dict[str, str] = {}
    views: dict[str, bool] = {}
    for writable, paths in ((False, [*SYSTEM, *box.readable]), (True, box.writable)):
        for path in paths:
            for real in _real(os.path.abspath(path), links):  # noqa: PTH100
                views[real] = writable
    return [(path, writable) for path, writable in sorted(views.items()) if _above(path, views) != writable], links


def _above(path: str, views: Mapping[str, bool]) -> bool | None:
    """Whether what is views above a path is writable, None where nothing is."""
    while (path := os.path.dirname(path)) != "/":  # noqa: PTH120
        if path in views:
            return views[path]
    return None


def _real(path: str, links: dict[str, str]) -> Iterable[str]:
    """The file or folder that a path leads to, if there is one; notes the links on the way. The root's folders for it:
    the root itself is never shown, for what is mounted there."""
    if path == "/":
        hidden = ("proc", "sys", "dev", "run", "tmp")
        return [real for name in os.listdir("/") if name not in hidden for real in _real(f"/{name}", links)]  # noqa: PTH208
    at, rest = "/", [part for part in path.split("/") if part]
    for _ in range(1000):
        if not rest:
            return [at] if os.path.exists(at) and at != "/" else []  # noqa: PTH110
        place = os.path.join(at, rest.pop(0))  # noqa: PTH118
        if os.path.islink(place):  # noqa: PTH114
            links[place] = os.readlink(place)  # noqa: PTH115
            target = os.path.normpath(os.path.join(at, links[place]))  # noqa: PTH118
            at, rest = "/", [part for part in target.split("/") if part] + rest
        else:
            at = place
    return []


def _mount(binds: Sequence[tuple[str, bool]], links: Mapping[str, str]) -> None:
    """Builds the new root in memory and makes it this namespace's."""
    _call("mount", None, b"/", None, MS_REC | MS_PRIVATE, None)
    _call("mount", b"tmpfs", STAGE.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"size=1m,mode=755")
    os.chdir(STAGE)
    for name in ("new", "old"):
        os.mkdir(name)  # noqa: PTH102
    _call("mount", b"tmpfs", b"new", b"tmpfs", MS_NOSUID | MS_NODEV, b"size=4m,mode=755")
    _pivot(b".", b"old")
    os.chdir("/")
    for folder in ("/new/proc", f"/new{SCRATCH}"):
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103
    # Read-only: some of its files change the whole system, and belong to the system's administrator by number alone.
    _call("mount", b"proc", b"/new/proc", b"proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    _call("mount", b"tmpfs", f"/new{SCRATCH}".encode(), b"tmpfs", MS_NOSUID | MS_NODEV, SCRATCH_OPTIONS)
    for path, writable in binds:
        _show(path, writable)
    for path, target in links.items():
        if not os.path.lexists(f"/new{path}"):
            with suppress(OSError):  # in a folder that is shown as it is
                os.makedirs(os.path.dirname(f"/new{path}"), exist_ok=True)  # noqa: PTH103, PTH120
                os.symlink(target, f"/new{path}")  # noqa: PTH211
    _read_only(b"/new", recursive=False)
    os.chdir("/new")
    _call("umount2", b"/old", MNT_DETACH)
    _pivot(b".", b".")
    _call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def _show(path: str, writable: bool) -> None:
    """Shows a file or folder of the old root in the new one, where it was; nothing if it has gone."""
    source, target = f"/old{path}", f"/new{path}"
    if not os.path.exists(source):  # noqa: PTH110
        return
    if not os.path.exists(target):  # noqa: PTH110
        if os.path.isdir(source):  # noqa: PTH112
            os.makedirs(target, exist_ok=True)  # noqa: PTH103
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _call("mount", os.fsencode(source), os.fsencode(target), None, MS_BIND | MS_REC, None)
    if not writable:
        _read_only(os.fsencode(target), recursive=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


def _read_only(path: bytes, recursive: bool) -> None:
    attributes = _MountAttributes(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID)
    flags = AT_RECURSIVE if recursive else 0
    size = ctypes.sizeof(attributes)
    _call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, path, flags, ctypes.byref(attributes), size, name="mount_setattr")


def _pivot(new: bytes, old: bytes) -> None:
    number = SYS_PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise Unconfined(f"pivot_root: no number for {platform.machine()}")
    _call("syscall", number, new, old, name="pivot_root")


def _call(function: str, *arguments: object, name: str = "") -> None:
    """A function of C. Raises Unconfined with its name where it fails."""
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    if getattr(_LIBC, function)(*words) < 0:
        raise Unconfined(f"{name or function}: {os.strerror(ctypes.get_errno())}")


_LIBC = ctypes.CDLL(None, use_errno=True)


def main(text: str, program: Sequence[str]) -> int:
    """Runs a program within walls; its exit code, 128 plus the number of a signal that ended it. See ``command``."""
    *fields, confinable = json.loads(text)
    box = Sandbox(*fields)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        _execute(box, confinable, program, writer)
    os.close(writer)
    end = os.pidfd_open(child)
    os.set_blocking(reader, False)
    printed, open_files = 0, [reader, end]
    while True:
        ready, _, _ = select.select(open_files, [], [])
        if reader in ready:
            data = os.read(reader, 65536)
            printed += len(data)
            _write(data)
            if not data:
                open_files.remove(reader)
            if printed > box.output_bytes:
                os.kill(child, signal.SIGKILL)
                _write(f"\nerror: the program printed more than {box.output_bytes} bytes\n".encode())
                os.waitpid(child, 0)
                return EXCESS
        elif end in ready:  # all that it printed is read
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            return code if code >= 0 else 128 - code


def _write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def _execute(box: Sandbox, confinable: bool, program: Sequence[str], output: int) -> NoReturn:
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nowhere, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.closerange(3, max(nowhere, output) + 1)
    try:
        forget(HOME=SCRATCH, TMPDIR=SCRATCH if confinable else os.environ.get("TMPDIR", ""))
        _limit(box)
        if confinable:
            _confine(box)
        os.execvp(program[0], list(program))
    except OSError as error:
        print(f"error: {program[0]}: {error.strerror or error}", file=sys.stderr, flush=True)
        os._exit(CANNOT_CONFINE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
