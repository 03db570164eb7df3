"""Muon trains like a plain implementation in one process, in every layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import GPT_SWITCHES, changed, small_recipe
from tests.engine.plain_muon import PlainRun, by_singular_values
from tests.ranks import fp16_on_cpu, join_world, run_ranks
from threefold.config.loading import parse_recipe
from threefold.config.recipe import Recipe
from threefold.engine.muon_exchange import update_scale
from threefold.engine.optimizer import Muon, orthogonalize
from threefold.prove.compare import NOISE_SUFFIX, split_noise
from threefold.prove.training import gather, held_state, held_weights, many_cases, start, train_step

STEPS = 3
SWITCHES = {"llama": {}, "gpt": GPT_SWITCHES}
LAYOUTS: dict[str, dict[str, Any]] = {  # on two ranks
    "ZeRO-1": {},
    "ZeRO-2": {"deepspeed": "ds_configs/zero2_fp32.json"},
    "ZeRO-3": {"deepspeed": "ds_configs/zero3_fp32.json"},
    "tensor": {"layout__tensor": 2},
}
MATRICES = {
    f"blocks.{layer}.{part}.weight"
    for layer in range(2)
    for part in ("attention.qkv", "attention.output", "mlp.up", "mlp.down")
}


def recipe_of(corpus: Path, **changes: Any) -> Recipe:
    settings = {"optimizer__kind": "muon", "optimizer__gradient_clipping": 0.5}
    settings["batch__micro_sequences"] = 4
    return parse_recipe(changed(small_recipe(corpus), **settings, **changes), "test")


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16), (1, 7)])
def test_newton_schulz_maps_the_singular_values(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    found = orthogonalize(matrices)
    for matrix, result in zip(matrices, found, strict=True):
        torch.testing.assert_close(result, by_singular_values(matrix), rtol=0, atol=2e-6)
        sizes = torch.linalg.svdvals(result)
        assert float(sizes.max()) < 1.25 and float(sizes[: min(shape) // 2 + 1].min()) > 0.6


def test_an_update_has_the_size_of_adamw_s() -> None:
    """An orthogonal matrix has the root mean square 1 / sqrt(max(rows, columns))."""
    for shape in ((64, 256), (256, 64)):
        orthogonal = torch.linalg.qr(torch.randn(256, 64))[0]
        root_mean_square = float(orthogonal.square().mean().sqrt())
        assert update_scale(shape) * root_mean_square == pytest.approx(0.2, rel=1e-5)


def test_only_the_matrices_inside_the_layers_are_muon_s(corpus: Path) -> None:
    states = run_ranks(1, kinds_worker, str(corpus))[0]
    assert {name for name, kinds in states.items() if "momentum_buffer" in kinds} == MATRICES
    assert {len(kinds) for name, kinds in states.items() if name not in MATRICES} == {3}


def kinds_worker(corpus: str) -> dict[str, tuple[str, ...]]:
    world = join_world()
    engine, _ = start(recipe_of(Path(corpus)), world)
    assert isinstance(engine.wrapped.optimizer.optimizer, Muon)
    return {name: engine.state.kinds(name) for name, _ in engine.parameters()}


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt", marks=pytest.mark.long)])
def test_losses_and_weights_equal_a_plain_implementation(model: str, corpus: Path) -> None:
    torch.set_num_threads(1)
    recipe = recipe_of(corpus, **SWITCHES[model])
    plain = PlainRun(recipe)
    plain.train(STEPS)
    found = run_ranks(2, layouts_worker, str(corpus), model)[0]
    for name, (losses, norms, weights, momenta) in found.items():
        assert losses == pytest.approx(plain.losses, rel=1e-6), name
        assert norms == pytest.approx(plain.norms, rel=1e-5), name
        assert weights.keys() == plain.parameters.keys()
        for key, weight in weights.items():
            expected = plain.parameters[key].detach()[: len(weight)]  # without padding
            for part, rows in split_noise(key, recipe.model).items():
                difference = float((weight[rows] - expected[rows]).norm() / expected[rows].norm())
                assert difference < 1e-5 or part.endswith(NOISE_SUFFIX), (name, part, difference)
        assert momenta.keys() == MATRICES
        for key, momentum in momenta.items():
            expected = plain.states[key].first
            assert float((momentum - expected).norm() / expected.norm()) < 1e-4, (name, key)


def layouts_worker(corpus: str, model: str) -> dict[str, Any]:
    """Train in each layout of two ranks."""
    world, found = join_world(), {}
    with many_cases() as begin_case:
        for name, layout in LAYOUTS.items():
            begin_case()
            recipe = recipe_of(Path(corpus), **SWITCHES[model], **layout)
            engine, data = start(recipe, world)
            results = [train_step(engine, data, step) for step in range(1, STEPS + 1)]
            found[name] = (
                [each.loss for each in results],
                [each.grad_norm for each in results],
                gather(engine, held_weights(engine)),
                gather(engine, held_state(engine, "momentum_buffer")),
            )
    return found


@pytest.mark.long
def test_sixteen_bits_train_in_several_layouts(corpus: Path) -> None:
    """Losses on one and on two ranks agree up to the rounding of 16 bits."""
    one = run_ranks(1, precision_worker, str(corpus), 1)[0]
    for tensor in (1, 2):
        two = run_ranks(2, precision_worker, str(corpus), tensor)[0]
        for config, losses in one.items():
            assert two[config] == pytest.approx(losses, rel=5e-3), config
            assert losses[-1] < losses[0], config


def precision_worker(corpus: str, tensor: int) -> dict[str, list[float]]:
    """Return the losses with each type of 16 bits and ZeRO stage."""
    world, found = join_world(), {}
    with fp16_on_cpu(), many_cases() as begin_case:
        for config in ("zero1_bf16", "zero2_bf16", "zero3_bf16", "zero1_fp16"):
            begin_case()
            json = f"ds_configs/{config}.json"
            recipe = recipe_of(Path(corpus), deepspeed=json, layout__tensor=tensor)
            engine, data = start(recipe, world)
            found[config] = [train_step(engine, data, step).loss for step in range(1, 7)]
            assert engine.diverged_replicas() == []
    return found
