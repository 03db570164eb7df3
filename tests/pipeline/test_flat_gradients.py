"""Gradients of one step, in tensors that outlive it."""

from pathlib import Path

import pytest

from tests.conftest import changed, small_recipe
from tests.ranks import join_world, run_ranks
from threefold.config.loading import parse_recipe
from threefold.pipeline.gradients import FlatGradients
from threefold.prove.training import many_cases, start, train_step

DTYPES = ("fp32", "bf16")
WEIGHT = "final_norm.weight"


def leave_one_out(corpus: str) -> dict[str, list[float]]:
    """Return a weight's largest gradient in a step with one, and in a step without one."""
    world, found = join_world(), {}
    with many_cases() as begin:
        for dtype in DTYPES:
            begin()
            config = f"ds_configs/zero1_{dtype}.json"
            engine, data = start(
                parse_recipe(changed(small_recipe(Path(corpus)), deepspeed=config), "test"), world
            )
            gradients = engine.wrapped.gradients
            assert isinstance(gradients, FlatGradients)
            weight = dict(engine.state.parameters)[WEIGHT]
            largest, finish = [], gradients.finish

            def finish_and_look(finish=finish, gradients=gradients, weight=weight, largest=largest):
                finish()
                largest.append(float(gradients.sum_of(weight).abs().max()))

            gradients.finish = finish_and_look
            train_step(engine, data, 1)
            weight.requires_grad_(False)
            train_step(engine, data, 2)
            found[dtype] = largest
    return found


@pytest.fixture(scope="module")
def found(corpus: Path) -> dict[str, list[float]]:
    return run_ranks(1, leave_one_out, str(corpus))[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_without_a_gradient_has_zeros_not_the_last_steps(
    dtype: str, found: dict[str, list[float]]
) -> None:
    with_gradient, without = found[dtype]
    assert with_gradient > 0
    assert without == 0
