"""Extracts the CUDA and C++ texts from a Python module that calls ``load_inline``, without executing the module."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kernelproof.grading import hostcode, hostpython
from kernelproof.grading.verdict import Finding
from kernelproof.ground.errors import WrongInput

PARAMETERS = ("name", "cpp_sources", "cuda_sources", "functions")
_LAUNCH = re.compile(r"([\w:]+(?:<[^<>;{}]*>)?)\s*<<<(.*?)>>>\s*\((.*?)\)\s*;", re.S)
_KERNEL = re.compile(r"__global__[^;{(]*?(\w+)\s*\(")
_TORCH_NAMES = re.compile(r"\b(?:torch|at|c10|pybind11)::|PYBIND11_MODULE|TORCH_LIBRARY|\bTensor\b")
_DEVICE_MARKS = re.compile(r"__global__|__device__")
_OTHER_BUILDERS = frozenset(("tvm_ffi", "tvm.ffi"))  # packages that have a load_inline of their own


@dataclass(frozen=True)
class HostLaunch:
    """A launch in host code, as text: the kernel, the values between ``<<<`` and ``>>>``, and the arguments."""

    kernel: str
    configuration: tuple[str, ...]
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Extension:
    """The arguments of a ``load_inline`` call: the C++ and CUDA texts, and the functions that Python may call."""

    name: str
    cpp: str
    cuda: str
    functions: tuple[str, ...]

    @property
    def device_text(self) -> str:
        """The CUDA text without torch's includes and without the host functions that use torch."""
        text = re.sub(r"^[ \t]*#[ \t]*include[ \t]*[<\"](?:torch|ATen|c10|pybind11)/.*$", "", self.cuda, flags=re.M)
        return "".join(
            part
            for part in parts(text)
            if _DEVICE_MARKS.search(part) or not _TORCH_NAMES.search(hostcode.without_comments(part))
        )

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of the kernels that the CUDA text defines, in the order of the text."""
        return tuple(dict.fromkeys(_KERNEL.findall(hostcode.without_comments(self.cuda))))

    @property
    def launches(self) -> tuple[HostLaunch, ...]:
        """Launches of the host code, in order of the text."""
        return tuple(
            HostLaunch(match[1], _split(match[2]), _split(match[3]))
            for match in _LAUNCH.finditer(hostcode.without_comments(self.cuda))
        )


@dataclass(frozen=True)
class ExtensionModule:
    """The extensions of a Python module, and findings about the rules that its text breaks."""

    extensions: tuple[Extension, ...]
    findings: tuple[Finding, ...]

    @property
    def device_text(self) -> str:
        return "\n".join(extension.device_text for extension in self.extensions)

    @property
    def host_text(self) -> str:
        """All C++ and CUDA text."""
        return "\n".join(f"{extension.cpp}\n{extension.cuda}" for extension in self.extensions)


def read(source: str) -> ExtensionModule | str | None:
    """Read a Python module. Returns None if the text is no Python, or a reason if its extensions cannot be found.

    A text that imports nothing counts as C++, even if it parses as Python.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    if not any(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.walk(tree)):
        return None
    try:
        return take_apart(source)
    except WrongInput as error:
        return str(error)


def take_apart(source: str) -> ExtensionModule:
    """Parse a module and find its extensions; nothing is executed.

    Raises WrongInput if the text of an extension is not an expression of constants.
    """
    tree = ast.parse(source)
    assignments = dict(_assignments(tree))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] == "load_inline"]
    if (
        calls
        and (imported := set(_imported_names(tree))) & _OTHER_BUILDERS
        and not any("cpp_ext" in name for name in imported)
    ):
        raise WrongInput("its extension is built by tvm-ffi, whose C++ interface is not here")
    extensions = tuple(_extension(call, assignments) for call in calls)
    if not extensions:
        raise WrongInput(
            "it is Python that calls no load_inline, so it has no CUDA text; kernels of Triton are checked by a marked "
            "test or a session of kernelproof.triton_emulation"
        )
    findings = [*hostpython.findings(tree), *(item for extension in extensions for item in _text_findings(extension))]
    return ExtensionModule(extensions, tuple(findings))


def _text_findings(extension: Extension) -> Iterator[Finding]:
    """Yields what is suspicious in the C++ and CUDA texts of an extension."""
    yield from hostcode.findings(f"{extension.cpp}\n{extension.cuda}")
    if not extension.launches and "cudaLaunchKernel" not in extension.cuda:
        yield Finding.of("no-kernel", f"extension {extension.name}: its host code launches no kernel", launches=0)


def _imported_names(tree: ast.Module) -> Iterator[str]:
    """The modules that a module imports, and their packages."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                names = [alias.name for alias in aliases]
            case ast.ImportFrom(module=str() as name, names=aliases):
                names = [name, *(f"{name}.{alias.name}" for alias in aliases)]
            case _:
                continue
        yield from names
        yield from (name.partition(".")[0] for name in names)


def _assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yields every name that the module assigns, at any depth, with its value. A name can occur several times."""
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                yield name, value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                yield name, value


def _extension(call: ast.Call, names: Mapping[str, ast.expr]) -> Extension:
    """The extension of a ``load_inline`` call. ``names``: the module's assignments. Raises WrongInput."""
    arguments = dict(zip(PARAMETERS, call.args, strict=False))
    arguments |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}

    def texts(parameter: str) -> tuple[str, ...]:
        node = arguments.get(parameter)
        value = () if node is None else _constant(node, names)
        return (value,) if isinstance(value, str) else value

    name = "".join(texts("name")) or "extension"
    return Extension(name, "\n".join(texts("cpp_sources")), "\n".join(texts("cuda_sources")), texts("functions"))


def _constant(node: ast.expr, names: Mapping[str, ast.expr], depth: int = 0) -> str | tuple[str, ...]:
    """Evaluate an expression of constants to a text or several texts. Raises WrongInput for anything else."""
    if depth > 20:  # names may refer to themselves
        raise WrongInput("load_inline: a text is defined by itself")
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.Constant(value=int() | float() as number):
            return str(number)
        case ast.Constant(value=None):
            return ()
        case ast.Name(id=name) if name in names:
            return _constant(names[name], names, depth + 1)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return tuple(_text(item, names, depth) for item in items)
        case ast.Dict(keys=keys):
            return tuple(_text(key, names, depth) for key in keys if key is not None)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, names, depth) + _text(right, names, depth)
        case ast.JoinedStr(values=items):
            return "".join(_part(item, names, depth) for item in items)
        case ast.Call(func=ast.Attribute(value=inner, attr="strip"), args=[]):
            return _text(inner, names, depth).strip()
        case ast.Call(func=ast.Attribute(value=inner, attr="replace"), args=[old, new], keywords=[]):
            # The text of a hostile module could grow beyond all memory; its process has a limit.
            return _text(inner, names, depth).replace(_text(old, names, depth), _text(new, names, depth))
        case ast.Call(func=ast.Attribute(attr="dedent") | ast.Name(id="dedent"), args=[inner]):
            return textwrap.dedent(_text(inner, names, depth))
        case ast.Call(func=ast.Attribute(attr="cleandoc"), args=[inner]):
            return inspect.cleandoc(_text(inner, names, depth))
    raise WrongInput(
        f"load_inline: line {node.lineno}: {ast.unparse(node)[:60]!r} is no constant text; write it down whole"
    )


def _part(node: ast.expr, names: Mapping[str, ast.expr], depth: int) -> str:
    """A part of an f-string. Raises WrongInput for one with a format of its own."""
    match node:
        case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
            return _text(value, names, depth)
        case ast.FormattedValue():
            raise WrongInput(
                f"load_inline: line {node.lineno}: a format in an f-string is not read; write the text down"
            )
    return _text(node, names, depth)


def _text(node: ast.expr, names: Mapping[str, ast.expr], depth: int) -> str:
    """An expression of constants as one text; several texts are joined as lines."""
    value = _constant(node, names, depth + 1)
    return value if isinstance(value, str) else "\n".join(value)


def parts(text: str) -> list[str]:
    """Split C++ text after each definition and declaration at its outermost level, and after each preprocessor line."""
    plain = hostcode.without_comments(text)
    out, start, depth = [], 0, 0
    for number, char in enumerate(plain):
        if char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
        ends = (char in ";}" and depth == 0) or (char == "\n" and depth == 0 and _directive(plain[start:number]))
        if ends:
            out.append(text[start : number + 1])
            start = number + 1
    return [*out, text[start:]]


def _directive(line: str) -> bool:
    """Whether a line ends a preprocessor directive."""
    return line.lstrip().startswith("#") and not line.endswith("\\")


def _split(text: str) -> tuple[str, ...]:
    """Split arguments at the commas that are not inside brackets."""
    out, depth = [""], 0
    for char in text:
        depth += char in "([{"
        depth -= char in ")]}"
        if char == "," and depth == 0:
            out.append("")
        else:
            out[-1] += char
    return tuple(" ".join(part.split()) for part in out if part.strip())
