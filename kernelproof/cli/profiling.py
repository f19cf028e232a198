"""The verb ``profile`` predicts from a kernel's machine code where its time goes.

``cudal2gen profile`` shares the options and the printing that are defined here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelproof.cli.program import app
from kernelproof.ground.chips import GPUS
from kernelproof.ground.command_line.groups import OneOf, verb
from kernelproof.ground.command_line.messages import refuse
from kernelproof.ground.command_line.options import Json
from kernelproof.ground.command_line.tables import print_section
from kernelproof.ground.files import write

if TYPE_CHECKING:
    from kernelproof.profile import Profile


@dataclass(frozen=True)
class ProfileOutput:
    """The options that say how profiles are shown: one as text, page or JSON, or two side by side."""

    lines: Annotated[
        int, typer.Option("--lines", min=0, help="How many instructions to print: those where warps wait the most.")
    ] = 16
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page: one HTML file that needs no network.")
    ] = None
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option("--compare", metavar="A B", help="Compare two cubins or profiles that --json saved."),
    ] = None
    as_json: Json = False

    def names(self, is_kernel_named: bool, options: str) -> tuple[str, str] | None:
        """The two kernels of ``--compare``, or None if one kernel is named by other options.

        Ends the command if both are given, or neither. ``options``: the names, in messages, of the options that name
        one kernel.
        """
        if self.compare is None:
            if not is_kernel_named:
                refuse(f"give one of {options} and --compare A B")
            return None
        if is_kernel_named or self.html or self.as_json:
            refuse(f"--compare names both kernels and prints tables only: leave out {options}, --html and --json")
        return self.compare

    def show(self, content: Profile) -> None:
        """Prints the profile as text or JSON, or writes its page."""
        from kernelproof import profile

        if self.html is not None:
            write(self.html, profile.html(content))
            print(f"written to {self.html}", file=sys.stderr)
        if self.as_json:
            print(content.model_dump_json())
        elif self.html is None:
            for section in profile.sections(content, self.lines):
                print_section(section)


def print_comparison(first: Profile, second: Profile) -> None:
    """Prints the figures of two profiles in the same tables."""
    from kernelproof import profile

    for section in profile.compare(first, second):
        print_section(section)


def profile_of_file(path: Path, gpu: str | None, kernel: str | None = None, launch: Path | None = None) -> Profile:
    """The profile of a cubin on a GPU model, of a .cu file compiled for that GPU, or a profile that ``--json`` saved.

    ``gpu``, ``kernel``, ``launch``: the values of these options; None if not given. Ends the command if there is no
    such file. Raises WrongInput, MissingTool without nvcc, and Failure with the compiler's errors.
    """
    from kernelproof import profile
    from kernelproof.checking import compilation, devices
    from kernelproof.ground import toolchain

    if path.suffix == ".json":
        return profile.load(path)
    if not path.is_file():
        refuse(f"no file at {path}; give a cubin, a .cu file, or a profile that --json saved")
    if path.suffix == ".cu":
        path = compilation.cubin(path, [], devices.target(gpu), toolchain.discover())
    return profile.of_cubin(path, gpu, kernel, profile.LaunchFacts.load(launch) if launch else None)


@verb(app, "profile")
def profile_kernel(
    output: ProfileOutput,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="A cubin or .cu file with MMAs, or a profile that --json saved."),
    ] = None,
    gpu: Annotated[
        str | None,
        OneOf(tuple(GPUS)),
        typer.Option("--gpu", help="GPU whose rates the prediction uses; by default the first that runs the cubin."),
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option(
            "--kernel", metavar="NAME", help="Part of the function's name; by default the longest function with MMAs."
        ),
    ] = None,
    launch: Annotated[
        Path | None,
        typer.Option(
            "--launch", metavar="FILE", help="How a cubin is launched: JSON, see docs/kernelproof/profile.md."
        ),
    ] = None,
) -> None:
    """Predict where a kernel's time goes, from its machine code.

    Prints the main loop, what its warps wait for, and which changes would help. Needs no GPU. Exit codes: 0 predicted,
    2 wrong input, 3 a missing tool. docs/kernelproof/profile.md has more.
    """
    names = output.names(file is not None, "FILE")
    if kernel and names:
        refuse("--kernel is for one cubin: leave it out with --compare")
    if names:
        first, second = (profile_of_file(Path(name), gpu, None, launch) for name in names)
        print_comparison(first, second)
    elif file is not None:
        output.show(profile_of_file(file, gpu, kernel, launch))
