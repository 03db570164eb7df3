"""A backward pass in two parts gives the gradients of a whole one."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from models.attention import ModelAxes, recomputed
from models.layer_specs import SequentialModel, layer_specs
from models.parallel.collectives import TensorAxis
from models.parallel.layers import (
    ColumnParallelLinear,
    Deferral,
    RowParallelLinear,
    VocabParallelEmbedding,
    defer_weights,
)
from models.parallel.micro_batch_info import MicroBatchInfo
from tests.models.test_transformer import SHAPES
from tests.ranks import join_world, run_ranks

IN, OUT = 8, 12


def linears(axis: TensorAxis, *, bias: bool) -> nn.Sequential:
    torch.manual_seed(1 + axis.rank)
    layers = nn.Sequential(
        ColumnParallelLinear(IN, (OUT,), bias=bias, tensor=axis),
        nn.GELU(),
        RowParallelLinear(OUT, IN, bias=False, tensor=axis),
    )
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.normal_()
    return layers


def gradients(
    axis: TensorAxis, *, bias: bool, split: bool, run: Callable[..., Tensor]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return all gradients, and the weight gradients that exist after the backward pass."""
    layers, deferral = linears(axis, bias=bias), Deferral()
    if split:
        defer_weights(layers, deferral)
    torch.manual_seed(7)
    x = torch.randn(6, 2, IN)
    if axis.sequence_parallel:
        x = x.chunk(axis.size)[axis.rank]
    x = x.clone().requires_grad_()
    run(layers, x).square().sum().backward()
    first = [None if each.grad is None else each.grad.clone() for each in layers.parameters()]
    for weight, gradient in deferral.take():
        assert weight.grad is None
        weight.grad = gradient()
    assert deferral.take() == []
    return [x.grad, *(each.grad for each in layers.parameters())], first


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("run", [lambda layers, x: layers(x), recomputed], ids=["kept", "again"])
def test_a_split_backward_pass_equals_a_whole_one(bias: bool, run: Callable[..., Tensor]) -> None:
    whole, at_once = gradients(TensorAxis(), bias=bias, split=False, run=run)
    parts, first = gradients(TensorAxis(), bias=bias, split=True, run=run)
    assert all(each is not None for each in at_once)
    assert [each is None for each in first] == ([True, False, True] if bias else [True] * 2)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(other, one)


def split_worker() -> list[float]:
    world = join_world()
    found = []
    for sequence_parallel in (False, True):
        axis = TensorAxis(dist.group.WORLD, world.rank, world.size, sequence_parallel)
        both = [
            gradients(axis, bias=True, split=split, run=lambda layers, x: layers(x))[0]
            for split in (False, True)
        ]
        apart = [(a - b).abs().max() / a.abs().max() for a, b in zip(*both, strict=True)]
        found.append(float(max(apart)))
    return found


def test_two_parts_are_the_whole_on_two_tensor_ranks() -> None:
    for found in run_ranks(2, split_worker):
        assert max(found) < 1e-6


def test_neither_lookup_nor_head_defers() -> None:
    table = VocabParallelEmbedding(10, IN, padded_vocab_size=10, tensor=TensorAxis())
    with torch.no_grad():
        table.weight.normal_()
    deferral = Deferral()
    defer_weights(table, deferral)
    for output in (table.logits(torch.randn(3, 1, IN)), table.embed(torch.tensor([[1, 2]]))):
        table.weight.grad = None
        output.sum().backward()
        assert table.weight.grad is not None and deferral.take() == []


def test_all_matrices_of_a_model_defer() -> None:
    """A matrix that does not defer would compute its weight gradient in the backward pass."""
    axis, deferral = TensorAxis(), Deferral()
    model = SequentialModel(layer_specs(SHAPES["qwen3"], ModelAxes(tensor=axis)))
    defer_weights(model, deferral)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    model(tokens, tokens, MicroBatchInfo()).backward()
    left = {id(weight) for weight, _ in deferral.take()}
    names = {name for name, each in model.named_parameters() if each.dim() == 2}
    deferred = {name for name, each in model.named_parameters() if id(each) in left}
    assert names - deferred == {"0.weight", "4.weight"}  # embedding and head
