"""Flat gradients are averaged bucket by bucket, each on the rank that owns it."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from models.pipeline.gradients import reduction
from models.pipeline.gradients.reduction import Bucket, ShardedReduction, Slot, plan_buckets
from recipes.proving.trial import many_cases, start, train_step
from recipes.training.engine.engine import Engine
from recipes.training.recipe.loading import parse_recipe
from tests.conftest import GPT_SWITCHES, changed, small_recipe
from tests.ranks import join_world, run_ranks

Place = tuple[int, int, int]


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def planned(chunks: list[list[nn.Parameter]], elements: int, padding: int = 0) -> list[Place]:
    """Return the buckets of one flat tensor that holds all parameters in order."""
    ordered = [each for chunk in chunks for each in chunk]
    slots, start = {}, 0
    for each in ordered:
        stop = start + each.numel() + (padding if each is ordered[-1] else 0)
        slots[each], start = Slot(0, start, stop), stop
    buckets = plan_buckets(slots, chunks, elements=elements)
    assert {p for bucket in buckets for p in bucket.parameters} == set(ordered)
    return [(bucket.flat, bucket.start, bucket.stop) for bucket in buckets]


def test_buckets_come_from_the_last_layer_to_the_first() -> None:
    layers = parameters(4, 4, 4, 4)
    assert planned([layers], elements=8) == [(0, 8, 16), (0, 0, 8)]
    assert planned([layers], elements=9, padding=1) == [(0, 8, 17), (0, 0, 8)]
    assert planned([layers], elements=3) == [(0, 12, 16), (0, 8, 12), (0, 4, 8), (0, 0, 4)]
    assert planned([layers], elements=100, padding=2) == [(0, 0, 18)]


def test_a_chunk_shares_no_bucket_with_another() -> None:
    first, second = parameters(4, 4), parameters(4, 4)
    assert planned([first, second], elements=100) == [(0, 0, 8), (0, 8, 16)]


def test_parameters_that_are_not_adjacent_share_no_bucket() -> None:
    a, tied, b = parameters(4, 4, 4)
    slots = {a: Slot(0, 0, 4), tied: Slot(0, 4, 8), b: Slot(0, 8, 12)}
    found = plan_buckets(slots, [[a, b]], elements=100)
    assert [(each.start, each.stop) for each in found] == [(8, 12), (0, 4)]


# Ways to reduce: the whole flat tensor, to each owner, and to all ranks if there are many shards.
WAYS = {"whole": ([(0, 24)], 4), "owners": ([(10, 24), (0, 10)], 4), "all": ([(7, 24), (0, 7)], 1)}
DTYPES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)]
DTYPES += [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)]
CASES = [(way, *dtypes) for way in WAYS for dtypes in DTYPES]


def gradients_of_rank(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(24, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduce_worker() -> list[tuple[list[float], str]]:
    """Return the average of this rank's shard and its type, for each case."""
    rank, found = join_world().rank, []
    for way, dtype, sent_in in CASES:
        bounds, owners = WAYS[way]
        flat = gradients_of_rank(rank, dtype)
        one = ShardedReduction(
            [flat], [dist.group.WORLD], dtype=sent_in, ranks=dist.get_world_size()
        )
        with mock.patch.object(reduction, "MAX_OWNERS_IN_BUCKET", owners):
            for start, stop in bounds:
                one.begin(Bucket(0, start, stop, ()))
        (shard,) = one.finish()
        found.append((shard.tolist(), str(shard.dtype)))
    return found


@pytest.fixture(scope="module")
def reduced() -> list[list[tuple[list[float], str]]]:
    return run_ranks(3, reduce_worker)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]} in {case[2]}")
def test_each_rank_gets_the_average_of_its_shard_rounded_once(
    case: tuple[str, torch.dtype, torch.dtype],
    reduced: list[list[tuple[list[float], str]]],
) -> None:
    _, dtype, sent_in = case
    ranks = [gradients_of_rank(rank, dtype) for rank in range(3)]
    exact = sum(each.double() for each in ranks) / 3
    size = sum(each.to(sent_in).double().abs() for each in ranks) / 3
    for rank, results in enumerate(reduced):
        found, found_dtype = results[CASES.index(case)]
        assert found_dtype == "torch.float32"
        found = torch.tensor(found, dtype=torch.float64)
        own = slice(8 * rank, 8 * rank + 8)
        roundings = 3 if sent_in == torch.bfloat16 else 1e-6 * 2**9
        assert ((found - exact[own]).abs() <= roundings * 2**-9 * size[own]).all()
        if sent_in == torch.bfloat16:  # the sum, three times the average, was sent in bf16
            sums = (3 * found).float()
            assert torch.allclose(sums, sums.to(torch.bfloat16).float(), rtol=1e-6, atol=0)


TIED = GPT_SWITCHES | {"model__layers": 4}
LAYOUTS = {
    "1f1b": (2, {}),
    "bf16": (2, {"deepspeed": "bf16"}),
    "zb-h1": (4, {"layout": {"pipeline": 2, "schedule": "zb-h1"}}),
    "tied, interleaved": (4, TIED | {"layout": {"pipeline": 2, "schedule": "interleaved"}}),
    "tied, zb-v, bf16": (
        4, TIED | {"layout": {"pipeline": 2, "schedule": "zb-v"}, "deepspeed": "bf16"},
    ),
    "tied, alone": (2, TIED),
}  # fmt: skip
SMALL_BUCKET = 5000  # elements: several in each of the small model's layers
SIZES = (SMALL_BUCKET, 10**9)
STEPS = 3


def config_file(folder: str, precision: str, elements: int) -> str:
    """Return the path of the JSON with this size of buckets."""
    return f"{folder}/{precision}-{elements}.json"


def write_configs(folder: str) -> None:
    for precision in ("fp32", "bf16"):
        config = json.loads(Path(f"ds_configs/zero1_{precision}.json").read_text())
        for elements in SIZES:
            config["zero_optimization"]["reduce_bucket_size"] = elements
            Path(config_file(folder, precision, elements)).write_text(json.dumps(config))


def bucket_worker(corpus: str, folder: str, layouts: dict) -> dict:
    """Return the losses with small and large buckets, and the log of instructions and buckets."""
    world, found = join_world(), {}
    with many_cases() as begin:
        for name, changes in layouts.items():
            for elements in SIZES:
                begin()
                config = config_file(folder, changes.get("deepspeed", "fp32"), elements)
                table = changed(small_recipe(Path(corpus)), model__layers=4)
                table = changed(table, **changes | {"deepspeed": config})
                engine, data = start(parse_recipe(table, "test"), world)
                log = watch(engine)
                losses = [train_step(engine, data, step).loss for step in range(1, STEPS + 1)]
                found[name, elements] = (losses, log, len(engine.wrapped.gradients.buckets))
    return found


def watch(engine: Engine) -> list[tuple[str, int | None]]:
    """Note each instruction when it begins, and the first element of each bucket that begins."""
    log: list[tuple[str, int | None]] = []
    reduction, crumb = engine.wrapped.gradients.reduction, engine.crumb
    begin = reduction.begin

    def noted_begin(bucket: Bucket) -> None:
        log.append(("bucket", bucket.start))
        begin(bucket)

    reduction.begin = noted_begin
    crumb.note = lambda doing, micro_batch=None, step=None: log.append((doing, micro_batch))
    return log


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Return (layout, elements of a bucket) -> losses, log and number of buckets of every rank."""
    folder, found = str(tmp_path_factory.mktemp("configs")), {}
    write_configs(folder)
    for world_size in (2, 4):
        layouts = {name: each for name, (size, each) in LAYOUTS.items() if size == world_size}
        ranks = run_ranks(world_size, bucket_worker, str(corpus), folder, layouts, seconds=120)
        found |= {key: [rank[key] for rank in ranks] for key in ranks[0]}
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_do_not_depend_on_the_size_of_buckets(name: str, trained: dict) -> None:
    """There are two data ranks, whose sum does not depend on the order."""
    small, large = trained[name, SMALL_BUCKET], trained[name, 10**9]
    assert [losses for losses, *_ in small] == [losses for losses, *_ in large]
    assert all(few[2] > 2 * many[2] for few, many in zip(small, large, strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_data_ranks_begin_the_same_buckets_in_the_same_order(name: str, trained: dict) -> None:
    ranks = trained[name, SMALL_BUCKET]
    orders = [[start for doing, start in log if doing == "bucket"] for _, log, _ in ranks]
    stages = [orders[first : first + 2] for first in range(0, len(ranks), 2)]
    assert all(one == other for one, other in stages)


@pytest.mark.parametrize("name", LAYOUTS)
def test_buckets_are_summed_during_the_last_pass(name: str, trained: dict) -> None:
    """Most buckets begin during the last pass and the rest right after it, none earlier."""
    for _, log, buckets in trained[name, SMALL_BUCKET]:
        during, after = buckets_of_last_passes(log[: len(log) // STEPS])
        assert len(during) + len(after) >= buckets  # more with tied weights
        assert len(during) > buckets / 2


def buckets_of_last_passes(log: list[tuple[str, int | None]]) -> tuple[list[int], list[int]]:
    """Return the buckets of a step that began during a pass, and those that began after it.

    If the stage has one chunk, check that these passes are the last ones of their kind.
    """
    during, after, doing = [], [], ""
    chunks = [what for what, _ in log].count("ReduceGrads") - 1
    for number, (what, where) in enumerate(log):
        if what != "bucket":
            doing = what
        elif doing == "ReduceGrads":
            after.append(where)
        else:
            assert doing in ("BackwardPass", "WeightPass")
            assert chunks > 1 or all(what != doing for what, _ in log[number:])
            during.append(where)
    return during, after
