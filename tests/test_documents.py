"""Documents that share a window and do not see each other."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from models import transformer
from models.config import ModelConfig
from models.initialization import initialize
from models.layer_specs import SequentialModel, layer_specs, logical_parameters, run_layers
from models.parallel.collectives import TensorAxis
from models.parallel.context import Context, Documents, positions_in
from models.parallel.rng import MaskKey
from models.transformer import rotary_table
from tests.test_transformer import GROUPED_WITH_DROPOUT, KEY, LLAMA, SHAPES, WITH_DROPOUT

SHAPES_WITH_DROPOUT = {"llama": GROUPED_WITH_DROPOUT, "gpt2": WITH_DROPOUT}
CPU = torch.device("cpu")

Seen = tuple[Tensor, dict[str, Tensor]]  # the losses of tokens [n], and what those do to weights


def tokens_of(config: ModelConfig, seed: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (count,), generator=generator)


def run(
    config: ModelConfig,
    rows: list[Tensor],
    lengths: tuple[tuple[int, ...], ...] | None,
    key: MaskKey | None = None,
    *,
    row: int,
    where: slice,
) -> Seen:
    """The losses of one row's tokens in one place, each to predict itself, and their gradients."""
    model = SequentialModel(layer_specs(config, TensorAxis()))
    parameters = dict(logical_parameters(model, config))
    initialize(parameters.items(), config, seed=3, tensor_rank=0, tensor_size=1)
    tokens = torch.stack(rows)
    context = Context(key, Documents(lengths) if lengths else None)
    logits = run_layers(model.layers, tokens, context=context)[:, row]  # [s, v]
    losses = F.cross_entropy(logits[where], tokens[row, where], reduction="none")
    losses.sum().backward()
    return losses.detach(), {name: p.grad for name, p in parameters.items()}


def same(one: Seen, other: Seen) -> bool:
    """Bit for bit."""
    assert one[1].keys() == other[1].keys()
    return torch.equal(one[0], other[0]) and all(
        torch.equal(one[1][name], other[1][name]) for name in one[1]
    )


@pytest.mark.parametrize("key", [None, KEY], ids=["", "dropout"])
@pytest.mark.parametrize("shape", SHAPES_WITH_DROPOUT)
def test_a_document_is_none_of_its_neighbours_business(shape: str, key: MaskKey | None) -> None:
    """Of three in a window, the second: what is around it changes, and how that divides."""
    config = SHAPES_WITH_DROPOUT[shape]
    rows = [tokens_of(config, seed, 24) for seed in (1, 2)]
    second = {"row": 1, "where": slice(9, 17)}
    expected = run(config, rows, ((24,), (9, 8, 7)), key, **second)
    assert float(expected[0].mean()) > 1 and expected[1]["blocks.0.attention.qkv.weight"].any()
    for name, (row, where, *lengths) in {
        "another one before it": (1, slice(9), (24,), (9, 8, 7)),
        "two shorter ones before it": (1, slice(9), (24,), (4, 5, 8, 7)),
        "another one behind it": (1, slice(17, 24), (24,), (9, 8, 7)),
        "two shorter ones behind it": (1, slice(17, 24), (24,), (9, 8, 1, 6)),
        "others beside it": (0, slice(24), (5, 19), (9, 8, 7)),
    }.items():
        changed = [tokens.clone() for tokens in rows]
        changed[row][where] = (changed[row][where] + 8) % config.vocab_size
        assert same(run(config, changed, tuple(lengths), key, **second), expected), name
        across = [run(config, each, None, key, **second) for each in (rows, changed)]
        assert torch.equal(across[0][0], across[1][0]) == ("before" not in name)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_document_is_the_same_anywhere_in_a_window(shape: str) -> None:
    """Positions start again: B after A, alone, and as the second half of another row."""
    config = SHAPES[shape]
    a, b = tokens_of(config, 1, 9), tokens_of(config, 2, 8)
    rest = tokens_of(config, 3, 7)
    settings = [
        (torch.cat([a, b, rest]), (9, 8, 7), slice(9, 17)),
        (torch.cat([b, rest, a]), (8, 7, 9), slice(0, 8)),
        (torch.cat([rest, a, b]), (7, 9, 8), slice(16, 24)),
    ]
    seen = [run(config, [row], (lengths,), row=0, where=where) for row, lengths, where in settings]
    for other in seen[1:]:
        torch.testing.assert_close(other[0], seen[0][0], rtol=1e-5, atol=1e-5)
        for name, gradient in seen[0][1].items():
            torch.testing.assert_close(other[1][name], gradient, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [WITH_DROPOUT, GROUPED_WITH_DROPOUT], ids=["gpt2", "llama"])
def test_written_out_attention_is_the_fused_one(config: ModelConfig) -> None:
    """With a probability of next to nothing, nothing is dropped, and only the path differs."""
    rows = [tokens_of(config, seed, 24) for seed in (1, 2)]
    lengths = ((9, 8, 7), (24,))
    nothing = replace(config, dropout=0.0, attention_dropout=1e-12)
    place = {"row": 0, "where": slice(0, 24)}
    fused = run(nothing, rows, lengths, **place)
    written_out = run(nothing, rows, lengths, KEY, **place)
    torch.testing.assert_close(written_out[0], fused[0], rtol=1e-5, atol=1e-5)
    across = run(nothing, rows, None, KEY, **place)
    assert not torch.allclose(across[0], fused[0], rtol=1e-2, atol=1e-2)


def test_sequences_that_divide_alike_are_one_call() -> None:
    lengths = ((24,), (24,), (9, 15), (9, 15), (24,))
    assert list(Documents(lengths).runs()) == [(2, (24,)), (2, (9, 15)), (1, (24,))]
    rows = [tokens_of(LLAMA, seed, 24) for seed in range(5)]
    attend = transformer.causal_attention
    with mock.patch.object(transformer, "causal_attention", side_effect=attend) as calls:
        run(LLAMA, rows, lengths, row=0, where=slice(0, 24))
    shapes = [tuple(call.args[0].shape[::2]) for call in calls.call_args_list]  # b and s
    assert shapes == 3 * [(2, 24), (2, 9), (2, 15), (1, 24)]


def test_rotary_angles_start_again() -> None:
    """Attention sees no more of it than rounding, hence a test of the table itself."""
    documents = Documents(((2, 3), (4, 1)))
    whole = rotary_table(5, 8, 10_000.0, CPU, None)
    for table, places in zip(rotary_table(5, 8, 10_000.0, CPU, documents), whole, strict=True):
        for sequence, lengths in enumerate(documents.lengths):
            expected = torch.cat([places[:length] for length in lengths])  # [s, 1, 1, d]
            assert torch.equal(table[:, sequence : sequence + 1], expected)


def test_positions_start_again_and_are_made_once() -> None:
    documents = Documents(((2, 3), (5,), (1, 1, 3)))
    positions = positions_in(documents, CPU)
    assert positions.t().tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 4], [0, 0, 0, 1, 2]]
    assert positions_in(Documents(((2, 3), (5,), (1, 1, 3))), CPU) is positions
