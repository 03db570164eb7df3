"""A recipe made small: the same structure, sizes for seconds instead of weeks."""

import math
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from recipes.training.recipe.schema import Recipe, parse_recipe

HEAD_SIZE = 8
MAX_HEADS_PER_GROUP = 3  # at most
MIN_SEQUENCE_LENGTH = 16  # at least
MAX_COMMON_MULTIPLE = 64  # common multiple of the sizes that stay legal
MIN_SEQUENCES = 8  # at least, of a global batch
MAX_LEARNING_RATE = 1e-4  # at most: Adam makes whole steps of gradients that are mere rounding


def shrink(recipe: Recipe, *, ranks: int, layers: int, steps: int, corpus: Path) -> Recipe:
    """Return the recipe with every architectural switch kept and every size small.

    What a layout must divide (key-value heads, feed-forward columns, sequence, global batch) keeps
    its divisors among 1 .. ranks, so that the same sizes are legal; the vocabulary keeps its
    remainder by 64 and the layers whether they are odd.

    ranks: the largest world it will be spread over
    layers: at most, or one more
    corpus: folder that `write_corpus` wrote
    """
    table = recipe.model_dump(mode="json", exclude_none=True)
    table.pop("cluster", None)
    table["model"] |= small_model(recipe.model, ranks, layers)
    table["layout"] = {}
    table["batch"] = {
        "global_sequences": math.lcm(
            _same_divisors(recipe.batch.global_sequences, ranks, at_least=MIN_SEQUENCES),
            larger_micro_batch(recipe),
        ),
        "micro_sequences": 1,
    }
    rate = min(recipe.optimizer.learning_rate, MAX_LEARNING_RATE)
    table["optimizer"] |= {
        "learning_rate": rate,
        "schedule": {"warmup_steps": 2, "decay": "cosine", "minimum_learning_rate": rate / 10},
    }
    table["training"] = {
        "steps": steps,
        "evaluate_every": steps,
        "evaluation_batches": 1,
        "compile": recipe.training.compile,
        "deterministic": recipe.training.deterministic,
    }
    table["data"] = {
        "train": [{"path": str(corpus / "train")}],
        "validation": str(corpus / "validation"),
        "tokenizer": str(corpus / "tokenizer"),
        "separate_documents": recipe.data.separate_documents,
    }
    table["checkpoint"] = {"every": steps}
    table["tracking"] = {"mode": "disabled"}
    return parse_recipe(table, f"{recipe.name}, made small")


def small_model(model: ModelConfig, ranks: int, layers: int) -> dict[str, Any]:
    """The sizes of the small model."""
    kv_heads = _same_divisors(model.kv_heads, ranks)
    heads = kv_heads * min(model.heads // model.kv_heads, MAX_HEADS_PER_GROUP)
    sizes = {
        "layers": min(model.layers, layers + (model.layers - layers) % 2),
        "heads": heads,
        "kv_heads": kv_heads,
        "hidden_size": heads * HEAD_SIZE,
        "ffn_hidden_size": _same_divisors(
            model.ffn_hidden_size, ranks, at_least=heads * HEAD_SIZE + 1
        ),
        "vocab_size": 64 * 3 + model.vocab_size % 64,
        "sequence_length": _same_divisors(
            model.sequence_length, ranks, at_least=MIN_SEQUENCE_LENGTH
        ),
    }
    # Products of a row with a column keep their spread, and attention is as far from flat.
    spread = math.sqrt(model.hidden_size / sizes["hidden_size"])
    sizes["initial_std"] = model.initial_std * spread
    if model.head_size is not None:  # heads of their own size: not hidden_size / heads
        sizes |= {"head_size": HEAD_SIZE, "hidden_size": heads * HEAD_SIZE + 8}
    return sizes


def larger_micro_batch(recipe: Recipe) -> int:
    """The micro-batch that a proof uses beside one of a single sequence.

    A prime that divides the recipe's own, so that a large one is small and an odd one stays odd.
    """
    return next((p for p in (2, 3, 5, 7) if recipe.batch.micro_sequences % p == 0), 2)


def _same_divisors(size: int, ranks: int, at_least: int = 1) -> int:
    """The smallest number that 1 .. ranks divide if, and only if, they divide `size`.

    Where that would be a large number, it holds for 1 .. fewer than ranks.
    """
    multiples = [math.lcm(*range(1, most + 1)) for most in range(ranks, 0, -1)]
    multiple = next(m for m in multiples if math.gcd(size, m) <= MAX_COMMON_MULTIPLE)
    common = math.gcd(size, multiple)
    number = -(-at_least // common) * common
    while math.gcd(number, multiple) != common:
        number += common
    return number
