"""Checks that the installed vLLM and SGLang have the functions and classes that our plugins replace.

    python scripts/check_hosts.py [vllm] [sglang]

Without names it checks those that are installed. Exit code 1 if one lacks something. Importing them may need their GPU;
no model is loaded.
"""

from __future__ import annotations

import logging
import os
import sys

from cudal2gen import plugins

# By host: the function with which it finds the plugin.
REGISTER = {plugins.VLLM: plugins.vllm, plugins.SGLANG: plugins.sglang}


def main(names: list[str]) -> int:
    if unknown := set(names) - {host.package for host in REGISTER}:
        print(f"{', '.join(sorted(unknown))}: no host of a plugin; they are vllm and sglang", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    failed = False
    for host, register in REGISTER.items():
        if host.package not in names and (names or not host.version):
            print(f"{host.name}: not checked" + ("" if host.version else ", not installed"))
            continue
        os.environ[host.variable] = "1"
        register()
        if host.name in plugins.REPLACEMENTS:
            print(f"{host.name} {host.version}: {host.function} is as expected")
        else:
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
