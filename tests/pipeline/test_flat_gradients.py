"""Gradients of one step, in tensors that outlive it."""

import itertools
from pathlib import Path
from unittest import mock

import pytest

from tests.conftest import changed, small_recipe
from tests.ranks import join_world, run_ranks
from threefold.config.loading import parse_recipe
from threefold.pipeline import gradients
from threefold.prove.training import many_cases, start, train_step

DTYPES = ("fp32", "bf16")
TAKEN = {"after the pass": gradients.MAX_ELEMENTS_KEPT, "by hooks": 0}
WEIGHT = "final_norm.weight"


def leave_one_out(corpus: str) -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    """Return a weight's largest gradients in a step with and in one without, and the two norms."""
    world, found = join_world(), {}
    with many_cases() as begin:
        for dtype, (taken, elements) in itertools.product(DTYPES, TAKEN.items()):
            begin()
            config = f"ds_configs/zero1_{dtype}.json"
            recipe = changed(small_recipe(Path(corpus)), deepspeed=config)
            with mock.patch.object(gradients, "MAX_ELEMENTS_KEPT", elements):
                engine, data = start(parse_recipe(recipe, "test"), world)
            flat = engine.wrapped.gradients
            assert isinstance(flat, gradients.FlatGradients)
            assert flat.takes_after_pass == (elements > 0)
            weight = dict(engine.state.parameters)[WEIGHT]
            largest, finish = [], flat.finish

            def finish_and_look(finish=finish, flat=flat, weight=weight, largest=largest):
                finish()
                largest.append(float(flat.sum_of(weight).abs().max()))

            flat.finish = finish_and_look
            norms = [train_step(engine, data, 1).grad_norm]
            weight.requires_grad_(False)
            norms.append(train_step(engine, data, 2).grad_norm)
            found[dtype, taken] = largest, norms
    return found


@pytest.fixture(scope="module")
def found(corpus: Path) -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    return run_ranks(1, leave_one_out, str(corpus))[0]


@pytest.mark.parametrize("taken", TAKEN)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_without_a_gradient_has_zeros_not_the_last_steps(
    dtype: str, taken: str, found: dict[tuple[str, str], tuple[list[float], list[float]]]
) -> None:
    (with_gradient, without), _ = found[dtype, taken]
    assert with_gradient > 0
    assert without == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_taken_after_a_pass_are_those_taken_by_hooks(
    dtype: str, found: dict[tuple[str, str], tuple[list[float], list[float]]]
) -> None:
    after_pass, by_hooks = (found[dtype, taken] for taken in TAKEN)
    assert after_pass == by_hooks
    assert min(after_pass[1]) > 0
