"""Runs inside a room (a sandboxed process): holds either a reference or a solution, and answers the grader's requests.

The code of a solution shares this process with the emulator and the ledger. Values are compared in the grader's
process. But a solution that knows this program could forge the record of the kernels that ran;
docs/kernelproof/threat-model.md says so.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from kernelproof.checking import devices
from kernelproof.checking.execution import REPLACED_LIBRARIES
from kernelproof.emulator import EmulatorError, LaunchRefused
from kernelproof.emulator.host.standin import stand_for
from kernelproof.grading.benchmarks import (
    absent,
    cuda_face,
    extensions,
    flashinfer,
    flashinfer_room,
    problems,
    values,
    wire,
)
from kernelproof.grading.benchmarks.device import RoomDevice
from kernelproof.grading.benchmarks.ledger import NOTHING, Ledger, address, tensors

MOST_TEXT = 400  # most characters of a message about a solution's failure
# Functions that measure or synchronise. A solution must not replace them.
_TIMERS = ("cuda.synchronize", "cuda.Event", "cuda.current_stream", "cuda.stream", "allclose", "testing.assert_close")
_CLOCKS = ("time", "perf_counter", "perf_counter_ns", "monotonic", "process_time")


class Guest:
    """The state of a room: its emulated device and ledger, and the reference (``problem``) or the solution.

    ``file``: the descriptor of the pipe to the grader. ``module``: the solution's Python module. ``inputs``: the
    tensors of all calls, so that their addresses never change. ``timers``: ``_timers()`` before the solution ran.
    """

    def __init__(self, file: int, device: str) -> None:
        self.file = file
        torch.set_num_threads(1)
        self.chip = devices.device(device)
        cuda_face.install(self.chip)
        self.ledger = Ledger()
        self.device = RoomDevice(self.chip, self.ledger)
        self.triton: Any = None
        self.problem: Any = None
        self.solution: Callable[..., Any] | None = None
        self.inputs: Any = None
        self.module: Any = None
        self.timers: dict[str, Any] = {}
        self.absent = absent.AbsentPackages()

    def serve(self) -> None:
        """Answer requests until the grader closes the pipe."""
        answers: dict[str, Callable[[wire.Message, list[wire.Tensor]], tuple[wire.Message, list[wire.Tensor]]]] = {
            "reference": self.open_reference, "draw": self.draw, "expect": self.expect,
            "solution": self.open_solution, "call": self.call,
        }  # fmt: skip
        while True:
            try:
                request, arrays = wire.receive(self.file)
            except (EOFError, wire.BrokenMessage):
                return
            try:
                answer, out = answers[request["do"]](request, arrays)
            except LaunchRefused as error:
                answer, out = {"failed": failure(error)}, []
            except (cuda_face.Unsupported, EmulatorError) as error:
                answer, out = {"obstacles": [str(error)]}, []
            except Exception as error:
                answer, out = {"failed": failure(error)}, []
            wire.send(self.file, answer, out)

    # --- a reference ---

    def open_reference(self, request: wire.Message, _: list[wire.Tensor]) -> tuple[wire.Message, list[wire.Tensor]]:
        """Execute a reference for a case. Without a case, KernelBench's own is made small enough for ``budget``.

        The answer has the ``stated`` case with its cost, the ``case`` that was executed, and the ``initial`` arguments
        of the model.
        """
        text, case = request["text"], request["case"]
        self._add_modules(request["modules"])
        stated, stated_cost = dict(case or {}), 0
        with cuda_face.CudaFace():
            if request["format"] == "GPU MODE":
                self.problem = problems.GpuMode(text, case, request["seed"])
            elif request["format"] == "FlashInfer-Bench":
                self.problem = flashinfer_room.FlashInfer(text, case, request["seed"])
            else:
                if case is None:
                    stated, case, stated_cost, _cost = problems.smaller_case(text, request["budget"])
                self.problem = problems.KernelBench(text, stated, case, request["seed"])
        out: list[wire.Tensor] = []
        initial = values.packed(self.problem.initial, out)
        return {"stated": stated, "case": case, "stated_cost": stated_cost, "initial": initial}, out

    def draw(self, request: wire.Message, _: list[wire.Tensor]) -> tuple[wire.Message, list[wire.Tensor]]:
        """Draw inputs from a seed."""
        self.ledger.begin(())
        with cuda_face.CudaFace(), torch.no_grad(), self.ledger:
            inputs = self.problem.inputs(request["seed"])
        # Inputs that were only drawn, without an operator of torch, have no structure that a solution may rely on.
        plain = [not self.ledger.union([address(tensor)]).operators for tensor in tensors(inputs)]
        out: list[wire.Tensor] = []
        return {"inputs": values.packed(inputs, out), "plain": plain}, out

    def expect(self, request: wire.Message, arrays: list[wire.Tensor]) -> tuple[wire.Message, list[wire.Tensor]]:
        """Compute the reference's outputs for some inputs, in its own types and, if possible, in fp64. The answer also
        has the work of its operators, and the inputs on which the outputs depend."""
        inputs, seed = values.unpacked(request["inputs"], arrays), request["seed"]
        self.ledger.begin(tensors(inputs))
        with cuda_face.CudaFace(), torch.no_grad():
            with self.ledger:
                own = self.problem.outputs(inputs, seed)
            exact = self.problem.exact(inputs, seed)
        origin = self.ledger.union(map(address, tensors(own)))
        out: list[wire.Tensor] = []
        answer = {
            "own": values.packed(own, out), "work": self.ledger.work(origin), "depends": sorted(origin.inputs),
        }  # fmt: skip
        answer["exact"] = None if exact is None else values.packed(exact, out)
        return answer, out

    # --- a solution ---

    def open_solution(self, request: wire.Message, arrays: list[wire.Tensor]) -> tuple[wire.Message, list[wire.Tensor]]:
        """Execute a solution's module and make its model."""
        self._add_modules(request["modules"])
        stand_for(*REPLACED_LIBRARIES)
        sys.meta_path.append(self.absent)
        self.device.draw_environments(request["seed"])
        cuda_face.answer_pointers(self.device.device_address)
        loader = extensions.Extensions(self.device, self._compile)
        import torch.utils.cpp_extension as real

        for name in ("load_inline", "load"):
            setattr(real, name, getattr(loader, name))
        self._open_triton()
        self.timers = _timers()
        initial = values.unpacked(request["initial"], arrays)
        with cuda_face.CudaFace():
            if request["format"] == "robust-kbench":
                self.solution = self._kernel_function(request, loader, initial)
            elif request["format"] == "FlashInfer-Bench":
                definition = flashinfer.Definition.model_validate_json(request["reference"])
                self.solution = flashinfer_room.solution_function(request["text"], definition, request["case"], loader)
            else:
                module = problems.execute_text(request["text"], "solution", request["stated"], request["case"])
                self.module = module
                self.solution = self._module_function(module, request, initial)
        return self._state({}), []

    def _module_function(self, module: Any, request: wire.Message, initial: Any) -> Callable[..., Any]:
        """The function of a solution that is a Python module. Raises SolutionError if the module lacks it."""
        name = "custom_kernel" if request["format"] == "GPU MODE" else "ModelNew"
        entry = getattr(module, name, None)
        if entry is None:
            raise problems.SolutionError(f"the solution has no {name}")
        if name == "custom_kernel":
            return entry  # type: ignore[no-any-return]
        problems.seed_all(request["seed"])
        model = problems.construct(entry, initial)
        return model.cuda() if isinstance(model, torch.nn.Module) else model  # type: ignore[no-any-return]

    def _kernel_function(
        self, request: wire.Message, loader: extensions.Extensions, initial: Any
    ) -> Callable[..., Any]:
        """The function of a solution of robust-kbench: the reference's model, which calls the extension's forward."""
        path = Path("/tmp/kernel.cu")  # this /tmp belongs to the sandbox
        path.write_text(request["text"])
        module = loader.load("kernel", str(path))
        reference = problems.execute_text(request["reference"], "reference_model", request["stated"], request["case"])
        problems.seed_all(request["seed"])
        model = problems.construct(reference.Model, initial)
        return lambda *inputs: model(*inputs, fn=module.forward)

    def call(self, request: wire.Message, arrays: list[wire.Tensor]) -> tuple[wire.Message, list[wire.Tensor]]:
        """Call the solution on inputs, which are at the same addresses in every call.

        The answer has the ``outputs`` and what ran: ``kernels`` and ``operators`` that have a part in the outputs, all
        kernels ``launched``, and the ``work`` of the operators. ``lazy``: types of results that are no plain tensors.
        ``unjoined``: streams with work that nothing waited for. ``bare``: for each result, whether no kernel has a part
        in it. ``changed``: for each input, whether the solution changed it. ``constants``: those in comparisons of the
        kernels. ``unmet``: those in comparisons that had the same result in all calls, which ``remark`` lists.
        ``windows``: see ``RoomDevice``. ``host_only``: the inputs that Python has read and that have no other part in
        the outputs.
        """
        assert self.solution is not None
        fresh = values.unpacked(request["inputs"], arrays)
        if self.inputs is None:
            self.inputs = fresh
        else:
            for old, new in zip(tensors(self.inputs), tensors(fresh), strict=True):
                old.copy_(new)
        self.ledger.begin(tensors(self.inputs))
        cuda_face.HOST_READS.clear()
        before = [tensor.clone() for tensor in tensors(self.inputs)]
        problems.seed_all(request["seed"])
        with torch.no_grad(), cuda_face.CudaFace(), self.ledger:
            result = self.solution(*self.inputs)
        results = tensors(result)
        lazy = sorted({type(item).__name__ for item in results if type(item) not in (torch.Tensor, torch.nn.Parameter)})
        unjoined = cuda_face.unjoined_streams()
        out: list[wire.Tensor] = []
        packed = values.packed(result, out) if not lazy else {"value": None}
        origins = [self.ledger.origins.get(address(item), NOTHING) for item in results]
        origin = self.ledger.union(map(address, results))
        host_inputs = self.ledger.union(map(address, cuda_face.HOST_READS)).inputs
        changed = [has_changed(old, new) for old, new in zip(before, tensors(self.inputs), strict=True)]
        answer = {
            "outputs": packed, "lazy": lazy, "unjoined": unjoined,
            "kernels": sorted({self.ledger.launches[number] for number in origin.launches}),
            "launched": sorted(set(self.ledger.launches)), "operators": self.ledger.names(origin),
            "work": self.ledger.work(origin), "bare": [not item.launches for item in origins], "changed": changed,
            "constants": list(self.device.constants), "unmet": self.device.outcomes.unmet_constants(),
            "host_only": sorted(host_inputs - origin.inputs),
            "remark": self.device.outcomes.remark(), "windows": self.device.windows[:1],
        }  # fmt: skip
        return self._state(answer), out

    def _state(self, answer: wire.Message) -> wire.Message:
        """Add to an answer what was found so far: findings, obstacles, absent packages and replaced timers."""
        reports = [*self.device.reports, *(self.triton.reports if self.triton is not None else ())]
        patched = [name for name, value in _timers().items() if self.timers[name] is not value]
        return {
            **answer, "patched": patched,
            "obstacles": list(dict.fromkeys([*self.device.obstacles, *cuda_face.OBSTACLES])),
            "absent": list(self.absent.names),
            "reports": [
                {"kind": item.kind, "message": item.message, "kernel": item.kernel, "line": item.line}
                for item in reports if item.is_error
            ],
        }  # fmt: skip

    def _compile(self, request: wire.Message) -> wire.Message:
        """Ask the grader to compile an extension, because no compiler runs in this room."""
        wire.send(self.file, {"compile": request})
        return wire.receive(self.file)[0]

    def _open_triton(self) -> None:
        """Let Triton kernels run on the emulator, if Triton is installed."""
        try:
            from kernelproof.grading.benchmarks.triton_kernels import RecordedTriton
        except ImportError:
            return
        self.triton = RecordedTriton(self.chip, self.device)
        self.triton.__enter__()

    def _add_modules(self, modules: Mapping[str, str]) -> None:
        """Write the modules beside a reference to a folder from which the room's code can import them."""
        files = {Path(name).name: text for name, text in modules.items()}
        problems.add_to_path(files, Path("/tmp/neighbours"))  # this /tmp belongs to the sandbox


def has_changed(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether an element of a tensor has another value than before. NaN counts as equal to NaN."""
    return not bool(((old == new) | (old.isnan() & new.isnan())).all())


def failure(error: BaseException) -> wire.Message:
    """The description of an exception that a reference or a solution raised, with the line in its text."""
    stack = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in stack if frame.filename.startswith("/tmp/")]
    return {
        "type": type(error).__name__, "text": str(error)[:MOST_TEXT], "line": frames[-1].lineno if frames else 0,
        "refused": isinstance(error, LaunchRefused), "of_torch": "/torch/" in stack[-1].filename,
    }  # fmt: skip


def _timers() -> dict[str, Any]:
    """The functions that measure or synchronise, as they are now, by name."""
    out: dict[str, Any] = {f"time.{name}": getattr(time, name) for name in _CLOCKS}
    for path in _TIMERS:
        at: Any = torch
        for part in path.split("."):
            at = getattr(at, part)
        out[f"torch.{path}"] = at
    for name in ("record", "synchronize", "elapsed_time"):
        out[f"torch.cuda.Event.{name}"] = cuda_face.Event.__dict__[name]
    return out
