"""Dropout masks are sufficiently random and do not depend on the layout."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from models.kernels.compile import as_written
from models.kernels.elementwise import keep_mask
from models.parallel.collectives import TensorAxis
from models.parallel.micro_batch_info import MaskKey, attention_rows
from models.parallel.micro_batch_info import dropout as fused_dropout

KEY = MaskKey(seed=1, samples=range(1000, 1008))
dropout = partial(fused_dropout, fuse=as_written)


def mask(probability: float, *, layer: str = "blocks.0.mlp", key: MaskKey = KEY) -> Tensor:
    """Return 1 for each element that is kept, else 0: [256, 8, 512]."""
    x = torch.ones(256, 8, 512)
    return (dropout(x, probability, key=key, layer=layer, tensor=TensorAxis()) != 0).double()


def deviations(a: Tensor, b: Tensor) -> float:
    """Return the correlation of two masks in standard deviations of independent masks."""
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).mean() / (a.std() * b.std())) * math.sqrt(a.numel())


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_share_dropped_is_the_probability(probability: float) -> None:
    kept = mask(probability)
    spread = math.sqrt(probability * (1 - probability) / kept.numel())
    assert abs(float(kept.mean()) - (1 - probability)) < 4 * spread


def test_kept_elements_are_scaled_to_preserve_the_mean() -> None:
    x = torch.ones(64, 8, 512)
    y = dropout(x, 0.25, key=KEY, layer="embedding", tensor=TensorAxis())
    assert y.unique().tolist() == pytest.approx([0, 4 / 3])


def test_neighbours_layers_and_seeds_are_unrelated() -> None:
    kept = mask(0.5)
    pairs = {
        "positions": (kept[1:], kept[:-1]),
        "samples": (kept[:, 1:], kept[:, :-1]),
        "columns": (kept[..., 1:], kept[..., :-1]),
        "diagonal": (kept[1:, :, 1:], kept[:-1, :, :-1]),
        "layers": (kept, mask(0.5, layer="blocks.1.mlp")),
        "halves of a block": (kept, mask(0.5, layer="blocks.0.attention")),
        "seeds": (kept, mask(0.5, key=MaskKey(2, KEY.samples))),
        "steps": (kept, mask(0.5, key=MaskKey(1, range(1008, 1016)))),
    }
    for name, (a, b) in pairs.items():
        assert abs(deviations(a, b)) < 4.5, name


def test_a_sequence_has_its_mask_in_any_micro_batch_and_on_any_rank() -> None:
    x = torch.randn(16, 8, 12)
    whole = dropout(x, 0.3, key=KEY, layer="blocks.2.mlp", tensor=TensorAxis())
    for first in range(8):
        alone = MaskKey(1, range(1000 + first, 1001 + first))
        part = x[:, first : first + 1]
        got = dropout(part, 0.3, key=alone, layer="blocks.2.mlp", tensor=TensorAxis())
        assert torch.equal(got, whole[:, first : first + 1])
    for rank in range(4):
        axis = TensorAxis(rank=rank, size=4, sequence_parallel=True)
        part = dropout(x.chunk(4)[rank], 0.3, key=KEY, layer="blocks.2.mlp", tensor=axis)
        assert torch.equal(part, whole.chunk(4)[rank])
        replicated = TensorAxis(rank=rank, size=4)
        got = dropout(x, 0.3, key=KEY, layer="blocks.2.mlp", tensor=replicated)
        assert torch.equal(got, whole)


def test_a_head_has_its_mask_on_any_rank() -> None:
    def heads(rank: int, size: int) -> Tensor:
        rows = attention_rows(
            torch.empty(8, 6 // size, 20, 20),
            key=KEY,
            layer="blocks.0.attention.core",
            first_head=rank * 6 // size,
            fuse=as_written,
        )
        return keep_mask(rows, 20, 0.3)

    whole = heads(0, 1)
    assert whole.shape == (8, 6, 20, 20)
    assert torch.equal(torch.cat([heads(rank, 3) for rank in range(3)], dim=1), whole)
    assert not torch.equal(whole[:, 0], whole[:, 1])


def test_the_hash_is_unchanged() -> None:
    """Another hash would change every resumed run."""
    x = torch.ones(2, 8, 16)
    kept = dropout(x, 0.5, key=KEY, layer="blocks.0.mlp", tensor=TensorAxis()) != 0
    rows = ["".join(str(int(bit)) for bit in kept[0, sample]) for sample in range(3)]
    assert rows == ["1100100011100000", "0011100010100101", "1101001011010110"]
