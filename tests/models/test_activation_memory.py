"""The memory kept for the backward pass agrees with the paper's formulas."""

from unittest import mock

import pytest

from benchmarks.activation_memory import FORMULAS, rows


@pytest.fixture(scope="module")
def counted() -> dict[tuple[int, bool, str], float]:
    """Return measured memory / formula for each number of tensor ranks and each recomputation."""
    return {
        (row["tensor"], row["sequence_parallel"], row["recompute"]): row["counted_over_formula"]
        for row in rows()
    }


@pytest.mark.parametrize(
    "way", [(1, *way) for way in FORMULAS if not way[0]] + [(8, *way) for way in FORMULAS]
)
def test_memory_is_that_of_the_formula(
    way: tuple[int, bool, str], counted: dict[tuple[int, bool, str], float]
) -> None:
    assert counted[way] == pytest.approx(1, abs=0.01)


@pytest.mark.long
def test_recomputation_that_keeps_everything_is_noticed() -> None:
    recomputing = {way: FORMULAS[way] for way in FORMULAS if way[0] and way[1] != "none"}
    with (
        mock.patch("benchmarks.activation_memory.FORMULAS", recomputing),
        mock.patch("models.layer_specs.recomputed", lambda function, *inputs: function(*inputs)),
        mock.patch("models.attention.recomputed", lambda function, *inputs: function(*inputs)),
    ):
        ratios = [row["counted_over_formula"] for row in rows()]
    assert min(ratios) > 1.5
