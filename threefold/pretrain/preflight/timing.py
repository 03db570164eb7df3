"""Timing of matmuls, transfers and all-reduces, for the preflight and for `sweep.py --links`."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from threefold.engine.build import DTYPES

TIMED_REPETITIONS = 7  # timed after one repetition for warm-up
MATMULS_PER_REPETITION = 5
Choose = Callable[[Sequence[float]], float]


def matmul_tflops(
    size: int, precision: str, device: torch.device, choose: Choose = median
) -> float:
    """Return this rank's rate of a square matmul in TFLOP/s.

    The values are random, because a GPU draws less power, and is faster, with simpler ones. Torch's
    own random numbers are left unchanged.

    Args:
        size: rows, columns and inner dimension
        precision: "fp32", "bf16" or "fp16"
        device: device of this rank
        choose: chooses one of the measured times
    """
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(size, size, device=device, generator=generator).to(DTYPES[precision])
        for _ in range(2)
    )  # [size, size]
    product = torch.empty_like(left)
    seconds = timed(
        lambda: torch.mm(left, right, out=product), MATMULS_PER_REPETITION, device, choose=choose
    )
    return 2e-12 * size**3 / seconds


def timed(
    call: Callable[[], object],
    calls: int,
    device: torch.device,
    *,
    repetitions: int = TIMED_REPETITIONS,
    choose: Choose = median,
) -> float:
    """Return the time of a call in seconds, after a warm-up.

    Args:
        call: the call
        calls: number of calls that are timed together, so that reading the clock does not matter
        device: device of this rank
        repetitions: number of times that the calls are timed
        choose: chooses one of these times
    """
    found = []
    for _ in range(1 + repetitions):
        synchronize(device)
        before = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        found.append((time.perf_counter() - before) / calls)
    return choose(found[1:])


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def all_reduce(message: torch.Tensor, group: dist.ProcessGroup | None) -> Callable[[], object]:
    """Return an all-reduce of a message; communication: all-reduce in `group`; None: all ranks."""
    return lambda: dist.all_reduce(message, group=group)


def transfer(message: torch.Tensor, pair: tuple[int, int], rank: int) -> Callable[[], object]:
    """Return a transfer of a message there and back.

    Communication: send and receive between the two ranks of the pair.

    Args:
        message: the message, which is overwritten by that of the peer
        pair: two global ranks, one of which is `rank`
        rank: this rank
    """
    first, second = pair

    def send_and_receive() -> None:
        dist.send(message, second)
        dist.recv(message, second)

    def receive_and_send() -> None:
        dist.recv(message, first)
        dist.send(message, first)

    return send_and_receive if rank == first else receive_and_send
