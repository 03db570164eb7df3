"""fp32 gradients of two tensor ranks are as close to fp64 as those of one process.

Losses of two layouts drift apart because a model amplifies rounding errors. This test shows that
tensor parallelism adds no rounding errors.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from models.attention import Frequencies, ModelAxes, rotary_table
from models.initialization import initialize
from models.layer_specs import SequentialModel, layer_specs, logical_parameters
from models.parallel.collectives import TensorAxis
from models.parallel.micro_batch_info import MicroBatchInfo
from models.sharding import sharding_of
from tests.models.test_transformer import SHAPES, example_tokens, gathered, labels_of
from tests.ranks import join_world, run_ranks

CONFIGS = {
    name: replace(
        SHAPES[name], hidden_size=192, ffn_hidden_size=512, sequence_length=96, initial_std=0.02
    )
    for name in ("llama", "gpt2")
}
MOST = 1.2  # error of two ranks relative to that of one process


def gradients(name: str, axis: TensorAxis, *, exact: bool = False) -> dict[str, Tensor]:
    """Return the logical gradients of one micro-batch, in fp64 if they are to be exact."""
    config = CONFIGS[name]
    model = SequentialModel(layer_specs(config, ModelAxes(tensor=axis)))
    parameters = dict(logical_parameters(model, config))
    initialize(parameters.items(), config, seed=3, tensor=axis)
    tokens = example_tokens(config)
    with in_fp64() if exact else nullcontext():
        model.to(torch.get_default_dtype())
        model(tokens, labels_of(tokens), MicroBatchInfo()).backward()
    return {n: gathered(p.grad, sharding_of(p), axis) for n, p in parameters.items()}


@contextmanager
def in_fp64() -> Iterator[None]:
    """Let kernels compute in fp64 instead of fp32, with the same rotary table."""
    config = CONFIGS["llama"]
    frequencies = Frequencies(config.attention_head_size, config.rope_theta)
    rotary_table((range(config.sequence_length),), frequencies, torch.device("cpu"), None)  # cached
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.object(Tensor, "float", Tensor.double):
            yield
    finally:
        torch.set_default_dtype(default)
        rotary_table.cache_clear()


def worker(name: str) -> dict[str, Tensor]:
    world = join_world()
    return gradients(name, TensorAxis(dist.group.WORLD, world.rank, world.size))


@pytest.mark.parametrize("name", CONFIGS)
def test_two_tensor_ranks_round_as_little_as_one_process(name: str) -> None:
    two, _ = run_ranks(2, worker, name)
    one = gradients(name, TensorAxis())
    exact = gradients(name, TensorAxis(), exact=True)
    assert all(each.dtype == torch.float64 for each in exact.values())
    weights = [n for n in exact if not n.endswith("bias")]  # exact gradients of some biases are 0
    errors = [[error(found[n], exact[n]) for n in weights] for found in (one, two)]
    mean_of_one, mean_of_two = (sum(each) / len(weights) for each in errors)
    assert mean_of_two < MOST * mean_of_one < 2e-6
    assert all(b < 2 * a + 1e-7 for a, b in zip(*errors, strict=True))


def error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm of the expected tensor."""
    return float((found.double() - expected).norm() / expected.norm())
