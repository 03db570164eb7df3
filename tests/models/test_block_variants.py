"""Norm placements, biases, activations, norms over projections, and changes of the logits.

Each variant of the block is compared with a plain model in fp64, on one rank and on tensor ranks.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from models import cost
from models.attention import ModelAxes
from models.config import Experts, ModelConfig
from models.initialization import (
    initialize,
    output_multiplier,
    query_multiplier,
    residual_multiplier,
)
from models.layer_specs import (
    SequentialModel,
    TokenEmbedding,
    layer_specs,
    logical_parameters,
)
from models.parallel.collectives import TensorAxis, create_groups
from models.parallel.micro_batch_info import MicroBatchInfo
from models.sharding import sharding_of
from models.transformer import Block
from tests.conftest import small_recipe
from tests.models.test_transformer import (
    COMPLETEP,
    DROPPING,
    LLAMA,
    PLAIN,
    Outcome,
    example_tokens,
    labels_of,
    largest_difference,
    run_model,
)
from tests.ranks import run_ranks
from threefold.config.loading import parse_recipe
from threefold.engine.optimizer import rule_of

SMALL = replace(LLAMA, layers=2, heads=8, kv_heads=4, head_size=6, sequence_length=16)
VARIANTS: dict[str, ModelConfig] = {
    "olmo2": replace(
        SMALL, norm_placement="after", qk_norm=True, qk_norm_over="projection", z_loss=0.02
    ),
    "gemma": replace(
        SMALL,
        norm_placement="both",
        activation="geglu",
        qk_norm=True,
        embedding_multiplier=5.0,
        tie_embeddings=True,
        logit_soft_cap=2.0,
        z_loss=0.05,
    ),
    "layernorms after, biases": replace(
        SMALL,
        norm="layernorm",
        norm_placement="after",
        positions="learned",
        activation="squared_relu",
        bias=True,
        qk_norm=True,
        qk_norm_over="projection",
        attention_output_bias=False,
        logit_soft_cap=2.0,
    ),
    "biases with norms of both": replace(
        SMALL, norm_placement="both", bias=True, activation="clamped_swiglu", qkv_bias=False
    ),
    "qwen2": replace(SMALL, qkv_bias=True, activation="squared_relu", z_loss=0.02),
    "completep": replace(
        SMALL,
        **COMPLETEP,
        norm_placement="after",
        attention_output_bias=True,
        activation="clamped_swiglu",
        logit_soft_cap=3.0,
        embedding_multiplier=0.5,
    ),
}
LAYOUTS = {  # tensor ranks, sequence parallelism, recomputation
    "tensor 2": (2, False, "selective"),
    "tensor 4, sequence-parallel": (4, True, "none"),
}
WITH_DROPOUT = replace(VARIANTS["biases with norms of both"], dropout=0.3)


def random_weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return a logical tensor that depends on the name alone; norm weights are around 1."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    values = 0.3 * torch.randn(shape, generator=generator)
    return 1 + values if name.endswith("norm.weight") else values


run_variant = functools.partial(run_model, weight=random_weight)


# The plain model, on logical weights by name, in fp64.


class PlainModel:
    """A forward pass that is written with torch's functions."""

    def __init__(self, config: ModelConfig):
        self.config = config
        with torch.device("meta"):
            shapes = {
                name: sharding_of(p).shape
                for name, p in logical_parameters(SequentialModel(layer_specs(config)), config)
            }
        self.weights = {
            name: random_weight(name, shape).double().requires_grad_()
            for name, shape in shapes.items()
        }

    def logits(self, tokens: Tensor) -> Tensor:
        """[b, s] to [b, s, v]."""
        config, weights = self.config, self.weights
        x = F.embedding(tokens, weights["embedding.weight"]) * config.embedding_multiplier
        if config.positions == "learned":
            x = x + weights["positions.weight"]
        for number in range(config.layers):
            for half, function in (("attention", self.attention), ("mlp", self.mlp)):
                name = f"blocks.{number}.{half}"
                y = x if config.norm_placement == "after" else self.norm(f"{name}_norm", x)
                y = function(name, y)
                if config.norm_placement != "before":
                    y = self.norm(f"{name}_output_norm", y)
                x = x + residual_multiplier(config) * y
        x = self.norm("final_norm", x) * output_multiplier(config)
        table = weights["embedding.weight" if config.tie_embeddings else "head.weight"]
        logits = x @ table.t()
        cap = config.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias")
        if bias is not None:
            return F.layer_norm(x, weight.shape, weight, bias, self.config.norm_epsilon)
        return F.rms_norm(x, weight.shape, weight, self.config.norm_epsilon)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def attention(self, name: str, x: Tensor) -> Tensor:
        config = self.config
        d = config.attention_head_size
        sizes = [config.query_size, config.key_value_size, config.key_value_size]
        q, k, v = self.linear(f"{name}.qkv", x).split(sizes, dim=-1)
        if config.qk_norm and config.qk_norm_over == "projection":
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        q, k, v = (each.unflatten(-1, (-1, d)).transpose(1, 2) for each in (q, k, v))
        if config.qk_norm and config.qk_norm_over == "head":
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        if config.positions == "rope":
            q, k = self.rotated(q), self.rotated(k)
        q = q * query_multiplier(config)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.linear(f"{name}.output", y.transpose(1, 2).flatten(2))

    def rotated(self, x: Tensor) -> Tensor:
        columns = torch.arange(0, x.shape[-1], 2).float()
        frequencies = 1 / self.config.rope_theta ** (columns / x.shape[-1])
        angles = (torch.arange(x.shape[2]).float()[:, None] * frequencies).double()
        turn = torch.polar(torch.ones_like(angles), angles)
        turned = torch.complex(*x.chunk(2, dim=-1)) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.down", activated(self.linear(f"{name}.up", x), self.config))


def activated(x: Tensor, config: ModelConfig) -> Tensor:
    """Apply the activation as transformers' classes of the families do."""
    if config.activation == "squared_relu":
        return F.relu(x) ** 2
    gate, up = x.chunk(2, dim=-1)
    if config.activation == "clamped_swiglu":  # GptOssExperts
        gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
        return (up + 1) * gate * torch.sigmoid(gate * 1.702)
    gelu: Callable[[Tensor], Tensor] = functools.partial(F.gelu, approximate="tanh")
    return {"swiglu": F.silu, "geglu": gelu}[config.activation](gate) * up


@functools.cache
def reference(variant: str) -> Outcome:
    """Return the results of the plain model; its gradients include those of the z-loss."""
    config = VARIANTS[variant]
    plain, tokens = PlainModel(config), example_tokens(config)
    logits = plain.logits(tokens)
    loss = F.cross_entropy(logits.flatten(0, 1), labels_of(tokens).flatten())
    (loss + config.z_loss * logits.logsumexp(-1).square().mean()).backward()
    gradients = {}
    for name, weight in plain.weights.items():
        assert weight.grad is not None
        gradients[name] = weight.grad.float()
    return logits.detach().float(), loss.detach().float(), gradients


# Several ranks


def four_rank_worker() -> dict[Any, Outcome]:
    """Run every variant in every layout."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    axes = {
        2: TensorAxis(create_groups([[0, 1], [2, 3]]), rank % 2, 2),
        4: TensorAxis(dist.group.WORLD, rank, 4),
    }

    def run(config: ModelConfig, layout: str, info: MicroBatchInfo = PLAIN) -> Outcome:
        size, split, recompute = LAYOUTS[layout]
        axis = replace(axes[size], sequence_parallel=split)
        return run_variant(config, axis, recompute, info)

    outcomes: dict[Any, Outcome] = {}
    with mock.patch.dict(cost.MAX_LOGITS, cpu=1000):  # chunks of a few tokens
        for layout in LAYOUTS:
            for variant, config in VARIANTS.items():
                outcomes[variant, layout] = run(config, layout)
            outcomes["dropout", layout] = run(WITH_DROPOUT, layout, DROPPING)
    dist.barrier()
    return outcomes if rank == 0 else {}


@pytest.fixture(scope="module")
def four_ranks() -> dict[Any, Outcome]:
    return run_ranks(4, four_rank_worker)[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_rank_agrees_with_the_plain_model(variant: str) -> None:
    config = VARIANTS[variant]
    outcome = run_variant(config)
    assert largest_difference(outcome, reference(variant)) < 2e-5
    for recompute in ("selective", "full"):
        assert largest_difference(run_variant(config, recompute=recompute), outcome) == 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_tensor_ranks_agree_with_the_plain_model(
    variant: str, layout: str, four_ranks: dict[Any, Outcome]
) -> None:
    assert largest_difference(four_ranks[variant, layout], reference(variant)) < 2e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensor_ranks_drop_what_one_rank_drops(layout: str, four_ranks: dict[Any, Outcome]) -> None:
    expected = run_variant(WITH_DROPOUT, info=DROPPING)
    assert largest_difference(four_ranks["dropout", layout], expected) < 2e-5


def test_dropout_follows_the_norm_of_the_output() -> None:
    block = Block(replace(WITH_DROPOUT, norm="layernorm"), ModelAxes(), number=0)
    for name, parameter in block.named_parameters():
        values = random_weight(name, tuple(parameter.shape))
        parameter.data = torch.zeros_like(values) if name.startswith("mlp_output") else values
    x = torch.randn(16, 2, SMALL.hidden_size, generator=torch.Generator().manual_seed(4))
    whole, dropped = (block(x, info) - x for info in (PLAIN, DROPPING))
    kept = dropped != 0
    assert 0.6 < float(kept.float().mean()) < 0.8
    assert torch.allclose(dropped[kept], whole[kept] / 0.7, atol=1e-5)


def test_new_vectors_start_as_others_and_do_not_decay() -> None:
    """Biases are 0 and norms 1; AdamW updates both without weight decay, also under Muon."""
    experts = Experts(count=2, per_token=1, ffn_hidden_size=8)
    config = replace(VARIANTS["gemma"], bias=True, qk_norm_over="projection", experts=experts)
    parameters = dict(logical_parameters(SequentialModel(layer_specs(config)), config))
    initialize(parameters.items(), config, seed=1)
    optimizer = parse_recipe(small_recipe(Path("corpus")), "small").optimizer
    vectors = {name: p for name, p in parameters.items() if p.dim() == 1}
    assert {
        "blocks.1.attention_output_norm.weight",
        "blocks.1.attention.q_norm.weight",
        "blocks.1.mlp.router.bias",
        "blocks.1.mlp.experts.up_1_bias",
        "blocks.1.mlp.experts.down_1_bias",
        "blocks.1.mlp_output_norm.weight",
    } <= vectors.keys()
    for name, vector in vectors.items():
        assert torch.equal(vector.detach(), torch.full_like(vector, "norm" in name)), name
        for kind in ("adamw", "muon"):
            settings = optimizer.model_copy(update={"kind": kind, "weight_decay": 0.1})
            rule = rule_of(name, vector, config, settings)
            assert (rule.algorithm, rule.weight_decay) == ("adamw", 0), name


def test_the_embedding_multiplier_scales_the_input_only() -> None:
    plain = replace(SMALL, tie_embeddings=True)
    tokens = example_tokens(plain)
    embeddings = []
    for config in (plain, replace(plain, embedding_multiplier=3.0)):
        table = TokenEmbedding(config, TensorAxis())
        table.weight.data = random_weight("embedding.weight", tuple(table.weight.shape))
        embeddings.append((table(tokens, PLAIN), table.predict(torch.ones(1, 1, 48))))
    (x, logits), (scaled, same) = embeddings
    assert torch.equal(scaled, 3 * x) and torch.equal(same, logits)
