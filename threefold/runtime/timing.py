"""Timing of matrix products and links.

The preflight of a run, `sweep.py links` and the measured datasheet of a device
(`benchmarks/device/`) all measure with this module, so that their rates can be compared. They
choose the sizes, the ranks and the number of repetitions.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

MATMULS_PER_REPETITION = 5


@dataclass(frozen=True)
class Repetitions:
    """The repetitions of an operation that are timed, after one for warm-up.

    Attributes:
        count: number of times that the calls are timed
        calls: number of calls that are timed together, so that reading the clock does not matter
        choose: chooses one of the measured times
    """

    count: int = 7
    calls: int = 1
    choose: Callable[[Sequence[float]], float] = median


def timed(call: Callable[[], object], device: torch.device, repetitions: Repetitions) -> float:
    """Return the time of a call in seconds, after a warm-up."""
    times = []
    for _ in range(1 + repetitions.count):
        synchronize(device)
        before = time.perf_counter()
        for _ in range(repetitions.calls):
            call()
        synchronize(device)
        times.append((time.perf_counter() - before) / repetitions.calls)
    return repetitions.choose(times[1:])


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_tflops(
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    choose: Callable[[Sequence[float]], float] = median,
) -> float:
    """Return this rank's rate of a square matmul in TFLOP/s.

    The values are random, because a GPU draws less power, and is faster, with simpler ones. Torch's
    own random numbers are left unchanged.

    Args:
        size: rows, columns and inner dimension
        choose: chooses one of the measured times
    """
    generator = torch.Generator(device).manual_seed(0)
    left, right = (
        torch.randn(size, size, device=device, generator=generator).to(dtype) for _ in range(2)
    )  # [size, size]
    product = torch.empty_like(left)
    repetitions = Repetitions(calls=MATMULS_PER_REPETITION, choose=choose)
    seconds = timed(lambda: torch.mm(left, right, out=product), device, repetitions)
    return 2e-12 * size**3 / seconds


def time_all_reduce(
    size: int,
    device: torch.device,
    repetitions: Repetitions,
    *,
    group: dist.ProcessGroup | None = None,
) -> float:
    """Return the time of an all-reduce of `size` bytes on each rank.

    Communication: all-reduce in `group`; None: all ranks.
    """
    message = zeros(size, device)
    return timed(lambda: dist.all_reduce(message, group=group), device, repetitions)


def time_transfer(
    size: int,
    device: torch.device,
    repetitions: Repetitions,
    *,
    pair: tuple[int, int],
    rank: int,
) -> float:
    """Return the time of a transfer of `size` bytes in one direction.

    A message there and back is timed. Communication: send and receive between the ranks of the
    pair.

    Args:
        pair: two global ranks, one of which is `rank`
    """
    first, second = pair
    message = zeros(size, device)

    def send_and_receive() -> None:
        dist.send(message, second)
        dist.recv(message, second)

    def receive_and_send() -> None:
        dist.recv(message, first)
        dist.send(message, first)

    return timed(send_and_receive if rank == first else receive_and_send, device, repetitions) / 2


def zeros(size: int, device: torch.device) -> torch.Tensor:
    """Return a message of `size` bytes, whose sums stay zero."""
    return torch.zeros(size // 4, dtype=torch.float32, device=device)  # [size / 4]
