"""Proves that a model's layers move to our kernels and back, and that its products are listed."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cudal2gen
from cudal2gen import cli, pack
from cudal2gen.generation import catalog
from cudal2gen.kernel import Problem
from tests.cudal2gen import packed
from tests.cudal2gen.emulated import EmulatedDevice, OperatorDevice
from tests.packages import require

torch = require("torch")

from cudal2gen.operators import emulated, shapes  # noqa: E402

pytestmark = pytest.mark.torch


def run_here(*arguments: str) -> Any:
    """The command line in this process, which has torch already."""
    from typer.testing import CliRunner

    return CliRunner().invoke(cli.app, arguments)


EXAMPLE = Path(__file__).parents[2] / "examples" / "llama.py"


@pytest.fixture(scope="module")
def llama() -> Any:
    """The module of the example model."""
    return shapes._from_file(EXAMPLE)


@pytest.fixture
def model(llama: Any) -> Any:
    """A small fp16 model of the example, with equal weights at each call."""
    torch.manual_seed(0)
    return llama.Llama(words=32, width=32, heads=2, blocks=1).half().eval()


TOKENS = torch.arange(6)[None]  # a batch of one sequence, the model's input


# --- patch and unpatch ---


@pytest.mark.slow
def test_layers_are_replaced_and_taken_back(model: Any) -> None:
    before, keys = model(TOKENS), list(model.state_dict())
    replaced = cudal2gen.patch(model)
    assert len(replaced.layers) == 8
    assert replaced.layers[0] == "blocks.0.attention.query"
    assert replaced.left == {}
    assert "8 layers replaced" in str(replaced)
    count = cudal2gen.stats()["torch"].get("on the CPU", 0)
    torch.testing.assert_close(model(TOKENS), before, atol=0.02, rtol=0.02)
    assert cudal2gen.stats()["torch"]["on the CPU"] == count + 8
    assert list(model.state_dict()) == keys
    second = cudal2gen.patch(model)
    assert second.layers == []
    assert set(second.left.values()) == {"replaced before"}
    assert cudal2gen.unpatch(model) == replaced.layers
    assert torch.equal(model(TOKENS), before)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert cudal2gen.unpatch(model) == []


def test_what_is_no_plain_fp16_layer_stays() -> None:
    class Own(torch.nn.Linear):  # type: ignore[misc]
        pass

    subclass = torch.nn.Linear(8, 8).half()
    subclass.forward = lambda x: x
    layers = {
        "plain": torch.nn.Linear(8, 8).half(), "wide": torch.nn.Linear(8, 8).double(), "own": Own(8, 8).half(),
        "set": subclass, "tied": torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 8).half()),
        "other": torch.nn.ReLU(),
    }  # fmt: skip
    replaced = cudal2gen.patch(torch.nn.ModuleDict(layers))
    assert replaced.layers == ["plain"]
    assert replaced.left == {
        "wide": "its weights are torch.float64, not torch.float16 or torch.bfloat16, and no autocast makes them so",
        "own": "a Own, which may compute something else",
        "set": "has a forward of its own",
        "tied": "a ParametrizedLinear, which may compute something else",
    }
    assert "4 left as they were" in str(replaced)
    cudal2gen.unpatch(torch.nn.ModuleDict(layers))
    assert layers["set"].forward(3) == 3, "another's forward stays"


@pytest.mark.slow
def test_hooks_gradients_copies_and_conversions_go_on(model: Any) -> None:
    cudal2gen.patch(model)
    calls: list[int] = []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    model(TOKENS).sum().backward()
    assert calls == [1]
    assert model.head.weight.grad is not None
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.head.weight.zero_()
    assert not torch.equal(copied(TOKENS), model(TOKENS)), "a copy computes with its own weights"
    assert float(copied(TOKENS).detach().abs().max()) == 0
    layer = pickle.loads(pickle.dumps(cudal2gen_layer()))
    assert torch.equal(layer(torch.ones(2, 8).half()), cudal2gen_layer()(torch.ones(2, 8).half()))
    model.float()
    assert model(TOKENS).dtype == torch.float32, "converted after it was patched"
    model.half()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.head(torch.ones(2, 32)).dtype == torch.bfloat16


def cudal2gen_layer() -> Any:
    """A linear layer that is patched."""
    torch.manual_seed(1)
    layer = torch.nn.Linear(8, 4).half()
    cudal2gen.patch(layer)
    return layer


@pytest.mark.slow
def test_a_compiled_model_gives_the_same(model: Any) -> None:
    torch._dynamo.reset()
    cudal2gen.patch(model)
    with torch.no_grad():
        expected = model(TOKENS)
        output = torch.compile(model, fullgraph=True, backend="aot_eager")(TOKENS)
    torch.testing.assert_close(output, expected, atol=0.01, rtol=0.01)


@pytest.mark.slow
def test_the_example_runs() -> None:
    env = os.environ | {"PYTHONPATH": str(EXAMPLE.parents[1])}
    command = [sys.executable, str(EXAMPLE), "--blocks", "1"]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert process.returncode == 0, process.stderr
    assert "8 layers replaced" in process.stdout
    assert "'on the CPU': 8" in process.stdout


@pytest.mark.slow
def test_a_layer_runs_on_kernels(tmp_path: Path) -> None:
    table = packed.table([packed.RECORDS["predicated"]])
    library = pack.open_pack(packed.folder(table, tmp_path / "pack"))
    with EmulatedDevice(packed.RECORDS["predicated"]) as device:
        layer = torch.nn.Linear(40, 24).half()
        for name, tensor in list(layer.named_parameters()):
            copy = device.empty(*tensor.shape).copy_(tensor.detach())
            setattr(layer, name, torch.nn.Parameter(copy, requires_grad=False))
        x = device.empty(2, 5, 40).normal_(generator=torch.Generator().manual_seed(0))
        before = layer(x.float().half())
        cudal2gen.patch(layer)
        with emulated(OperatorDevice(device, "a100"), [library], prefer="kernel") as dispatcher:
            after = layer(x)
            assert sum(dispatcher.stats()["kernel"].values()) == 1
        torch.testing.assert_close(after, before, atol=0.01, rtol=0.01)
        cudal2gen.unpatch(layer)
        assert torch.equal(layer(x), before)


# --- what a model asks for ---


@pytest.mark.slow
def test_products_are_collected_without_computing_them(llama: Any) -> None:
    products = shapes.collect(lambda: llama.main(batch=4, length=1024, words=32000, width=4096, heads=32, blocks=1))
    assert products.others == {}
    rows = products.problems("h200", "f32")
    sizes = {(row["m"], row["n"], row["k"]): row["count"] for row in rows if row["op"] == "aten.mm"}
    assert sizes == {
        (4096, 32000, 4096): 1, (4096, 8192, 4096): 2, (4096, 4096, 8192): 1, (4096, 4096, 4096): 2,
        (4096, 2048, 4096): 2,
    }  # fmt: skip
    assert rows[0]["n"] == 32000, "the most work first"
    assert {row["layout"] for row in rows if row["op"] == "aten.mm"} == {"tn"}


def test_every_kind_of_product_is_seen() -> None:
    a, b, c = torch.ones(4, 8).half(), torch.ones(8, 6).half(), torch.ones(4, 6).half()

    def run_products() -> None:
        torch.mm(a, b)
        torch.addmm(c, a, b)
        torch.bmm(a.expand(3, 4, 8), b.expand(3, 8, 6))
        torch.baddbmm(c.expand(2, 4, 6), a.expand(2, 4, 8), b.expand(2, 8, 6))
        torch.nn.functional.linear(a, b.t().contiguous())
        cudal2gen.matmul(a, b)
        cudal2gen.linear(a, b.t().contiguous())
        torch.mm(a.float(), b.float())
        torch.mm(a[:0], b)

    for fake in (False, True):
        collected = shapes.collect(run_products, fake)
        counts = {
            (product.op.split(".")[1], product.layout): count
            for product, count in collected.products.items()
            if product.m
        }
        assert counts == {
            ("mm", "nn"): 1, ("addmm", "nn"): 1, ("bmm", "nn"): 3, ("baddbmm", "nn"): 2, ("mm", "tn"): 1,
            ("matmul", "nn"): 1, ("linear", "tn"): 1,
        }  # fmt: skip
        assert collected.others == {"torch.float32": 1}
        assert all(row["m"] == 4 for row in collected.problems("a100", "f32")), "an empty product is no problem"
    assert shapes.collect(run_products, any_type=True).others == {}


def test_the_command_writes_a_list_that_bench_reads(tmp_path: Path) -> None:
    out = tmp_path / "problems.jsonl"
    process = run_here("tune-model", str(EXAMPLE), "--gpu", "h200", "--out", str(out))
    assert process.exit_code == 0, process.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert process.stdout == f"{len(rows)} problems, {sum(row['count'] for row in rows)} products, in {out}\n"
    problems = catalog.load_problems(out)
    assert Problem(gpu="h200", acc="f32", layout="tn", m=48, n=256, k=64) in problems
    assert len(problems) <= len(rows)
    second = run_here("tune-model", f"{EXAMPLE}:main", "--gpu", "h200", "--real")
    assert second.stdout == out.read_text(), "with data or without"


def test_models_that_cannot_be_watched(tmp_path: Path) -> None:
    looks = tmp_path / "looks.py"
    looks.write_text("import torch\ndef main(): return torch.ones(3).half()[torch.ones(3).bool()].sum().item()\n")
    for name, message in (
        ("nowhere.py", "no file nowhere.py"),
        ("nowhere_at_all", "nowhere_at_all cannot be imported"),
        (f"{EXAMPLE}:nothing", "has no callable nothing"),
        (str(looks), "the model looks at values, which tensors without data lack"),
    ):
        process = run_here("tune-model", name)
        assert (process.exit_code, message in process.stderr) == (2, True), process.stderr
    fails = tmp_path / "fails.py"
    fails.write_text("def main():\n    return 1 / 0\n")
    message = run_here("tune-model", str(fails)).stderr
    assert f"the model fails on tensors without data; --real uses real ones: {fails}:2: ZeroDivisionError" in message
    wide_model = tmp_path / "wide.py"
    wide_model.write_text("import torch\ndef main(): return torch.ones(8, 8) @ torch.ones(8, 8)\n")
    process = run_here("tune-model", str(wide_model))
    assert (process.stdout, process.stderr) == (
        "",
        "note: 1 products of torch.float32 are left out; --any-type takes them\n",
    )
    assert json.loads(run_here("tune-model", str(wide_model), "--any-type").stdout)["m"] == 8


def test_a_list_that_is_none_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "list.jsonl"
    line = '{"gpu":"h200","acc":"f32","layout":"tn","m":8,"n":8,"k":8,"count":3}'
    for text, message in (
        ("{", f"{path}:2: not a problem"),
        ("[1]", f"{path}:2: not a problem"),
        ('{"gpu":"h200"}', f"{path}:2: not a problem: acc: field required"),
        (line.replace('"m":8', '"m":0'), f"{path}:2: not a problem: m=0: input should be greater"),
    ):
        path.write_text(f"{line}\n{text}\n")
        with pytest.raises(catalog.CatalogError) as raised:
            catalog.load_problems(path)
        assert message in str(raised.value)
    path.write_text(f"{line}\n{line}\n")
    assert len(catalog.load_problems(path)) == 1
