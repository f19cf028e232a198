"""Searches the Python text of a module for cheats: results computed by torch, patched timers, threads, caches.

The text is parsed, not executed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kernelproof.grading.hostcode import COMPUTING
from kernelproof.grading.verdict import Finding

MODEL = "ModelNew"
# Names that a source has no honest use for: modules of threads and of introspection, built-in functions that reach the
# grader, functions of streams, and methods of tensors that compute when they are read.
_THREADS = frozenset(("threading", "multiprocessing", "concurrent", "asyncio", "subprocess", "_thread"))
_INTROSPECTION_MODULES = frozenset(
    ("gc", "inspect", "ctypes", "importlib", "traceback", "builtins", "pickle", "atexit", "signal")
)
_INTROSPECTION_CALLS = frozenset(("open", "exec", "eval", "compile", "__import__", "globals", "vars"))
_STREAMS = frozenset(("Stream", "ExternalStream", "stream", "set_stream", "CUDAGraph", "graph"))
_LAZY = frozenset(("__torch_dispatch__", "__torch_function__", "_make_subclass", "_make_wrapper_subclass"))
# Modules whose attributes a source must not replace.
_ROOTS = frozenset(("torch", "time", "nn", "F", "functional"))


def findings(tree: ast.Module) -> Iterator[Finding]:
    """A finding for everything suspicious in a module's text."""
    yield from _module_findings(tree)
    models = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == MODEL]
    if not models:
        yield Finding.of("no-kernel", f"the module has no class {MODEL}", line=0)
    for model in models:
        yield from _model_findings(model, _extensions(tree), _functions(tree))


def _finding(rule: str, node: ast.AST, text: str) -> Finding:
    """A finding with the line of a node. ``text``: the suspicious expression."""
    line = getattr(node, "lineno", 0)
    return Finding.of(rule, f"module, line {line}: {text}", line=line, text=text)


def _name(node: ast.AST) -> str:
    """The dotted name of an expression, such as ``torch.cuda.Stream``; "" if it is not one."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            inner = _name(value)
            return f"{inner}.{attr}" if inner else ""
    return ""


def _module_findings(tree: ast.Module) -> Iterator[Finding]:
    """Report what is suspicious in any part of a module."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (item for alias in names for item in _import_findings(node, alias.name))
            case ast.ImportFrom(module=str() as module):
                yield from _import_findings(node, module)
            case ast.Assign(targets=targets):
                yield from (item for target in targets for item in _patch_findings(target))
            case ast.Call(func=ast.Name(id="setattr"), args=[target, *_]) if _name(target).split(".")[0] in _ROOTS:
                yield _finding("timer-patch", node, f"setattr({_name(target)}, ...)")
            case ast.ClassDef(bases=bases) if any(_name(base).rpartition(".")[2] == "Tensor" for base in bases):
                yield _finding("lazy-output", node, f"class {node.name} of torch.Tensor")
            case ast.FunctionDef(name=name) | ast.Attribute(attr=name) if name in _LAZY:
                yield _finding("lazy-output", node, name)
            case ast.Call(func=func) if _name(func).startswith("torch.") and _name(func).rpartition(".")[2] in _STREAMS:
                yield _finding("extra-stream", node, _name(func))
            case ast.Call(func=ast.Name(id=name)) if name in _INTROSPECTION_CALLS:
                yield _finding("grader-access", node, name)
            case ast.Attribute() if _name(node) in ("sys._getframe", "sys.modules", "sys.settrace", "sys.setprofile"):
                yield _finding("grader-access", node, _name(node))


def _import_findings(node: ast.AST, module: str) -> Iterator[Finding]:
    """Report an import of a module for threads or processes, or for access to the caller."""
    root = module.split(".", maxsplit=1)[0]
    if root in _THREADS:
        yield _finding("host-thread", node, f"import {module}")
    elif root in _INTROSPECTION_MODULES:
        yield _finding("grader-access", node, f"import {module}")


def _patch_findings(target: ast.expr) -> Iterator[Finding]:
    """Report an assignment that replaces an attribute of torch or time. Settings of torch's backends are allowed."""
    name = _name(target)
    if isinstance(target, ast.Attribute) and name.split(".")[0] in _ROOTS and ".backends." not in name:
        yield _finding("timer-patch", target, f"{name} = ...")


def _extensions(tree: ast.Module) -> set[str]:
    """The names to which results of ``load_inline`` are assigned."""
    return {
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if _name(node.value.func).endswith("load_inline")
    }


def _functions(tree: ast.Module) -> dict[str, list[ast.FunctionDef]]:
    """The functions of the module by the name by which code reaches them: their own, or that of their class."""
    out: dict[str, list[ast.FunctionDef]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            out[node.name] = [node]
        elif isinstance(node, ast.ClassDef) and node.name != MODEL:
            out[node.name] = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    return out


def _reachable_functions(
    methods: list[ast.FunctionDef], functions: dict[str, list[ast.FunctionDef]]
) -> list[ast.FunctionDef]:
    """The methods and all functions of the module that they name, directly or indirectly."""
    out, unreached = list(methods), dict(functions)
    for function in out:  # The list grows during the loop.
        for node in ast.walk(function):
            out += unreached.pop(_name(node).split(".")[0], [])
    return out


def _model_findings(
    model: ast.ClassDef, extensions: set[str], functions: dict[str, list[ast.FunctionDef]]
) -> Iterator[Finding]:
    """Report what is suspicious in the model's class and in the functions that its methods reach."""
    methods = {node.name: node for node in model.body if isinstance(node, ast.FunctionDef)}
    reached = _reachable_functions([node for name, node in methods.items() if name != "__init__"], functions)
    constructor = methods.get("__init__")
    aliases = extensions | _aliases(constructor, extensions)
    names = {_name(node) for method in reached for node in ast.walk(method)}
    if not any(name == alias or name.startswith(f"{alias}.") for alias in aliases for name in names):
        yield _finding(
            "no-kernel", model, f"{MODEL} uses no function of {', '.join(sorted(extensions)) or 'an extension'}"
        )
    layers = _layers(constructor)
    for method in reached:
        yield from _computation_findings(method, layers, aliases)
        yield from _cache_findings(method)


def _assignments(constructor: ast.FunctionDef | None) -> Iterator[tuple[str, ast.expr]]:
    """The names that a constructor assigns, each with its value; assignments of tuples are taken apart."""
    for node in ast.walk(constructor) if constructor is not None else iter(()):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            match target, node.value:
                case ast.Tuple(elts=targets), ast.Tuple(elts=values):
                    yield from ((_name(part), value) for part, value in zip(targets, values, strict=False))
                case _:
                    yield _name(target), node.value


def _aliases(constructor: ast.FunctionDef | None, extensions: set[str]) -> set[str]:
    """Attributes that hold an extension, or a function of one."""
    return {name for name, value in _assignments(constructor) if _name(value).split(".")[0] in extensions}


def _layers(constructor: ast.FunctionDef | None) -> set[str]:
    """Attributes that hold layers of ``torch.nn``."""
    return {
        name
        for name, value in _assignments(constructor)
        if isinstance(value, ast.Call)
        and _name(value.func).startswith(("nn.", "torch.nn."))
        and not _name(value.func).endswith(("Parameter", "ParameterList", "ModuleList"))
    }


def _computation_findings(method: ast.FunctionDef, layers: set[str], extensions: set[str]) -> Iterator[Finding]:
    """Report operations of torch that compute in place of the kernels."""
    for node in ast.walk(method):
        match node:
            case ast.BinOp(op=ast.MatMult()):
                yield _finding("library-call", node, "a product by @")
            case ast.Call(func=func):
                name = _name(func)
                last = func.attr if isinstance(func, ast.Attribute) else name
                if name in layers:
                    yield _finding("library-call", node, f"{name}(...), a layer of torch.nn")
                elif "super" in ast.unparse(func) and last == "forward":
                    yield _finding("library-call", node, "super().forward(...)")
                elif (
                    last.removesuffix("_") in COMPUTING
                    and isinstance(func, ast.Attribute)
                    and not _is_own_call(func, extensions)
                ):
                    yield _finding("library-call", node, name or last)


def _is_own_call(func: ast.Attribute, extensions: set[str]) -> bool:
    """Whether a call is to an extension, to math or NumPy, or to the model itself, rather than to torch or a tensor."""
    owner = _name(func.value)
    return owner in {"math", "np", *extensions} or owner.startswith("self.")


def _cache_findings(method: ast.FunctionDef) -> Iterator[Finding]:
    """Report what may keep results: attributes that a method both sets and reads, globals, caching decorators, and
    addresses of tensors, which may be keys of a cache."""
    for decorator in method.decorator_list:
        name = _name(decorator.func if isinstance(decorator, ast.Call) else decorator).rpartition(".")[2]
        if name in ("lru_cache", "cache"):
            yield _finding("result-cache", decorator, f"@{name}")
    stored: dict[str, ast.AST] = {}
    read = set()
    for node in ast.walk(method):
        match node:
            case ast.Global(names=names):
                yield _finding("result-cache", node, f"global {', '.join(names)}")
            case ast.Attribute(value=ast.Name(id="self"), attr=attr, ctx=ast.Store()):
                stored[attr] = node
            case ast.Subscript(value=ast.Attribute(value=ast.Name(id="self"), attr=attr), ctx=ast.Store()):
                stored[attr] = node
            case ast.Attribute(value=ast.Name(id="self"), attr=attr, ctx=ast.Load()):
                read.add(attr)
            case ast.Call(
                func=ast.Name(id="hasattr" | "getattr"),
                args=[ast.Name(id="self"), ast.Constant(value=str() as attr), *_],
            ):
                read.add(attr)
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store()) if name.isupper() or name.startswith("_"):
                yield _finding("result-cache", node, f"{name}[...] = ...")
            case ast.Call(func=ast.Attribute(attr="data_ptr")):
                yield _finding("result-cache", node, "data_ptr() in Python")
    for attr, node in stored.items():
        if attr in read:
            yield _finding("result-cache", node, f"self.{attr}")
