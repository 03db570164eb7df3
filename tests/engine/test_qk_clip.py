"""QK-clip limits the attention logits alike in every layout, as a plain implementation does."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from models.attention import AttentionCore
from models.errors import UserError
from models.kernels.attention_parts import LargestLogits
from models.parallel.micro_batch_info import MicroBatchInfo
from tests.conftest import changed, selected, small_recipe
from tests.ranks import run_ranks
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.prove.training import gather, held_weights, many_cases, start, train_step

STEPS, LIMIT, SIZE = 2, 1.5, 16
ADAMW = {"optimizer__kind": "adamw", "optimizer__epsilon": 1e-4}
CLIP = {"optimizer__qk_clip": LIMIT}
MODELS: dict[str, dict[str, Any]] = {
    "grouped": {
        "data__separate_documents": True,
        "model__window": {"size": 9},
        "model__attention_pattern": ["window", "full"],
        "model__attention_sinks": True,
    },
    "biases": {"model__bias": True, "model__kv_heads": 4} | ADAMW,
    "latent": {
        "model__kv_heads": 4,
        "model__head_size": SIZE,
        "model__latent": {
            "query_rank": 24, "key_value_rank": 20, "rotary_size": 8, "value_size": 12,
        },
        "model__prediction": {"depth": 1},
    },
}  # fmt: skip
ZERO = {stage: {"deepspeed": f"ds_configs/zero{stage}_fp32.json"} for stage in (1, 2, 3)}
SPLIT = {"tensor": 2, "sequence_parallel": True, "recompute": "full"}
STAGES = {"pipeline": 2, "schedule": "zb-h1", "recompute": "selective"}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {  # on two ranks
    "tensor": ("grouped", {"layout": SPLIT}),
    "ring": ("grouped", {"layout": {"context": 2, "context_attention": "ring"}}),
    "ulysses": ("grouped", {"layout": {"context": 2, "context_attention": "ulysses"}} | ZERO[2]),
    "zero-3": ("grouped", ZERO[3]),
    "biases, tensor": ("biases", {"layout": SPLIT}),
    "biases, zero-2": ("biases", ZERO[2]),
    "latent, tensor": ("latent", {"layout": SPLIT}),
    "latent, gather": ("latent", {"layout": {"context": 2, "context_attention": "gather"}}),
    "latent, zb-h1": ("latent", {"layout": STAGES}),
}

Outcome = tuple[list[float], dict[str, Tensor]]


def recipe_of(corpus: Path, model: str, **changes: Any) -> Recipe:
    settings = {"optimizer__kind": "muon", "model__initial_std": 0.3, "batch__micro_sequences": 4}
    settings |= MODELS[model] | changes
    return parse_recipe(changed(small_recipe(corpus), **settings), "test")


class PlainLogits:
    """The largest logit of each head, from whole matrices of scores, by layer."""

    def __init__(self) -> None:
        self.largest: dict[str, Tensor] = {}

    def note(self, layer: AttentionCore, q: Tensor, k: Tensor, info: MicroBatchInfo) -> None:
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = q.detach() @ keys.detach().mT / q.shape[-1] ** 0.5  # [b, a, s, s]
        place = torch.arange(q.shape[2])
        distance = place[:, None] - place
        hidden = distance < 0
        if layer.limits is not None and layer.limits.window is not None:
            hidden = hidden | (distance >= layer.limits.window)
        for number, of_sequence in enumerate(scores):
            lengths = info.documents.lengths[number] if info.documents else (q.shape[2],)
            document = torch.repeat_interleave(torch.tensor(lengths))
            others = document[:, None] != document
            largest = of_sequence.masked_fill(hidden | others, -torch.inf).amax(dim=(1, 2))
            before = self.largest.get(layer.name, largest)
            self.largest[layer.name] = torch.maximum(before, largest)

    @contextmanager
    def noted(self) -> Iterator[None]:
        attend = AttentionCore._attend

        def noting(layer: AttentionCore, q: Tensor, k: Tensor, *rest: Any, **info: Any) -> Tensor:
            self.note(layer, q, k, info["info"])
            return attend(layer, q, k, *rest, **info)

        with mock.patch.object(AttentionCore, "_attend", noting):
            yield


def rescale(recipe: Recipe, weights: dict[str, Tensor], largest: dict[str, Tensor]) -> None:
    """Rescale the weights of one process, head by head."""
    model = recipe.model
    for layer, logits in largest.items():
        name = layer.removesuffix(".core")
        for number in range(model.layers, model.layers + model.prediction_depth):
            of_module = f"predictions.{number - model.layers}.block."
            name = name.replace(f"blocks.{number}.", of_module)
        for head, logit in enumerate(logits.tolist()):
            factor = min(1.0, LIMIT / logit)
            if model.latent is not None:
                query, pair = weights[f"{name}.q_up.weight"], weights[f"{name}.kv_up.weight"]
                query.view(model.heads, SIZE + 8, -1)[head, :SIZE] *= factor**0.5
                query.view(model.heads, SIZE + 8, -1)[head, SIZE:] *= factor
                pair.view(model.heads, SIZE + 12, -1)[head, :SIZE] *= factor**0.5
                continue
            own_keys = model.heads == model.kv_heads
            for part in ("weight", "bias"):
                if (rows := weights.get(f"{name}.qkv.{part}")) is None:
                    continue
                of_heads = rows.view(-1, SIZE, *rows.shape[1:])
                of_heads[head] *= factor**0.5 if own_keys else factor
                if own_keys:
                    of_heads[model.heads + head] *= factor**0.5


def worker(corpus: str, layouts: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Outcome]:
    """Return the largest logit of each step, and the last weights, on rank 0."""
    found, world = {}, LaunchEnvironment.from_environment(os.environ)
    with many_cases() as begin:
        for name, (model, changes) in layouts.items():
            begin()
            engine, data = start(recipe_of(Path(corpus), model, **CLIP, **changes), world)
            results = []
            for step in range(1, STEPS + 1):
                engine.evaluate(data.evaluation())  # whose logits do not count
                results.append(train_step(engine, data, step).largest_logit)
            found[name] = results, gather(engine, held_weights(engine))
            assert engine.diverged_replicas() == []
    return found


def plain_worker(corpus: str, models: list[str]) -> dict[str, Outcome]:
    """Return what `worker` does, for one process that is rescaled by `rescale`."""
    found, world = {}, LaunchEnvironment.from_environment(os.environ)
    with many_cases() as begin:
        for model in models:
            begin()
            recipe = recipe_of(Path(corpus), model)
            engine, data = start(recipe, world)
            results = []
            for step in range(1, STEPS + 1):
                plain = PlainLogits()
                with plain.noted():
                    train_step(engine, data, step)
                results.append(max(float(logits.max()) for logits in plain.largest.values()))
                weights = {name: parameter.data for name, parameter in engine.parameters()}
                rescale(recipe, weights, plain.largest)
            found[model] = results, gather(engine, held_weights(engine))
    return found


@pytest.fixture(scope="module")
def outcomes(corpus: Path, request: pytest.FixtureRequest) -> dict[str, Outcome]:
    chosen = selected(request, test_every_layout_clips_as_a_plain_implementation, "layout")
    layouts = {name: LAYOUTS[name] for name in chosen}
    plain = run_ranks(1, plain_worker, str(corpus), sorted({m for m, _ in layouts.values()}))[0]
    return plain | run_ranks(2, worker, str(corpus), layouts)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_clips_as_a_plain_implementation(
    layout: str, outcomes: dict[str, Outcome]
) -> None:
    model, _ = LAYOUTS[layout]
    (logits, weights), (expected_logits, expected) = outcomes[layout], outcomes[model]
    assert max(expected_logits) > LIMIT
    assert logits == pytest.approx(expected_logits, rel=2e-6)
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        difference = (weight - expected[name]).norm() / expected[name].norm()
        assert float(difference) < 1e-5, name


def test_norms_of_queries_and_keys_are_rejected(corpus: Path) -> None:
    with pytest.raises(UserError, match=r"optimizer.qk_clip = 1.5 has no effect with model.qk_n"):
        recipe_of(corpus, "biases", **CLIP, model__qk_norm=True)


def test_logits_beyond_the_range_of_fp16_are_clipped() -> None:
    """They would be infinite, or not numbers where later keys are hidden."""
    largest, heads = LargestLogits(1), torch.full((1, 1, 3, 64), 120.0, dtype=torch.float16)
    largest.note(heads, heads, causal=True)
    assert largest.values is not None and largest.values.tolist() == [120.0**2 * 64**0.5]
