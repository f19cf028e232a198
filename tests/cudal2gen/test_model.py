"""Proves the cheap form of the timing model against bounds worked out by hand and known orders of kernels.

The bounds have these constants of ``kernelproof.ground.chips`` and of ``cudal2gen.timing.model``:

- H200: 1700 MHz; per clock and SM 4096 FLOP, of which several warpgroups sustain 0.93, 128 bytes from shared memory and
  40 from the L2; a load takes 0.7 us from device memory, and 263 clocks from the L2; the TMA adds 170 clocks.
- A100: 1380 MHz; per clock and SM 2048 FLOP, of which mma.sync sustains 0.85, 128 bytes from shared memory and 40 from
  the L2, or up to 64 if few SMs load; a load takes 0.6 us, and 262 clocks from the L2.
- All: 1.6 us for a launch, 0.35 for the first tensor map, 0.3 before the first load, and 0.3 for an epilogue without
  its stores. An SM stores 64 bytes per clock by TMA, and 20 otherwise.
- Partial sums: three round trips to the L2 and one for every eight loads of 16 bytes. Within a cluster two trips of 180
  clocks, and 13 bytes per clock.

A half has 2 bytes.
"""

from __future__ import annotations

import importlib.util
import sys
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cudal2gen import places
from cudal2gen.generation import catalog
from cudal2gen.kernel import (
    IllegalRecord,
    Problem,
    Record,
    Sm90Wgmma,
    Sm100Tcgen05,
    ceil_div,
    parse,
    revise,
)
from cudal2gen.timing import model
from cudal2gen.timing.model import memory
from kernelproof.ground.chips import GPUS
from kernelproof.profile.rates import l2_share
from tests.cudal2gen.strategies import direct, multistage, single_shot, wgmma
from tests.draws import draw_part


@pytest.fixture(scope="module")
def modelled() -> ModuleType:
    """The module ``scripts/modelled.py``."""
    root = places.checkout()
    assert root is not None
    spec = importlib.util.spec_from_file_location("modelled", root / "scripts" / "modelled.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["modelled"] = module
    spec.loader.exec_module(module)
    return module


def large(**changes: Any) -> Record:
    """A record for 4096^3 in tiles of 128 x 256: 512 tiles on 132 SMs, four of them on the busiest SM, with 64 k-tiles
    each."""
    fields: dict[str, Any] = {
        "m": 4096, "n": 4096, "k": 4096, "acc": "f32", "bm": 128, "bn": 256, "bk": 64, "stages": 4, "atom_n": 256,
        "cluster": [1, 1], "consumers": 2, "registers": [40, 232], "raster_group": 8,
    }  # fmt: skip
    return wgmma(**(fields | changes))


def test_bounds_by_hand() -> None:
    """Three waves of 132 CTAs and one of 116 have 64 k-tiles each. In the last one each SM gets more of the L2."""
    estimate = model.estimate(large())
    steps = 4 * 64
    flops = 2 * 128 * 256 * 64
    assert estimate.bounds_us["mma"] == pytest.approx(steps * flops / 4096 / 0.93 / 1700)
    # Each of two atoms of 64 x 256 reads (64 + 256) x 64 halves. The stage's (128 + 256) x 64 halves are loaded.
    moved = (2 * (64 + 256) + 128 + 256) * 64 * 2
    assert estimate.bounds_us["shared memory"] == pytest.approx(steps * moved / 128 / 1700)
    step_bytes = (128 + 256) * 64 * 2
    assert estimate.bounds_us["L2"] == pytest.approx(64 * (3 + 116 / 132) * step_bytes / 40 / 1700)
    # Three stages are in flight while the fourth is multiplied. The TMA adds 170 clocks to a load.
    assert estimate.bounds_us["latency"] == pytest.approx(steps * (0.7 + 170 / 1700) / 3)
    bounds = [estimate.bounds_us[name] for name in ("mma", "shared memory", "L2", "latency", "device memory")]
    assert len(estimate.bounds_us) == len(bounds)
    # The main loop takes the norm of the five bounds with exponent 16, because the TMA copies.
    assert max(bounds) < estimate.main_us < max(bounds) * 5 ** (1 / 16)
    # The launch and the tensor map, the descriptors and the first load, and the drain and stores of four tiles in
    # sequence.
    store_us = 128 * 256 * 2 / 64 / 1700
    outside_us = 1.6 + 0.35 + 0.3 + 0.7 + 170 / 1700 + 4 * (0.3 + store_us)
    assert estimate.around_us == pytest.approx(outside_us)
    assert estimate.us == pytest.approx(estimate.main_us + outside_us)


def test_an_epilogue_during_another_tiles_main_loop_takes_shared_memory_and_no_time() -> None:
    fields: dict[str, Any] = {"bn": 128, "atom_n": 128, "schedule": "pingpong"}
    estimate = model.estimate(large(**fields))
    # The 1024 tiles of 128 x 128 are 7 waves of 132 and one of 100, of 64 k-tiles. A tile of D passes shared memory
    # twice in the course of these.
    moved = (2 * (64 + 128) + 128 + 128) * 64 * 2 + 2 * 128 * 128 * 2 / 64
    assert estimate.bounds_us["shared memory"] == pytest.approx(8 * 64 * moved / 128 / 1700)
    assert estimate.around_us == pytest.approx(1.6 + 0.35 + 0.3 + 0.7 + 0.1 + 0.3 + 128 * 128 * 2 / 64 / 1700)


def test_bounds_of_mma_sync_by_hand() -> None:
    """2 x 2 warps on 128 x 128 read each row of A and each column of B twice; both are written once."""
    record = multistage(padding="none", bm=128, bn=128, bk=64, mma_repeat=[2, 2, 1], stages=3, split_k=1)
    assert record.ctas_by_smem == 1
    estimate = model.estimate(record)
    # There are nine waves of 108 CTAs and one of 52, which load 64 bytes a clock from the L2.
    steps = 10 * 64
    moved = (128 * 2 + 128 * 2 + 128 + 128) * 64 * 2
    # A row of a stage is a line of 128 bytes.
    assert estimate.bounds_us["shared memory"] == pytest.approx(steps * (moved / 128 + 128 + 128) / 1380)
    assert estimate.bounds_us["mma"] == pytest.approx(steps * 2 * 128 * 128 * 64 / 2048 / 0.85 / 1380)
    assert estimate.bounds_us["L2"] == pytest.approx(64 * (9 / 40 + 1 / 64) * (128 + 128) * 64 * 2 / 1380)
    assert estimate.bounds_us["latency"] == pytest.approx(steps * 0.6 / 2)
    store_us = 128 * 128 * 2 / 20 / 1380
    assert estimate.around_us == pytest.approx(1.6 + 10 * (0.3 + 0.6 + 0.3 + store_us))


@pytest.mark.parametrize(
    ("bm", "bn", "bk", "repeat", "clocks"),
    [
        # MMAs of 48 clocks per k-block hide half of an iteration's 100 clocks.
        (64, 64, 32, [2, 2, 1], 2 * 2 * 64 * 64 * 16 / 2048 / 0.85 + 100 - 2 * 64 * 64 * 16 / 2048 / 0.85),
        # A single warp uses one of four sub-cores: MMAs take 38 clocks per block on a fourth of the SM.
        (16, 32, 64, [1, 1, 1], 4 * 4 * 2 * 16 * 32 * 16 / 2048 / 0.85 + 100 - 4 * 2 * 16 * 32 * 16 / 2048 / 0.85),
        # Eight blocks of ldmatrix, in sequence.
        (32, 32, 128, [2, 2, 1], 8 * 38),
    ],
)
def test_a_lone_ctas_chain_of_waits_by_hand(bm: int, bn: int, bk: int, repeat: list[int], clocks: float) -> None:
    """``clocks``: those of one of four k-tiles. A k-block of 16 takes at least 38 clocks. Between a k-tile's last MMA
    and the next one's first are 100 clocks, fewer if MMAs are in flight."""
    swizzle = {"smem_swizzle": [2, 3, 3] if bk == 32 else [3, 3, 3]}
    record = multistage(
        m=bm, n=bn, k=4 * bk, bm=bm, bn=bn, bk=bk, mma_repeat=repeat, padding="none", stages=3, split_k=1, c_batch=1,
        **swizzle,
    )  # fmt: skip
    assert model.estimate(record).bounds_us["mma"] == pytest.approx(4 * clocks / 1380)


def test_a_load_that_is_waited_for_is_in_the_chain() -> None:
    kernel = model.kernel_of(multistage(m=128, n=128, k=512, padding="none", split_k=1))
    ring, waiting = (model.estimate_kernel(kernel._replace(flight=flight)).bounds_us for flight in (2, 0))
    assert waiting["latency"] == 0.0
    assert waiting["mma"] - ring["mma"] == pytest.approx(kernel.tile_steps * 0.6)


def test_an_sm_takes_its_share_of_the_l2_and_what_its_port_passes() -> None:
    a100 = GPUS["a100"]
    assert (a100.rates.l2_bytes, a100.sms) == (40, 108)
    shares = [l2_share(a100.rates, a100.sms, ctas) for ctas in (1000, 108, 90, 1)]
    assert shares == pytest.approx([40, 40, 48, 64])


def test_what_the_l2_forgets_between_waves_by_hand() -> None:
    """16384 cubed on an A100: 108 tiles of 128 x 128 at a time, in slices of 2048 columns with 16 tiles per row.

    A wave needs 7 rows of tiles and 16 columns of A and B from device memory; D is written once.
    """
    record = multistage(m=16384, n=16384, k=16384, raster="zsplit", swizzle_stride=2048, padding="none", split_k=1)
    rows, columns = 7 * 128, 16 * 128
    per_wave = 2 * 16384 * (rows + columns)
    expected = 128 * 128 / 108 * per_wave + 2 * 16384 * 16384
    assert memory.dram_bytes(record, record.work, record.target.rates, 108) == pytest.approx(expected)
    plain = revise(record, raster="plain", swizzle_stride=None)
    assert memory.dram_bytes(plain, plain.work, record.target.rates, 108) > 1.8 * expected


def test_fragments_from_global_memory_by_hand() -> None:
    """Without a ring every warp loads its own fragments from the L2, 16 bytes at a time: A once per column of warps,
    and B once per row."""
    record = direct(m=64, n=128, k=128, bm=32, bn=64, mma_repeat=[2, 4, 1])
    estimate = model.estimate(record)
    fragments = (32 * 4 + 64 * 2) * 32 * 2
    assert estimate.bounds_us["shared memory"] == pytest.approx(4 * fragments / 16 / 1380)
    assert estimate.bounds_us["L2"] == pytest.approx(4 * fragments / 64 / 1380)


def sums_us(record: Record) -> float:
    """The modelled microseconds of a record's sums over slices of k, with one CTA at a time on an SM."""
    return memory.sums_us(record, record.work, record.target.rates, record.target.sms, 1)


def test_partial_sums_by_hand() -> None:
    """Partial sums take round trips to the L2, and the time of the bytes that are stored and loaded."""
    # Four tiles have 16 slices each. Each of 64 CTAs stores 128 x 256 floats and adds as many, with 32 loads per
    # thread.
    shared = large(m=128, n=1024, k=16384, split_k=16, reduce="workspace")
    expected = ((3 + 4) * 263 + 2 * 128 * 256 * 4 / 40) / 1700
    assert sums_us(shared) == pytest.approx(expected)
    # 132 SMs share 34 tiles. Each SM computes 34/132 of a tile, and stores and adds one and 34/132 tiles.
    streamed = large(m=128, n=34 * 256, stream_k=True)
    assert model.estimate(streamed).bounds_us["mma"] == pytest.approx(
        34 / 132 * 64 * 2 * 128 * 256 * 64 / 4096 / 0.93 / 1700
    )
    parts = 1 + 34 / 132
    expected = ((3 + -(-parts * 32 // 8)) * 263 + 2 * parts * 128 * 256 * 4 / 40) / 1700
    assert sums_us(streamed) == pytest.approx(expected)
    # If the last wave is whole, no part is stored.
    assert sums_us(large(m=128, n=132 * 256, stream_k=True)) == 0.0


def test_sums_of_a_cluster_by_hand() -> None:
    """The sums take two round trips to shared memory of other CTAs, and the time of the parts that a CTA sends: three
    quarters of its tile."""
    record = large(m=512, n=512, k=16384, bn=128, atom_n=128, split_k=4, reduce="cluster", epilogue="direct")
    assert sums_us(record) == pytest.approx((2 * 180 + 128 * 128 * 4 * 3 / 4 / 13) / 1700)


def test_partial_sums_of_the_last_to_arrive_by_hand() -> None:
    """Each CTA stores one slice of a tile. The last one reads all eight, with 256 loads per thread."""
    record = multistage(
        padding="none", bm=128, bn=128, bk=64, mma_repeat=[2, 2, 1], stages=3, split_k=8, m=256, n=256, k=8192
    )
    expected = ((3 + 32) * 262 + (1 + 8) * 128 * 128 * 4 / 40) / 1380
    assert sums_us(record) == pytest.approx(expected)


@pytest.mark.parametrize("gpu", [gpu for gpu, chip in GPUS.items() if chip.sms])
def test_clusters_of_more_than_two_leave_a_sixteenth_of_the_sms_idle(gpu: str) -> None:
    chip = GPUS[gpu]

    def usable(ctas: int) -> int:
        return memory.usable_sms(SimpleNamespace(target=chip, cluster_ctas=ctas))  # type: ignore[arg-type]

    assert (usable(1), usable(2)) == (chip.sms, chip.sms - chip.sms % 2)
    for ctas in (3, 4, 8, 16):
        assert usable(ctas) % ctas == 0
        assert 0 <= chip.sms * 15 / 16 - usable(ctas) < ctas


def test_stream_k_pays_where_the_last_wave_is_nearly_empty_and_k_is_long() -> None:
    us = lambda record: model.estimate(record).us  # noqa: E731
    nearly_empty = {"m": 10 * 128, "n": 14 * 256, "k": 8192}
    assert us(large(**nearly_empty, stream_k=True)) < 0.7 * us(large(**nearly_empty))
    assert us(large(**(nearly_empty | {"k": 256}), stream_k=True)) > us(large(**(nearly_empty | {"k": 256})))


def test_what_the_model_knows() -> None:
    us = lambda record: model.estimate(record).us  # noqa: E731
    assert us(large()) < us(large(bn=128, atom_n=128)), "a wide tile reads less"
    assert model.estimate(large(cluster=[2, 1])).bounds_us["L2"] < model.estimate(large()).bounds_us["L2"]
    few = {"m": 512, "n": 512, "k": 16384, "epilogue": "direct"}
    split = large(**few, split_k=4, reduce="cluster")
    assert us(split) < us(large(**few)), "eight tiles leave most SMs idle"
    square = large(m=1024, n=1024, k=1024)
    bounds, larger = model.estimate(square).bounds_us, model.estimate(large()).bounds_us
    assert bounds["mma"] == pytest.approx(larger["mma"] / 16), "a CTA of 16 k-tiles"
    assert bounds["L2"] < larger["L2"] / 16, "few SMs have more of the L2 each"
    bands = large(m=16384, n=16384, k=16384, raster_group=8)
    dram = model.estimate(bands).bounds_us["device memory"]
    assert dram < model.estimate(revise(bands, raster_group=1)).bounds_us["device memory"]
    assert dram > bands.problem.traffic_bytes / 4.1e6


def test_what_is_in_flight_by_family() -> None:
    """A ring loads all stages except the one that is multiplied. A single shot loads all of its k at once."""
    assert [large(stages=stages).steps_in_flight for stages in (2, 4)] == [1, 3]
    assert [multistage(stages=stages).steps_in_flight for stages in (1, 2, 3)] == [1, 1, 2]
    assert single_shot(k_chunks=4).steps_in_flight == 4
    assert direct().steps_in_flight == 1
    assert model.estimate(single_shot(k_chunks=4)).bounds_us["latency"] == 0.0


@pytest.mark.slow
def test_every_family_has_an_estimate() -> None:
    for record in draw_part(catalog.load(places.shipped("configs") / "kernels.jsonl")[::61], 3):
        estimate = model.estimate(record)
        chip = record.target
        floor = record.problem.flops / (chip.capability.mma_flops * chip.sms * chip.rates.mhz)
        assert estimate.us > floor, record.mnk


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "sources"), [("h200", {"timing model", "published H100 choice"}), ("b200", {"timing model"})]
)
def test_the_catalogs_records_are_the_models_choice(modelled: ModuleType, gpu: str, sources: set[str]) -> None:
    """The records are those that the model chooses today, so the origin that they state is true.

    After a change of the model or a chip, write the records again by scripts/modelled.py.
    """
    own = catalog.load(places.shipped("configs") / "kernels.jsonl")
    records = [record for record in own if record.gpu == gpu and record.origin.structure == "modelled"]
    assert {record.origin.source for record in records} == sources
    for record in draw_part(records[::37], 4):
        assert record in modelled.near_best(record.problem)


@pytest.mark.slow
def test_both_accumulators_have_every_problem(modelled: ModuleType) -> None:
    own = catalog.load(places.shipped("configs") / "kernels.jsonl")
    sizes = {(record.m, record.n, record.k) for record in own if record.gpu == "a100"}
    for gpu, acc in product(modelled.DECODING, ("f16", "f32")):
        selected = [record for record in own if (record.gpu, record.acc, record.layout) == (gpu, acc, "tn")]
        decode = set(modelled.DECODE) if acc == "f32" else set()
        assert {(record.m, record.n, record.k) for record in selected} == sizes | decode
        assert len({record.name for record in selected}) <= 340


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "family"), [("h200", Sm90Wgmma), ("b200", Sm100Tcgen05)])
def test_products_of_decoding_have_records_that_any_fewer_rows_take(
    modelled: ModuleType, gpu: str, family: type[Sm90Wgmma | Sm100Tcgen05]
) -> None:
    """Few rows of D lie along the columns of an instruction, CTAs share the k of a router's few tiles, and kernels
    overlap."""
    path = places.shipped("configs") / "kernels.jsonl"
    own = {(r.m, r.n, r.k): r for r in catalog.load(path) if (r.gpu, r.acc, r.layout) == (gpu, "f32", "tn")}
    for m, n, k in modelled.DECODE:
        record = own[m, n, k]
        assert isinstance(record, family)
        assert record.swap_ab or m > 16
        assert record.split_k > 1 or record.stream_k or (n, k) not in modelled.ROUTERS
        assert record.pdl
        if gpu == "b200":
            steps = ceil_div(k, record.bk) if record.stream_k else 1
            # A router of 256 columns has 112 k-tiles of 128 for all CTAs.
            assert min(record.ctas * steps, record.target.sms) >= (112 if n == 256 else 120)
        for rows in {m - 1, (m + 1) // 2 + 1} - {0}:
            larger = min(row for row in modelled.DECODE_ROWS if row >= rows)
            problem = Problem(gpu=gpu, acc="f32", layout="tn", m=rows, n=n, k=k)
            assert catalog.find(problem, path).record.code() == own[larger, n, k].code()


def columns_first(record: Record) -> Record | None:
    """The record with B stored (K,N); None if its producer has too few registers for the narrower boxes."""
    try:
        return revise(record, layout="nn")
    except IllegalRecord:
        return None


@pytest.mark.slow
def test_other_layouts_choose_alike(modelled: ModuleType) -> None:
    """The model treats both layouts alike: a record for (N,K) that is legal for (K,N) is a candidate there."""
    records = [record for record in catalog.load(places.shipped("configs") / "kernels.jsonl") if record.gpu == "h200"]
    forms = [form for record in draw_part(records[::97], 3) if (form := columns_first(record))]
    assert len(forms) > 5
    for form in forms:
        assert form.code() in [offer.code() for offer in modelled.near_best(form.problem)]


def test_variants_are_legal_and_many(modelled: ModuleType) -> None:
    problem = Problem(gpu="h200", acc="f32", layout="tn", m=64, n=4096, k=4096)
    offered = list(modelled.variants(problem))
    assert len(offered) > 300
    assert "sm90_wgmma" in {record.family for record in offered}
    assert any(record.swap_ab for record in offered)
    assert all(parse(record.model_dump(mode="json")) == record for record in offered[::29])


def test_few_kernels_serve_many_problems(modelled: ModuleType) -> None:
    """``cover`` chooses one of each problem's offers. The kernel that most problems could use is taken first, and one
    that the catalog has already counts twice."""
    wide, narrow, split = large(), large(bn=128, atom_n=128), large(bn=192, atom_n=192)
    offers = [[narrow, wide], [narrow], [split, narrow]]
    assert modelled.cover(offers, set()) == [narrow, narrow, narrow]
    assert modelled.cover([[narrow], [wide, split]], {split.name}) == [narrow, split]
    assert modelled.cover([[narrow], [wide, split]], {wide.name}) == [narrow, wide]
    assert modelled.cover([[narrow, wide], [split, wide]], set()) == [wide, wide]


def test_published_choices_seed_their_problems(modelled: ModuleType) -> None:
    """A certain published H100 configuration is taken if the model gains less than a tenth with another one."""
    facts = next(facts for facts in modelled.hopper_choices().values() if (facts["bm"], facts["bn"]) == (128, 256))
    problem = Problem(gpu="h200", acc="f32", layout="tn", m=facts["m"], n=facts["n"], k=facts["k"])
    offers = modelled.near_best(problem)
    assert {offer.origin.source for offer in offers} == {"published H100 choice"}
    assert {(offer.bm, offer.bn, offer.cluster) for offer in offers} == {(128, 256, tuple(facts["cluster"][:2]))}


@pytest.mark.parametrize(
    ("gpu", "family", "area", "cluster"),
    [
        ("rtx4090", "sm80_multistage", 128 * 128, 1),
        ("rtx5090", "sm120_mma", 128 * 128, 1),
        ("b200", "sm100_tcgen05", 128 * 256, 2),
    ],
)
def test_large_products_take_the_tiles_of_published_kernels(
    modelled: ModuleType, gpu: str, family: str, area: int, cluster: int
) -> None:
    offers = modelled.near_best(Problem(gpu=gpu, acc="f32", layout="tn", m=8192, n=8192, k=8192))
    assert family in {offer.family for offer in offers}
    assert min(offer.bm * offer.bn for offer in offers) == area
    assert all(offer.split_k == 1 and offer.cluster_ctas == cluster for offer in offers)
    few = modelled.near_best(Problem(gpu=gpu, acc="f32", layout="tn", m=64, n=64, k=16384))
    assert all(offer.split_k > 1 and offer.origin.source == "timing model" for offer in few)


@pytest.mark.slow
def test_the_script_writes_into_a_catalog_of_its_own(
    modelled: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "kernels.jsonl"
    tuned = revise(large(), origin={"source": "H200", "structure": "tuned", "changed": []})
    others = [record for record in catalog.load() if record.gpu == "a100" and record.k == 64][:3]
    catalog.save([tuned, *others], target)
    monkeypatch.setenv("CUDAL2GEN_CATALOG", str(target))
    sizes = [(64, 64, 64), (4096, 4096, 4096)]
    problems = [Problem(gpu="h200", acc=acc, layout="tn", m=m, n=n, k=k) for acc in ("f32", "f16") for m, n, k in sizes]
    monkeypatch.setattr(modelled, "problems", lambda gpu: [problem for problem in problems if problem.gpu == gpu])
    monkeypatch.setattr(sys, "argv", ["modelled.py", "--write"])
    modelled.main()
    written = catalog.load(target)
    assert tuned in written, "what was tuned stays"
    assert len(written) == len(others) + 4
