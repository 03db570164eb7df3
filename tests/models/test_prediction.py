"""Prediction of further tokens against a plain formula in fp64, and on tensor and context ranks."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from models import cost
from models.attention import Frequencies, ModelAxes
from models.config import Experts, ModelConfig, Prediction
from models.context_parallel.division import divide
from models.cost import (
    active_parameter_count,
    block_multiply_adds,
    block_parameters,
    expert_parameters,
    flops_per_token,
    hidden_matrices,
    hidden_matrix_parameters,
    parameter_count,
    prediction_parameters,
)
from models.errors import UserError
from models.initialization import initialize
from models.layer_specs import (
    SequentialModel,
    layer_specs,
    logical_parameters,
    logical_shapes,
    vocabulary_tables,
)
from models.parallel.collectives import TensorAxis
from models.parallel.layers import Deferral, defer_weights
from models.parallel.micro_batch_info import Documents, MaskKey, MicroBatchInfo
from models.sharding import sharding_of
from tests.models.test_latent_attention import outcomes_on_four_ranks
from tests.models.test_transformer import gathered, relative
from tests.ranks import run_ranks

MODEL = ModelConfig(
    layers=2,
    hidden_size=24,
    heads=4,
    kv_heads=4,
    ffn_hidden_size=40,
    vocab_size=67,
    sequence_length=32,
    norm="rmsnorm",
    positions="rope",
    activation="swiglu",
    bias=False,
    tie_embeddings=False,
    initial_std=0.2,
    prediction=Prediction(depth=2, loss_weight=0.4),
)
CAPPED = replace(
    MODEL, tie_embeddings=True, logit_soft_cap=3.0, z_loss=0.1, embedding_multiplier=2.0
)
MODELS = {"own head": MODEL, "tied": CAPPED}
EXPERTS = replace(
    MODEL, experts=Experts(count=8, per_token=2, ffn_hidden_size=16, balance_loss=0.02)
)
DOCUMENTS = Documents(((9, 23), (4, 1, 7, 20)))
INFO = {
    "whole": MicroBatchInfo(),
    "documents": MicroBatchInfo(documents=DOCUMENTS),
    "dropout": MicroBatchInfo(MaskKey(seed=7, samples=range(40, 42)), DOCUMENTS),
}
DROPPING = replace(MODEL, dropout=0.2)


def example(config: ModelConfig, info: MicroBatchInfo) -> tuple[Tensor, Tensor]:
    """Return tokens [b, s] and labels [b, s, 1 + D], -1 where the input is of another document."""
    depth, s = config.prediction_depth, config.sequence_length
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(config.vocab_size, (2, s + depth + 1), generator=generator)
    labels = torch.stack([tokens[:, k : k + s] for k in range(1, depth + 2)], dim=-1)
    if info.documents is not None:
        numbers = [torch.repeat_interleave(torch.tensor(n)) for n in info.documents.lengths]
        for k in range(1, depth + 1):
            later = torch.stack([torch.cat([n[k:], n.new_full((k,), -1)]) for n in numbers])
            labels[..., k][later != torch.stack(numbers)] = -1
    return tokens[:, :s], labels


def formula(
    config: ModelConfig, weights: dict[str, Tensor], tokens: Tensor, labels: Tensor,
    documents: Documents | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the losses of all depths, [1 + D], and the loss with all gradients: equations 21 to 25
    of DeepSeek-V3, with the sum over the labels that count divided by the number of all tokens.
    """
    b, s = tokens.shape
    rows = documents.lengths if documents else ((s,),) * b
    numbers = torch.stack([torch.repeat_interleave(torch.tensor(n)) for n in rows])
    seen = (numbers[:, :, None] == numbers[:, None]).tril()[:, None]  # [b, 1, s, s]
    places = torch.stack([torch.cat([torch.arange(n) for n in each]) for each in rows])
    angles = places[..., None] * Frequencies(6, config.rope_theta, None).on(tokens.device).double()
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]  # [b, 1, s, 3]

    def norm(name: str, x: Tensor) -> Tensor:
        rms = (x.square().mean(-1, keepdim=True) + config.norm_epsilon).sqrt()
        return x / rms * weights[f"{name}.weight"]

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.complex(*x.chunk(2, dim=-1)) * turn
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    def block(name: str, x: Tensor) -> Tensor:
        qkv = norm(f"{name}.attention_norm", x) @ weights[f"{name}.attention.qkv.weight"].T
        q, k, v = (y.unflatten(-1, (4, 6)).transpose(1, 2) for y in qkv.chunk(3, dim=-1))
        scores = rotate(q) @ rotate(k).mT / 6**0.5
        y = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
        y = y.transpose(1, 2).flatten(2)
        x = x + y @ weights[f"{name}.attention.output.weight"].T
        gate, up = (norm(f"{name}.mlp_norm", x) @ weights[f"{name}.mlp.up.weight"].T).chunk(2, -1)
        return x + (F.silu(gate) * up) @ weights[f"{name}.mlp.down.weight"].T

    def losses(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = x @ weights["embedding.weight" if config.tie_embeddings else "head.weight"].T
        if config.logit_soft_cap is not None:
            logits = config.logit_soft_cap * torch.tanh(logits / config.logit_soft_cap)
        entropies = F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-1
        )
        z = logits.logsumexp(-1).square().flatten() * (labels.flatten() >= 0)
        return entropies.sum() / labels.numel(), config.z_loss * z.sum() / labels.numel()

    def embed(tokens: Tensor) -> Tensor:
        return weights["embedding.weight"][tokens] * config.embedding_multiplier

    x = embed(tokens)
    for number in range(config.layers):
        x = block(f"blocks.{number}", x)
    h = norm("final_norm", x)
    found, z = losses(h, labels[..., 0])
    reported, total = [found], found + z
    assert config.prediction is not None
    for k in range(1, config.prediction.depth + 1):
        name, later = f"predictions.{k - 1}", embed(labels[..., k - 1].clamp(min=0))
        both = torch.cat(
            [norm(f"{name}.embedding_norm", later), norm(f"{name}.hidden_norm", h)], -1
        )
        h = norm(
            f"{name}.output_norm",
            block(f"{name}.block", both @ weights[f"{name}.projection.weight"].T),
        )
        found, z = losses(h, labels[..., k])
        reported.append(found)
        total = total + config.prediction.loss_weight / config.prediction.depth * (found + z)
    return torch.stack(reported), total


@pytest.mark.parametrize("info", ["whole", "documents"])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_their_formula(
    name: str, info: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MODELS[name]
    monkeypatch.setitem(cost.MAX_LOGITS, "cpu", 1500)  # of some tokens at a time
    model = SequentialModel(layer_specs(config))
    parameters = dict(logical_parameters(model, config))
    initialize(parameters.items(), config, seed=3)
    for parameter_name, parameter in parameters.items():
        if parameter_name.endswith("norm.weight"):
            parameter.data += torch.linspace(-0.3, 0.5, len(parameter))
    tokens, labels = example(config, INFO[info])
    loss = model(tokens, labels, INFO[info])
    loss.backward()
    weights = {
        n: sharding_of(p).logical_tensor([p.detach()]).double().requires_grad_()
        for n, p in parameters.items()
    }
    losses, total = formula(config, weights, tokens, labels, INFO[info].documents)
    total.backward()
    assert relative(loss.detach().double(), losses[0].detach()) < 1e-6
    sums = sum(t.prediction_sums for t in vocabulary_tables(model) if t.prediction_sums is not None)
    counts = (labels[..., 1:] >= 0).sum((0, 1))
    assert torch.equal(sums[:, 1].long(), counts)
    assert relative(sums[:, 0] / labels[..., 0].numel(), losses[1:].detach()) < 1e-6
    for n, p in parameters.items():
        assert p.grad is not None and weights[n].grad is not None
        found = sharding_of(p).logical_tensor([p.grad]).double()
        assert relative(found, weights[n].grad) < 1e-5, n


def test_documents_do_not_change_the_labels_that_do_not_cross_them() -> None:
    _, labels = example(MODEL, INFO["documents"])
    _, whole = example(MODEL, INFO["whole"])
    assert torch.equal(labels[..., 0], whole[..., 0])
    assert (labels[0, 7:9, 1] < 0).tolist() == [False, True]  # the first document has 9 tokens
    assert (labels[0, 6:9, 2] < 0).tolist() == [False, True, True]


Outcome = tuple[Tensor, Tensor, dict[str, Tensor]]  # loss, sums, gradients of logical weights


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
    tokens, labels = example(config, info)
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
    (sums,) = (t.prediction_sums for t in vocabulary_tables(model) if t.prediction_sums is not None)
    found = torch.cat([loss.detach().double()[None] / context.size, sums.flatten()])
    gradients = {}
    for name, parameter in parameters.items():
        assert parameter.grad is not None, name
        if context.size > 1:
            dist.all_reduce(parameter.grad, group=context.group)
        gradients[name] = gathered(parameter.grad / context.size, sharding_of(parameter), tensor)
    if context.size > 1:
        dist.all_reduce(found, group=context.group)
    return found[0], found[1:], gradients


def difference(one: Outcome, other: Outcome) -> float:
    assert one[2].keys() == other[2].keys()
    return max(
        relative(one[0], other[0]),
        relative(one[1], other[1]),
        *(relative(one[2][n], other[2][n]) for n in one[2]),
    )


# name -> model, information, tensor ranks, context ranks, settings
CASES: dict[str, tuple[ModelConfig, str, int, int, dict[str, Any]]] = {
    "tensor 4": (MODEL, "documents", 4, 1, {}),
    "tensor 4, sequence parallel": (CAPPED, "documents", 4, 1, {"split": True}),
    "deferred": (MODEL, "whole", 4, 1, {"split": True, "defers": True}),
    "context 4": (CAPPED, "documents", 1, 4, {}),
    "ulysses, deferred": (MODEL, "whole", 1, 4, {"attention": "ulysses", "defers": True}),
    "selective": (MODEL, "documents", 2, 2, {"recompute": "selective"}),
    "full": (CAPPED, "whole", 2, 2, {"split": True, "recompute": "full", "attention": "ring"}),
    "dropout": (DROPPING, "dropout", 2, 2, {"split": True}),
}  # fmt: skip


def worker() -> dict[str, Outcome]:
    return outcomes_on_four_ranks(CASES, INFO, outcome)


@functools.cache
def four_ranks() -> dict[str, Outcome]:
    return run_ranks(4, worker)[0]


@pytest.mark.parametrize("name", CASES)
def test_four_ranks_agree_with_one(name: str) -> None:
    config, info, *_ = CASES[name]
    assert difference(four_ranks()[name], outcome(config, INFO[info])) < 1e-5


def test_recomputation_changes_nothing() -> None:
    whole = outcome(EXPERTS, INFO["documents"])
    for recompute in ("selective", "full"):
        assert difference(outcome(EXPERTS, INFO["documents"], recompute=recompute), whole) < 1e-6


def test_an_evaluation_predicts_one_token() -> None:
    model = SequentialModel(layer_specs(MODEL))
    initialize(logical_parameters(model, MODEL), MODEL, seed=3)
    tokens, labels = example(MODEL, INFO["whole"])
    with torch.no_grad():
        loss = model(tokens, labels[..., 0], INFO["whole"])
    assert all(table.prediction_sums is None for table in vocabulary_tables(model))
    assert torch.equal(loss, model(tokens, labels, INFO["whole"]).detach())


def test_combinations_that_are_not_possible_are_rejected() -> None:
    for key, value in (("positions", "learned"), ("parametrization", "mup")):
        with pytest.raises(UserError, match=f"{key}.*prediction"):
            replace(MODEL, **{key: value, "base_hidden_size": 8 if value == "mup" else None})
    with pytest.raises(UserError, match="depth = 0"):
        Prediction(depth=0)
    with pytest.raises(UserError, match="loss_weight = 0"):
        Prediction(loss_weight=0.0)


@pytest.mark.parametrize("config", [MODEL, CAPPED, EXPERTS], ids=["dense", "tied", "experts"])
def test_costs_are_those_of_the_parameters(config: ModelConfig) -> None:
    shapes = logical_shapes(config)
    assert parameter_count(config) == sum(torch.Size(shape).numel() for shape in shapes.values())
    in_layers = {n: shape for n, shape in shapes.items() if n.startswith(("blocks", "predictions"))}
    matrices = [s for n, s in in_layers.items() if len(s) == 2 and "router" not in n]
    assert hidden_matrix_parameters(config) == sum(a * b for a, b in matrices)
    assert hidden_matrices(config)[24, 48] == 2
    with torch.device("meta"):
        model = SequentialModel(layer_specs(config, ModelAxes(tensor=TensorAxis(size=2))))
    local = [p.numel() for n, p in logical_parameters(model, config) if "predictions.1" in n]
    expert = ModelAxes().expert  # without expert ranks, each tensor rank has all experts here
    assert expert.size == 1
    if config.experts is None:
        assert prediction_parameters(config, 2) == sum(local)
    plain = replace(config, prediction=None)
    h, v = config.hidden_size, config.vocab_size
    added = 2 * (block_multiply_adds(config) + 2 * h * h + h * v)
    assert flops_per_token(config) == flops_per_token(plain) + 6 * added
    more = parameter_count(config) - parameter_count(plain)
    assert more == 2 * (block_parameters(config) + 2 * h * h + 3 * h)
    idle = 0 if config.experts is None else 4 * 6 * expert_parameters(config)
    assert active_parameter_count(config) == parameter_count(config) - idle
