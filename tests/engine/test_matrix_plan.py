"""Every element of every matrix has one owner, and owners share the work."""

import random
from dataclasses import replace
from itertools import chain

import pytest
import torch

from models.parallel.collectives import TensorAxis
from models.sharding import Sharding
from threefold.checkpoint.state import Fragment
from threefold.engine import muon_exchange
from threefold.engine.muon_exchange import (
    Matrix,
    Round,
    Shard,
    matrices_of,
    owners_by_round,
    sizes,
)

LAYERS, HIDDEN, FFN = 4, 24, 40


def shardings() -> dict[str, Sharding]:
    """Return the matrices of a model with grouped-query attention and a gated MLP."""
    h, f = HIDDEN, FFN
    return {
        f"blocks.{layer}.{name}": sharding
        for layer in range(LAYERS)
        for name, sharding in {
            "qkv": Sharding((2 * h, h), 0, (h, h // 2, h // 2), role="hidden"),
            "output": Sharding((h, h), 1, (h,), role="hidden"),
            "up": Sharding((2 * f, h), 0, (f, f), role="hidden"),
            "down": Sharding((h, f), 1, (f,), role="hidden"),
        }.items()
    }


def divided(tensor: int, data: int, *, expert: bool = False) -> list[list[Shard]]:
    """Return the shards of all ranks, as ZeRO-1 divides a flat tensor of all matrices.

    expert: also give each tensor rank a matrix of its own
    """
    ranks: list[list[Shard]] = []
    for data_rank in range(data):
        for tensor_rank in range(tensor):
            own = shardings()
            if expert:
                whole = Sharding((2 * FFN, HIDDEN), None, (FFN, FFN), of_expert=True, role="hidden")
                own |= {f"expert.{tensor_rank}": whole}
            shapes = {name: each.local_shape(TensorAxis(size=tensor)) for name, each in own.items()}
            counts = {name: rows * columns for name, (rows, columns) in shapes.items()}
            share = -(-sum(counts.values()) // data)
            first, shards = 0, []
            for name, count in counts.items():
                start = max(first, data_rank * share)
                stop = min(first + count, (data_rank + 1) * share)
                if start < stop:
                    elements = range(start - first, stop - first)
                    fragment = Fragment(name, elements, 0, start - data_rank * share)
                    shards.append(Shard(fragment, own[name], tensor_rank))
                first += count
            ranks.append(shards)
    return ranks


@pytest.mark.parametrize(("tensor", "data"), [(1, 1), (1, 3), (2, 1), (2, 5), (4, 7)])
@pytest.mark.parametrize("expert", [False, True])
def test_every_element_is_in_one_piece(tensor: int, data: int, expert: bool) -> None:
    matrices = matrices_of(divided(tensor, data, expert=expert), tensor)
    assert len(matrices) == LAYERS * 7 + (2 * tensor if expert else 0)
    for matrix in matrices:
        seen = set()
        for piece in matrix.pieces:
            columns = piece.part.columns
            for element in range(piece.start, piece.start + piece.length):
                row, column = divmod(element, len(columns))
                seen.add((piece.part.rows[row], columns[column]))
        assert len(seen) == matrix.elements == sum(piece.length for piece in matrix.pieces)


def test_the_messages_of_all_ranks_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon_exchange, "MUON_ROUND_ELEMENTS", 600)
    matrices = matrices_of(divided(2, 3), 2)
    rounds = owners_by_round(matrices, 6)
    assert len(rounds) > 2
    assert list(chain(*chain(*rounds))) != matrices  # but the same ones
    assert sorted(map(id, chain(*chain(*rounds)))) == sorted(map(id, matrices))
    for owned in rounds:
        views = [Round.of_rank(rank, owned) for rank in range(6)]
        for sender in range(6):
            for receiver in range(6):
                message = views[sender].sent[receiver]
                assert message == views[receiver].received[sender]
                assert all(piece.rank == sender for piece in message)
        assert sum(map(sum, (sizes(view.sent) for view in views))) == sum(
            matrix.elements for matrix in chain(*owned)
        )


def test_a_missing_shard_is_noticed() -> None:
    ranks = divided(2, 2)
    lost = ranks[1].pop()
    with pytest.raises(AssertionError, match=f"elements: {lost.fragment.name}"):
        matrices_of(ranks, 2)


def test_ranks_that_divide_the_parameters_differently_are_noticed() -> None:
    ranks = divided(2, 2)
    first = ranks[1][0]
    ranks[1][0] = replace(first, fragment=replace(first.fragment, flat=1))
    with pytest.raises(AssertionError, match="divide the parameters differently"):
        matrices_of(ranks, 2)


def test_the_work_of_512_ranks_is_balanced() -> None:
    """A stage of a large model has more matrices than ranks; the planner assumes equal shares."""
    shapes = [(8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), (28672, 8192)] * 400
    generator = random.Random(0)
    matrices = [Matrix(shape, 0) for shape in generator.sample(shapes, len(shapes))]
    for ranks in (8, 64, 512):
        load = [0] * ranks
        for owned in owners_by_round(matrices, ranks):
            for rank, own in enumerate(owned):
                load[rank] += sum(matrix.cost for matrix in own)
        mean, most = sum(load) / ranks, max(matrix.cost for matrix in matrices)
        assert max(load) <= mean + most
        assert ranks == 512 or max(load) < 1.1 * mean


def test_copies_of_a_matrix_get_the_same_update() -> None:
    """Two tensor ranks hold the whole matrix each, divided among two data ranks."""
    sharding = Sharding((6, 4), role="hidden")
    shards = [
        [Shard(Fragment("kv_down", elements, 0, 0), sharding, tensor_rank)]
        for elements in (range(13), range(13, 24))
        for tensor_rank in range(2)
    ]
    (matrix,) = matrices_of(shards, 2)
    values = torch.arange(24.0)
    places = {id(p): values[p.start : p.start + p.length].clone() for p in matrix.pieces}
    whole = muon_exchange._assembled(matrix, places, values)
    assert torch.equal(whole, values.view(6, 4))
    muon_exchange._take_apart(matrix, -whole, places)
    assert len(matrix.pieces) == 4
    for piece in matrix.pieces:
        assert torch.equal(places[id(piece)], -values[piece.start : piece.start + piece.length])
