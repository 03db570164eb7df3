"""Gather matrices from the shards of several ranks, orthogonalize them, and return the results."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from math import sqrt

import torch
import torch.distributed as dist
from torch import Tensor

from models.cost import MUON_BATCH_ELEMENTS
from models.parallel.collectives import wait_for
from models.sharding import sharding_of
from threefold.checkpoint.state import TrainingState
from threefold.engine.matrix_plan import (
    Matrix,
    Piece,
    Round,
    Shard,
    matrices_of,
    owners_by_round,
    sizes,
)
from threefold.engine.newton_schulz import orthogonalize

ADAMW_UPDATE_RMS = 0.2  # typical root mean square of AdamW's updates (Moonlight, section 2.2)


@dataclass(frozen=True)
class _Running:
    """The all-to-all of a round that runs in the background: its result, input and handle."""

    received: Tensor
    sent: Tensor
    work: dist.Work | None


class MatrixExchange:
    """Orthogonalizes logical matrices that are sharded over ranks, each matrix on one rank.

    The constructor communicates: an all-gather of the addresses of all shards.

    Communication of a call: in each round, an all-to-all to the owners of the matrices and one
    back. Both run in the background: the first one during `meanwhile` or the computation of the
    previous round, the second one during the computation of the next round.

    Args:
        state: this rank's share of the training state
        group: the ranks that hold one copy of the optimizer state of a stage; None: only this rank
        tensor_rank: rank along the tensor axis
        tensor_size: number of tensor ranks
        dtype: type in which matrices are sent and orthogonalized
    """

    def __init__(
        self,
        state: TrainingState,
        group: dist.ProcessGroup | None,
        *,
        tensor_rank: int,
        tensor_size: int,
        dtype: torch.dtype,
    ):
        self.group, self.dtype = group, dtype
        own = [
            Shard(fragment, sharding_of(state.parameters[fragment.name]), tensor_rank)
            for fragment in state.fragments
            if sharding_of(state.parameters[fragment.name]).role == "hidden"
        ]
        shards = [own] if group is None else gather_shards(own, state, group)
        self.ranks = len(shards)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.flats = {id(flat): number for number, flat in enumerate(state.weights)}
        self.matrices = matrices_of(shards, tensor_size)
        self.rounds: dict[tuple[int, ...], list[Round]] = {}

    @torch.no_grad()
    def __call__(self, flats: Mapping[int, Tensor], meanwhile: Callable[[], None]) -> None:
        """Replace the matrices in the flat tensors by their scaled, orthogonalized values.

        Args:
            flats: this rank's shard of each flat tensor, by `id` of the tensor of its weights
            meanwhile: function to call while the elements of the first round are exchanged
        """
        held = {self.flats[key]: values for key, values in flats.items()}
        rounds = self._rounds(tuple(sorted(held)))
        coming = self._send(rounds[0], held) if rounds else None
        meanwhile()
        returning: tuple[Round, _Running] | None = None
        for number, current in enumerate(rounds):
            assert coming is not None
            running, coming = coming, None
            if number + 1 < len(rounds):
                coming = self._send(rounds[number + 1], held)
            self._orthogonalize(current, _finished(running))
            if returning is not None:
                self._store(*returning, held)
            returning = current, self._return(current, running)
        if returning is not None:
            self._store(*returning, held)

    def _rounds(self, flats: tuple[int, ...]) -> list[Round]:
        """Return the rounds of the matrices in some flat tensors."""
        if flats not in self.rounds:
            matrices = [each for each in self.matrices if each.flat in flats]
            rounds = owners_by_round(matrices, self.ranks)
            self.rounds[flats] = [Round.of_rank(self.rank, owned) for owned in rounds]
        return self.rounds[flats]

    def _send(self, current: Round, held: Mapping[int, Tensor]) -> _Running:
        """Begin to send this rank's pieces to the owners."""
        sent = torch.empty(sum(sizes(current.sent)), dtype=self.dtype, device=_device(held))
        for values, part in _in_place(current, sent, held):
            part.copy_(values)
        return self._exchange(sent, current.sent, current.received)

    def _return(self, current: Round, gathered: _Running) -> _Running:
        """Begin to send the results, which have replaced the received pieces, to their holders."""
        return self._exchange(gathered.received, current.received, current.sent)

    def _exchange(
        self, sent: Tensor, messages: Sequence[Sequence[Piece]], answers: Sequence[Sequence[Piece]]
    ) -> _Running:
        if self.group is None:
            return _Running(sent, sent, None)
        received = sent.new_empty(sum(sizes(answers)))
        work = dist.all_to_all_single(
            received, sent, sizes(answers), sizes(messages), group=self.group, async_op=True
        )
        return _Running(received, sent, work)

    def _store(self, current: Round, running: _Running, held: Mapping[int, Tensor]) -> None:
        """Wait for the results, and copy them into the flat tensors."""
        for values, part in _in_place(current, _finished(running), held):
            values.copy_(part)

    def _orthogonalize(self, current: Round, buffer: Tensor) -> None:
        """Replace the pieces in the buffer by those of the scaled, orthogonalized matrices."""
        received = list(chain.from_iterable(current.received))
        split = buffer.split([piece.length for piece in received])
        places = {id(piece): values for piece, values in zip(received, split, strict=True)}
        for together in _batches(current.owned):
            matrices = torch.stack([_assembled(matrix, places, buffer) for matrix in together])
            updates = orthogonalize(matrices).mul_(update_scale(together[0].shape))
            for matrix, update in zip(together, updates, strict=True):
                _take_apart(matrix, update, places)


def gather_shards(
    own: list[Shard], state: TrainingState, group: dist.ProcessGroup
) -> list[list[Shard]]:
    """Return the shards of each rank of a group; collective.

    `plan.py --trace`, which simulates one rank, replaces this function; it reads `state`.
    """
    shards: list[list[Shard]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(shards, own, group=group)
    return shards


def update_scale(shape: tuple[int, int]) -> float:
    """Return the factor that gives an orthogonal matrix the root mean square of AdamW's updates.

    Moonlight (arXiv 2502.16982), equation 4.

    shape: rows and columns of the logical matrix
    """
    return ADAMW_UPDATE_RMS * sqrt(max(shape))


def _batches(matrices: Sequence[Matrix]) -> Iterator[list[Matrix]]:
    """Yield matrices of equal shape that are orthogonalized together."""
    for shape, group in groupby(sorted(matrices, key=lambda each: each.shape), lambda m: m.shape):
        of_shape = list(group)
        count = max(1, MUON_BATCH_ELEMENTS // (shape[0] * shape[1]))
        for first in range(0, len(of_shape), count):
            yield of_shape[first : first + count]


def _assembled(matrix: Matrix, places: Mapping[int, Tensor], like: Tensor) -> Tensor:
    """Return a matrix from its pieces, given the values of each piece by its `id`."""
    whole = like.new_empty(matrix.shape)
    for pieces in _by_part(matrix):
        part = pieces[0].part
        values = torch.cat([places[id(piece)] for piece in pieces])
        region = whole[part.rows.start : part.rows.stop, part.columns.start : part.columns.stop]
        region.copy_(values.view(len(part.rows), len(part.columns)))
    return whole


def _take_apart(matrix: Matrix, update: Tensor, places: Mapping[int, Tensor]) -> None:
    """Copy the pieces of a matrix to their places in the buffer, given by the `id` of the piece."""
    for pieces in _by_part(matrix):
        part = pieces[0].part
        region = update[part.rows.start : part.rows.stop, part.columns.start : part.columns.stop]
        values = region.reshape(-1)
        for piece in pieces:
            places[id(piece)].copy_(values[piece.start : piece.start + piece.length])


def _in_place(
    current: Round, buffer: Tensor, held: Mapping[int, Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield two views of each piece of this rank: in its flat tensor, and in a message buffer.

    buffer: pieces to send, or the results that have returned, in the same order
    """
    sent = list(chain.from_iterable(current.sent))
    for piece, part in zip(sent, buffer.split([piece.length for piece in sent]), strict=True):
        yield held[piece.flat][piece.offset : piece.offset + piece.length], part


def _by_part(matrix: Matrix) -> Iterator[list[Piece]]:
    """Yield the pieces of each tensor rank's part, in the order of its elements."""
    ordered = sorted(
        matrix.pieces, key=lambda p: (p.part.rows.start, p.part.columns.start, p.start)
    )
    for _, pieces in groupby(ordered, lambda p: (p.part.rows.start, p.part.columns.start)):
        yield list(pieces)


def _finished(running: _Running) -> Tensor:
    """Wait for an exchange and return what has arrived."""
    if running.work is not None:
        wait_for(running.work)
    return running.received


def _device(held: Mapping[int, Tensor]) -> torch.device:
    return next(iter(held.values())).device
