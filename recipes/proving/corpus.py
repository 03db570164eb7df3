"""A small made-up corpus with something to learn, so that a proof needs no data."""

import json
from pathlib import Path

import numpy as np

from recipes.training.token_file import write_token_file

DOCUMENT_TOKENS = 100


def write_corpus(folder: Path, vocab_size: int, *, validation_tokens: int = 4000) -> None:
    """Training and validation files of noisy arithmetic sequences, and what passes for a tokenizer.

    folder: is made
    validation_tokens: at least so many; five times as many are for training
    """
    documents_needed = -(-validation_tokens // DOCUMENT_TOKENS)
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps({"made": "for a proof"}))
    random = np.random.default_rng(0)
    for name, count in (("train", 5 * documents_needed), ("validation", documents_needed)):
        steps = 3 * np.arange(DOCUMENT_TOKENS)
        documents = [
            (random.integers(vocab_size) + steps + random.integers(2, size=DOCUMENT_TOKENS))
            % vocab_size
            for _ in range(count)
        ]
        write_token_file(folder / name, documents, vocab_size=vocab_size)
