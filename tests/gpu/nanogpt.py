"""nanoGPT's recipe for Shakespeare, config/train_shakespeare_char.py, trained with Threefold.

Its README publishes a best validation loss of 1.4697. `recipes/shakespeare/input.txt` is the
"tinyshakespeare" file of karpathy/char-rnn: 40,000 lines of Shakespeare's plays, in the public
domain.

nanoGPT draws sequences at random offsets, and averages losses over 200 random batches. Threefold
reads sequences that begin at multiples of their length, in a new order in each epoch, and evaluates
on the whole validation part.
"""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.runs import start
from tests.gpu.setting import Result, Setting
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.data.token_file import write_token_file
from threefold.run_folder.json_lines import validation_losses

TEXT = REPOSITORY / "recipes/shakespeare/input.txt"
PUBLISHED_LOSS = 1.4697  # nanoGPT's best evaluation; it evaluates every 250 steps
TOLERANCE = 0.02
TRAINED_SHARE = 0.9  # of the characters; the others validate
POLL_SECONDS = 1.0
RECIPE = "recipes/shakespeare-gpu.toml"
SMALL: dict[str, Any] = {
    "model.layers": 2,
    "model.hidden_size": 24,
    "model.ffn_hidden_size": 96,
    "batch.global_sequences": 2,
    "batch.micro_sequences": 2,
    "optimizer.schedule.warmup_steps": 2,
    "training.steps": 8,
    "training.evaluate_every": 4,
    "training.evaluation_batches": 1,
    "training.compile": "false",
}


def shakespeare(setting: Setting) -> Result:
    """Train, and compare the best validation loss with the published one."""
    settings = settings_of(setting, write_characters(setting.output / "shakespeare"))
    changes = [f"{key}={value}" for key, value in settings.items()]
    steps = load_recipe(REPOSITORY / RECIPE, changes).training.steps
    run = start(setting, "nanogpt", changes, recipe=RECIPE)
    while run.processes[0].poll() is None:
        time.sleep(POLL_SECONDS)
        setting.save(result_of(run.metrics(), steps=steps))
    lines = run.finish()
    result = result_of(lines, steps=steps)
    best = min(loss for _, loss in evaluations(lines))
    if not setting.small:
        claim = f"the best loss is at most {PUBLISHED_LOSS} + {TOLERANCE}"
        result.check(best <= PUBLISHED_LOSS + TOLERANCE, claim)
    return result


def settings_of(setting: Setting, corpus: Path) -> dict[str, Any]:
    """Return the changes of the recipe."""
    precision = "bf16" if setting.device == "cuda" else "fp32"
    files = {
        "deepspeed": f"ds_configs/zero1_{precision}.json",
        "data.train": f'[{{path = "{corpus}/train"}}]',
        "data.validation": f"{corpus}/validation",
        "data.tokenizer": f"{corpus}/tokenizer",
        "model.vocab_size": len(set(TEXT.read_text(encoding="utf-8"))),
    }
    return files | (SMALL if setting.small else {})


def write_characters(folder: Path) -> Path:
    """Write token files with a token for each character of the text, as nanoGPT's prepare.py."""
    text = TEXT.read_text(encoding="utf-8")
    alphabet = sorted(set(text))
    numbers = {character: number for number, character in enumerate(alphabet)}
    tokens = np.array([numbers[character] for character in text])
    end = int(TRAINED_SHARE * len(tokens))
    (folder / "tokenizer").mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps({"characters": alphabet}))
    for name, piece in (("train", tokens[:end]), ("validation", tokens[end:])):
        write_token_file(folder / name, [piece], vocab_size=len(alphabet))
    return folder


def evaluations(lines: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return (step, validation loss) of each evaluation in lines of metrics."""
    return [(line["step"], loss) for line in lines for loss in validation_losses(line).values()]


def result_of(lines: list[dict[str, Any]], *, steps: int) -> Result:
    """Return what a run has shown so far."""
    result = Result()
    if not lines:
        return result
    seconds = sum(line["step_seconds"] for line in lines[1:]) / max(1, len(lines) - 1)
    result.say(f"{len(lines)} of {steps} steps, {1e3 * seconds:.1f} ms per step.")
    if losses := evaluations(lines):
        step, best = min(losses, key=lambda each: each[1])
        result.say(
            f"Best validation loss {best:.4f}, after step {step}; published: {PUBLISHED_LOSS}."
        )
        result.table(["step", "validation loss"], [[str(n), f"{loss:.4f}"] for n, loss in losses])
    return result
