"""Two kernels that ptxas translates to wrong machine code, executed in both forms on a CPU.

    python examples/miscompilations.py                   by the installed ptxas
    python examples/miscompilations.py --ptxas PATH      by another one

The emulator executes the PTX and then the cubin that ptxas makes of it. If the results differ, the machine code is
wrong.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from kernelproof import emulator
from kernelproof.ground import toolchain

LANES = 32
KERNEL = """.version 8.7
.target {target}
.address_size 64
.visible .entry k(.param .u64 in, .param .u64 out)
{{
.reg .b64 %a<5>; .reg .b32 %r<9>; .reg .b16 %h<4>;
ld.param.u64 %a0, [in]; ld.param.u64 %a1, [out]; mov.u32 %r0, %tid.x;
mul.wide.u32 %a2, %r0, 8; add.s64 %a3, %a0, %a2; mul.wide.u32 %a2, %r0, 4; add.s64 %a4, %a1, %a2;
ld.global.v2.b32 {{%r1, %r2}}, [%a3];
{body}
st.global.b32 [%a4], %r8; ret;
}}
"""
# A constant is added to two halves, and only the lower sum is used: triton-lang/triton#11581.
HALVES = """mov.b32 {%h0, %h1}, %r1; mul.lo.s16 %h0, %h0, 9; mov.b32 %r3, {%h0, %h1}; mov.b32 %r4, 65537;
add.s16x2 %r5, %r3, %r4; mov.b32 {%h2, %h3}, %r5; cvt.u32.u16 %r8, %h2;"""
# The maximum of an absolute value and another number: pytorch/pytorch#190973.
ABSOLUTE = "neg.s32 %r3, %r1; max.s32 %r4, %r1, %r3; max.s32 %r8, %r4, %r2;"
KERNELS = {
    "sum of halves": (HALVES, ("sm_90a", "sm_100a", "sm_120a")),
    "absolute value": (ABSOLUTE, ("sm_100a",)),
}


def text(body: str, target: str) -> str:
    """The PTX of a kernel."""
    return KERNEL.format(target=target, body=body)


def values(source: str | Path) -> np.ndarray:
    """The results of a kernel, one for each lane, whose inputs are lane - 16 and 6."""
    words = np.array([(lane - LANES // 2, 6) for lane in range(LANES)], np.int32)
    memory = emulator.Memory()
    out = memory.upload(np.zeros(LANES, np.int32), "output")
    emulator.load(source).launch("k", 1, LANES, [memory.upload(words), out], memory=memory)
    return out.bytes().view(np.int32).copy()


def wrong_lanes(ptx: str, target: str, ptxas: Path, level: int = 3) -> int:
    """The number of lanes for which the machine code by ``ptxas`` has another result than the PTX."""
    with TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "k.ptx", Path(folder) / "k.cubin"
        source.write_text(ptx)
        command = [str(ptxas), f"-O{level}", f"-arch={target}", "-o", str(cubin), str(source)]
        subprocess.run(command, check=True)
        return int((values(ptx) != values(cubin)).sum())


def version(ptxas: Path) -> str:
    """The version of a ptxas, as in 13.0.88."""
    printed = subprocess.run([str(ptxas), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", printed)
    return found[1] if found else "?"


def main() -> None:
    """Print for how many lanes each kernel is wrong, by level of optimisation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--ptxas", type=Path, help="the ptxas to try")
    ptxas = parser.parse_args().ptxas or toolchain.discover().ptxas
    print(f"ptxas {version(ptxas)}")
    for name, (body, targets) in KERNELS.items():
        for target in targets:
            for level in (0, 3):
                wrong = wrong_lanes(text(body, target), target, ptxas, level)
                print(f"{name:14}  {target:7}  -O{level}  {wrong:2} of {LANES} lanes wrong")


if __name__ == "__main__":
    main()
