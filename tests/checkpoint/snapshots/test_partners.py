"""Partner nodes, and the exchange of copies between them."""

import hashlib
import os
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import join_world, run_ranks
from threefold.checkpoint.snapshots import writer
from threefold.checkpoint.snapshots.node_memory import NodeMemory
from threefold.checkpoint.snapshots.writer import Partners, partner_nodes
from threefold.runtime.processes import RankTree


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 127, 128, 1024, 1025])
def test_every_node_has_a_partner_far_away(nodes: int) -> None:
    groups = partner_nodes(nodes)
    assert sorted(node for group in groups for node in group) == list(range(nodes))
    if nodes == 1:
        return
    sizes = sorted(map(len, groups))
    assert sizes == [2] * (nodes // 2) or sizes == [2] * (nodes // 2 - 1) + [3]
    for group in groups:
        assert group == sorted(group) and group[1] - group[0] == nodes // 2


@pytest.mark.parametrize("nodes", [4, 8, 9])
def test_pairs_lose_data_only_if_both_fail(nodes: int) -> None:
    """Two failed nodes lose both copies of a file only if they are partners."""
    holders = [
        {node, group[(place + 1) % len(group)]}
        for group in partner_nodes(nodes)
        for place, node in enumerate(group)
    ]
    lost = sum(any(files <= set(failed) for files in holders)
               for failed in combinations(range(nodes), 2))  # fmt: skip
    assert lost == (nodes // 2 if nodes % 2 == 0 else nodes // 2 - 1 + 3)


def exchange(folder: Path, ranks_per_node: int, chunk: int, full: int) -> tuple[str | None, str]:
    """Exchange the files of each rank; return the problem, and what the node then holds."""
    writer.CHUNK_BYTES = chunk
    world = join_world()
    node = world.rank // ranks_per_node
    workspace = folder / f"node{node}"
    workspace.mkdir(exist_ok=True)
    sizes = {}
    for label, size in (("weights", 1000 + world.rank), ("moments", 2500 * (world.rank % 3))):
        name = f"{label}-{world.rank:05d}.safetensors"
        if size:
            (workspace / name).write_bytes(bytes([world.rank]) * size)
            sizes[name] = size
    own = Partners(ranks_per_node, timedelta(seconds=60))
    problem = "no memory" if world.rank == full else None
    problem = own.exchange(workspace, sizes, problem)
    own.exchange(workspace, {}, None)  # nothing to send does not disturb the next exchange
    # A file that has disappeared is this rank's problem, and does not let its partner wait.
    gone = {"weights-99999.safetensors": 10} if world.rank == 0 else {}
    lost = own.exchange(workspace, gone, None)
    single = len(own.ranks) == 1
    assert lost == (f"{workspace}/weights-99999.safetensors: No such file or directory"
                    if gone and not single else None)  # fmt: skip
    dist.barrier()  # a rank that ends closes the store of the others
    return problem, ",".join(sorted(os.listdir(workspace)))


@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "chunk", "full"),
    [(2, 1, 2**20, -1), (4, 1, 700, 2), (6, 2, 999, -1), (2, 2, 100, -1)],
)
def test_files_arrive_at_the_partner(
    ranks: int, ranks_per_node: int, chunk: int, full: int, tmp_path: Path
) -> None:
    results = run_ranks(ranks, exchange, tmp_path, ranks_per_node, chunk, full)
    assert [problem for problem, _ in results] == [
        "no memory" if rank == full else None for rank in range(ranks)
    ]
    nodes = ranks // ranks_per_node
    for group in partner_nodes(nodes):
        for place, node in enumerate(group):
            other = group[(place + 1) % len(group)]
            for rank in range(node * ranks_per_node, (node + 1) * ranks_per_node):
                for file in (tmp_path / f"node{node}").glob(f"*-{rank:05d}.safetensors"):
                    copy = tmp_path / f"node{other}" / file.name
                    receiver = other * ranks_per_node + rank % ranks_per_node
                    if receiver == full:
                        assert not copy.exists()
                        continue
                    assert digest(copy) == digest(file), (file, copy)


@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(2, 2), (4, 1), (6, 2)])
def test_a_node_needs_memory_for_its_own_files_and_those_of_one_partner(
    ranks: int, ranks_per_node: int
) -> None:
    size_of = [4 * 3 * elements_of(rank) for rank in range(ranks)]
    nodes = [
        sum(size_of[first : first + ranks_per_node]) for first in range(0, ranks, ranks_per_node)
    ]
    held = {0: nodes[0]}
    for group in partner_nodes(len(nodes)):
        for place, node in enumerate(group[1:] + group[:1] if len(group) > 1 else ()):
            held[node] = nodes[node] + nodes[group[place]]
    expected = [held[rank // ranks_per_node] for rank in range(ranks)]
    assert run_ranks(ranks, needed, ranks_per_node) == expected


def elements_of(rank: int) -> int:
    """Return the number of weights that a rank writes; the first rank has the embedding."""
    return 100_000 if rank == 0 else 10 * rank


def needed(ranks_per_node: int) -> int:
    """Return the memory that a snapshot of three kinds of state needs on this rank's node."""
    rank = join_world().rank
    assembly = SimpleNamespace(
        shapes={"w": (elements_of(rank) // 10, 10)}, kinds={"w": ("weights", "a", "b")}
    )
    training: Any = SimpleNamespace(
        assembly=assembly,
        tree=RankTree(timedelta(seconds=60), fan_out=2),
        folder=SimpleNamespace(events=Path("/absent")),
    )
    memory = NodeMemory(Path("/absent"))
    own = writer.SnapshotWriter(training, memory, every=1, step=0, ranks_per_node=ranks_per_node)
    dist.barrier()  # a rank that ends closes the store of the others
    return own.bytes_of_node


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
