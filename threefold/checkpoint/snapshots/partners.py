"""Copies of a node's files in the memory of a partner node.

Nodes form pairs, as in GEMINI (Wang et al., SOSP 2023, section 4). Of all placements with two
copies, pairs are the least likely to lose both copies of a file when several nodes fail: two
failures lose data only if they hit the same pair. Partners are half of the list of nodes apart,
because neighbours in a list often share a rack or a switch.
"""

import mmap
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.parallel.process_groups import create_host_groups

CHUNK_BYTES = 64 * 2**20  # of a message


def partner_nodes(nodes: int) -> list[list[int]]:
    """Return the groups of partners: pairs of nodes, and one group of three if `nodes` is odd.

    In a group, each node copies its files to the next one, and the last one to the first. A single
    node has no partner.
    """
    half = max(nodes // 2, 1)
    groups = [[node, node + half] for node in range(nodes // 2)] or [[0]]
    if nodes > 1 and nodes % 2:
        groups[-1].append(nodes - 1)
    return groups


class Partners:
    """The ranks with which this rank exchanges copies; the constructor is collective.

    Args:
        ranks_per_node: number of ranks on each node
        timeout: time limit of each message
    """

    def __init__(self, ranks_per_node: int, timeout: timedelta):
        nodes = dist.get_world_size() // ranks_per_node
        groups = [
            [node * ranks_per_node + local for node in group]
            for group in partner_nodes(nodes)
            for local in range(ranks_per_node)
        ]
        self.group = create_host_groups(groups, timeout)
        self.ranks: Sequence[int] = next(ranks for ranks in groups if dist.get_rank() in ranks)

    def exchange(self, workspace: Path, files: dict[str, int], problem: str | None) -> str | None:
        """Send this rank's files to the next partner, and write those of the previous one.

        Args:
            workspace: the folder of the files, on this node
            files: this rank's files -> bytes
            problem: a reason not to write, with which this rank receives without keeping

        Returns:
            The problem, or a message if the copies cannot be written.
        """
        size = len(self.ranks)
        if size == 1:
            return problem
        try:
            sources = [_mapped(workspace / name) for name in files]
        except OSError as error:
            sources, files = [], {}
            problem = problem or f"{error.filename or workspace}: {error.strerror}"
        own = self.ranks.index(dist.get_rank())
        everyones: list[Any] = [None] * size
        dist.all_gather_object(everyones, files, group=self.group)
        arriving: dict[str, int] = everyones[(own - 1) % size]
        destinations, problem = _create(workspace, arriving, problem)
        # Chunks of both directions travel at the same time; each side waits before the next one.
        outgoing = [part for source in sources for part in source.split(CHUNK_BYTES)]
        incoming = [part for each in destinations for part in each.split(CHUNK_BYTES)]
        for number in range(max(len(outgoing), len(incoming))):
            works = []
            if number < len(outgoing):
                target = (own + 1) % size
                works.append(dist.isend(outgoing[number], group=self.group, group_dst=target))
            if number < len(incoming):
                source = (own - 1) % size
                works.append(dist.irecv(incoming[number], group=self.group, group_src=source))
            for work in works:
                if work is not None:
                    work.wait()
        return problem


def _create(
    workspace: Path, files: dict[str, int], problem: str | None
) -> tuple[list[Tensor], str | None]:
    """Return a tensor for the bytes of each file, mapped to the file unless there is a problem."""
    destinations = []
    for name, size in files.items():
        path = workspace / name
        if problem is None:
            try:
                with path.open("wb") as stream:
                    os.posix_fallocate(stream.fileno(), 0, size)  # a full disk raises an error here
                destinations.append(_mapped(path))
                continue
            except OSError as error:
                problem = f"{path}: {error.strerror}"
        destinations.append(torch.empty(size, dtype=torch.uint8))
    return destinations, problem


def _mapped(path: Path) -> Tensor:
    """Return the bytes of a file, mapped into memory."""
    with path.open("r+b") as stream:
        return torch.frombuffer(mmap.mmap(stream.fileno(), 0), dtype=torch.uint8)
