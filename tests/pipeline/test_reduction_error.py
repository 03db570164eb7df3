"""The error of a simulated ring reduction, and its table in docs/zero-and-precision.md."""

import pytest

from benchmarks.reduction_error import NOISES, RANKS, ring_errors, table
from threefold.config.loading import REPOSITORY


@pytest.fixture(scope="module")
def errors() -> dict[float, dict[int, dict[str, float]]]:
    return {noise: dict(ring_errors(RANKS, noise)) for noise in NOISES}


@pytest.mark.parametrize("noise", NOISES)
def test_a_sum_in_fp32_is_exact_to_a_millionth_over_a_thousand_ranks(
    noise: float, errors: dict[float, dict[int, dict[str, float]]]
) -> None:
    assert 0 < errors[noise][1024]["fp32"] < 1e-6


@pytest.mark.parametrize("noise", NOISES)
def test_a_sum_in_bf16_loses_more_than_a_hundredth_over_512_ranks(
    noise: float, errors: dict[float, dict[int, dict[str, float]]]
) -> None:
    assert 1e-2 < errors[noise][512]["bf16"] < 0.3
    assert errors[noise][512]["bf16"] > errors[noise][8]["bf16"] > 1e-3


def test_the_docs_show_the_simulated_errors(
    errors: dict[float, dict[int, dict[str, float]]],
) -> None:
    page = REPOSITORY / "docs" / "zero-and-precision.md"
    assert table(errors) in page.read_text()
