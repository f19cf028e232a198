"""A stand-in for nvdisasm that remembers its answers, since nvdisasm takes a third of a second even for a small file.

It is a shell script, which tests put on the path. For a file and options that it has seen, it prints what nvdisasm
printed then, from the user's cache. A file that nvdisasm refuses is not remembered.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

SCRIPT = """#!/bin/sh
for file; do options="$options ${before-}"; before=$file; done
[ -f "$file" ] || exec '{program}' "$@"
key=$({ echo "$options"; cat "$file"; } | sha256sum)
answer='{folder}'/${key%% *}
if [ ! -f "$answer" ]; then
  '{program}' "$@" > "$answer.$$" || { code=$?; rm -f "$answer.$$"; exit $code; }
  mv "$answer.$$" "$answer"
fi
exec cat "$answer"
"""


def caching_disassembler(program: Path, cache: Path) -> Path:
    """A program that stands in for nvdisasm, with a folder of answers for each version of ``program``."""
    state = program.stat()
    identity = hashlib.sha256(f"{program}\0{state.st_size}\0{state.st_mtime_ns}\0{SCRIPT}".encode()).hexdigest()[:20]
    folder = cache / "test-disassembly" / identity
    script = folder / "nvdisasm"
    if not script.exists():
        folder.mkdir(parents=True, exist_ok=True)
        text = SCRIPT.replace("{program}", str(program)).replace("{folder}", str(folder))
        draft = folder / f"nvdisasm.{os.getpid()}"
        draft.write_text(text)
        draft.chmod(0o755)
        draft.replace(script)
    return script
