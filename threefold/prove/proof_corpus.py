"""A small synthetic corpus with learnable structure, so that a proof needs no data."""

import json
from pathlib import Path

import numpy as np

from threefold.data.token_file import write_token_file

DOCUMENT_TOKENS = (1, 2, 4, 30, 63, 150, 150)  # shorter and longer than a sequence of a proof


def write_corpus(folder: Path, vocab_size: int, *, validation_tokens: int = 4000) -> None:
    """Write training and validation files of noisy arithmetic sequences, and a dummy tokenizer.

    Args:
        folder: folder to create
        vocab_size: number of different tokens
        validation_tokens: minimum number of validation tokens; training has five times as many
    """
    rounds = -(-validation_tokens // sum(DOCUMENT_TOKENS))
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.json").write_text(
        json.dumps({"made": "for a proof"}), encoding="utf-8"
    )
    random = np.random.default_rng(0)
    for name, count in (("train", 5 * rounds), ("validation", rounds)):
        documents = [
            (random.integers(vocab_size) + 3 * np.arange(length) + random.integers(2, size=length))
            % vocab_size
            for _ in range(count)
            for length in random.permutation(DOCUMENT_TOKENS)
        ]
        write_token_file(folder / name, documents, vocab_size=vocab_size)
