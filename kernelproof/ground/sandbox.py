"""Runs untrusted programs in a sandbox, which limits what a process can see, write, start and use up.

If the system has user namespaces, a confined process sees only the files and folders that its ``Sandbox`` names, and
it can write only to its own folders. It sees no process outside of the sandbox and has no network. Every confined
process also has resource limits and an environment without secrets; on systems without namespaces these are the only
protection.

``confine`` puts the current, forked process into a sandbox. ``command`` makes a command line that runs another program
in a sandbox. That command executes this file, which therefore imports nothing but the standard library.
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

# Constants of Linux, by the names in its headers.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, AT_FDCWD, AT_RECURSIVE = 1, 2, -100, 0x8000
SYS_MOUNT_SETATTR = 442
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CAPABILITY_VERSION = 0x20080522
USER = 1000  # the user id inside the sandbox; it has no capabilities there
# Files and folders of the system that every confined process sees.
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ld.so.cache",
    "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom",
)  # fmt: skip
# Environment variables that a confined process keeps.
VARIABLES = frozenset(("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "OMP_NUM_THREADS"))
STAGE = "/tmp"  # the folder of the old root over which the new root is mounted while it is built
SCRATCH = "/tmp"  # the private, writable folder inside the sandbox
SCRATCH_OPTIONS = b"size=1g,nr_inodes=65536,mode=1777"
THREADS = 128  # threads allowed in all processes together, besides the first thread of each
NICENESS = 10  # a program that forks without end must not starve the process that has to kill it
CANNOT_CONFINE = 126  # exit code if the sandbox cannot be built; shells use it for a command that cannot be executed
EXCESS = 125  # exit code of a program that prints too much
NO_NAMESPACES = "compiled and run with resource limits only, because this system has no namespaces"


class Sandbox(NamedTuple):
    """What a confined process may see and use.

    ``readable`` are files and folders that it sees besides the system's programs and libraries; ``writable`` are
    folders that it may also change. ``cpu_s`` limits the CPU seconds of each process, ``gib`` its address space (0: no
    limit), ``file_mib`` the size of each file, ``processes`` the number of processes that exist at the same time, and
    ``output_bytes`` how much a program may print.
    """

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()
    cpu_s: int = 90
    gib: float = 12.0
    file_mib: int = 256
    processes: int = 256
    output_bytes: int = 1 << 20


class ConfinementError(OSError):
    """The system refuses a step of building the sandbox; the message names the step and the reason."""


@cache
def namespace_obstacle() -> str:
    """The reason why this system cannot confine a process by namespaces; empty if it can.

    Containers and administrators forbid namespaces in many ways, so a child process tries to enter a sandbox.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reader)
            _enter_namespaces(Sandbox())
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
    return "" if text == "+" else text or "the trial process gave no answer"


def environment(**additional: str) -> dict[str, str]:
    """The variables of this process that programs need and that hold no secret (``VARIABLES``), plus ``additional``."""
    return {name: value for name, value in os.environ.items() if name in VARIABLES} | additional


def command(box: Sandbox, program: Sequence[str]) -> list[str]:
    """The command line that runs ``program`` in a sandbox."""
    return [sys.executable, "-I", "-S", __file__, json.dumps([*box, namespace_obstacle() == ""]), *program]


def views_of_python() -> tuple[str, ...]:
    """The folders from which Python, the installed packages and this package are loaded."""
    installed = {entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))}
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    return (*sorted(installed), sys.prefix, sys.base_prefix, package)


def confine(box: Sandbox, files: Container[int], **kept: str) -> None:
    """Confine this process and all that it starts. It must be a forked process with a single thread.

    The function returns in a child process; the calling process waits and ends with the same status. The environment
    keeps only harmless variables and ``kept``. Open file descriptors stay usable only if their numbers are in
    ``files``; all others are redirected to /dev/null. Raises ConfinementError if the system has namespaces but refuses
    a step.
    """
    confinable = not namespace_obstacle()
    erase_variables(HOME=SCRATCH, TMPDIR=SCRATCH if confinable else "", **kept)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        # Descriptors are redirected rather than closed: Python objects that own them may still close them, and a number
        # that had been reused in between would then close somebody else's file.
        if number not in files and number != nowhere:
            with suppress(OSError):  # the descriptor of this directory listing is closed already
                os.dup2(nowhere, number)
    _limit(box)
    os.nice(NICENESS)
    if confinable:
        _enter_namespaces(box)


def erase_variables(**kept: str) -> None:
    """Erase all environment variables of this forked process but harmless ones and ``kept``.

    The block of memory in which the kernel placed the variables at the program's start is overwritten too, because
    /proc/PID/environ and C code still read it after ``os.environ`` has changed.
    """
    variables = environment(**kept)
    os.environ.clear()
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
        fields = file.read().rpartition(")")[2].split()
    # env_start and env_end are fields 50 and 51 of proc(5), counted from 1; the name, which may contain blanks and
    # parentheses, ends the first two fields and is cut off above.
    start, end = int(fields[47]), int(fields[48])
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)
    os.environ.update({name: value for name, value in variables.items() if value})


def _limit(box: Sandbox) -> None:
    """Set the resource limits of this process, below the present hard limits."""
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
    """How many threads the user has already: RLIMIT_NPROC counts all threads of a user, not those of this process."""
    own, count = os.getuid(), 0
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208
        with suppress(OSError):
            if os.stat(f"/proc/{name}").st_uid == own:  # noqa: PTH116
                count += len(os.listdir(f"/proc/{name}/task"))  # noqa: PTH208
    return count


def _enter_namespaces(box: Sandbox) -> None:
    """Continue in namespaces of its own, as a grandchild of this process, which waits and ends with the same status.

    Two forks are needed. ``unshare`` puts only later children into the new process namespace, so the first fork makes
    that namespace's first process. The kernel does not deliver fatal signals to a first process from within its
    namespace, so the program runs in a second fork, and the first process only waits and reports the status.
    """
    # Links are resolved while the old root is still visible.
    user, group = os.getuid(), os.getgid()
    folder = os.getcwd()  # noqa: PTH109
    binds, links = _layout(box)
    spaces = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    _call("unshare", spaces)
    # Without setgroups=deny, an unprivileged process may not write gid_map.
    for name, text in (("setgroups", "deny"), ("uid_map", f"{USER} {user} 1"), ("gid_map", f"{USER} {group} 1")):
        with open(f"/proc/self/{name}", "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(text)
    reader, writer = os.pipe()
    if first := os.fork():
        os.close(writer)
        _mirror(first, reader)
    os.close(reader)
    # This process is now the first of its namespace: if it dies, the kernel kills all others in the namespace. It dies
    # with its parent, so nothing inside outlives the process that entered the sandbox.
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        with suppress(OSError), open("/proc/sys/kernel/pid_max", "w", encoding="utf-8") as file:  # noqa: PTH123
            # Newer kernels have one limit per namespace. They refuse limits below 301, since 300 numbers are reserved.
            file.write(str(max(box.processes + THREADS, 301)))
        _mount(binds, links)
        # Capabilities are dropped last, because mounting needs them. No program that is started later gets them back.
        _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _call("capset", (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())
    except OSError as error:
        os.write(writer, f"-{error}".encode())
        os._exit(CANNOT_CONFINE)
    with suppress(OSError):
        os.chdir(folder)
    if second := os.fork():
        status = None
        while status is None:  # the first process also inherits orphans, whose ends must be collected
            ended, code = os.wait()
            status = code if ended == second else None
        os.write(writer, b"%d" % status)
        os._exit(0)
    os.close(writer)


def _mirror(child: int, reader: int) -> None:
    """End with the status of the program in the namespaces, which their first process writes to ``reader``.

    Raises ConfinementError if the first process could not build the sandbox.
    """
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    if text.startswith("-"):
        raise ConfinementError(text[1:])
    if not text:  # The first process was killed before it could write, and all others with it.
        os.kill(os.getpid(), signal.SIGKILL)
    code = os.waitstatus_to_exitcode(int(text))
    if code < 0:  # A signal ended the program: end by the same signal, so that callers see the same status.
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _layout(box: Sandbox) -> tuple[list[tuple[str, bool]], dict[str, str]]:
    """The files and folders to mount, each with whether it is writable, and the symbolic links that lead to them.

    Parents come before what lies in them, because a later mount of a parent would hide them. A path is left out if the
    nearest mounted folder above it has the same permission and so shows it already.
    """
    links: dict[str, str] = {}
    views: dict[str, bool] = {}
    for writable, paths in ((False, [*SYSTEM, *box.readable]), (True, box.writable)):
        for path in paths:
            for real in _real(os.path.abspath(path), links):  # noqa: PTH100
                views[real] = writable
    return [(path, writable) for path, writable in sorted(views.items()) if _above(path, views) != writable], links


def _above(path: str, views: Mapping[str, bool]) -> bool | None:
    """Whether the nearest mounted folder above a path is writable; None if there is none."""
    while (path := os.path.dirname(path)) != "/":  # noqa: PTH120
        if path in views:
            return views[path]
    return None


def _real(path: str, links: dict[str, str]) -> Iterable[str]:
    """The file or folder that a path leads to, if it exists; the links on the way are added to ``links``.

    For "/" these are the folders of the root without those of the system, because the root itself is never mounted.
    """
    if path == "/":
        hidden = ("proc", "sys", "dev", "run", "tmp")
        return [real for name in os.listdir("/") if name not in hidden for real in _real(f"/{name}", links)]  # noqa: PTH208
    at, rest = "/", [part for part in path.split("/") if part]
    for _ in range(1000):  # links may form a circle
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
    """Build the new root in memory, make it this namespace's root, and detach the old one.

    The root changes twice: first to a temporary one that holds both ``/new`` and ``/old``, so that files can be bound
    from one to the other; then to ``/new``, which contains no way back.
    """
    # Private mounts do not propagate: nothing that is mounted here appears outside.
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
    # /proc is read-only, because writing to some of its files changes the whole system, and the kernel checks only the
    # number of the user for them, which may be the administrator's.
    _call("mount", b"proc", b"/new/proc", b"proc", MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    _call("mount", b"tmpfs", f"/new{SCRATCH}".encode(), b"tmpfs", MS_NOSUID | MS_NODEV, SCRATCH_OPTIONS)
    for path, writable in binds:
        _show(path, writable)
    for path, target in links.items():
        if not os.path.lexists(f"/new{path}"):
            with suppress(OSError):  # A folder that is bound read-only has its own links and takes no new ones.
                os.makedirs(os.path.dirname(f"/new{path}"), exist_ok=True)  # noqa: PTH103, PTH120
                os.symlink(target, f"/new{path}")  # noqa: PTH211
    _read_only(b"/new", recursive=False)  # not the mounts in it, some of which are writable
    os.chdir("/new")
    _call("umount2", b"/old", MNT_DETACH)
    _pivot(b".", b".")  # stacks the temporary root over the new one, at the same place, where it can be detached
    _call("umount2", b".", MNT_DETACH)
    os.chdir("/")


def _show(path: str, writable: bool) -> None:
    """Bind a file or folder of the old root to the same place in the new one; do nothing if it no longer exists."""
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
    """The struct mount_attr of mount_setattr(2)."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace")]


def _read_only(path: bytes, recursive: bool) -> None:
    """Make a mount read-only; with ``recursive``, also the mounts below it."""
    attributes = _MountAttributes(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID)
    flags = AT_RECURSIVE if recursive else 0
    size = ctypes.sizeof(attributes)
    _call("syscall", SYS_MOUNT_SETATTR, AT_FDCWD, path, flags, ctypes.byref(attributes), size, name="mount_setattr")


def _pivot(new: bytes, old: bytes) -> None:
    """Make the mount ``new`` the root of this namespace, and move the old root to ``old``."""
    number = SYS_PIVOT_ROOT.get(platform.machine())
    if number is None:
        raise ConfinementError(f"pivot_root: no system call number is known for {platform.machine()}")
    _call("syscall", number, new, old, name="pivot_root")


def _call(function: str, *arguments: object, name: str = "") -> None:
    """Call a function of the C library. Raises ConfinementError with its name if it fails."""
    words = [ctypes.c_long(word) if isinstance(word, int) else word for word in arguments]
    if getattr(_LIBC, function)(*words) < 0:
        raise ConfinementError(f"{name or function}: {os.strerror(ctypes.get_errno())}")


_LIBC = ctypes.CDLL(None, use_errno=True)


def main(text: str, program: Sequence[str]) -> int:
    """Run a program in a sandbox and return its exit code, or 128 plus the number of the signal that ended it.

    The program's output passes through this process, which counts it and kills a program that prints too much.
    """
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
        # The end is handled only once nothing is left to read. Grandchildren may hold the pipe open for longer than the
        # program runs, so the end of the pipe alone does not tell that the program has ended.
        elif end in ready:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            return code if code >= 0 else 128 - code


def _write(data: bytes) -> None:
    """Write all of the data to standard output."""
    while data:
        data = data[os.write(1, data) :]


def _execute(box: Sandbox, confinable: bool, program: Sequence[str], output: int) -> NoReturn:
    """Become the program in its sandbox. ``output``: the descriptor that takes its output and errors."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nowhere, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.closerange(3, max(nowhere, output) + 1)
    try:
        erase_variables(HOME=SCRATCH, TMPDIR=SCRATCH if confinable else os.environ.get("TMPDIR", ""))
        _limit(box)
        if confinable:
            _enter_namespaces(box)
        os.execvp(program[0], list(program))
    except OSError as error:
        print(f"error: {program[0]}: {error.strerror or error}", file=sys.stderr, flush=True)
        os._exit(CANNOT_CONFINE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
