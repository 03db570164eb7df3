"""Cases of a world share process groups, even if only some ranks already have the right ones."""

import torch
import torch.distributed as dist

from models.parallel.collectives import create_groups
from tests.ranks import join_world, run_ranks
from threefold.prove.training import shared_groups

CASES = (  # partitions of three ranks, in the order in which cases request their groups
    [[[0, 1]]],
    [[[0], [1, 2]], [[0, 1]]],
    [[[0], [1], [2]]],  # only rank 1 must create its group
    [[[0, 1, 2]], [[0, 1]], [[0, 1]]],
    [[[1, 2]], [[0, 2]]],
    [[[0, 1], [2]], [[0, 1, 2]], [[1, 2]]],
)


def sharing_worker() -> list[list[int | None]]:
    """Return the sum of the ranks of this rank's group, for each case and request."""
    rank = join_world().rank
    found = []
    with shared_groups() as forget_asked:
        for partitions in CASES:
            forget_asked()
            sums: list[int | None] = []
            for partition in partitions:
                group = create_groups(partition)
                total = torch.tensor(rank)
                if group is not None:
                    dist.all_reduce(total, group=group)
                sums.append(None if group is None else int(total))
            found.append(sums)
    return found


def test_ranks_share_the_groups_of_any_sequence_of_cases() -> None:
    """Torch names a group after the number of its members' groups, which must be the same."""
    for rank, found in enumerate(run_ranks(3, sharing_worker, seconds=60)):
        expected = [
            [
                next((sum(ranks) for ranks in partition if rank in ranks), None)
                for partition in partitions
            ]
            for partitions in CASES
        ]
        assert found == expected
