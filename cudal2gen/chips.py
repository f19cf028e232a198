"""Facts of each GPU model. Every per-GPU number of the project is here."""

from __future__ import annotations

from typing import NamedTuple


class Gpu(NamedTuple):
    """Limits of one GPU model, from the CUDA programming guide's table of compute capabilities."""

    title: str
    sm: str
    sms: int
    smem_block_bytes: int
    smem_sm_bytes: int
    threads_sm: int
    blocks_sm: int

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor number of the compute capability."""
        major, minor = divmod(int(self.sm.removeprefix("sm_")), 10)
        return major, minor


GPUS: dict[str, Gpu] = {
    "a100": Gpu("A100", "sm_80", 108, 163 << 10, 164 << 10, 2048, 32),
    "rtx3090": Gpu("GeForce RTX 3090", "sm_86", 82, 99 << 10, 100 << 10, 1536, 16),
    "l40s": Gpu("L40S", "sm_89", 142, 99 << 10, 100 << 10, 1536, 24),
    "h100": Gpu("H100", "sm_90", 132, 227 << 10, 228 << 10, 2048, 32),
    "h200": Gpu("H200", "sm_90", 132, 227 << 10, 228 << 10, 2048, 32),
    "rtx5090": Gpu("GeForce RTX 5090", "sm_120", 170, 99 << 10, 100 << 10, 1536, 24),
}
REGISTERS_SM = 65536
REGISTERS_THREAD = 255
