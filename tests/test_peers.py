"""Proves that ``scripts/sentryward.py`` describes launches as they are, and counts answers by their meaning."""

from __future__ import annotations

import struct

import numpy as np

from kernelproof.emulator import Device, Memory, Options, load
from kernelproof.emulator.hopper.tensor_map import TensorMap
from kernelproof.emulator.host.tensors import Tensors
from kernelproof.ground.chips import GPUS
from scripts.sentryward import Answer, Comparison, input_of, table

# A kernel with parameters of every kind.
PTX = """
.version 8.7
.target sm_100a
.address_size 64
.visible .entry copy(.param .u64 x, .param .align 8 .b8 sizes[16], .param .align 64 .b8 map[128])
{
  .reg .b32 %r<4>;
  .reg .b64 %rd<4>;
  ld.param.u64 %rd1, [x];
  ld.param.v2.u32 {%r1, %r2}, [sizes];
  ld.param.u64 %rd2, [sizes+8];
  ret;
}
"""


def test_an_input_has_scalars_and_tensor_maps_and_leaves_pointers_open() -> None:
    memory = Memory()
    x = memory.upload(np.zeros((64, 128), np.float16), "inout")
    swizzled = TensorMap(6, x.address, (128, 64), (256,), (64, 8), (1, 1), 0, 3, 0, 0)
    arguments = [x, struct.pack("<IIQ", 7, 9, x.address), swizzled.encode()]
    launch = load(PTX).prepare(
        "copy", (2, 3), 64, arguments, Tensors(memory), Device.of(GPUS["b200"]), Options(), shared_bytes=512, ctas=None,
        cluster=2, overlapping=False, cooperative=False,
    )  # fmt: skip
    given = input_of(launch)
    assert given["entry"] == "copy"
    assert given["launch"] == {
        "grid_dim": (2, 3, 1), "block_dim": (64, 1, 1), "cluster_dim": (2, 1, 1), "dynamic_shared_bytes": 512,
    }  # fmt: skip
    word = {"parameter": "sizes", "type": "u32"}
    assert given["arguments"] == [word | {"offset": 0, "value": 7}, word | {"offset": 4, "value": 9}]
    (map_,) = given["tma_descriptors"]
    assert (map_["parameter"], map_["offset"], map_["swizzle"], map_["element_type"]) == ("map", 0, "128B", "f16")
    assert (map_["global_shape"], map_["global_strides_bytes"], map_["box_shape"]) == ((128, 64), (256,), (64, 8))


def test_a_table_counts_the_answers_of_each_group() -> None:
    right, wrong = Answer("right", "race_free", 1.0), Answer("wrong", "potential_race", 3.0)
    rows = [Comparison("a", "examples", right, wrong), Comparison("b", "examples", wrong, wrong)]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(rows).splitlines()[2:]]
    assert [row[2:] for row in cells] == [["1", "1", "0", "2.00"], ["0", "2", "0", "3.00"]]
