"""Measurements of a rank: exact checks of matmuls, and messages of a limited duration."""

import pytest
import torch

from threefold.pretrain.preflight import run
from threefold.pretrain.preflight.run import (
    MESSAGE_BYTES,
    PROBE_BYTES,
    REPETITIONS,
    SECONDS_PER_ROUND,
    measure_device,
    message_bytes,
    wrong_rows,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("size", [64, 256])
def test_a_healthy_device_has_no_wrong_rows(precision: str, size: int) -> None:
    assert wrong_rows(size, precision, CPU) == 0


@pytest.mark.parametrize("wrong", [1.0, float("nan"), float("inf")])
def test_a_single_wrong_number_is_found(wrong: float) -> None:
    calls = []

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        product = left @ right
        calls.append(product)
        if len(calls) == 3:
            product[7, 11] += wrong
        return product

    assert wrong_rows(64, "bf16", CPU, multiply) == 1


def test_products_are_small_integers_in_every_order_of_additions() -> None:
    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        assert set(left.unique().tolist()) == {-1.0, 0.0, 1.0}
        # 256 is the largest integer below which bf16 has all integers. The sum of the absolute
        # values limits every partial sum, here for 16 times the rows of the largest check.
        largest = (left.double().abs() @ right.double().abs()).max()
        assert largest * run.CHECKED_SIZE["cuda"] / len(left) <= 256
        return left @ right

    assert wrong_rows(1024, "fp32", CPU, multiply) == 0


def test_a_report_has_the_rate_and_the_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = measure_device("fp32", CPU)
    assert healthy.device == "cpu" and healthy.tflops and not healthy.problem
    assert healthy.free_gib is None
    monkeypatch.setattr(run, "wrong_rows", lambda *_: 3)
    assert measure_device("fp32", CPU).problem == "3 rows of matmuls have wrong results"

    def fail(*_: object, **__: object) -> float:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nfurther lines")

    monkeypatch.setattr(run, "matmul_tflops", fail)
    failed = measure_device("fp32", CPU)
    assert failed.tflops is None
    assert failed.problem == "CUDA error: uncorrectable ECC error encountered"


def test_the_random_numbers_of_training_are_unchanged() -> None:
    before = torch.get_rng_state()
    measure_device("fp32", CPU)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("seconds", [0.0, 1e-5, 1e-3, 1e-2, 0.1, 1.0])
def test_a_round_is_short_on_a_slow_link(kind: str, seconds: float) -> None:
    probe, most = PROBE_BYTES[kind], MESSAGE_BYTES[kind]
    size = message_bytes(seconds, probe, most)
    assert probe <= size <= most
    if size > probe:
        assert seconds * size / probe * (1 + REPETITIONS) <= SECONDS_PER_ROUND
    assert size == most or seconds > 0
