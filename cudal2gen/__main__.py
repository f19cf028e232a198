"""``python -m cudal2gen`` is the ``cudal2gen`` command."""

from cudal2gen.cli import main

main()
