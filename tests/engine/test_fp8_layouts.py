"""Matmuls in FP8: every layout quantizes the same logical tiles and blocks in the same way.

The layouts are compared by the sets of their tiles in the first step, without regard to the rank or
the micro-batch that has quantized one. The weights are in fp32, so that the sums of most layouts
differ by so little that no activation of the small model is rounded to another value of FP8.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.config import FP8_TILE
from models.kernels.matmul import Fp8, Parts, Quantized
from models.parallel.layers import Deferring
from tests.conftest import changed, small_recipe
from tests.ranks import run_ranks
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.engine.engine import Engine
from threefold.prove.training import many_cases, start, train_step

ZERO3 = {"deepspeed": "ds_configs/zero3_fp32.json"}
TENSOR2 = {"layout__tensor": 2}
SEQUENCE2 = TENSOR2 | {"layout__sequence_parallel": True}
CONTEXT2 = {"layout__context": 2}
PIPELINE2 = {"layout__pipeline": 2}
ZB_H1 = PIPELINE2 | {"layout__schedule": "zb-h1"}
FULL = {"layout__recompute": "full"}
EXPERTS = {
    "model__experts": {
        "count": 4, "per_token": 2, "ffn_hidden_size": 256, "shared": 1, "dense_layers": 1
    },
    "model__initial_std": 0.1,
}  # fmt: skip
LATENT = {
    "model__latent": {"query_rank": 192, "key_value_rank": 128, "rotary_size": 64,
                      "value_size": 64},
}  # fmt: skip
MODELS = {"dense": {}, "experts": EXPERTS, "latent": LATENT}
Key = tuple[int, str, str]  # world size, model and name of a layout
LAYOUTS: dict[Key, dict[str, Any]] = {  # -> changes of the recipe
    (1, "dense", "micro-batch 2"): {"batch__micro_sequences": 2},
    (4, "dense", "tensor 2, zb-h1"): TENSOR2 | ZB_H1,
    (4, "experts", "sequence 2, expert 2"): SEQUENCE2 | {"layout__expert": 2},
}
LONG_LAYOUTS: dict[Key, dict[str, Any]] = {
    (4, "dense", "zero3, context 2, full"): ZERO3 | CONTEXT2 | FULL,
    (4, "latent", "sequence 2, zb-h1"): SEQUENCE2 | ZB_H1,
    (8, "dense", "tensor 2, pipeline 2, zero2"): TENSOR2 | PIPELINE2
    | {"deepspeed": "ds_configs/zero2_fp32.json"},
    (8, "experts", "sequence 2, pipeline 2, expert 2"): SEQUENCE2 | PIPELINE2
    | {"layout__expert": 2},
    (8, "dense", "sequence 2, context 2, pipeline 2"): SEQUENCE2 | CONTEXT2 | PIPELINE2,
    (8, "dense", "tensor 2, ulysses, zb-h1"): TENSOR2 | CONTEXT2 | ZB_H1
    | {"layout__context_attention": "ulysses"},
    (8, "dense", "ring, zero2"): CONTEXT2 | TENSOR2 | {"deepspeed": "ds_configs/zero2_fp32.json",
                                                       "layout__context_attention": "ring"},
    (8, "experts", "expert tensor 2, context 2"): TENSOR2 | CONTEXT2 | {
        "layout__expert": 2, "layout__expert_tensor_parallel": True},
    (8, "latent", "sequence 2, context 2"): SEQUENCE2 | CONTEXT2 | FULL,
}  # fmt: skip
CHANGES = LAYOUTS | LONG_LAYOUTS
# Layouts whose sums do not differ by enough to round an activation to another value. Over context
# ranks, and over tensor ranks with latents, a few of 8,000 tiles differ in the first block.
EXACT = [
    (1, "dense", "micro-batch 2"),
    (4, "dense", "tensor 2, zb-h1"),
    (4, "experts", "sequence 2, expert 2"),
    (8, "dense", "tensor 2, pipeline 2, zero2"),
    (8, "experts", "sequence 2, pipeline 2, expert 2"),
]
MAX_SHARE = 0.01
Tiles = dict[tuple[str, str], np.ndarray]  # layer and kind of matrix -> a number for each tile


def recipe_of(corpus: Path, changes: dict[str, Any]) -> Any:
    sizes = {
        "model__hidden_size": 256,
        "model__heads": 4,
        "model__kv_heads": 4,
        "model__head_size": 64,
        "model__ffn_hidden_size": 512,
        "model__sequence_length": 512,
        "batch__global_sequences": 2,
        "batch__micro_sequences": 1,
        "training__matmul_precision": "fp8",
        "training__evaluate_every": 0,
        "data__validation": None,
    }
    return parse_recipe(changed(small_recipe(corpus), **(sizes | changes)), "test")


@dataclass(frozen=True)
class Recording(Fp8):
    """A quantization that records its tiles."""

    layer: str = ""
    record: Any = None

    def rows(self, x: Tensor, columns: Parts | None = None) -> Quantized:
        kind = "input" if columns is None else "gradient"
        return self._noted(kind, super().rows(x, columns))

    def tokens(self, x: Tensor) -> Quantized:
        return self._noted("tokens", super().tokens(x))

    def weight(self, weight: Tensor) -> Quantized:
        return self._noted("weight", super().weight(weight))

    def _noted(self, kind: str, quantized: Quantized) -> Quantized:
        # The gradient of a rank's mean loss is a power of two times that of all tokens.
        with_scales = kind in ("input", "weight")
        self.record.setdefault((self.layer, kind), []).append(numbers(quantized, with_scales))
        return quantized


def numbers(quantized: Quantized, with_scales: bool) -> np.ndarray:
    """Return a number for each tile or block, which depends on all of its values."""
    bits = quantized.values.contiguous().view(torch.uint8)
    sizes = [size for part in quantized.columns for size in pieces(part)]
    parts = bits.split(sizes, -1)
    if quantized.rows is not None:
        rows = [size for part in quantized.rows for size in pieces(part)]
        blocks = [[block.flatten() for block in part.split(rows)] for part in parts]
        in_order = [block for row in zip(*blocks, strict=True) for block in row]
        found = np.array([mixed(block[None])[0] for block in in_order], dtype=np.uint64)
    else:
        found = np.stack([mixed(part.flatten(0, -2)) for part in parts], -1).ravel()
    if with_scales:
        found = found + quantized.scales.flatten().view(torch.int32).numpy().astype(np.uint64)
    return np.unique(found)


def pieces(size: int) -> list[int]:
    return [min(FP8_TILE, size - first) for first in range(0, size, FP8_TILE)]


def mixed(bits: Tensor) -> np.ndarray:
    """Return a number for each row of bytes, whose number is divisible by 8."""
    words = bits.contiguous().view(torch.int64).numpy().view(np.uint64)
    factors = np.random.default_rng(0).integers(2**62, size=words.shape[1], dtype=np.uint64)
    return (words * (2 * factors + 1)).sum(1, dtype=np.uint64)


def record(engine: Engine) -> dict[tuple[str, str], list[np.ndarray]]:
    """Let all layers of an engine record their tiles in the result."""
    found: dict[tuple[str, str], list[np.ndarray]] = {}
    names = {id(parameter): name for name, parameter in engine.parameters()}

    def wrap(layer: Any) -> None:
        quantization = layer.quantization

        def recorded(weight: Any, tensor: Any) -> Fp8 | None:
            fp8 = quantization(weight, tensor)
            layer_name = re.sub(r"_\d+$", "", names[id(weight)])
            return fp8 and Recording(fp8.outputs, fp8.fuse, layer_name, found)

        layer.quantization = recorded

    for layer in engine.wrapped.module.modules():
        if isinstance(layer, Deferring):
            wrap(layer)
    return found


def step_worker(corpus: str, layouts: list[tuple[str, dict[str, Any]]]) -> list[Tiles]:
    """Return the tiles of the first step of each layout on this rank."""
    world, results = LaunchEnvironment.from_environment(os.environ), []
    with many_cases() as begin_case:
        for model, changes in layouts:
            begin_case()
            engine, data = start(recipe_of(Path(corpus), MODELS[model] | changes), world)
            found = record(engine)
            train_step(engine, data, 1)
            results.append({key: np.unique(np.concatenate(all)) for key, all in found.items()})
    return results


@pytest.fixture(scope="module")
def tiles(request: pytest.FixtureRequest, corpus: Path) -> dict[Key, Tiles]:
    """Return the tiles of all ranks of each layout that a selected test needs, and of one rank."""
    items: list[Any] = request.session.items
    asked = [
        item.callspec.params["key"]
        for item in items
        if "tiles" in getattr(item, "fixturenames", ())
    ]
    changes = {(1, key[1], "alone"): {} for key in asked} | {key: CHANGES[key] for key in asked}
    results: dict[Key, Tiles] = {}
    for size in {key[0] for key in changes}:
        keys = [key for key in changes if key[0] == size]
        of_ranks = run_ranks(
            size, step_worker, str(corpus), [(key[1], changes[key]) for key in keys]
        )
        for key, of_layout in zip(keys, zip(*of_ranks, strict=True), strict=True):
            results[key] = joined(of_layout)
    return results


def joined(of_ranks: Sequence[Tiles]) -> Tiles:
    """Return the tiles that any rank has quantized."""
    keys = set().union(*of_ranks)
    return {
        key: np.unique(np.concatenate([tiles[key] for tiles in of_ranks if key in tiles]))
        for key in keys
    }


def share_of_others(tiles: np.ndarray, expected: np.ndarray) -> float:
    """Return the share of tiles that only one of two layouts has."""
    return len(np.setxor1d(tiles, expected)) / len(np.union1d(tiles, expected))


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=[pytest.mark.long] * (key in LONG_LAYOUTS), id=" ".join(key[1:]))
        for key in CHANGES
    ],
)
def test_the_layout_does_not_change_quantized_values(key: Key, tiles: dict[Key, Tiles]) -> None:
    of_layout, expected = tiles[key], tiles[1, key[1], "alone"]
    assert of_layout.keys() == expected.keys()
    shares = {name: share_of_others(of_layout[name], expected[name]) for name in expected}
    for (layer, kind), share in shares.items():
        if kind == "weight" or (kind == "input" and key in EXACT):
            assert share == 0, (layer, kind)
        elif kind == "input" and layer.startswith("blocks.0."):
            assert share < MAX_SHARE, (layer, kind)
        elif key in EXACT and layer == "blocks.1.mlp.down.weight":
            # These gradients are the first ones; only the loss is summed in another order.
            assert share < MAX_SHARE, (layer, kind)
