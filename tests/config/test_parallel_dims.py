import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from models.errors import UserError
from threefold.config.layout import Layout
from threefold.config.parallel_dims import (
    Coordinates,
    LaunchEnvironment,
    ParallelDims,
    check_placement,
    rank_map,
)


@pytest.mark.parametrize(("pipeline", "data", "tensor"), [(2, 3, 4), (1, 1, 1), (4, 2, 1)])
def test_coordinates_are_those_of_deepspeed(pipeline: int, data: int, tensor: int) -> None:
    ours = ParallelDims(pipeline=pipeline, data=data, tensor=tensor)
    theirs = PipeModelDataParallelTopology(num_pp=pipeline, num_dp=data, num_mp=tensor)
    for rank in range(ours.world_size):
        place = theirs.get_coord(rank)
        expected = Coordinates(pipeline=place.pipe, data=place.data, tensor=place.model)
        assert ours.coordinates(rank) == expected
        assert ours.rank(expected) == rank
    assert ours.groups("tensor") == theirs.get_axis_comm_lists("model") or tensor == 1


@pytest.mark.parametrize(
    ("pipeline", "data", "context", "tensor"), [(2, 3, 2, 2), (1, 1, 4, 1), (3, 2, 2, 1)]
)
def test_context_ranks_are_data_ranks_of_deepspeed(
    pipeline: int, data: int, context: int, tensor: int
) -> None:
    ours = ParallelDims(pipeline=pipeline, data=data, tensor=tensor, context=context)
    theirs = PipeModelDataParallelTopology(num_pp=pipeline, num_dp=ours.dp_cp_size, num_mp=tensor)
    assert ours.world_size == theirs.world_size()
    for rank in range(ours.world_size):
        place, found = theirs.get_coord(rank), ours.coordinates(rank)
        assert (place.pipe, place.model) == (found.pipeline, found.tensor)
        assert place.data == found.data * context + found.context
        assert ours.rank(found) == rank
    groups = ours.groups("context")
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(ours.world_size))
    for ranks in groups:
        places = [ours.coordinates(rank) for rank in ranks]
        assert [place.context for place in places] == list(range(context))
        assert len({(place.pipeline, place.data, place.tensor) for place in places}) == 1


def test_dp_shard_groups_are_neighbouring_replicas() -> None:
    ours = ParallelDims(pipeline=2, data=2, context=2, tensor=2, dp_shard=2)
    assert ours.dp_shard_groups()[:4] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert ours.dp_replicate_groups()[:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    for groups in (ours.dp_shard_groups(), ours.dp_replicate_groups()):
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(16))
    assert [ours.copy_of_shards(rank) for rank in (0, 3, 4, 7, 8)] == [
        (0, 2), (0, 2), (1, 2), (1, 2), (0, 2),
    ]  # fmt: skip
    assert ours.is_hsdp
    whole = ParallelDims(pipeline=2, data=4, tensor=2, dp_shard=4)
    assert not whole.is_hsdp
    assert whole.dp_shard_groups() == ParallelDims(pipeline=2, data=4, tensor=2).dp_shard_groups()
    assert whole.copy_of_shards(15) == (0, 1)


def test_the_remaining_ranks_are_data_parallel() -> None:
    assert ParallelDims.of_layout(Layout(pipeline=2, tensor=4), 16).data == 2
    assert ParallelDims.of_layout(Layout(pipeline=2, tensor=2, context=2), 16).data == 2


@pytest.mark.parametrize(
    ("environment", "world"),
    [
        ({}, LaunchEnvironment()),
        (
            {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            LaunchEnvironment(rank=3, size=8, local_rank=1, local_size=2),  # torchrun
        ),
        (
            {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"},
            LaunchEnvironment(rank=3, size=8, local_rank=1, local_size=2),  # deepspeed
        ),
        (
            {
                "SLURM_PROCID": "9",
                "SLURM_NTASKS": "16",
                "SLURM_LOCALID": "1",
                "SLURM_TASKS_PER_NODE": "8(x2)",
            },
            LaunchEnvironment(rank=9, size=16, local_rank=1, local_size=8),
        ),
    ],
)
def test_the_launcher_decides_the_rank(
    environment: dict[str, str], world: LaunchEnvironment
) -> None:
    assert LaunchEnvironment.from_environment(environment) == world


def test_tensor_groups_belong_inside_a_node() -> None:
    hosts = ["a", "a", "b", "b"]
    check_placement(ParallelDims(pipeline=2, data=1, tensor=2), hosts)
    with pytest.raises(UserError, match=r"ranks 0 .. 1 is spread over a and b; start neighbouring"):
        check_placement(ParallelDims(pipeline=2, data=1, tensor=2), ["a", "b", "a", "b"])


def test_the_rank_map_shows_the_coordinates_of_each_node() -> None:
    assert rank_map(ParallelDims(pipeline=2, data=2, tensor=2), [*"aaaa", *"bbbb"]) == [
        "a: rank 0 .. 3: pipeline 0, data 0 .. 1, tensor 0 .. 1",
        "b: rank 4 .. 7: pipeline 1, data 0 .. 1, tensor 0 .. 1",
    ]
    assert rank_map(ParallelDims(pipeline=1, data=2, tensor=1, context=2), [*"aabb"]) == [
        "a: rank 0 .. 1: pipeline 0, data 0, context 0 .. 1, tensor 0",
        "b: rank 2 .. 3: pipeline 0, data 1, context 0 .. 1, tensor 0",
    ]
