"""Updated weights are gathered during the next step's passes, and no layer runs too early."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from models.transformer import Block
from tests.conftest import GPT_SWITCHES, changed, quick_and_long, selected, small_recipe
from tests.ranks import join_world, run_ranks
from threefold.config.loading import parse_recipe
from threefold.pipeline import weight_gathering
from threefold.pipeline.weight_gathering import WeightGathering
from threefold.prove.training import many_cases, start, train_step

TIED = GPT_SWITCHES | {"model__layers": 4}
LAYOUTS = {
    "1f1b": (2, {}),
    "tied, alone": (2, TIED),
    "bf16": (2, {"deepspeed": "bf16"}),
    "recomputed": (2, {"layout": {"recompute": "full", "recompute_interval": 2}}),
    "tied, interleaved": (4, TIED | {"layout": {"pipeline": 2, "schedule": "interleaved"}}),
    "zb-v": (4, {"layout": {"pipeline": 2, "schedule": "zb-v"}}),
}  # fmt: skip
QUICK = ("tied, interleaved",)
BUCKET = 5000  # elements: several in each of the small model's layers
STEPS = 3
AVERAGE = PipelineEngine._aggregate_total_loss


class LateWork(dist.Work):
    """A collective that runs when the caller waits for it, as late as a real one may end."""

    def __init__(self, run: Callable[[], dist.Work]):
        super().__init__()
        self.run, self.ended = run, False

    def wait(self, *_: Any) -> bool:
        assert not self.ended
        self.ended = True
        with torch.no_grad():
            return bool(self.run().wait())


def late_gather(whole: Tensor, part: Tensor, *, group: Any, async_op: bool) -> dist.Work:
    """Return an all-gather of the shard as it is now that changes no weight before the wait."""
    assert async_op
    own = part.clone()
    return LateWork(lambda: dist.all_gather_into_tensor(whole, own, group=group, async_op=True))


def all_but_the_last_bucket(self: WeightGathering, numbers: list[int]) -> None:
    """Wait as WeightGathering does, but never for the last bucket."""
    for number in numbers:
        if number != self.order[-1] and number in self.running:
            self.running.pop(number).wait()


def config_of(folder: str, precision: str) -> Path:
    """Return the path of the JSON with small buckets."""
    return Path(folder) / f"{precision}.json"


def write_configs(folder: str) -> None:
    for precision in ("fp32", "bf16"):
        config = json.loads(Path(f"ds_configs/zero1_{precision}.json").read_text())
        config["zero_optimization"]["reduce_bucket_size"] = BUCKET
        config_of(folder, precision).write_text(json.dumps(config))


def train(recipe: Any, world: Any) -> dict[str, Any]:
    """Train for a few steps; return losses, and the numbers of unfinished gathers at each block."""
    engine, data = start(recipe, world)
    running = engine.wrapped.gathering.running
    unfinished: list[int] = []
    for module in engine.wrapped.module.modules():
        if isinstance(module, Block):
            module.register_forward_pre_hook(lambda *_: unfinished.append(len(running)))
    unfinished_at_loss: list[int] = []

    def averaged(engine: PipelineEngine) -> torch.Tensor:
        unfinished_at_loss.append(len(running))
        return AVERAGE(engine)

    losses, between = [], []
    for step in range(1, STEPS + 1):
        if step == STEPS:
            losses.append(engine.evaluate(data.evaluation()))
        unfinished.clear()
        with mock.patch.object(PipelineEngine, "_aggregate_total_loss", averaged):
            losses.append(train_step(engine, data, step).loss)
        between.append((list(unfinished), len(running)))
    diverged = engine.diverged_replicas()
    return {
        "losses": losses,
        "between": between,
        "diverged": diverged,
        "left": len(running),
        "at loss": unfinished_at_loss,
    }


def gather_worker(corpus: str, folder: str, layouts: dict) -> dict:
    """Return each layout's results: as it is, with late gathers, and with a missing wait."""
    world, found = join_world(), {}
    late = mock.patch.object(weight_gathering, "all_gather_single", late_gather)
    missing = mock.patch.object(WeightGathering, "wait", all_but_the_last_bucket)
    with many_cases() as begin:
        for name, changes in layouts.items():
            table = changed(small_recipe(Path(corpus)), model__layers=4)
            config = str(config_of(folder, changes.get("deepspeed", "fp32")))
            recipe = parse_recipe(changed(table, **changes | {"deepspeed": config}), "test")
            begin()
            found[name, "as it is"] = train(recipe, world)
            with late:
                begin()
                found[name, "late"] = train(recipe, world)
                begin()
                with missing:
                    found[name, "missing wait"] = train(recipe, world)
    return found


@pytest.fixture(scope="module")
def trained(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict:
    """Return (layout, variant) -> results of every rank."""
    names = selected(request, test_no_layer_runs_before_its_weights_are_gathered, "name")
    folder, found = str(tmp_path_factory.mktemp("configs")), {}
    write_configs(folder)
    for size in (2, 4):
        layouts = {name: LAYOUTS[name][1] for name in names if LAYOUTS[name][0] == size}
        if not layouts:
            continue
        results = run_ranks(size, gather_worker, str(corpus), folder, layouts, seconds=180)
        found |= {key: [rank[key] for rank in results] for key in results[0]}
    return found


@pytest.mark.parametrize("name", quick_and_long(QUICK, LAYOUTS))
def test_no_layer_runs_before_its_weights_are_gathered(name: str, trained: dict) -> None:
    """If gathers complete only when they are waited for, all results are the same."""
    for now, late in zip(trained[name, "as it is"], trained[name, "late"], strict=True):
        assert late["losses"] == now["losses"]
        assert late["diverged"] == now["diverged"] == []
        assert late["left"] == 0  # comparing replicas waits for all weights


@pytest.mark.parametrize("name", quick_and_long(QUICK, LAYOUTS))
def test_a_missing_wait_is_noticed(name: str, trained: dict) -> None:
    """The losses change on at least one rank if the wait for the last bucket is missing."""
    missing, late = trained[name, "missing wait"], trained[name, "late"]
    assert any(one["losses"] != other["losses"] for one, other in zip(missing, late, strict=True))


@pytest.mark.parametrize("name", quick_and_long(QUICK, LAYOUTS))
def test_the_loss_does_not_wait_for_the_gathers(name: str, trained: dict) -> None:
    """The loss is averaged over the group that gathers, whose collectives run in order."""
    for rank in trained[name, "late"]:
        assert rank["at loss"] == STEPS * [0]


@pytest.mark.parametrize("name", quick_and_long(QUICK, LAYOUTS))
def test_layers_run_while_later_weights_are_gathered(name: str, trained: dict) -> None:
    for rank in trained[name, "late"]:
        (first, after), *later = rank["between"]
        assert set(first) == {0} and after > 4  # before the first update there is nothing to gather
        for unfinished, _ in later[:-1]:
            assert unfinished[0] > 0 and unfinished[-1] == 0
            assert unfinished == sorted(unfinished, reverse=True)
