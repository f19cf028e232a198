"""Starts the command line, for ``python -m kernelproof`` and for the ``kernelproof`` command."""

import signal


def main() -> None:
    """Runs the command line of this process. During its import, Ctrl-C ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from kernelproof.cli import main

    main()


if __name__ == "__main__":
    main()
