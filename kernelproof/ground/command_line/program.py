"""Defines what both programs share: options before the verb, usage errors, shell completion, and the entry point.

Every error that a user can correct ends in one line on stderr and an exit code, never in a traceback.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import typer
from typer.completion import get_completion_inspect_parameters, install_callback, show_callback
from typer.core import TyperGroup

from kernelproof.ground.command_line import signals, streams
from kernelproof.ground.command_line.messages import EXIT_FAILED, EXIT_USAGE, error, note, report
from kernelproof.ground.errors import LONGEST, SkippedLine, UserError, brief

Shell = Literal["bash", "zsh", "fish", "powershell", "pwsh"]
USAGE_ERROR = typer.BadParameter.__mro__[1]  # the base of every error that Typer finds in a command line


class VerbGroup(TyperGroup):
    """A program with verbs. Errors that a user can correct are turned into messages and exit codes here only."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Moves the program's own options to the front, so that a user may also write them after the verb."""
        flags = {flag for option in self.params if _has_value(option) for flag in option.opts}
        end = args.index("--") if "--" in args else len(args)
        own: list[str] = []
        others: list[str] = []
        words = iter(args[:end])
        for word in words:
            name = word.partition("=")[0] if word.startswith("--") else word[:2]
            if name not in flags:
                others.append(word)
                continue
            own.append(word)
            if name == word:  # else the value is in the same word, as in --jobs=4 and -j4
                own.extend(islice(words, 1))
        return super().parse_args(ctx, [*own, *others, *args[end:]])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Runs a command line."""
        get_completion_inspect_parameters()  # registers Typer's completion of each shell
        try:
            with _skipped_lines_as_notes(), signals.exit_restored():
                code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
        except typer.Abort:
            sys.exit(EXIT_FAILED)
        except (UserError, OSError) as failure:
            sys.exit(report(failure))
        except Exception as usage:
            if not standalone_mode or not isinstance(usage, USAGE_ERROR):
                raise
            _print_usage(usage)
            sys.exit(EXIT_USAGE)
        if not standalone_mode:
            return code
        sys.exit(code or 0)


def _has_value(option: Any) -> bool:
    """Whether one of the program's own options takes a value, as ``--nvcc`` does."""
    return option.expose_value and not option.is_flag


@contextmanager
def _skipped_lines_as_notes() -> Iterator[None]:
    """Prints the warning about a damaged line of a store as a note.

    Python's own format would show a line of this program's source, which does not help a user.
    """
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, SkippedLine):
                note(str(message))
            else:
                others(message, category, filename, lineno, file, line)

        warnings.simplefilter("always", SkippedLine)
        warnings.showwarning = show
        yield


def _print_usage(usage: Any) -> None:
    """Prints Typer's message and the command whose help says more. If the verb is missing, the message is the help."""
    message = usage.format_message().replace("Value error, ", "")
    if usage.ctx and message == usage.ctx.get_help():
        print(message, file=sys.stderr)
        return
    command = usage.ctx.command_path if usage.ctx else Path(sys.argv[0]).name
    message = message[0].lower() + message[1:].rstrip(".")
    advice = f"{' See' if message.endswith('?') else '; see'} '{command} --help'"
    error(brief(message, LONGEST - len(advice)) + advice)


def program(help_text: str) -> typer.Typer:
    """A new program, to which ``verb`` adds verbs. ``help_text`` says what it is for and what its exit codes mean."""
    return typer.Typer(
        cls=VerbGroup,
        help=help_text,
        no_args_is_help=True,
        add_completion=False,  # Typer's own two options guess the shell; ``OwnOptions`` has two that take its name
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def _print_version(context: typer.Context, value: bool) -> None:
    """The callback of ``--version``."""
    if value:
        from kernelproof.ground.version import __version__

        print(f"{context.find_root().info_name} {__version__}")
        raise typer.Exit


def _choose_nvcc(value: Path | None) -> None:
    """The callback of ``--nvcc``."""
    if value is not None:
        os.environ["KERNELPROOF_NVCC"] = str(value)  # the search for the toolchain reads this variable


@dataclass(frozen=True)
class OwnOptions:
    """The options that every program has. Their callbacks act while Typer reads the command line."""

    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False
    show: Annotated[
        Shell | None,
        typer.Option("--show-completion", callback=show_callback, is_eager=True, help="Print a shell's completion."),
    ] = None
    install: Annotated[
        Shell | None,
        typer.Option(
            "--install-completion", callback=install_callback, is_eager=True, help="Install a shell's completion."
        ),
    ] = None
    nvcc: Annotated[
        Path | None, typer.Option("--nvcc", callback=_choose_nvcc, help="The nvcc to use, in place of the one found.")
    ] = None


def run(app: typer.Typer, name: str) -> None:
    """Runs the command line of this process and exits. If the output cannot be written, the exit code is 1."""
    is_open = streams.prepare()
    signals.handle()
    if not is_open:  # `>&-`
        error("standard output is closed; send it to a file or to /dev/null")
        sys.exit(EXIT_FAILED)
    try:
        try:
            app(prog_name=name)
        finally:
            sys.stdout.flush()
    except OSError as failure:
        streams.discard(1)
        # If an OSError was reported before (by VerbGroup.main, which exits), the failure to flush adds nothing.
        ended = failure.__context__
        is_reported = isinstance(ended, SystemExit) and isinstance(ended.__context__, OSError)
        sys.exit(ended.code if isinstance(ended, SystemExit) and is_reported else report(failure))
