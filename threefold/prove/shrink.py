"""Reduction of a recipe to small sizes with the same structure, and a synthetic corpus for it."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from models.config import FP8_TILE, Experts, Latents, ModelConfig
from threefold.config.loading import parse_recipe
from threefold.config.recipe import Recipe
from threefold.data.token_file import write_token_file

SMALL_ROTARY_SIZE, SMALL_KEY_VALUE_RANK, SMALL_QUERY_RANK = 4, 10, 12
HEAD_SIZE = 8
# In FP8, two tensor ranks and two context ranks, which have two slices of a sequence each, have
# whole blocks and tiles.
FP8_COLUMNS, FP8_SEQUENCE_LENGTH = 2 * FP8_TILE, 4 * FP8_TILE
MAX_HEADS_PER_GROUP = 3  # query heads per key-value head
MIN_SEQUENCE_LENGTH = 16
MAX_COMMON_MULTIPLE = 64  # the largest divisor of the recipe's size that a small size keeps
MIN_SEQUENCES = 8  # in a global batch
MIN_EXPERTS = 8
MAX_AVERAGE_DECAY = 0.8  # so that a few steps change the average of the weights visibly
MAX_LEARNING_RATE = 1e-4  # because Adam turns gradients that are rounding errors into full steps


def shrink(
    recipe: Recipe, *, ranks: int, layers: int, steps: int, corpus: Path, fp8: bool = False
) -> Recipe:
    """Return the recipe with every architectural switch kept and every size small.

    Sizes that a layout must divide (key-value heads, feed-forward columns, global batch) keep their
    divisors among 1 .. ranks, so that the same layouts are valid. The sequence length keeps its
    divisors among 1 .. 2 * ranks, because each context rank has two slices. The vocabulary keeps
    its remainder modulo 64, and an odd number of layers stays odd.

    With matmuls in FP8, the sizes are instead so large that each of two tensor ranks and two
    context ranks has whole blocks and tiles.

    Args:
        ranks: size of the largest world
        layers: maximum number of layers, or one more to keep an odd number odd
        corpus: folder that `write_corpus` wrote
        fp8: keep matmuls in FP8; otherwise they are in the type of the weights
    """
    table = recipe.model_dump(mode="json", exclude_none=True)
    for key in ("cluster", "phase", "evaluation"):  # a proof has a task of its own
        table.pop(key, None)
    fp8 = fp8 and recipe.training.matmul_precision == "fp8"
    table["model"] |= small_model(recipe.model, ranks, layers, fp8=fp8)
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
    if recipe.optimizer.qk_clip is not None:
        table["optimizer"]["qk_clip"] = min(
            recipe.optimizer.qk_clip, spread_of_logits(recipe.model)
        )
    if (average := recipe.optimizer.average) is not None:
        table["optimizer"]["average"] = {
            "decay": min(average.decay, MAX_AVERAGE_DECAY),
            "start_step": min(average.start_step, 1),
            "every": min(average.every, 2),
        }
    table["training"] = {
        "steps": steps,
        "evaluate_every": steps,
        "evaluation_batches": 1,
        "position_losses": 2 - table["model"]["sequence_length"] % 2,
        "compile": recipe.training.compile,
        "deterministic": recipe.training.deterministic,
        "matmul_precision": "fp8" if fp8 else "weights",
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


def spread_of_logits(model: ModelConfig) -> float:
    """Return the standard deviation of the first attention logits, about the same when made small.

    The largest logit of a head is a few times as large. A limit of this size therefore rescales
    queries and keys in every step, and attention does not become uniform.
    """
    spread = model.initial_std**2 * model.hidden_size  # of unit inputs, over sqrt(score_size)
    if model.attention_scale is not None:
        spread *= model.attention_scale * math.sqrt(model.score_size)
    return spread


def small_model(
    model: ModelConfig, ranks: int, layers: int, *, fp8: bool = False
) -> dict[str, Any]:
    """Return the sizes of the small model."""
    kv_heads = _same_divisors(model.kv_heads, ranks)
    ratio, head_size = min(model.heads // model.kv_heads, MAX_HEADS_PER_GROUP), HEAD_SIZE
    if fp8:
        kv_heads, ratio = math.gcd(model.kv_heads, 4), min(ratio, 2)
        head_size = FP8_COLUMNS // kv_heads
    heads = kv_heads * ratio
    hidden = heads * head_size
    sizes: dict[str, Any] = {
        "layers": min(model.layers, layers + (model.layers - layers) % 2),
        "heads": heads,
        "kv_heads": kv_heads,
        "hidden_size": hidden,
        "ffn_hidden_size": 3 * FP8_COLUMNS if fp8
        else _same_divisors(model.ffn_hidden_size, ranks, at_least=hidden + 1),
        "vocab_size": 64 * 3 + model.vocab_size % 64,
        "sequence_length": FP8_SEQUENCE_LENGTH if fp8
        else _same_divisors(model.sequence_length, 2 * ranks, at_least=MIN_SEQUENCE_LENGTH),
    }  # fmt: skip
    # The outputs of matmuls keep their standard deviation, so that attention is as far from uniform
    # as in the recipe.
    spread = math.sqrt(model.hidden_size / hidden)
    sizes["initial_std"] = model.initial_std * spread
    if model.embedding_multiplier != 1:  # the multiplied embeddings keep theirs, too
        sizes["embedding_multiplier"] = model.embedding_multiplier / spread
    if model.head_size is not None:  # the recipe sets the head size separately
        sizes |= {"head_size": head_size, "hidden_size": hidden + 8}
    sizes |= small_base(model, sizes, head_size) | small_attention(model, sizes, head_size)
    if model.experts is not None:
        width = FP8_COLUMNS if fp8 else None
        sizes["experts"] = small_experts(model.experts, ranks, sizes["layers"], width)
    return sizes


def small_base(model: ModelConfig, sizes: Mapping[str, int], head_size: int) -> dict[str, int]:
    """Return the sizes of the base model of the small model, in the ratios of the recipe."""
    pairs = {  # base size -> sizes of the recipe's model and of the small model
        "base_hidden_size": (model.hidden_size, sizes["hidden_size"]),
        "base_layers": (model.layers, sizes["layers"]),
        "base_head_size": (model.attention_head_size, head_size),
    }
    given = {key: getattr(model, key) for key in pairs}
    return {
        key: max(1, round(base * pairs[key][1] / pairs[key][0]))
        for key, base in given.items()
        if base is not None
    }


def small_attention(model: ModelConfig, sizes: Mapping[str, Any], head_size: int) -> dict[str, Any]:
    """Return the settings of attention that depend on sizes.

    Each kind of layer stays, a window keeps its ratio to the sequence, and the scores keep their
    size.
    """
    pattern = model.attention_pattern
    if len(pattern) > sizes["layers"]:
        kinds = tuple(dict.fromkeys(pattern))
        pattern = (*kinds, *pattern)[: sizes["layers"]]
    small: dict[str, Any] = {"attention_pattern": pattern}
    if model.window is not None:
        length = sizes["sequence_length"]
        size = max(2, round(model.window.size * length / model.sequence_length))
        if model.window.size < model.sequence_length:
            size = min(size, length - 1)
        small["window"] = asdict(model.window) | {"size": size}
    if model.partial_rotary_factor != 1:
        columns = max(2, round(model.partial_rotary_factor * head_size / 2) * 2)
        small["partial_rotary_factor"] = columns / head_size
    # Queries of whole tiles need a rotary part of the size of the other part.
    rotary_size = SMALL_ROTARY_SIZE if head_size == HEAD_SIZE else head_size
    if model.latent is not None:
        small["latent"] = small_latent(model.latent, head_size, rotary_size)
    if model.attention_scale is not None:
        columns = head_size + (rotary_size if model.latent else 0)
        ratio = math.sqrt(model.score_size / columns)
        small["attention_scale"] = model.attention_scale * ratio
    return small


def small_latent(latent: Latents, head_size: int, rotary_size: int) -> dict[str, int | None]:
    """Return small sizes of latent attention, all different from each other where they may be."""
    value_size = head_size if latent.value_size > latent.rotary_size else rotary_size
    return {
        "query_rank": None if latent.query_rank is None else SMALL_QUERY_RANK,
        "key_value_rank": SMALL_KEY_VALUE_RANK,
        "rotary_size": rotary_size,
        "value_size": value_size,
    }


def small_experts(
    experts: Experts, ranks: int, layers: int, width: int | None = None
) -> dict[str, Any]:
    """Return the settings of the small model's experts: few and narrow ones.

    Args:
        width: columns of an expert; None: a small number with the same divisors as the recipe's
    """
    groups = experts.groups
    count = _same_divisors(
        experts.count,
        ranks,
        at_least=max(min(experts.count, MIN_EXPERTS), 2 * groups),
        multiple_of=groups,
    )
    choice = count // groups * experts.groups_per_token  # experts of a token's groups
    width = width or _same_divisors(experts.ffn_hidden_size, ranks, at_least=HEAD_SIZE)
    return asdict(experts) | {
        "count": count,
        "per_token": min(experts.per_token, max(1, choice // 2)),
        "ffn_hidden_size": width,
        "dense_layers": min(experts.dense_layers, layers // 2),
    }


def larger_micro_batch(recipe: Recipe) -> int:
    """Return the micro-batch size that a proof uses in addition to 1.

    It is a prime factor of the recipe's micro-batch size: it is small, and odd if that size is odd.
    """
    return next((p for p in (2, 3, 5, 7) if recipe.batch.micro_sequences % p == 0), 2)


def _same_divisors(size: int, ranks: int, at_least: int = 1, *, multiple_of: int = 1) -> int:
    """Return the smallest number with the same divisors among 1 .. ranks as `size`.

    If that number would be large, the divisors agree only up to a number below `ranks`.

    Args:
        multiple_of: a divisor of `size` and of the returned number
    """
    multiples = [math.lcm(*range(1, most + 1)) for most in range(ranks, 0, -1)]
    multiple = next(m for m in multiples if math.gcd(size, m) <= MAX_COMMON_MULTIPLE)
    common = math.gcd(size, multiple)
    step = math.lcm(common, multiple_of)
    number = -(-at_least // step) * step
    while math.gcd(number, multiple) != common:
        number += step
    return number


# A small synthetic corpus with learnable structure, so that a proof needs no data.

DOCUMENT_TOKENS = (1, 2, 4, 30, 63, 150, 150)  # shorter and longer than a sequence of a proof


def write_corpus(folder: Path, vocab_size: int, *, validation_tokens: int = 4000) -> None:
    """Write training and validation files of noisy arithmetic sequences, and a dummy tokenizer.

    Args:
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
