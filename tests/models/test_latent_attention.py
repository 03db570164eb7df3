"""Latent attention against a plain formula in fp64, and on tensor and context ranks."""

import functools
import itertools
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.attention import Frequencies, ModelAxes
from models.config import Latents, ModelConfig, RopeScaling
from models.context_parallel.collectives import ContextAxis
from models.context_parallel.division import divide
from models.cost import (
    block_multiply_adds,
    block_parameters,
    hidden_matrices,
    hidden_matrix_parameters,
    parameter_count,
    sends_latents,
)
from models.errors import UserError
from models.initialization import initialize
from models.kernels import attention
from models.latent_attention import LatentAttention
from models.layer_specs import SequentialModel, layer_specs, logical_parameters, logical_shapes
from models.parallel.collectives import TensorAxis, create_groups
from models.parallel.layers import Deferral, defer_weights
from models.parallel.micro_batch_info import Documents, MaskKey, MicroBatchInfo
from models.sharding import sharding_of
from tests.models.test_transformer import example_tokens, gathered, labels_of, relative
from tests.ranks import run_ranks

MODEL = ModelConfig(
    layers=2,
    hidden_size=24,
    heads=4,
    kv_heads=4,
    head_size=6,
    ffn_hidden_size=40,
    vocab_size=67,
    sequence_length=32,
    norm="rmsnorm",
    positions="rope",
    rope_scaling=RopeScaling(type="yarn", factor=4.0, original_sequence_length=8),
    activation="swiglu",
    bias=False,
    tie_embeddings=False,
    initial_std=0.2,
    latent=Latents(query_rank=10, key_value_rank=8, rotary_size=4, value_size=5),
)
DIRECT = replace(  # queries from the activations; wide latents, which are not sent
    MODEL,
    attention_scale=0.5,
    rope_scaling=None,
    latent=Latents(key_value_rank=80, rotary_size=2, value_size=8),
)
MODELS = {"latent queries": MODEL, "direct queries": DIRECT}
DOCUMENTS = Documents(((9, 23), (4, 1, 7, 20)))
INFO = {
    "whole": MicroBatchInfo(),
    "documents": MicroBatchInfo(documents=DOCUMENTS),
    "dropout": MicroBatchInfo(MaskKey(seed=7, samples=range(40, 42)), DOCUMENTS),
}
PLAIN = MicroBatchInfo()
DROPPING = replace(MODEL, attention_dropout=0.2)


def formula(
    module: LatentAttention, x: Tensor, documents: Documents | None, config: ModelConfig
) -> Tensor:
    """Return equations 9 to 19 of DeepSeek-V2 with all probabilities, [s, b, h]."""
    latent = config.latent
    assert latent is not None
    d, r, heads = config.attention_head_size, latent.rotary_size, config.heads
    weights = dict(module.named_parameters())

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T

    def norm(name: str, x: Tensor) -> Tensor:
        rms = (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt()
        return x / rms * weights[f"{name}.weight"]

    s, b, _ = x.shape
    rows = documents.lengths if documents else ((s,),) * b
    numbers = torch.stack([torch.repeat_interleave(torch.tensor(n)) for n in rows])  # [b, s]
    places = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in rows])
    frequencies = Frequencies(r, config.rope_theta, config.rope_scaling)
    angles = places[..., None] * frequencies.on(x.device).double()  # [b, s, r/2]
    turn = torch.polar(torch.full_like(angles, frequencies.amplitude), angles)

    def rotate(x: Tensor) -> Tensor:
        """[s, b, heads, r], as complex numbers of the two halves."""
        pairs = torch.complex(*x.chunk(2, dim=-1)) * turn.transpose(0, 1)[:, :, None]
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    if latent.query_rank is None:
        q = linear("q", x)
    else:
        q = linear("q_up", norm("q_latent_norm", linear("q_down", x)))
    q = q.view(s, b, heads, d + r)
    q = torch.cat([q[..., :d], rotate(q[..., d:])], dim=-1)
    down = linear("kv_down", x)
    key = rotate(down[..., None, -r:]).expand(-1, -1, heads, -1)
    kv = linear("kv_up", norm("kv_latent_norm", down[..., :-r])).view(s, b, heads, -1)
    k = torch.cat([kv[..., :d], key], dim=-1)
    scale = config.attention_scale or (d + r) ** -0.5
    scores = torch.einsum("sbad,tbad->bast", q, k) * scale
    seen = (numbers[:, :, None] == numbers[:, None]).tril()[:, None]
    probabilities = scores.masked_fill(~seen, float("-inf")).softmax(dim=-1)
    return linear("output", torch.einsum("bast,tbav->sbav", probabilities, kv[..., d:]).flatten(2))


def outcome_of(y: Tensor, x: Tensor, module: LatentAttention) -> dict[str, Tensor]:
    weights = dict(module.named_parameters())
    loss = (y * torch.linspace(-1, 2, y.numel()).view(y.shape).to(y.dtype)).sum()
    grads = torch.autograd.grad(loss, [x, *weights.values()])
    return {"y": y.detach()} | dict(zip(["x", *weights], grads, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_its_formula(name: str) -> None:
    config = MODELS[name]
    for info, (fused, kept) in itertools.product(
        ("whole", "documents"), ((64, 1024), (0, 1024), (0, 0))
    ):
        module = LatentAttention(config, ModelAxes(), name="test")
        generator = torch.Generator().manual_seed(0)
        for weight in module.parameters():
            weight.data.normal_(generator=generator).div_(3)
        x = torch.randn(32, 2, 24, generator=generator).requires_grad_()
        with mock.patch.multiple(attention, MAX_FUSED_LENGTH=fused, MAX_KEPT_LENGTH=kept):
            found = outcome_of(module(x, INFO[info]), x, module)
        module.double()
        x = x.detach().double().requires_grad_()
        expected = outcome_of(formula(module, x, INFO[info].documents, config), x, module)
        for key, value in expected.items():
            assert relative(found[key].double(), value) < 1e-5, (info, fused, kept, key)


Outcome = tuple[Tensor, dict[str, Tensor]]  # loss, gradients of logical weights


def outcome(
    config: ModelConfig,
    info: MicroBatchInfo,
    axes: ModelAxes | None = None,
    *,
    recompute: str = "none",
    defers: bool = False,
) -> Outcome:
    """Run a forward and a backward pass on a rank; return sums over the ranks."""
    axes = axes or ModelAxes()
    tensor, context = axes.tensor, axes.context
    model = SequentialModel(
        layer_specs(config, axes, recompute_core=recompute == "selective"),
        recompute_interval=int(recompute == "full"),
    )
    parameters = dict(logical_parameters(model, config))
    initialize(parameters.items(), config, seed=3, tensor=tensor)
    deferral = Deferral()
    if defers:
        defer_weights(model, deferral)
    tokens = example_tokens(config)
    labels = labels_of(tokens)
    if context.size > 1:
        lengths = info.documents.lengths if info.documents else None
        division = divide(config.sequence_length, context.rank, context.size, lengths)
        tokens, labels = (
            torch.cat([x[:, held.start : held.stop] for held in division.slices], dim=1)
            for x in (tokens, labels)
        )
        info = replace(info, division=division)
    loss = model(tokens, labels, info)
    loss.backward()
    for weight, gradient in deferral.take():
        weight.grad = gradient() if weight.grad is None else weight.grad + gradient()
    loss = loss.detach().clone()
    gradients = {}
    for name, parameter in parameters.items():
        assert parameter.grad is not None
        if context.size > 1:
            dist.all_reduce(parameter.grad, group=context.group)
        gradients[name] = gathered(parameter.grad / context.size, sharding_of(parameter), tensor)
    if context.size > 1:
        dist.all_reduce(loss, group=context.group)
    return loss / context.size, gradients


def difference(one: Outcome, other: Outcome) -> float:
    assert one[1].keys() == other[1].keys()
    return max(relative(one[0], other[0]), *(relative(one[1][n], other[1][n]) for n in one[1]))


# name -> model, information, tensor ranks, context ranks, settings
CASES: dict[str, tuple[ModelConfig, str, int, int, dict[str, Any]]] = {
    "tensor 4": (MODEL, "whole", 4, 1, {}),
    "tensor 4, documents, sequence parallel": (MODEL, "documents", 4, 1, {"split": True}),
    "tensor 4, direct, sequence parallel": (DIRECT, "whole", 4, 1, {"split": True}),
    "deferred": (MODEL, "whole", 4, 1, {"split": True, "defers": True}),
    "deferred, ulysses": (MODEL, "whole", 1, 4, {"attention": "ulysses", "defers": True}),
    "selective": (MODEL, "documents", 2, 2, {"recompute": "selective"}),
    "full": (MODEL, "whole", 2, 2, {"split": True, "recompute": "full", "attention": "ring"}),
    "deferred, both": (MODEL, "documents", 2, 2, {"split": True, "defers": True}),
    "dropout": (DROPPING, "dropout", 2, 2, {}),
    "dropout, ulysses": (DROPPING, "dropout", 2, 2, {"attention": "ulysses"}),
    **{
        f"context 4, {name}, {attention}": (
            MODELS[name],
            "documents",
            1,
            4,
            {"attention": attention},
        )
        for name in MODELS
        for attention in ("gather", "ring", "ulysses")
    },
}  # fmt: skip


def axes_of(tensor_size: int, split: bool, attention: str) -> ModelAxes:
    """Return the axes of this rank among four; tensor ranks are neighbours."""
    place, index = divmod(dist.get_rank(), tensor_size)
    tensor, context = groups(tensor_size)
    return ModelAxes(
        tensor=TensorAxis(tensor, index, tensor_size, split and tensor_size > 1),
        context=ContextAxis(context, place, 4 // tensor_size, attention),
    )


@functools.cache
def groups(tensor_size: int) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Create the groups of tensor and of context ranks."""
    ranks = torch.arange(4).view(-1, tensor_size)
    return create_groups(ranks.tolist()), create_groups(ranks.t().tolist())


def worker() -> dict[str, Outcome]:
    return outcomes_on_four_ranks(CASES, INFO, outcome)


def outcomes_on_four_ranks(
    cases: Mapping[str, tuple[ModelConfig, str, int, int, dict[str, Any]]],
    info: Mapping[str, MicroBatchInfo],
    outcome: Callable[..., Any],
) -> dict[str, Any]:
    """Return the outcome of each case on the axes that its settings describe; {} except on rank 0.

    cases: name -> model, information, tensor ranks, context ranks, settings
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name, (config, key, tensor, _, settings) in cases.items():
        settings = dict(settings)
        axes = axes_of(tensor, settings.pop("split", False), settings.pop("attention", "gather"))
        found[name] = outcome(config, info[key], axes, **settings)
    dist.barrier()
    return found if os.environ["RANK"] == "0" else {}


@functools.cache
def four_ranks() -> dict[str, Outcome]:
    return run_ranks(4, worker)[0]


@pytest.mark.parametrize("name", CASES)
def test_four_ranks_agree_with_one(name: str) -> None:
    config, info, *_ = CASES[name]
    assert difference(four_ranks()[name], outcome(config, INFO[info])) < 1e-5


def test_recomputation_changes_nothing() -> None:
    whole = outcome(MODEL, PLAIN)
    for recompute in ("selective", "full"):
        assert difference(outcome(MODEL, PLAIN, recompute=recompute), whole) < 1e-6


def test_latents_are_sent_where_they_have_fewer_columns() -> None:
    assert sends_latents(MODEL, 1) and sends_latents(MODEL, 4)  # 12 columns of 80 and of 20
    assert not sends_latents(MODEL, 4, shares=2)  # of 10
    assert not sends_latents(DIRECT, 1)  # 82 columns of 64
    assert not sends_latents(replace(MODEL, latent=None), 1)


@pytest.mark.parametrize("name", MODELS)
def test_costs_are_those_of_the_parameters(name: str) -> None:
    config = MODELS[name]
    shapes = logical_shapes(config)
    assert parameter_count(config) == sum(torch.Size(shape).numel() for shape in shapes.values())
    matrices = [shape for n, shape in shapes.items() if "blocks" in n and len(shape) == 2]
    assert hidden_matrix_parameters(config) == sum(a * b for a, b in matrices)
    assert sum(hidden_matrices(config).values()) == len(matrices) + config.layers  # gate|up
    scores = config.sequence_length * config.heads * (config.score_size + config.value_head_size)
    of_matrices = hidden_matrix_parameters(config) / config.layers
    assert block_multiply_adds(config) == of_matrices + scores
    with torch.device("meta"):
        axes = ModelAxes(tensor=TensorAxis(size=2))
        model = SequentialModel(layer_specs(config, axes))
    local = [p.numel() for name, p in model.named_parameters() if name.startswith("1.")]
    assert block_parameters(config, 2) == sum(local)


def test_combinations_that_are_not_possible_are_rejected() -> None:
    for key, value in (
        ("kv_heads", 2),
        ("qk_norm", True),
        ("attention_sinks", True),
        ("bias", True),
        ("head_size", None),
    ):
        with pytest.raises(UserError, match=f"{key.removesuffix('s')}.*latent"):
            replace(MODEL, **{key: value})
    with pytest.raises(UserError, match="value_size = 11 is above"):
        replace(MODEL, latent=Latents(key_value_rank=8, rotary_size=4, value_size=11))
