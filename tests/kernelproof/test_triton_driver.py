"""Proves what Triton gets in place of a GPU's driver: a device's facts, programs, launches, and arguments."""

from __future__ import annotations

import random
import re
import struct
import warnings
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kernelproof import emulator
from kernelproof.checking import devices
from kernelproof.emulator.host.tensors import Tensors
from kernelproof.ground.chips import GPUS
from kernelproof.ground.errors import WrongInput

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
from triton.backends.nvidia.compiler import CUDABackend  # noqa: E402
from triton.runtime.driver import driver as of_triton  # noqa: E402
from triton.testing import get_dram_gbps  # noqa: E402

from kernelproof import triton_emulation  # noqa: E402
from kernelproof.triton_emulation import backend, parameters  # noqa: E402
from kernelproof.triton_emulation.session import TritonSession  # noqa: E402

# A text with the lines of its files, and a kernel that does nothing.
EMPTY = ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k()\n{\n%s\nret;\n}\n%s\n"


def test_the_driver_states_the_facts_of_the_emulated_gpu() -> None:
    """Triton and kernels that choose a grid read them under these names. A CTA of all threads finds registers, so that
    no kernel is refused or given a smaller grid than fits."""
    identities = set()
    for name, chip in GPUS.items():
        sm = int(chip.capability.sm.removeprefix("sm_"))
        with triton_emulation.emulate(name) as session:
            active = of_triton.active
            target, facts = active.get_current_target(), active.utils.get_device_properties(active.get_current_device())
            assert (target.backend, target.arch, target.warp_size) == ("cuda", sm, 32)
            assert active.get_device_capability() == divmod(sm, 10)
            assert facts["multiprocessor_count"] == chip.sms
            assert facts["max_shared_mem"] == chip.capability.smem_block_bytes
            assert facts["warpSize"] == 32
            module, program, registers, spills, threads = active.utils.load_binary(
                "k", (EMPTY % ("", "")).encode(), 0, ""
            )
            assert active.utils.unload_module(module) is None
            assert (list(program.kernels), spills, threads) == (["k"], 0, 1024)
            assert registers * threads == facts["max_num_regs"] == 2**16
            # 40 GB of HBM2 at 1215 MHz and 5120 bits.
            assert get_dram_gbps(active.get_current_device()) == pytest.approx(1555.2)
            assert active.get_current_stream() == 0
            assert active.get_active_torch_device() == torch.device("cpu")
            assert active.get_device_interface() is torch.cpu
            assert active.set_current_device(active.get_current_device()) is None
            assert not active.is_active()
            with pytest.raises(NotImplementedError):
                active.get_benchmarker()
        assert backend.EmulatedDriver(session.device, session.launch).get_current_device() == active.identity
        identities.add(active.identity)
    assert len(identities) == len({devices.device(name) for name in GPUS})


def test_texts_and_machine_code_have_different_keys_in_the_cache_of_triton() -> None:
    target = SimpleNamespace(backend="cuda", arch=80, warp_size=32)
    ours, theirs = backend.PtxBackend(target), CUDABackend(target)
    assert ours.hash() != theirs.hash()
    assert theirs.hash() in ours.hash()
    stages: dict[str, Any] = {}
    ours.add_stages(stages, ours.parse_options({}), "triton")
    assert stages["cubin"]("a text", None) == b"a text"
    assert list(stages)[-2:] == ["ptx", "cubin"]


def test_a_launch_calls_the_hooks_of_triton_around_it() -> None:
    events: list[object] = []
    before = of_triton._active
    own = backend.EmulatedDriver(emulator.HOPPER, lambda *launch: events.append(launch))
    of_triton.set_active(own)
    try:
        for enter, leave in product((None, lambda given: events.append(("enter", given))), (None, events.append)):
            events.clear()
            own.launcher_cls("source", "metadata")(2, 3, 4, 0, "program", (), "launch", enter, leave, "x", "y")
            launch = ("program", "source", "metadata", (2, 3, 4), ("x", "y"))
            assert events == [*[("enter", "launch")] * bool(enter), launch, *["launch"] * bool(leave)]
    finally:
        of_triton.set_active(before)


def test_an_inline_assembly_keeps_its_first_location_alone() -> None:
    generator = random.Random(0)
    for _ in range(40):
        lines, kept = [], []
        inside, located = False, False
        for number in range(30):
            kind = generator.choice(("code", ".loc", ".loc", "edge"))
            if kind == "edge":
                text, inside, located = f"\t// {'end' if inside else 'begin'} inline asm", not inside, False
            else:
                text = f"\t.loc\t1 {number} 7" if kind == ".loc" else f"\tmov.u32 %r1, {number}; // .loc"
            lines.append(text)
            # An edge that opens at the end of the text has no end, and is no inline assembly.
            kept.append("" if inside and kind == ".loc" and located else text)
            located |= inside and kind == ".loc"
        if inside:
            lines.append("\t// end inline asm")
            kept.append("\t// end inline asm")
        written = backend._INLINE.sub(backend._first_location, "\n".join(lines))
        assert written.splitlines() == kept


def test_a_program_names_the_file_that_defines_its_kernel_now() -> None:
    """The only file of a text, or the only one of the same name, is replaced, and no other."""
    here = "/now/kernels.py"
    for files, expected in (
        ([], None), (["/then/kernels.py"], 0), (["/then/other.py"], 0), ([here], None),
        (["/then/kernels.py", "/lib/math.py"], 0), (["/lib/math.py", "/then/kernels.py"], 1),
        (["/then/kernels.py", "/old/kernels.py"], None), (["/lib/math.py", "/lib/other.py"], None),
        (["/then/kernels.py", here], None),
    ):  # fmt: skip
        table = "\n".join(f'\t.file\t{number} "{file}"' for number, file in enumerate(files, 1))
        program = emulator.load(EMPTY % ("", table))
        moved = backend.in_file(program, here)
        after = [here if number == expected else file for number, file in enumerate(files)]
        assert re.findall(r'\.file\t\d+ "(.*)"', moved.module.text) == after
        assert (moved is program) == (expected is None)


def converted(*signature: Any, maps: Any = None) -> Callable[..., list[Any]]:
    """The function that converts arguments of parameters of these types."""
    source = SimpleNamespace(
        signature={f"p{i}": kind for i, kind in enumerate(signature)},
        fn=SimpleNamespace(arg_names=[f"p{i}" for i in range(len(signature))]),
    )
    made = parameters.Parameters(source, SimpleNamespace(tensordesc_meta=maps), Tensors(emulator.Memory()))
    return lambda *args: made.arguments(args)


def test_numbers_arrive_as_from_the_launcher_of_triton() -> None:
    """It passes fp32 as C does, the upper half of that as bf16, fp16 and fp64 to nearest, and integers as they are."""
    generator = random.Random(0)
    drawn = [generator.uniform(-1, 1) * 2.0 ** generator.randint(-150, 140) for _ in range(200)]
    for value in (*drawn, 0.0, -0.0, 1.0, -(2.0**200), 3.4028235e38, float("inf"), float("nan")):
        (fp32,), (again,), (bf16,), (fp64,) = (converted(kind)(value) for kind in ("fp32", "f32", "bf16", "fp64"))
        with warnings.catch_warnings(action="ignore"):
            single = np.float64(value).astype(np.float32)
        assert fp32 == again == single.tobytes()
        upper = single.view(np.uint32) & np.uint32(0xFFFF0000)
        assert bytes(2) + bf16 == upper.tobytes()
        assert fp64 == struct.pack("<d", value)
        if abs(value) < 65504:
            assert converted("fp16")(value) == [torch.tensor(value, dtype=torch.float64).half().numpy().tobytes()]
    assert converted("i32", "u64", "i1")(-5, 2**63, True) == [-5, 2**63, 1]


def test_tuples_are_passed_by_their_parts_without_constants() -> None:
    generator = random.Random(0)

    def drawn(depth: int) -> tuple[Any, Any, list[Any]]:
        """A type, an argument, and the values that it becomes."""
        if depth and generator.random() < 0.4:
            parts = [drawn(depth - 1) for _ in range(generator.randrange(4))]
            return tuple(p[0] for p in parts), tuple(p[1] for p in parts), [value for p in parts for value in p[2]]
        number = generator.randrange(-99, 99)
        return generator.choice((
            ("i32", number, [number]), ("constexpr", number, []), ("*fp32", None, [0]), ("*i8", 4096, [4096]),
        ))  # fmt: skip

    for _ in range(100):
        arguments = [drawn(3) for _ in range(4)]
        assert converted(*(kind for kind, _, _ in arguments))(*(value for _, value, _ in arguments)) == [
            value for _, _, values in arguments for value in values
        ]


def test_pointers_are_tensors_what_wraps_one_addresses_or_null() -> None:
    whole = torch.arange(64, dtype=torch.int32)
    first, second, wrapped, address, null = converted(*["*i32"] * 5)(
        whole, whole[5:], SimpleNamespace(base=whole[7:]), 2**40, None
    )
    assert (second - first, wrapped - first, address, null) == (20, 28, 2**40, 0)
    with pytest.raises(WrongInput, match="p1 is str"):
        converted("i32", "*i32")(1, "text")


def test_scratch_memory_is_as_large_as_all_ctas_need() -> None:
    for global_bytes, profile_bytes, ctas in product((0, 1, 24), (0, 8), (1, 7)):
        memory = emulator.Memory()
        metadata = SimpleNamespace(global_scratch_size=global_bytes, profile_scratch_size=profile_bytes)
        addresses = parameters.scratch(metadata, memory, ctas)
        sizes = {buffer.address: buffer.nbytes for buffer in memory.buffers}
        assert [sizes.get(address, 0) for address in addresses] == [ctas * global_bytes, ctas * profile_bytes]
        assert [bool(address) for address in addresses] == [global_bytes > 0, profile_bytes > 0]
    assert parameters.scratch(SimpleNamespace(), emulator.Memory(), 1) == [0, 0]


def test_a_session_takes_the_configuration_that_it_is_given() -> None:
    configs = [triton.Config({"BLOCK": 2**i}) for i in range(4)]
    tuner = SimpleNamespace(
        configs=configs,
        prune_configs=lambda _: configs[2:],
        base_fn=test_tuples_are_passed_by_their_parts_without_constants,
    )

    def taken(config: Any) -> Any:
        return TritonSession(emulator.HOPPER, config)._configuration(tuner, {})[0]

    own = triton.Config({})
    assert taken(own) is own
    assert taken(None) is configs[2], "the first that is left after pruning"
    for number in range(-6, 6):
        if -4 <= number < 4:
            assert taken(number) is configs[number]
        else:
            with pytest.raises(WrongInput):
                taken(number)


@pytest.mark.parametrize("grid", list(product((0, 1, 2), repeat=3)))
def test_a_grid_with_an_extent_of_zero_launches_nothing(grid: tuple[int, int, int]) -> None:
    session = TritonSession(emulator.Device())
    source = SimpleNamespace(
        signature={},
        fn=SimpleNamespace(__name__="k", arg_names=[], fn=test_a_launch_calls_the_hooks_of_triton_around_it),
    )
    metadata = SimpleNamespace(num_warps=2, num_ctas=1, shared=0, launch_pdl=False, launch_cooperative_grid=False)
    session.launch(emulator.load(EMPTY % ("", "")), source, metadata, grid, ())
    assert [launch.result.grid for launch in session.launches] == [grid] * (min(grid) > 0)
    assert all(launch.result.block == (64, 1, 1) for launch in session.launches)
