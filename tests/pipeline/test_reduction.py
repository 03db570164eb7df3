"""Flat gradients are averaged bucket by bucket, each on the rank that owns it."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.conftest import GPT_SWITCHES, changed, quick_and_long, selected, small_recipe
from tests.ranks import join_world, run_ranks
from threefold.config.loading import parse_recipe
from threefold.engine.engine import Engine
from threefold.pipeline.gradients import ShardedReduction, divide_into_buckets
from threefold.prove.training import many_cases, start, train_step


def divided(*chunks: list[int], elements: int, kinds: str = "", units: str = "") -> list[list[int]]:
    """Return the buckets of parameters that are numbered over all chunks.

    Args:
        chunks: the sizes of the parameters of each chunk
        elements: maximum size of a bucket
        kinds: a letter for the kind of each parameter; empty: all have the same
        units: a letter for the unit of each parameter, a space for none
    """
    made = [[nn.Parameter(torch.zeros(size)) for size in sizes] for sizes in chunks]
    numbers = {each: n for n, each in enumerate(each for chunk in made for each in chunk)}
    kind_of = {each: kinds[n : n + 1] for each, n in numbers.items()}
    unit_of = {each: units[n] for each, n in numbers.items() if units[n : n + 1].strip()}
    buckets = divide_into_buckets(made, elements=elements, kinds=kind_of, units=unit_of)
    return [[numbers[each] for each in bucket] for bucket in buckets]


def test_buckets_are_filled_in_the_order_of_the_layers() -> None:
    assert divided([4, 4, 4, 4], elements=8) == [[0, 1], [2, 3]]
    assert divided([4, 4, 4, 4], elements=7) == [[0], [1], [2], [3]]
    assert divided([4, 9, 4], elements=8) == [[0], [1], [2]]
    assert divided([4, 4, 4], elements=100) == [[0, 1, 2]]


def test_a_chunk_shares_no_bucket_with_another() -> None:
    assert divided([4, 4], [4, 4], [], elements=100) == [[0, 1], [2, 3]]


def test_parameters_of_another_kind_share_no_bucket() -> None:
    assert divided([4, 1, 4, 1, 4], elements=8, kinds="abaab") == [[0, 2], [3], [1, 4]]


def test_the_experts_of_a_layer_share_a_bucket_of_any_size() -> None:
    assert divided([4, 4, 4, 4, 4], elements=8, units=" abab") == [[0], [1, 3], [2, 4]]
    assert divided([9, 9, 9, 4], elements=8, units="aaa ") == [[0, 1, 2], [3]]


DTYPES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)]
DTYPES += [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)]
GROUPS = 3  # of micro-batches, whose sums are added up
CASES = [(sharded, *dtypes) for sharded in (False, True) for dtypes in DTYPES]


def gradients_of_rank(rank: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(24, generator=torch.Generator().manual_seed(10 * rank + group)).to(dtype)


def reduce_worker() -> list[tuple[list[float], str]]:
    """Return the average of this rank's shard and its type, for each case, in the second step."""
    rank, found = join_world().rank, []
    for sharded, dtype, sent_in in CASES:
        one = ShardedReduction(
            [dist.group.WORLD, dist.group.WORLD],
            dtype=sent_in,
            divisor=dist.get_world_size(),
            accumulated=[torch.zeros(8), torch.zeros(8)] if sharded else None,
        )
        for _step in (1, 2):
            for group in range(GROUPS if sharded else 1):
                one.begin(0, gradients_of_rank(rank, group, dtype))
                one.begin(1, gradients_of_rank(rank, group + 5, dtype))
            shard, _ = one.finish()
        found.append((shard.tolist(), str(shard.dtype)))
    return found


@pytest.fixture(scope="module")
def reduced() -> list[list[tuple[list[float], str]]]:
    return run_ranks(3, reduce_worker)


def hybrid_worker() -> list[tuple[list[int], list[float]]]:
    """Return the number of sums over the groups after each `begin`, and the average, by stage.

    Each of the two ranks is a shard group of its own.
    """
    rank = join_world().rank
    alone = [dist.new_group([each]) for each in (0, 1)][rank]
    found = []
    for sharded in (False, True):
        one = ShardedReduction(
            [alone, alone],
            dtype=torch.float32,
            divisor=2,
            same_shard=dist.group.WORLD,
            accumulated=[torch.zeros(24), torch.zeros(24)] if sharded else None,
        )
        counts = []
        for group in range(GROUPS if sharded else 1):
            for number in (0, 1):
                flat = gradients_of_rank(rank, group + 5 * number, torch.float32)
                one.begin(number, flat, is_last=group == GROUPS - 1 or not sharded)
                counts.append(len(one.replica_sums))
        found.append((counts, one.finish()[0].tolist()))
    return found


def test_shard_groups_sum_a_bucket_as_soon_as_it_is_complete() -> None:
    """The sum over the groups begins before the next bucket, and once in a step."""
    first, second = run_ranks(2, hybrid_worker)
    assert first == second
    (once, average), (groups, average_of_groups) = first
    assert once == [1, 2] and groups == [0, 0, 0, 0, 1, 2]
    for count, got in ((1, average), (GROUPS, average_of_groups)):
        parts = [gradients_of_rank(rank, n, torch.float32) for rank in (0, 1) for n in range(count)]
        assert torch.allclose(torch.tensor(got), torch.stack(parts).sum(0) / 2, atol=1e-6)


def name_of(case: tuple[bool, torch.dtype, torch.dtype]) -> str:
    return f"{'added up' if case[0] else 'once'} {case[1]} in {case[2]}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_each_rank_gets_the_average_of_its_shard_rounded_once(
    case: tuple[bool, torch.dtype, torch.dtype],
    reduced: list[list[tuple[list[float], str]]],
) -> None:
    sharded, dtype, sent_in = case
    groups = range(GROUPS if sharded else 1)
    parts = [gradients_of_rank(rank, group, dtype) for rank in range(3) for group in groups]
    exact = sum(each.double() for each in parts) / 3
    size = sum(each.to(sent_in).double().abs() for each in parts) / 3
    for rank, results in enumerate(reduced):
        values, found_dtype = results[CASES.index(case)]
        assert found_dtype == "torch.float32"
        found = torch.tensor(values, dtype=torch.float64)
        own = slice(8 * rank, 8 * rank + 8)
        roundings = 3 if sent_in == torch.bfloat16 else 1e-6 * 2**9
        assert ((found - exact[own]).abs() <= roundings * 2**-9 * size[own]).all()
        if sent_in == torch.bfloat16 and not sharded:  # the sum, three times the average, is bf16
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
QUICK = ("bf16", "tied, interleaved", "zb-h1")
SMALL_BUCKET = 5000  # elements: several in each of the small model's layers
SIZES = (SMALL_BUCKET, 10**9)
STEPS = 2


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
    """Note each instruction when it begins, and the number of each bucket that begins."""
    log: list[tuple[str, int | None]] = []
    reduction, crumb = engine.wrapped.gradients.reduction, engine.crumb
    begin = reduction.begin

    def noted_begin(number: int, flat: torch.Tensor, **settings: bool) -> None:
        log.append(("bucket", number))
        begin(number, flat, **settings)

    reduction.begin = noted_begin
    crumb.note = lambda doing, micro_batch=None, step=None: log.append((doing, micro_batch))
    return log


@pytest.fixture(scope="module")
def trained(
    corpus: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict:
    """Return (layout, elements of a bucket) -> losses, log and number of buckets of every rank."""
    names = selected(request, test_losses_do_not_depend_on_the_size_of_buckets, "name")
    folder, found = str(tmp_path_factory.mktemp("configs")), {}
    write_configs(folder)
    for world_size in (2, 4):
        layouts = {name: LAYOUTS[name][1] for name in names if LAYOUTS[name][0] == world_size}
        if not layouts:
            continue
        ranks = run_ranks(world_size, bucket_worker, str(corpus), folder, layouts, seconds=120)
        found |= {key: [rank[key] for rank in ranks] for key in ranks[0]}
    return found


@pytest.mark.parametrize("name", quick_and_long(QUICK, LAYOUTS))
def test_losses_do_not_depend_on_the_size_of_buckets(name: str, trained: dict) -> None:
    """Only the norm, and with it the clipping, adds up in another order."""
    small, large = trained[name, SMALL_BUCKET], trained[name, 10**9]
    for one, other in zip(small, large, strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-6)
    assert all(few[2] > many[2] for few, many in zip(small, large, strict=True))


@pytest.mark.parametrize("name", quick_and_long(QUICK, LAYOUTS))
def test_data_ranks_begin_the_same_buckets_in_the_same_order(name: str, trained: dict) -> None:
    ranks = trained[name, SMALL_BUCKET]
    orders = [[start for doing, start in log if doing == "bucket"] for _, log, _ in ranks]
    stages = [orders[first : first + 2] for first in range(0, len(ranks), 2)]
    assert all(one == other for one, other in stages)


@pytest.mark.parametrize("name", quick_and_long(QUICK, LAYOUTS))
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
