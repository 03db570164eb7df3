"""A small corpus of text with its tokenizer, and two tasks, for tests of evaluations."""

import argparse
import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.conftest import changed, small_recipe
from threefold.data.token_file import write_token_file

VOCAB_SIZE = 350  # divisible by neither 64 nor any tensor size: padding is exercised
SEQUENCE_LENGTH = 96
END = "<|endoftext|>"


def write_text_corpus(folder: Path) -> None:
    """Write a byte-level tokenizer, token files and two tasks, from the sources of argparse."""
    text = inspect.getsource(argparse)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text[:40_000]], trainer)
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, part in (
        ("train", text[:40_000]),
        ("validation", text[40_000:70_000]),
        ("short", text[70_000:72_000]),
    ):
        documents = [
            np.array([*tokenizer.encode(each).ids, tokenizer.token_to_id(END)])
            for each in part.split("\n\n")
        ]
        write_token_file(folder / name, documents, vocab_size=VOCAB_SIZE)
    lines = [line for line in text[40_000:].split("\n") if len(line.split()) > 2]
    write_lines(folder / "choice.jsonl", [
        {"prompt": "\n".join(lines[n : n + 2]), "delimiter": "\n", "answer": n % 3,
         "choices": [lines[n + 2 + (k - n) % 3 * 40] for k in range(3)]}
        for n in range(0, 30, 3)
    ])  # fmt: skip
    # After a few steps of training, the model knows only the answers of the last ten items.
    write_lines(folder / "cloze.jsonl", [
        *({"prompt": line.rpartition(" ")[0], "answer": line.rpartition(" ")[2]}
          for line in lines[200:215]),
        *({"prompt": f"    def {name}(", "answer": "self", "delimiter": ""}
          for name in re.findall(r"def (\w+)\(self", text)[:10]),
    ])  # fmt: skip


def write_lines(file: Path, items: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(item) + "\n" for item in items))


def evaluating_recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return the table of a small recipe that validates on two sets and has two tasks."""
    settings = {
        "model__layers": 4,
        "model__vocab_size": VOCAB_SIZE,
        "model__sequence_length": SEQUENCE_LENGTH,
        "model__initial_std": 0.1,  # so that the choices have different log-likelihoods
        "training__position_losses": 6,
        "data__validation": {
            "long": str(folder / "validation"),
            "short": str(folder / "short"),
        },
        "evaluation__tasks": [
            {"name": "choice", "path": str(folder / "choice.jsonl")},
            {"name": "cloze", "path": str(folder / "cloze.jsonl")},
        ],
    }
    return changed(small_recipe(folder), **(settings | changes))
