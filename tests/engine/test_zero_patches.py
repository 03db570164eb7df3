"""DeepSpeed's ZeRO optimizer computes the same without needless copies."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from torch import Tensor

from tests.conftest import changed, small_recipe
from tests.ranks import join_world, run_ranks
from threefold.config.loading import parse_recipe
from threefold.config.phases import recipe_at
from threefold.data.dataset import TrainingData
from threefold.engine.deepspeed_overrides import (
    ROW_ELEMENTS,
    gradient_norm,
    reduce_scatter_together,
    scale_in_update,
    squared_norm,
)
from threefold.prove.training import gather, held_state, many_cases, start, train_step

CONFIGS = ("zero1_fp32", "zero1_bf16", "zero2_bf16", "zero3_fp32", "zero3_bf16")
CLIPPING = (0.01, 1e6)  # below every gradient's norm, and above


@pytest.mark.parametrize("elements", [1, ROW_ELEMENTS - 1, ROW_ELEMENTS, 1541, 4_000_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_norm_is_as_exact_as_in_fp64(elements: int, dtype: torch.dtype) -> None:
    gradient = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = float(gradient.double().square().sum())
    assert float(squared_norm(gradient)) == pytest.approx(expected, rel=1e-6)


def test_a_gradient_that_is_not_finite_shows() -> None:
    assert torch.isinf(squared_norm(torch.tensor([1.0, float("inf")])))
    assert torch.isnan(squared_norm(torch.tensor([1.0, float("nan")])))


@pytest.mark.parametrize("norm", [0.5, 8.0])  # below and above the clipping norm
@pytest.mark.parametrize("loss_scale", [1.0, 4.0])
@pytest.mark.parametrize("growth", [1, 2])  # of the scale, for the next step
def test_adamw_clips_while_it_updates(norm: float, loss_scale: float, growth: int) -> None:
    weights, expected = (torch.ones(4, requires_grad=True) for _ in range(2))
    gradient = torch.tensor([1.0, -2.0, 3.0, 0.5])
    gradient *= norm / gradient.norm()
    # With a small epsilon AdamW's first step would not depend on the size of the gradient.
    settings = {"lr": 0.1, "eps": 1.0, "fused": True}
    optimizer = torch.optim.AdamW([weights], **settings)
    zero = SimpleNamespace(
        loss_scale=loss_scale,
        clip_grad=2.0,
        device="cpu",
        optimizer=optimizer,
        model_parallel_rank=0,
        dp_process_group=None,
        _model_parallel_all_reduce=lambda tensor, op: None,
    )
    weights.grad = gradient * loss_scale
    with mock.patch("torch.distributed.get_world_size", return_value=1):
        measured = gradient_norm(zero, [weights.grad], [weights])
    assert float(measured) == pytest.approx(norm * loss_scale)
    zero.loss_scale *= growth
    scale_in_update(zero, [weights.grad], measured)
    optimizer.step()
    plain = torch.optim.AdamW([expected], **settings)
    expected.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_([expected], 2.0)
    plain.step()
    assert torch.allclose(weights, expected, rtol=1e-6)


def first_steps(corpus: str) -> dict[tuple[str, float], tuple[float, float]]:
    """Return the norms of the gradient and of the first moments, by config and clipping."""
    world, found = join_world(), {}
    with many_cases() as begin:
        for config in CONFIGS:
            for clipping in CLIPPING:
                begin()
                table = changed(
                    small_recipe(Path(corpus)),
                    deepspeed=f"ds_configs/{config}.json",
                    optimizer__gradient_clipping=clipping,
                    batch__micro_sequences=4,
                )
                engine, data = start(parse_recipe(table, "test"), world)
                norm = train_step(engine, data, 1).grad_norm
                moments = gather(engine, held_state(engine, "exp_avg"))
                squares = sum(float(each.double().square().sum()) for each in moments.values())
                found[config, clipping] = norm, squares**0.5
    return found


@pytest.fixture(scope="module")
def steps(corpus: Path) -> dict[tuple[str, float], tuple[float, float]]:
    return run_ranks(2, first_steps, str(corpus))[0]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_optimizer_clips(config: str, steps: dict) -> None:
    """After one step the first moments are (1 - beta) times the gradient that AdamW has used."""
    norm, clipped = steps[config, CLIPPING[0]]
    assert norm == pytest.approx(steps["zero1_fp32", CLIPPING[0]][0], rel=1e-2)
    assert clipped == pytest.approx((1 - 0.9) * CLIPPING[0], rel=1e-3)
    norm, whole = steps[config, CLIPPING[1]]
    assert whole == pytest.approx((1 - 0.9) * norm, rel=1e-3)


RAMP = {"start_sequences": 4, "increment": 2, "samples": 16}  # 2, 3, then 4 micro-batches


def ramped(corpus: str) -> dict[str, list[tuple[float, float]]]:
    """Return the losses and gradient norms of the steps of a ramp, by config."""
    world, found = join_world(), {}
    with many_cases() as begin:
        for config in ("zero1_fp32", "zero2_fp32", "zero3_fp32"):
            begin()
            table = changed(
                small_recipe(Path(corpus)), deepspeed=f"ds_configs/{config}.json", batch__ramp=RAMP
            )
            engine, data = start(parse_recipe(table, "test"), world)
            results = [train_step(engine, data, step) for step in range(1, 9)]
            found[config] = [(result.loss, result.grad_norm) for result in results]
    return found


def test_every_optimizer_updates_once_a_step_while_the_batch_grows(corpus: Path) -> None:
    """DeepSpeed's ZeRO-3 decides by a count over all steps whether to update."""
    (found,) = run_ranks(1, ramped, str(corpus))
    for config, steps in found.items():
        assert np.array(steps) == pytest.approx(np.array(found["zero1_fp32"]), rel=1e-6), config


def ramped_in_groups(corpus: str) -> list[list[tuple[float, float]]]:
    """Return the losses and gradient norms of ZeRO-1, and of ZeRO-2 in groups of 3 micro-batches.

    The ramp has steps of 2 micro-batches, which is less than a group, and then of 4.
    """
    world, found = join_world(), []
    ramp = {"start_sequences": 8, "increment": 8, "samples": 16}
    with many_cases() as begin:
        for zero, layout in ((1, {}), (2, {"reduce_every": 3})):
            table = changed(
                small_recipe(Path(corpus)),
                batch={"global_sequences": 16, "micro_sequences": 2, "ramp": ramp},
                deepspeed=f"ds_configs/zero{zero}_fp32.json",
                layout=layout,
            )
            begin()
            recipe = parse_recipe(table, "test")
            engine, _ = start(recipe_at(recipe, 1), world)
            data = TrainingData(recipe, recipe.parallel_dims(world), world.rank)
            results = [train_step(engine, data, step) for step in range(1, 5)]
            found.append([(result.loss, result.grad_norm) for result in results])
            assert engine.micro_batches == 4
    return found


def test_a_step_of_a_ramp_may_have_fewer_micro_batches_than_a_group(corpus: Path) -> None:
    expected, got = run_ranks(2, ramped_in_groups, str(corpus))[0]
    for step, numbers in zip(got, expected, strict=True):
        assert step == pytest.approx(numbers, rel=2e-6)


def average_parts() -> list[tuple[list[Tensor], list[Tensor]]]:
    """Average gradients of several sizes with DeepSpeed's function and with ours."""
    rank = join_world().rank
    results = []
    for sizes in ([9], [7], [1], [2, 3, 10], [1, 1, 6, 100, 4]):
        draw = torch.Generator().manual_seed(rank)
        gradients = [torch.randn(size, generator=draw) for size in sizes]
        copies = [gradient.clone() for gradient in gradients]
        results.append((reduce_scatter_coalesced(copies), reduce_scatter_together(gradients)))
    return results


def test_gradients_are_averaged_as_by_deepspeed() -> None:
    for results in run_ranks(3, average_parts):
        for theirs, ours in results:
            assert [part.shape for part in ours] == [part.shape for part in theirs]
            assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
