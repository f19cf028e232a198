"""Starts the command line, for ``python -m cudal2gen`` and for the ``cudal2gen`` command."""

import signal


def main() -> None:
    """Runs the command line. While its modules are being imported, Ctrl-C ends the process without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from cudal2gen.cli import main

    main()


if __name__ == "__main__":
    main()
