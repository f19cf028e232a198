"""Tests whether a model learns from the reward of written kernels: GRPO by TRL on a CPU, and a control run.

    python scripts/writing_rl.py --svg docs/writing-rl.svg > table.md

The model is tiny, of random weights, with a tokenizer of its own; nothing is downloaded. It answers questions about one
slow kernel with three words of a grammar, each of which stands for a part of the kernel: some make it faster, some are
disguised copies or hacks. Answers are compiled, proven in the emulator and timed by the timing model
(``KernelScorer``). No GPU runs anything.

Every few steps the exact mean reward of the model's answers on sizes outside the training set is computed, from the
probabilities of all answers. In the control run the rewards of a step are shuffled among its answers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from cudal2gen.kernel import Problem
from cudal2gen.tuner import curve
from cudal2gen.tuner.writing.proof import CheckLimits
from cudal2gen.tuner.writing.rewarding import KernelScorer
from kernelproof.ground.files import write
from kernelproof.ground.pages import grid

# The kernel that is rewritten, and how it is launched.
TEXT = Path(__file__).parents[1] / "tests" / "cudal2gen" / "device_texts" / "gemm.cu"
LAUNCH = {
    "entry": "gemm", "bm": 16, "bn": 16, "bk": 16, "stages": 1, "split_k": 1, "block": 32, "dynamic_smem": 0,
    "call": "tiles raster=plain", "baked": 0, "padding": "predicate",
}  # fmt: skip
# Parts of the kernel that the grammar replaces.
LOOP = "  for (int at = pair; at < k; at += kStep) {\n"
SUMS = "  float sums[2][4] = {};\n"
STORE = "  for (int i = 0; i < 8; ++i)\n    store"
# The grammar: one word of each line, and what it puts in place of a part of the kernel.
GRAMMAR: tuple[tuple[str, dict[str, str]], ...] = (
    (LOOP, {"loop=plain": LOOP, **{f"loop=unroll{n}": f"#pragma unroll {n}\n{LOOP}" for n in (2, 4, 8)}}),
    (
        SUMS,
        {
            "sums=plain": SUMS,
            "sums=dead": f"  int unused = k;\n  (void)unused;\n{SUMS}",
            "sums=content": f"  if (__half2float(a[0]) == 0.12345f) return;\n{SUMS}",
        },
    ),
    (STORE, {"end=plain": STORE, "end=clock": f"  if (clock64() < 0) return;\n{STORE}"}),
)
# Sizes m, n, k of training, and others that are only evaluated.
TRAINED, HELD_OUT = ((64, 48, 64), (128, 64, 256)), ((256, 256, 512), (64, 512, 128))
STEPS_BETWEEN = 5  # steps between two evaluations
# By whether the rewards are shuffled, what ``train`` returns for each seed.
Runs = dict[bool, list[list[tuple[int, float, float]]]]
NAMES = {False: "reward", True: "shuffled reward"}


def problem_of(size: tuple[int, int, int]) -> Problem:
    """The problem of a size (m, n, k)."""
    return Problem(gpu="a100", acc="f32", layout="tn", m=size[0], n=size[1], k=size[2])


def answers() -> dict[tuple[str, ...], str]:
    """Every answer of the grammar as a model would write it: a text as JSON."""
    written = {}
    for words in itertools.product(*(parts for _, parts in GRAMMAR)):
        text = TEXT.read_text(encoding="utf-8")
        for word, (before, parts) in zip(words, GRAMMAR, strict=True):
            text = text.replace(before, parts[word])
        written[words] = json.dumps({"reasoning": "", "kernels": [{"base": "incumbent", "source": text}]})
    return written


class Rewards:
    """The rewards of answers to the question about a size. Each is computed once."""

    def __init__(self) -> None:
        self._scorer = KernelScorer(bounds=CheckLimits(seconds=120, seed=1))
        self._answers = answers()
        shown = {"incumbent": {"text": TEXT.read_text(encoding="utf-8"), "launch": LAUNCH, "speed": 1.0}}
        self._shown = json.dumps(shown)

    def reward_of(self, size: tuple[int, int, int], words: tuple[str, ...]) -> float:
        """The reward of the answer that consists of these words; 0 for words that are no answer of the grammar."""
        if words not in self._answers:
            return 0.0
        (value,) = self._scorer(
            [""], [[{"content": self._answers[words]}]], kernels=[self._shown],
            product=[problem_of(size).model_dump_json()],
        )  # fmt: skip
        assert value is not None
        return value


def tokenizer() -> Any:
    """A tokenizer whose words are those of the grammar and of the sizes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    sizes = {f"{name}={2**power}" for name in "mnk" for power in range(4, 12)} | {f"{name}=48" for name in "mnk"}
    words = ["<pad>", "<end>", "[ask]", "[answer]", *sorted(sizes), *(word for _, parts in GRAMMAR for word in parts)]
    base = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>"))
    base.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own = PreTrainedTokenizerFast(tokenizer_object=base, pad_token="<pad>", eos_token="<end>")
    own.chat_template = (
        "{% for message in messages %}[ask] {{ message.content }} {% endfor %}"
        "{% if add_generation_prompt %}[answer]{% endif %}"
    )
    return own


def make_model(word_tokenizer: Any, seed: int) -> Any:
    """A model of random weights that writes answers of the grammar alone."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    ids = [[word_tokenizer.convert_tokens_to_ids(word) for word in parts] for _, parts in GRAMMAR]
    begin, end = word_tokenizer.convert_tokens_to_ids("[answer]"), word_tokenizer.eos_token_id

    # The token ids that may follow: a word of the grammar's line for the place after "[answer]", and then the end.
    def allowed(_: int, tokens: Any) -> list[int]:
        place = len(tokens) - 1 - tokens.tolist()[::-1].index(begin)
        written = len(tokens) - place - 1
        return ids[written] if written < len(ids) else [end]

    class Constrained(LlamaForCausalLM):
        def generate(self, *arguments: Any, **options: Any) -> Any:
            return super().generate(*arguments, prefix_allowed_tokens_fn=allowed, **options)

    config = LlamaConfig(
        vocab_size=len(word_tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Constrained(config)


def prompt_of(size: tuple[int, int, int]) -> str:
    """The question about a size, in words of the tokenizer."""
    return " ".join(f"{name}={extent}" for name, extent in zip("mnk", size, strict=True))


def expected(model: Any, word_tokenizer: Any, rewards: Rewards, sizes: Sequence[tuple[int, int, int]]) -> float:
    """The exact mean reward of the model's answers on these sizes."""
    import torch

    means = []
    for size in sizes:
        prompt = word_tokenizer(f"[ask] {prompt_of(size)} [answer]")["input_ids"]
        every = list(itertools.product(*(parts for _, parts in GRAMMAR)))
        written = torch.tensor([prompt + word_tokenizer.convert_tokens_to_ids(list(item)) for item in every])
        with torch.no_grad():
            scores = model(written).logits  # (answers, tokens, vocabulary)
        # An answer's probability is the product of its words' probabilities among the words that are allowed there.
        probability = torch.ones(len(every))
        for place, (_, parts) in enumerate(GRAMMAR):
            ids = word_tokenizer.convert_tokens_to_ids(list(parts))
            own = torch.softmax(scores[:, len(prompt) - 1 + place][:, ids], -1)
            column = torch.tensor([list(parts).index(item[place]) for item in every])
            probability *= own.gather(1, column[:, None])[:, 0]
        chances = zip(probability.tolist(), every, strict=True)
        means.append(sum(chance * rewards.reward_of(size, item) for chance, item in chances))
    return fmean(means)


def train(rewards: Rewards, steps: int, seed: int, shuffled: bool) -> list[tuple[int, float, float]]:
    """Trains a model; (step, mean reward on trained sizes, on held-out ones) every few steps."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    word_tokenizer = tokenizer()
    model = make_model(word_tokenizer, seed)
    generator = random.Random(seed)
    rows: list[tuple[int, float, float]] = []

    def reward(completions: Sequence[Any], size: Sequence[Sequence[int]], **_: Any) -> list[float]:
        values = [
            rewards.reward_of(tuple(own), tuple(answer[0]["content"].split()))  # type: ignore[arg-type]
            for answer, own in zip(completions, size, strict=True)
        ]
        if shuffled:
            generator.shuffle(values)
        return values

    def evaluate(step: int) -> None:
        model.eval()
        trained, held_out = (expected(model, word_tokenizer, rewards, sizes) for sizes in (TRAINED, HELD_OUT))
        rows.append((step, trained, held_out))
        model.train()

    class Evaluations(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            if state.global_step % STEPS_BETWEEN == 0:
                evaluate(state.global_step)

    evaluate(0)
    with tempfile.TemporaryDirectory() as folder:
        data = Dataset.from_list(
            [{"prompt": [{"role": "user", "content": prompt_of(size)}], "size": list(size)} for size in TRAINED] * 64
        )
        config = GRPOConfig(
            output_dir=folder, max_steps=steps, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
            disable_tqdm=True, logging_strategy="no", per_device_train_batch_size=32, num_generations=16,
            max_completion_length=4, learning_rate=0.01, lr_scheduler_type="constant", beta=0.0, seed=seed,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model, reward_funcs=reward, args=config, train_dataset=data, processing_class=word_tokenizer
        )
        trainer.add_callback(Evaluations())
        trainer.train()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--svg", type=Path, help="file of the picture")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    rewards = Rewards()
    runs: Runs = {
        shuffled: [train(rewards, options.steps, seed, shuffled) for seed in range(options.seeds)]
        for shuffled in (False, True)
    }
    print(table(runs))
    if options.svg:
        write(options.svg, picture(runs))


def _held_out(runs: Sequence[Sequence[tuple[int, float, float]]]) -> list[tuple[int, list[float]]]:
    """For each step the mean rewards on held-out sizes, one of each seed."""
    return [(rows[0][0], [row[2] for row in rows]) for rows in zip(*runs, strict=True)]


def table(runs: Runs) -> str:
    """The mean reward on held-out sizes by step, with the least and the greatest of the seeds."""
    columns = {shuffled: dict(_held_out(own)) for shuffled, own in runs.items()}
    steps = list(columns[False])

    def cell(values: Sequence[float]) -> str:
        return f"{fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    rows = [[step, *(cell(columns[shuffled][step]) for shuffled in NAMES)] for step in steps]
    return grid(["step", *NAMES.values()], rows)


def picture(runs: Runs) -> str:
    """Mean rewards on held-out sizes by step; the shaded area reaches from the least to the greatest of the seeds."""
    curves = []
    for shuffled, own in runs.items():
        points = _held_out(own)
        curves.append(
            curve.Curve(
                NAMES[shuffled],
                [(step + 1, fmean(values)) for step, values in points],
                [(min(values), max(values)) for _, values in points],
            )
        )
    return curve.svg("GRPO of a tiny model, modelled times", "step + 1", "mean reward on held-out sizes", curves)


if __name__ == "__main__":
    main()
