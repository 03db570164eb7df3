"""A tree of groups gathers and broadcasts like one group, over few connections."""

from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import join_world, run_ranks
from threefold.runtime.processes import FAN_OUT, RankTree, levels


@pytest.mark.parametrize("ranks", [1, 2, 31, 32, 33, 1024, 1025, 16384])
def test_every_rank_reaches_rank_0_with_few_connections(ranks: int) -> None:
    found = levels(ranks, FAN_OUT)
    assert found[-1][0][0] == 0 and len(found[-1]) == 1
    assert [rank for group in found[0] for rank in group] == list(range(ranks))
    for lower, upper in pairwise(found):
        assert [group[0] for group in lower] == [rank for group in upper for rank in group]
    connections = dict.fromkeys(range(ranks), 0)
    for group in (group for level in found for group in level):
        assert len(group) <= FAN_OUT
        for rank in group:
            connections[rank] += len(group) - 1
    assert max(connections.values()) <= (FAN_OUT - 1) * len(found) <= 3 * (FAN_OUT - 1)


def tree_worker() -> tuple[dict[int, Any], list[str]]:
    world = join_world()
    tree = RankTree(timedelta(seconds=60), fan_out=2)
    gathered = tree.gather({"rank": world.rank})
    received = [tree.broadcast(f"{each} of rank {world.rank}") for each in ("one", "two")]
    dist.barrier()
    return gathered, received


def test_a_tree_gathers_to_rank_0_and_broadcasts_from_it() -> None:
    results = run_ranks(5, tree_worker)
    assert results[0][0] == {rank: {"rank": rank} for rank in range(5)}
    assert [gathered for gathered, _ in results[1:]] == [{}] * 4
    assert [received for _, received in results] == [["one of rank 0", "two of rank 0"]] * 5
