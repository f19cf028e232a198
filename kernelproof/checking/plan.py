"""Describes what a check runs, and on which device: a program's main, one of its functions, or single launches.

Users write arguments and launches as text (``in:f32[64,32]=random``, ``add<<<4,256>>>``) or as a JSON file; the
functions here parse them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kernelproof.ground.errors import WrongInput, invalid, reading
from kernelproof.sass.elf import capability

DTYPES = {
    "f16": "f2", "bf16": "u2", "f32": "f4", "f64": "f8", "i8": "i1", "u8": "u1", "i16": "i2", "u16": "u2", "i32": "i4",
    "u32": "u4", "i64": "i8", "u64": "u8",
}  # fmt: skip
ROLES = {"in": "input", "out": "output", "inout": "inout", "scratch": "scratch"}
GENERATED = ("zeros", "ones", "iota", "random")  # contents that are computed; any other content names a file
_BUFFER = re.compile(r"(in|out|inout|scratch):(\w+)\[([\d, x]+)\](?:=(.+))?")
_TYPED = re.compile(r"(\w+):(-?[\d.][\w.+-]*)")
ADDRESSES = ("u64", "s64", "b64")  # PTX types of parameters that may be addresses
FORM = "a number, i64:5, f64:0.5, or in|out|inout|scratch:f32[64,32]=zeros|ones|iota|random|FILE.npy"


def example(kinds: Sequence[str]) -> str:
    """Arguments that a user may write for parameters of these PTX types, for a message.

    Parameters of 64 bits are taken for addresses, and the last address for that of the result.
    """
    last = max((i for i, kind in enumerate(kinds) if kind in ADDRESSES), default=-1)
    words = []
    for i, kind in enumerate(kinds):
        if kind in ADDRESSES:
            words.append("inout:f32[1000]" if i == last else "in:f32[1000]")
        else:
            words.append("2.0" if kind.startswith("f") else "1000")
    return " ".join(words)


@dataclass(frozen=True)
class BufferSpec:
    """An array argument of a launch: its role, NumPy type and shape, and its initial content."""

    role: str
    dtype: str
    shape: tuple[int, ...]
    content: str

    def placed(self, place: Callable[[str], Path]) -> BufferSpec:
        """This buffer with its file name, if it has one, replaced by the path that ``place`` returns for it."""
        return self if self.content in GENERATED else replace(self, content=str(place(self.content)))

    def array(self, seed: int) -> NDArray[np.generic]:
        """The initial content. Raises WrongInput if a file cannot be read or has another size in bytes."""
        kind, count = np.dtype(self.dtype), int(np.prod(self.shape))
        if self.content == "zeros":
            return np.zeros(self.shape, kind)
        if self.content == "ones":
            return np.ones(self.shape, kind)
        if self.content == "iota":
            return np.arange(count).astype(kind).reshape(self.shape)
        rng = np.random.default_rng(seed)
        if self.content == "random":
            values = rng.random(count) * 2 - 1 if kind.kind == "f" else rng.integers(0, 100, count)
            return values.astype(kind).reshape(self.shape)
        with reading(Path(self.content)):
            try:
                array = np.load(self.content)
            except ValueError as error:
                raise WrongInput(f"{self.content}: {error}") from None
        if array.nbytes != count * kind.itemsize:
            raise WrongInput(f"{self.content} holds {array.nbytes} bytes, {count * kind.itemsize} are needed")
        loaded: NDArray[np.generic] = np.ascontiguousarray(array).view(kind).reshape(self.shape)
        return loaded


# A buffer, the name of a buffer that several launches share, a number that takes the size of its parameter, or a number
# with a type of its own.
Argument = BufferSpec | str | int | float | np.generic


def argument(text: str | int | float, buffers: Mapping[str, BufferSpec]) -> Argument:
    """Parse an argument, such as ``7``, ``f64:0.5``, ``out:f32[64]`` or a shared buffer's name. Raises WrongInput."""
    if not isinstance(text, str):
        return text
    if text in buffers:
        return text
    if match := _BUFFER.fullmatch(text):
        return _buffer(match)
    if (typed := _TYPED.fullmatch(text)) and typed[1] in DTYPES:
        kind = np.dtype(DTYPES[typed[1]])
        try:
            with np.errstate(over="ignore"):
                scalar: np.generic = kind.type(float(typed[2]) if kind.kind == "f" else int(typed[2], 0))
        except (ValueError, OverflowError) as error:
            raise WrongInput(f"argument {text!r}: {error}; write {FORM}") from None
        return scalar
    # A float may have C's suffix, as in 0.5f.
    for read in (lambda text: int(text, 0), float):
        try:
            number: int | float = read(text.rstrip("f") if read is float else text)
        except ValueError:
            continue
        return number
    raise WrongInput(f"argument {text!r}: write {FORM}")


def buffer(text: str) -> BufferSpec:
    """Parse a buffer, such as ``in:f32[64,32]=random``. Raises WrongInput."""
    match = _BUFFER.fullmatch(text)
    if match is None:
        raise WrongInput(f"buffer {text!r}: write {FORM.partition('or ')[2]}")
    return _buffer(match)


def _buffer(match: re.Match[str]) -> BufferSpec:
    """The buffer that a match of ``_BUFFER`` describes. Raises WrongInput for an unknown type."""
    role, kind, shape, content = match.groups()
    if kind not in DTYPES:
        raise WrongInput(f"type {kind!r} of {match[0]!r}: one of {', '.join(DTYPES)}")
    extents = tuple(int(extent) for extent in re.split(r"[,x ]+", shape.strip()) if extent)
    return BufferSpec(ROLES[role], DTYPES[kind], extents, content or ("random" if role == "in" else "zeros"))


@dataclass(frozen=True)
class LaunchSpec:
    """A launch: the kernel by the name that the user wrote, its geometry, bytes of shared memory, and arguments."""

    entry: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    smem: int = 0
    cluster: tuple[int, ...] = (1,)
    arguments: tuple[Argument, ...] = ()


_Extent = Annotated[int, Field(ge=1)]
_Extents = Annotated[list[_Extent], Field(min_length=1, max_length=3)] | _Extent


class LaunchEntry(BaseModel):
    """A launch in a JSON file or in a request to the MCP server."""

    model_config = ConfigDict(extra="forbid")
    entry: Annotated[str, Field(description="The kernel: its plain name where unambiguous, else add<float>.")]
    grid: Annotated[_Extents, Field(description="CTAs: x, or up to [x, y, z].")] = 1
    block: Annotated[_Extents, Field(description="Threads of a CTA: x, or up to [x, y, z].")]
    smem: Annotated[int, Field(ge=0, description="Bytes of dynamic shared memory.")] = 0
    cluster: Annotated[_Extents, Field(description="CTAs of a cluster: x, or up to [x, y, z].")] = 1
    args: Annotated[
        list[str | int | float],
        Field(description=f"One per parameter: {FORM}, or the name of one of the buffers."),
    ] = []


class LaunchFile(BaseModel):
    """The JSON file of ``--launch``: launches in order, and the buffers that they share, by name."""

    model_config = ConfigDict(extra="forbid")
    launches: Annotated[list[LaunchEntry], Field(min_length=1)]
    buffers: dict[str, str] = {}

    def specifications(
        self, place: Callable[[str], Path] = Path
    ) -> tuple[tuple[LaunchSpec, ...], dict[str, BufferSpec]]:
        """The launches and shared buffers. ``place`` turns each file name in them into a path. Raises WrongInput."""

        def placed(item: Argument) -> Argument:
            return item.placed(place) if isinstance(item, BufferSpec) else item

        buffers = {name: buffer(spec).placed(place) for name, spec in self.buffers.items()}
        launches = tuple(
            LaunchSpec(
                launch.entry,
                _extents(launch.grid),
                _extents(launch.block),
                launch.smem,
                _extents(launch.cluster),
                tuple(placed(argument(value, buffers)) for value in launch.args),
            )
            for launch in self.launches
        )
        return launches, buffers


def launch_file(path: Path) -> tuple[tuple[LaunchSpec, ...], dict[str, BufferSpec]]:
    """Read the launches and shared buffers of a JSON file. Raises WrongInput."""
    with reading(path):
        text = path.read_text()
    try:
        content = LaunchFile.model_validate_json(text)
    except ValidationError as error:
        raise invalid(str(path), error) from None
    return content.specifications()


def _extents(value: Sequence[int] | int) -> tuple[int, ...]:
    """A size of a launch as a tuple."""
    return (value,) if isinstance(value, int) else tuple(value)


# A number, or up to three in parentheses.
_EXTENTS = r"\s*(\d{1,10}|\(\s*\d{1,10}(?:\s*,\s*\d{1,10}){0,2}\s*\))\s*"
_LAUNCH = re.compile(rf"(.+?)<<<{_EXTENTS},{_EXTENTS}(?:,\s*(\d{{1,10}})\s*)?>>>")


def launch(text: str, arguments: tuple[Argument, ...]) -> LaunchSpec:
    """Parse a launch in CUDA's notation, ``add<<<4,256>>>``; a name alone launches one warp. Raises WrongInput."""
    if "<<<" not in text:
        return LaunchSpec(text, (1,), (32,), arguments=arguments)
    match = _LAUNCH.fullmatch(text.strip())
    grid, block = (tuple(map(int, re.findall(r"\d+", part))) for part in match.group(2, 3)) if match else ((0,), (0,))
    if match is None or min(*grid, *block) < 1:
        raise WrongInput(f"--launch {text!r}: expected KERNEL<<<GRID,BLOCK,SMEM>>>, such as 'add<<<4,256>>>'")
    return LaunchSpec(match[1].strip(), grid, block, smem=int(match[4] or 0), arguments=arguments)


@dataclass(frozen=True)
class CheckPlan:
    """Everything that the process of a check needs to know.

    ``device`` is a capability or a chip, as in ``devices``. ``library`` holds host code and kernels; ``kernels`` are
    files of PTX, or cubins, without host code. Exactly one of ``main`` (the program's name and its arguments), ``call``
    (a function and its arguments) and ``launches`` is set; ``buffers`` are those that launches share, by name.
    ``counters``: whether the emulator counts instructions and memory traffic. ``adverse``: whether events happen in
    another order that hardware may choose. ``sample`` is how many CTAs of each launch run; 0 runs all. ``seed``: for
    the sample and for random contents of buffers. ``machine_code``: whether machine code is executed in place of PTX.
    ``quiet``: whether findings are only sent to the parent process and not printed. ``output_to_stderr``: whether the
    program's standard output goes to standard error.
    """

    device: str
    library: Path | None = None
    kernels: tuple[Path, ...] = ()
    main: tuple[str, ...] | None = None
    call: tuple[str, tuple[Argument, ...]] | None = None
    launches: tuple[LaunchSpec, ...] = ()
    buffers: Mapping[str, BufferSpec] = field(default_factory=dict)
    counters: bool = False
    adverse: bool = False
    sample: int = 0
    seed: int = 0
    machine_code: bool = False
    quiet: bool = False
    output_to_stderr: bool = False


def target_of(files: Sequence[Path]) -> str | None:
    """The newest architecture among those that PTX files name, or None without files. Raises WrongInput."""
    targets = []
    for path in files:
        with reading(path):
            match = re.search(r"^\s*\.target\s+(\w+)", path.read_text(errors="replace"), re.M)
        if match is None:
            raise WrongInput(f"{path}: no .target directive, so not a PTX file")
        targets.append(match[1])
    return max(targets, key=lambda target: (int(re.sub(r"\D", "", target) or 0), target), default=None)


def target_of_cubins(files: Sequence[Path]) -> str | None:
    """The newest architecture of cubins, or None without one. Raises WrongInput."""
    numbers = []
    for path in files:
        if path.suffix == ".cubin":
            with reading(path):
                numbers.append(capability(path.read_bytes()))
    newest = max(numbers, default=0)
    return f"sm_{newest}" if newest else None
