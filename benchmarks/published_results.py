"""Reproduce published results and plain training loops on two CPU cores, in 15 minutes.

    make reproduce
    python benchmarks/published_results.py --only plain
    python benchmarks/published_results.py --markdown

- `nanogpt`: recipes/shakespeare-cpu.toml, nanoGPT's recipe for a CPU, against the validation loss
  that its README states; and the same run in three layouts of two ranks, whose loss curves are
  compared with that of one rank.
- `plain`: models of transformers' GPT-2 and Llama classes, trained by `plain_loop` below and by
  pretrain.py from the same weights on the same batches: the loss of every step, and the weights
  after the last one.

The exit code is 1 if a result differs by more than its tolerance.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # imports start at the repository, not at this folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedModel

from threefold.config.loading import REPOSITORY, load_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.data.dataset import TrainingData
from threefold.run_folder.json_lines import validation_losses
from threefold.runtime.ranks import CPU_VARIABLES, log_tails, start_interpreters

RECIPE = "recipes/shakespeare-cpu.toml"
TEXT = "recipes/shakespeare/input.txt"
CORPUS = REPOSITORY / "data/shakespeare"

# nanoGPT evaluates on 20 random batches of 12 x 64 tokens. The standard deviation of a token's loss
# is about 1.9 nats, so that of the mean of 15,360 tokens is 0.015.
PUBLISHED_LOSS, NOISE = 1.88, 0.03
LAYOUTS = {  # of two ranks
    "pipeline 2": ["layout.pipeline=2", "batch.micro_sequences=3"],
    "tensor 2": ["layout.tensor=2"],
    "ZeRO-2 over 2": ["deepspeed=ds_configs/zero2_fp32.json", "batch.micro_sequences=6"],
}
EXACT_STEPS = 100  # rounding errors grow exponentially in the later steps
CURVE_TOLERANCE = 2e-6  # relative
FINAL_TOLERANCE = 0.01  # nats, of the validation loss after 2,000 steps

PLAIN_STEPS = 500
PLAIN_TOLERANCE = 1e-5  # relative, of the loss of every step
WEIGHT_TOLERANCE = 1e-4  # of a tensor: norm of the difference over the norm
SIZES: dict[str, Any] = {"vocab_size": 66, "bos_token_id": 65, "eos_token_id": 65}
CLASSES = {
    "GPT-2": GPT2Config(
        **SIZES, n_positions=64, n_embd=64, n_layer=3, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "Llama": LlamaConfig(
        **SIZES, max_position_embeddings=64, hidden_size=64, intermediate_size=176,
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A line of the table: a figure, its source, our value, and whether they agree."""

    figure: str
    source: str
    expected: str
    ours: str
    layout: str
    seconds: float
    agrees: bool


def main() -> int:
    """Run the comparisons, and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("nanogpt", "plain"), help="run only these comparisons")
    parser.add_argument("--markdown", action="store_true", help="print the table of the docs")
    options = parser.parse_args()
    os.chdir(REPOSITORY)
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    prepare()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "plain":
            rows += list(nanogpt(Path(folder)))
        if options.only != "nanogpt":
            for name in CLASSES:
                rows += list(plain(name, Path(folder) / name))
    if options.markdown:
        print("| figure | source | expected | ours | layout | seconds |\n|---|---|---|---|---|---|")
        for row in rows:
            cells = row.figure, row.source, row.expected, row.ours, row.layout
            print(f"| {' | '.join(cells)} | {row.seconds:.0f} |")
    failed = [row for row in rows if not row.agrees]
    print(f"{len(rows) - len(failed)} of {len(rows)} results agree")
    return int(bool(failed))


def prepare() -> None:
    """Prepare the corpus if it does not exist."""
    if not (CORPUS / "manifest.json").exists():
        tokenizer = ["--text-is", "file", "--tokenizer", "recipes/shakespeare/tokenizer"]
        python("recipes/prepare_data.py", "--source", TEXT, *tokenizer, "--output", str(CORPUS))


def say(row: Row) -> Row:
    """Print a row, and return it."""
    verdict = "agrees" if row.agrees else "DIFFERS"
    print(
        f"{verdict}: {row.figure}, {row.layout}: {row.ours}, expected {row.expected} "
        f"({row.source}; {row.seconds:.0f} s)",
        flush=True,
    )
    return row


def nanogpt(folder: Path) -> Iterator[Row]:
    """Yield the results of nanoGPT's recipe."""
    source = "README of nanoGPT"
    lines, seconds = train(folder / "one", RECIPE)
    loss = final_loss(lines)
    expected = f"{PUBLISHED_LOSS} ± {NOISE}"
    agrees = abs(loss - PUBLISHED_LOSS) <= NOISE
    yield say(Row("validation loss", source, expected, f"{loss:.4f}", "1 rank", seconds, agrees))
    for layout, changes in LAYOUTS.items():
        name = folder / layout.replace(" ", "-")
        other, seconds = train(name, RECIPE, changes, ranks=2)
        apart = differences(other, [line["loss"] for line in lines])
        early, final = max(apart[:EXACT_STEPS]), final_loss(other)
        yield say(
            Row(
                f"loss of the first {EXACT_STEPS} steps, largest relative difference", "1 rank",
                f"at most {CURVE_TOLERANCE:.0e}", f"{early:.1e}", layout, seconds,
                early <= CURVE_TOLERANCE,
            )
        )  # fmt: skip
        yield say(
            Row(
                "validation loss", source, expected, f"{final:.4f}", layout, seconds,
                abs(final - loss) <= FINAL_TOLERANCE,
            )
        )  # fmt: skip


def plain(name: str, folder: Path) -> Iterator[Row]:
    """Yield the comparison of a class of transformers with the same model in pretrain.py."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CLASSES[name], attn_implementation="eager")
    model.save_pretrained(folder / "initial")
    words = "from-hf", str(folder / "initial"), str(folder / "weights")
    shown = python("recipes/convert.py", *words)
    settings = tomllib.loads(shown[shown.index("[model]") :])
    changes = [
        *(f"model.{key}={json.dumps(value)}" for key, value in settings["model"].items()),
        f"training.initial_weights={folder / 'weights'}",
        *PLAIN_SETTINGS,
    ]
    lines, seconds = train(folder / "run", RECIPE, changes)
    recipe = load_recipe(REPOSITORY / RECIPE, changes)
    begun = time.monotonic()
    losses = list(plain_loop(model, recipe, PLAIN_STEPS))
    plain_seconds = time.monotonic() - begun
    largest = max(differences(lines, losses))
    source = f"transformers' {type(model).__name__}, plain loop of {plain_seconds:.0f} s"
    yield say(
        Row(
            f"loss of {PLAIN_STEPS} steps, largest relative difference", source,
            f"at most {PLAIN_TOLERANCE:.0e}", f"{largest:.1e}", "1 rank", seconds,
            largest <= PLAIN_TOLERANCE,
        )
    )  # fmt: skip
    python("recipes/convert.py", "to-hf", str(folder / "run"), str(folder / "exported"))
    exported = AutoModelForCausalLM.from_pretrained(
        folder / "exported", trust_remote_code=False
    ).state_dict()
    distance = max(
        relative_difference(name, tensor, exported[name])
        for name, tensor in model.state_dict().items()
    )
    yield say(
        Row(
            "weights after the last step, largest relative difference of a tensor", source,
            f"at most {WEIGHT_TOLERANCE:.0e}", f"{distance:.1e}", "1 rank", seconds,
            distance <= WEIGHT_TOLERANCE,
        )
    )  # fmt: skip


PLAIN_SETTINGS = [
    f"training.steps={PLAIN_STEPS}",
    f"training.evaluate_every={PLAIN_STEPS}",
    "optimizer.schedule.warmup_steps=50",
    "optimizer.betas=[0.9, 0.95]",
]


def plain_loop(model: PreTrainedModel, recipe: Recipe, steps: int) -> Iterator[float]:
    """Train a model of transformers as a script would; yield the loss of each step."""
    optimizer_settings, schedule = recipe.optimizer, recipe.optimizer.schedule
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    vectors = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": optimizer_settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, betas=optimizer_settings.betas, eps=optimizer_settings.epsilon
    )
    highest, lowest = optimizer_settings.learning_rate, schedule.minimum_learning_rate
    for step, (tokens, labels) in enumerate(batches(recipe, steps), start=1):
        if step <= schedule.warmup_steps:
            rate = highest * step / schedule.warmup_steps
        else:
            done = (step - schedule.warmup_steps) / (steps - schedule.warmup_steps)
            rate = lowest + (highest - lowest) * (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        logits = model(tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer_settings.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def batches(recipe: Recipe, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and labels [b, s] of each step, in the order in which a run reads them."""
    data = TrainingData(recipe, recipe.parallel_dims(LaunchEnvironment()), rank=0)
    for step in range(1, steps + 1):
        (micro_batch,) = data.micro_batches(step)
        assert micro_batch.tokens is not None and micro_batch.labels is not None
        yield micro_batch.tokens, micro_batch.labels


def train(
    folder: Path, recipe: str, changes: Sequence[str] = (), *, ranks: int = 1
) -> tuple[list[dict[str, Any]], float]:
    """Run pretrain.py; return the lines of its metrics, and the seconds that it took."""
    options = [word for change in changes for word in ("--set", change)]
    command = ["recipes/pretrain.py", recipe, "--run-dir", str(folder), *options]
    begun, logs = time.monotonic(), Path(tempfile.mkdtemp(dir=folder.parent))
    processes = start_interpreters(ranks, command, logs=logs, variables=CPU_VARIABLES)
    processes.wait(until_failure=True)
    processes.stop()
    if any(processes.ended().values()):
        raise SystemExit(f"{' '.join(command)} failed:\n{log_tails(sorted(logs.iterdir()))}")
    metrics = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in metrics], time.monotonic() - begun


def relative_difference(name: str, expected: Tensor, ours: Tensor) -> float:
    """Return the norm of the difference over the norm of a weight.

    The biases of keys are left out: they add the same number to all scores of a query, which a
    softmax ignores, so their gradients are rounding errors, and AdamW's steps are as large as for
    other gradients.
    """
    if name.endswith("attn.c_attn.bias"):  # of queries, keys and values
        expected, ours = (tensor.view(3, -1)[[0, 2]] for tensor in (expected, ours))
    return float((expected - ours).norm() / expected.norm())


def final_loss(lines: Sequence[dict[str, Any]]) -> float:
    """Return the validation loss of the last step."""
    (loss,) = validation_losses(lines[-1]).values()
    return loss


def differences(lines: Sequence[dict[str, Any]], losses: Sequence[float]) -> list[float]:
    """Return the relative difference of each step's loss."""
    assert len(lines) == len(losses)
    return [abs(line["loss"] / loss - 1) for line, loss in zip(lines, losses, strict=True)]


def python(*words: str) -> str:
    """Run a command of the repository, and return its output."""
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
