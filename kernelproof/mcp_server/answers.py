"""Answers each request in a child process of its own, which runs ``python -m kernelproof.mcp_server.answers FOLDER``.

The child compiles kernels to PTX, without their host code, and runs the launches as ``kernelproof check`` does. Request
and answer are files in a temporary folder, because the child's output belongs to the kernels. The child ends at the
limit of time, or when the server ends.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kernelproof.checking import compilation, devices, execution, includes, plan, supervision
from kernelproof.ground import files, places, process_tree, sandbox, toolchain
from kernelproof.ground.errors import Failure, UserError, WrongInput, brief, reading
from kernelproof.mcp_server.requests import Request

# Files by which the server and the process of a check exchange a request and its answer.
REQUEST, ANSWER = "request.json", "answer.json"
START_S = 60.0  # seconds for starting Python and compiling, in addition to the limit of the run
LONGEST_OUTPUT = 4000  # most characters of the kernels' output in an answer
MAX_THREADS = 8  # most threads listed for each side of a finding
MAX_OTHERS = 8  # most other places that an answer lists for a cause
NAME = "kernel.cu"  # the file name that findings show for a text that came without a file
# Options of the command line that messages mention, and the words of requests that replace them.
_WORDS = {"--timeout": "seconds", "--memory": "the server's --memory", "--sample N": "sample=N", "--launch ": "entry "}


def answer(request: Request) -> dict[str, Any]:
    """Answer a request by the document that ``check --json`` prints, and the kernels' ``output``.

    Each access of a finding lists only its first threads. Raises WrongInput, Failure.
    """
    with TemporaryDirectory() as name:
        folder = Path(name)
        files.write(folder / REQUEST, request.model_dump_json())
        command = [sys.executable, "-m", "kernelproof.mcp_server.answers", name]
        names = ("KERNELPROOF_NVCC", "CUTLASS_PATH", "PYTHONPATH", "HOME", "TMPDIR")
        variables = {name: os.environ[name] for name in names if name in os.environ}
        variables["KERNELPROOF_CACHE_DIR"] = str(places.user_cache())
        try:
            _, output = process_tree.output(command, sandbox.environment(**variables), request.seconds + START_S)
        except subprocess.TimeoutExpired:
            raise Failure(f"did not end within {request.seconds + START_S:.0f} s, compilation included") from None
        if not (folder / ANSWER).exists():
            raise Failure(f"the process of the check ended without an answer: {brief(output, LONGEST_OUTPUT)}")
        document: dict[str, Any] = json.loads((folder / ANSWER).read_text())
    if "error" in document:
        raise WrongInput(document["error"])
    for finding in document["findings"]:
        finding["also"] = finding["also"][:MAX_OTHERS]
        for side in filter(None, (finding["access"], finding["other"])):
            side["threads"] = side["threads"][:MAX_THREADS]
    return {**document, "output": brief(output, LONGEST_OUTPUT)}


def run(request: Request) -> dict[str, Any]:
    """Compile and run a request in this process, and return the document of its result. Raises UserError."""
    if lines := includes.revealing_lines(request.source):
        raise WrongInput(f"source: {lines[0]!r} is not allowed here; put the text into source, or give path")
    path = _file(request)
    content = plan.LaunchFile(launches=request.launches, buffers=request.buffers)
    launches, buffers = content.specifications(request.allowed_path)
    arguments, sm = compilation.split_arguments(request.options())
    ptx = path
    if path.suffix == ".cu":
        sm = sm or devices.target(request.device)
        ptx = compilation.ptx(path, arguments, sm, toolchain.discover(), START_S, foreign=request.roots)
    device = request.device or devices.nearest(plan.target_of([ptx]) or devices.DEFAULT)
    program = plan.CheckPlan(
        device, kernels=(ptx,), launches=launches, buffers=buffers, counters=request.counters, adverse=request.adverse,
        sample=request.sample, quiet=True,
    )  # fmt: skip
    box = execution.program_sandbox([ptx, *request.roots], request.seconds)
    result = supervision.run(program, request.path or NAME, request.seconds, request.gib, box=box)
    if reason := sandbox.namespace_obstacle():
        result.notes.append(f"{sandbox.NO_NAMESPACES}: {reason}")
    return result.document()


def _file(request: Request) -> Path:
    """The file of the kernels. A text that came without a file is stored in the cache. Raises WrongInput."""
    if bool(request.source) == bool(request.path):
        raise WrongInput("give source (CUDA C++ or PTX text) or path (a .cu or .ptx file)")
    if request.path:
        path = request.allowed_path(request.path)
        if path.suffix not in (".cu", ".ptx"):
            raise WrongInput(f"path {path}: neither .cu nor .ptx")
        with reading(path):
            path.read_bytes()
        return path
    return compilation.text_file(
        request.source, ".ptx" if re.search(r"^\s*\.version\s", request.source, re.M) else ".cu"
    )


def _in_words_of_requests(text: str, request: Request) -> str:
    """Replace options of the command line in an answer by fields of a request, and a file of the cache by ``NAME``."""
    for word, own in _WORDS.items():
        text = text.replace(word, own)
    return text.replace(str(_file(request)), NAME) if request.source and not request.path else text


def main(folder: Path) -> None:
    """Read the request in a folder and write the answer there."""
    request = Request.model_validate_json((folder / REQUEST).read_text())
    try:
        text = json.dumps(run(request))
    except UserError as error:
        text = json.dumps({"error": str(error)})
    files.write(folder / ANSWER, _in_words_of_requests(text, request))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
