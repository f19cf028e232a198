"""The verb ``doctor`` checks what this machine can do (compile, emulate, use a GPU) and says what to install for the
rest."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from cudal2gen import places, torch_range
from cudal2gen.cli.program import app
from cudal2gen.generation import catalog
from kernelproof.ground.chips import GPUS, CardFacts
from kernelproof.ground.command_line.groups import verb
from kernelproof.ground.command_line.messages import EXIT_TOOL
from kernelproof.ground.command_line.options import Json
from kernelproof.ground.errors import WrongInput, installation

if TYPE_CHECKING:
    from cudal2gen.pack import Pack, PackSearch

# The checks that decide the exit code: without one of these, no kernel can be built and run.
REQUIRED_CHECKS = ("catalog", "compile", "emulate", "build directory")


class Check(NamedTuple):
    """Whether something is available; ``detail`` says which version or file, or how to install it."""

    ok: bool
    detail: str


@verb(app, "doctor")
def doctor(as_json: Json = False) -> None:
    """Print what this machine can do, and how to add the rest."""
    from cudal2gen import pack, plugins
    from kernelproof.ground import build_folder

    search = pack.search(pack.installed())
    checks = {
        "catalog": _catalog(),
        "compile": _compiler(),
        "disassemble": _disassembler(),
        "emulate": _emulator(),
        "gpu": _cards(search.packs),
        "build directory": Check(*build_folder.writable(places.build_dir())),
        "torch": _torch(search.packs),
        "vendor": _vendor(),
        "packs": _packs(search),
        "calls from C++": _calls(search.packs),
        **{host.name: Check(bool(host.version), host.state()) for host in plugins.HOSTS},
    }
    if as_json:
        facts = {name: {**check._asdict(), "needed": name in REQUIRED_CHECKS} for name, check in checks.items()}
        print(json.dumps(facts, indent=1))
    else:
        for name, check in checks.items():
            state = "ok" if check.ok else "missing" if name in REQUIRED_CHECKS else "optional"
            print(f"{state:8}  {name:16} {check.detail}")
        if any(not check.ok for name, check in checks.items() if name not in REQUIRED_CHECKS):
            print("Kernels are rendered, built and judged on the CPU without what is optional.")
    if not all(checks[name].ok for name in REQUIRED_CHECKS):
        raise typer.Exit(EXIT_TOOL)


def _catalog() -> Check:
    """Whether there are records."""
    try:
        if records := catalog.load():
            return Check(True, f"{len(records)} records in {places.catalog()}")
        raise catalog.no_records()
    except catalog.CatalogError as error:
        return Check(False, str(error))


def _compiler() -> Check:
    """Whether kernels can be compiled."""
    from kernelproof.ground import toolchain

    try:
        tools = toolchain.discover()
    except toolchain.ToolchainError as error:
        return Check(False, str(error))
    return Check(
        True,
        f"nvcc {tools.nvcc_version} ({tools.nvcc}), CuTe of CUTLASS {tools.cutlass_version} ({tools.cutlass_include})",
    )


def _disassembler() -> Check:
    """Whether machine code can be read."""
    from kernelproof.ground import toolchain

    try:
        return Check(True, f"nvdisasm ({toolchain.find_nvdisasm()})")
    except toolchain.ToolchainError as error:
        return Check(False, str(error))


def _emulator() -> Check:
    """Whether kernels can be executed without a GPU."""
    from kernelproof import emulator

    try:
        return Check(True, f"kernels run on the CPU, by {emulator.runtime_path()}")
    except emulator.EmulatorError as error:
        return Check(False, f"{error}; e.g. apt install gcc")
    except OSError as error:
        return Check(False, f"{error.filename}: {error.strerror}")


def _packs(search: PackSearch) -> Check:
    """Whether a pack can be used, and which are found."""
    details = [f"{gpu} of CUDA {opened.cuda} in {opened.directory}" for gpu, opened in search.packs.items()]
    details += search.notes
    usable = bool(search.packs) and not search.refused
    return Check(usable, "; ".join(details) or "none is installed, so cudal2gen.matmul calls torch")


def _torch(packs: Mapping[str, Pack]) -> Check:
    """The installed torch: whether it is in the supported range, and which CUDA it brings. It is not imported.

    ``packs``: the usable packs, whose kernels need the CUDA of their ptxas or a newer one.
    """
    try:
        distribution = metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return Check(False, f"none; the operators need {torch_range.OLDEST} to {torch_range.NEWEST}")
    version = distribution.version
    stated = Path(str(distribution.locate_file("torch/version.py")))
    found = re.search(r"^cuda.*= '([\d.]+)'", stated.read_text(), re.MULTILINE) if stated.is_file() else None
    cuda = found[1] if found else ""
    builds = f"for CUDA {cuda}" if cuda else "a build without CUDA"
    served = any(opened.cuda <= torch_range.major(cuda) for opened in packs.values())
    place, other = torch_range.remark_on_torch(version), "" if served else torch_range.remark_on_cuda(cuda)
    old = torch_range.numbers(version) < torch_range.numbers(torch_range.OLDEST)
    return Check(not (old or other), "; ".join(filter(None, [f"{version}, {builds}", place, other])))


def _vendor() -> Check:
    """nvmath, by which ``bench`` times cuBLASLt's algorithms."""
    try:
        return Check(True, f"nvmath {metadata.version('nvmath-python')}: bench times cuBLASLt's algorithms")
    except metadata.PackageNotFoundError:
        return Check(False, f"without nvmath bench compares with torch and cuBLAS only: {installation('gpu')}")


def _calls(packs: Mapping[str, Pack]) -> Check:
    """Whether torch can call our kernels from C++ without Python. Torch is not imported for this."""
    from cudal2gen.generation import compiler
    from cudal2gen.launch.launcher import TORCH_LIBRARY

    oldest = torch_range.OLDEST
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Check(False, f"no torch; such calls need torch {oldest} or newer")
    if torch_range.numbers(version) < torch_range.numbers(oldest):
        return Check(False, f"Python makes calls: torch {version} has no stable ABI of {oldest}")
    if files := [str(opened.torch_library) for opened in packs.values() if opened.torch_library]:
        return Check(True, ", ".join(files))
    if compiler.torch_launcher_file().is_file() or shutil.which("g++"):
        return Check(True, f"{compiler.torch_launcher_file()}, compiled at first use")
    return Check(False, f"Python makes calls: no pack has {TORCH_LIBRARY}, and g++ is missing; e.g. apt install g++")


def _cards(packs: Mapping[str, Pack]) -> Check:
    """The GPUs of this machine, each with the GPU model whose records it uses, and its pack."""
    from cudal2gen.launch import gpu

    if cards := gpu.cards():
        driver = gpu.driver_cuda()
        newest = [f"the driver supports CUDA up to {torch_range.spelled(driver)}"] if driver else []
        services = [f"{card.text}: {_service(card, packs)}" for card in cards]
        old = {torch_range.remark_on_driver(driver, _cuda(card, packs)) for card in cards} - {""}
        return Check(not old, "; ".join([*services, *(sorted(old) or newest)]))
    file = Path("/dev/nvidiactl")
    if file.exists() or gpu.has_driver():
        found = f"{file} is there" if file.exists() else "a driver's library is there"
        return Check(False, f"{found}, but libcuda.so.1 lists no device: nvidia-smi may say why")
    return Check(False, "no NVIDIA driver: kernels run in the emulator and cannot be timed")


def _cuda(card: CardFacts, packs: Mapping[str, Pack]) -> int:
    """The major version of CUDA that kernels for a card need: that of its pack, or of this version without one."""
    from cudal2gen import pack

    with contextlib.suppress(WrongInput):  # ``_service`` reports this error
        if served := pack.serving(packs, card):
            return served.cuda
    return torch_range.CUDA


def _service(card: CardFacts, packs: Mapping[str, Pack]) -> str:
    """A phrase that names the records and the pack that a card uses."""
    from cudal2gen import pack

    models = card.stand_ins(GPUS)
    if not models:
        return "no record fits its architecture, so torch computes"
    records = f"records of {models[0]}" if card.model == models[0] else f"an unknown card, records of {models[0]}"
    try:
        served = pack.serving(packs, card)
    except WrongInput as error:
        return f"{records}, {error}"
    if served is None:
        return f"{records}, no pack"
    if served.card is None:
        return f"{records}, the pack of {served.gpu}"
    return f"{records}, kernels of {served.gpu}'s pack, of which nothing was measured on this card"
