"""Logical tensors out of the pieces that the ranks of one stage hold.

Each tensor is put together by one rank, so that all of them write at the same time. Everything
here is in the host's memory.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from models.sharding import Sharding, sharding_of
from recipes.training.checkpoint.state import KINDS, Fragment, TrainingState

Flats = Sequence[Mapping[str, Tensor]]  # of each flat, kind -> elements; as TrainingState.tensors


@dataclass(frozen=True)
class Piece:
    """What a rank of the stage sends of a parameter."""

    rank: int  # in the stage's group
    tensor_rank: int
    fragment: Fragment


class Assembly:
    """Who sends what to whom; the same at every save.

    Communicates when it is made: an all-gather of the fragments' addresses in the stage.

    group: the ranks of this stage, communicating through the host's memory
    """

    def __init__(
        self, state: TrainingState, group: dist.ProcessGroup, *, tensor_rank: int, tensor_size: int
    ):
        self.group, self.tensor_size = group, tensor_size
        self.rank = dist.get_rank(group)
        self.shardings: dict[str, Sharding] = {
            name: sharding_of(parameter)
            for name, parameter in state.parameters.items()
            if not getattr(parameter, "ds_pipe_replicated", False)  # another stage has the first
        }
        own = [
            Piece(self.rank, tensor_rank, fragment)
            for fragment in state.fragments
            if fragment.name in self.shardings
            and (tensor_rank == 0 or self.shardings[fragment.name].dimension is not None)
        ]
        everyones: list[list[Piece]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyones, own, group=group)
        self.pieces: dict[str, list[Piece]] = {name: [] for name in self.shardings}
        for pieces in everyones:
            for piece in pieces:
                self.pieces[piece.fragment.name].append(piece)
        shapes = {name: sharding.shape for name, sharding in self.shardings.items()}
        self.owners = deal(shapes, dist.get_world_size(group))
        self.numbers = {name: number for number, name in enumerate(self.shardings)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The logical tensors that this rank puts together, in its order."""
        return {
            name: sharding.shape
            for name, sharding in self.shardings.items()
            if self.owners[name] == self.rank
        }

    def send(self, flats: Flats) -> list[dist.Work]:
        """Begin to send this rank's pieces of what others put together."""
        return [
            dist.isend(
                _elements(flats, kind, piece.fragment),
                group=self.group,
                group_dst=self.owners[name],
                tag=self._tag(kind, name),
            )
            for kind in KINDS
            for name, pieces in self.pieces.items()
            for piece in pieces
            if piece.rank == self.rank != self.owners[name]
        ]

    def receive(self, kind: str, flats: Flats) -> Iterator[tuple[str, Tensor]]:
        """(name, logical tensor) of this rank's tensors, one after the other.

        All of all kinds must be taken: the others wait until what they send has arrived.
        """
        for name in self.shapes:
            yield name, self._put_together(kind, name, flats)

    def _put_together(self, kind: str, name: str, flats: Flats) -> Tensor:
        sharding = self.shardings[name]
        holders = 1 if sharding.dimension is None else self.tensor_size
        parts = [torch.empty(sharding.local_shape(self.tensor_size)) for _ in range(holders)]
        receiving = []
        for piece in self.pieces[name]:
            elements = piece.fragment.elements
            place = parts[piece.tensor_rank].view(-1)[elements.start : elements.stop]
            if piece.rank == self.rank:
                place.copy_(_elements(flats, kind, piece.fragment))
                continue
            receiving.append(
                dist.irecv(
                    place,
                    group=self.group,
                    group_src=piece.rank,
                    tag=self._tag(kind, name),
                )
            )
        for work in receiving:
            work.wait()
        return sharding.logical_tensor(parts)

    def _tag(self, kind: str, name: str) -> int:
        """Of a message with a piece; no two between the same ranks are alike in one save."""
        return KINDS.index(kind) * len(self.numbers) + self.numbers[name]


def _elements(flats: Flats, kind: str, fragment: Fragment) -> Tensor:
    return flats[fragment.flat][kind].narrow(0, fragment.offset, len(fragment.elements))


def deal(shapes: Mapping[str, tuple[int, ...]], owners: int) -> dict[str, int]:
    """The owner of each tensor, 0 .. owners - 1: always the one with the fewest elements so far."""
    load = [0] * owners
    owner_of = {}
    for name, shape in shapes.items():
        owner_of[name] = load.index(min(load))
        load[owner_of[name]] += math.prod(shape)
    return owner_of
