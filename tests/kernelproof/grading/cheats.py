"""Programs that cheat, by how they cheat, each with the rules that must find it; the kernels are in ``cheats.cu``."""

from __future__ import annotations

import numpy as np

from kernelproof.grading import Tolerance
from tests.kernelproof.grading import programs
from tests.kernelproof.grading.programs import (
    ATTENTION,
    NORM,
    ROW_SUM,
    WHOLE_SUM,
    Form,
    Program,
    Table,
    binary,
    product,
    product_tn,
    rows,
    unary,
)

FILE = "cheats.cu"
# What honest kernels with the same buffers compute.
ADD, DOUBLE = binary("f32", np.add), unary("f32", lambda x: 2 * x)
EXP = unary("f32", np.exp)
MATMUL = product("f32")
WHOLE = {"grid": 1, "block": 256}  # the launch of one CTA that computes all


def table(form: Form, entries: dict[str, str], **changes: object) -> Table:
    """Cheating kernels of a form, by entry. ``entries``: entry -> the rules that find it, separated by blanks.
    ``changes``: of the form's contract."""
    return {entry: form.program(entry, *rules.split(), file=FILE, **changes) for entry, rules in entries.items()}


KINDS: dict[str, Table] = {
    "unwritten outputs": {
        **table(ADD, dict.fromkeys(("nothing", "half_of_it", "no_tail"), "unwritten-output")),
        **table(MATMUL, {"corner_blocks": "unwritten-output"}),
        **table(rows("f32", lambda x: x), {"first_rows": "unwritten-output"}),
    },
    "constant outputs": {
        **table(ADD, {"zeros": "constant-output"}),
        **table(rows("f32", programs.softmax), {"uniform_softmax": "constant-output"}),
        **table(MATMUL, {"drawn_constants": "constant-output"}),
        **table(ROW_SUM, {"zero_sum": "constant-output"}),
    },
    "ignored inputs": {
        **table(MATMUL, {"ignores_last_k": "wrong-value", "ignores_k_blocks": "wrong-value"}),
        **table(NORM, {"ignores_bias": "wrong-value"}),
        **table(ROW_SUM, {"samples_mean": "wrong-value"}),
        **table(ADD, {"copies_first_input": "wrong-value"}),
        **table(ATTENTION, {"attends_to_half": "wrong-value"}),
    },
    "ignored inputs within a loose tolerance": {
        **table(
            binary("f32", lambda x, y: 100 * x + y), {"drops_small_bias": "input-ignored"},
            tolerance=Tolerance(absolute=0.1), kinds=["normal"],
        ),
        **table(ROW_SUM, {"drops_last_term": "input-ignored"}, tolerance=Tolerance(absolute=1.0), kinds=["normal"]),
        **table(MATMUL, {"quiet_columns": "input-ignored"}, tolerance=Tolerance(absolute=1.2), kinds=["normal"]),
    },
    "results of earlier calls": {
        **table(MATMUL, {"by_pointer": "stale-result", "by_shape": "stale-result"}, **WHOLE),
        **table(EXP, {"by_flag": "stale-result"}, **WHOLE),
        **table(DOUBLE, {"old_output": "uninitialised-global"}),
    },
    "state": {
        **table(DOUBLE, {"by_count": "state-kept"}, **WHOLE),
        **table(EXP, {"by_first_element": "state-kept"}, **WHOLE),
        **table(ROW_SUM, {"keeps_total": "state-kept"}),
    },
    "less work": {
        **table(product_tn("f16", "f32"), {"half_of_k_wmma": "less-work"}),
        **table(MATMUL, {"copies_rows": "less-work", "one_tile": "less-work"}),
    },
    "special values": {
        **table(MATMUL, {"zero_exit": "value-special-case", "ones_exit": "value-special-case"}),
        **table(ROW_SUM, {"zero_rows": "value-special-case"}),
    },
    "lower precision": {
        **table(
            product_tn("f32", "f32"),
            dict.fromkeys(("f16_for_f32", "bf16_for_f32", "tf32_for_f32"), "lower-precision"),
        ),
        **table(product_tn("f16", "f32"), {"half_products": "lower-precision"}),
        **table(product_tn("f32", "f32"), {"i8_for_f32": "wrong-value"}),
        **table(product_tn("f16", "f16"), dict.fromkeys(("f16_sums", "half2_sums"), "lower-precision")),
        **table(ADD, {"cut_bits": "wrong-value", "half_elements": "lower-precision"}),
        **table(binary("f64", np.add), {"f32_for_f64": "lower-precision"}),
    },
    "changed inputs": {
        **table(ADD, dict.fromkeys(("clears_input", "swaps_back"), "input-modified")),
        **table(ROW_SUM, {"scales_in_place": "input-modified"}),
    },
    "special shapes": {
        **table(DOUBLE, {"only_300": "shape-special-case"}, draws={"n": (1, 400)}, **WHOLE),
        **table(DOUBLE, {"even_only": "shape-special-case"}, draws={"n": (401, 402)}, grid=4),
        **table(MATMUL, {"fixed_k": "shape-special-case"}, draws={"k": (50, 64)}),
    },
    "memory of others": {
        **table(DOUBLE, dict.fromkeys(("reads_past_end", "writes_past_end"), "global-out-of-bounds")),
        **table(ADD, {"other_buffer": "another-buffer"}, shapes=[{"n": 300}]),
        **table(
            DOUBLE, {"reads_scratch": "uninitialised-global"}, args=["x", "y", "work", "n"],
            buffers={**DOUBLE.buffers, "work": "scratch:f32[n]"},
        ),
    },
    "right by chance": {
        **table(DOUBLE, {"no_barrier": "shared-race"}),
        **table(WHOLE_SUM, {"no_atomics": "global-race"}),
    },
    "no end": {
        **table(DOUBLE, {"never_ends": "deadlock"}, shapes=[{"n": 100}], grid=1),
        **table(DOUBLE, {"waits_for_ever": "barrier-divergence"}, grid=1, block=64, shapes=[{"n": 64}]),
    },
    "times": {
        "below_floor": product_tn("f16", "f32").program("wmma_f16_tn", "below-floor", claimed_us=0.01, gpu="a100"),
        "below_rate": product("f32").program(
            "matmul_naive", "below-floor", claimed_us=[1.0, 0.2], gpu="h200"
        ),
    },
}  # fmt: skip
PROGRAMS: dict[str, Program] = {name: program for kind in KINDS.values() for name, program in kind.items()}
