"""The measurements of a preflight: the device, transfers and all-reduces of the ranks.

All ranks measure at the same time and in the same order, so that the duration hardly depends on
their number. The transfers use the communicator of the world, and the all-reduces the groups that
training needs anyway: no group is created. Only one communicator is busy at a time, because each
rank waits for its device after every operation. Of several repetitions, the fastest one counts,
because disturbances only make them slower, and a faulty device or link is slow in all of them.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from threefold.engine.build import DTYPES
from threefold.pretrain.preflight.evaluate import DeviceReport, LinkReport, Scope, pair_rounds
from threefold.runtime.processes import driver_name
from threefold.runtime.timing import (
    Repetitions,
    matmul_tflops,
    time_all_reduce,
    time_transfer,
)

MATMUL_SIZE = {"cpu": 256, "cuda": 8192}  # rows, columns and inner dimension, by kind of device
MATMUL_SIZE_FP32 = 4096  # on GPUs, where fp32 is up to 16 times slower
CHECKED_SIZE = {"cpu": 256, "cuda": 4096}  # likewise, of the matmuls whose results are checked
CHECKED_MATMULS = 4
ENTRIES_PER_NONZERO = 8  # one entry in eight is 1 or -1, the others are 0
PROBE_BYTES = {"cpu": 2**16, "cuda": 2**22}  # of a first message, which also connects the ranks
MESSAGE_BYTES = {"cpu": 2**20, "cuda": 2**26}  # of the measured messages, if there is enough time
REPETITIONS = 3  # of a transfer or an all-reduce
SECONDS_PER_ROUND = 0.2
GIB = 2**30


def matmul_size(device: torch.device, precision: str) -> int:
    """Return the rows, columns and inner dimension of the measured matmul."""
    if device.type == "cuda" and precision == "fp32":
        return MATMUL_SIZE_FP32
    return MATMUL_SIZE[device.type]


def release_memory(device: torch.device) -> None:
    """Return the memory of the measurements to the device, and forget their peak."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def measure_device(precision: str, device: torch.device) -> DeviceReport:
    """Measure the device of this rank, and check its results."""
    name, rate, free = driver_name(), None, None
    try:
        free = torch.cuda.mem_get_info(device)[0] / GIB if device.type == "cuda" else None
        size = matmul_size(device, precision)
        rate = matmul_tflops(size, DTYPES[precision], device, choose=min)
        wrong = wrong_rows(CHECKED_SIZE[device.type], precision, device)
        release_memory(device)
    except RuntimeError as error:  # of CUDA, including a lack of memory
        return DeviceReport(name, rate, free, str(error).strip().partition("\n")[0])
    problem = f"{wrong} rows of matmuls have wrong results" if wrong else ""
    return DeviceReport(name, rate, free, problem)


def wrong_rows(
    size: int,
    precision: str,
    device: torch.device,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.mm,
) -> int:
    """Return the number of wrong rows in products of matrices of small integers.

    All sums of the products are integers of at most 256, which every precision represents exactly,
    so that the order of the additions does not matter. Each product is multiplied by a vector, and
    compared with the product of one matrix by the other times the vector (Freivalds 1977), in fp64,
    where this is exact, too. No other device is needed for the comparison.
    """
    generator = torch.Generator(device).manual_seed(0)

    def integers() -> torch.Tensor:  # [size, size], of -1, 0 and 1
        drawn = torch.randint(
            0, 2 * ENTRIES_PER_NONZERO, (size, size), device=device, generator=generator
        )
        return (drawn == 0).to(DTYPES[precision]) - (drawn == 1).to(DTYPES[precision])

    wrong = 0
    for _ in range(CHECKED_MATMULS):
        left, right = integers(), integers()
        vector = torch.randint(1, 1000, (size,), device=device, generator=generator).double()
        expected = left.double() @ (right.double() @ vector)  # [size]
        computed = multiply(left, right).double() @ vector  # [size]
        wrong += int((computed != expected).sum())  # NaN differs from everything
    return wrong


class LinkTest:
    """Times transfers and all-reduces; all methods are collective.

    Args:
        note: called with a description of each measurement, for hang reports
    """

    def __init__(self, rank: int, device: torch.device, note: Callable[[str], None]):
        self.rank, self.device, self.note = rank, device, note

    def measure(
        self, scopes: list[Scope], groups: Mapping[str, dist.ProcessGroup | None]
    ) -> LinkReport:
        """Return the rates of this rank.

        Args:
            scopes: the scopes of the transfers, the same on all ranks
            groups: axis -> this rank's group of several ranks; the same axes on all ranks
        """
        transfers: dict[str, dict[int, float]] = {}
        all_reduces: dict[str, float] = {}
        sizes: dict[str, int] = {}
        for scope in scopes:
            rates = transfers[scope.measure] = {}
            for pairs in pair_rounds(scope.size):
                partner = scope.partner(self.rank, pairs)
                seconds, size = self._transfer(scope.measure, partner)
                sizes[scope.measure] = min(size, sizes.get(scope.measure, size))
                if partner is not None and seconds is not None:
                    rates[partner] = 1e-9 * size / seconds
        for axis, group in groups.items():
            seconds, size = self._time(axis, partial(time_all_reduce, group=group))
            ranks = dist.get_world_size(group)
            sizes[axis] = size
            if seconds is not None:  # NCCL's bus bandwidth
                all_reduces[axis] = 1e-9 * size * 2 * (ranks - 1) / ranks / seconds
        return LinkReport(transfers, all_reduces, sizes)

    def _transfer(self, measure: str, partner: int | None) -> tuple[float | None, int]:
        """Time a transfer in one direction; return the seconds and the size of the message."""
        if partner is None:
            return self._time(measure, None)
        pair = (min(self.rank, partner), max(self.rank, partner))
        return self._time(
            f"{measure} between rank {pair[0]} and rank {pair[1]}",
            partial(time_transfer, pair=pair, rank=self.rank),
        )

    def _time(self, name: str, seconds_of: Callable[..., float] | None) -> tuple[float | None, int]:
        """Time an operation; return the seconds and the size of its message.

        First send a message of PROBE_BYTES untimed, which connects the ranks, and then a timed one.
        The slowest rank's time sets the size of the measured messages, so that a round stays below
        SECONDS_PER_ROUND.

        Args:
            name: the measurement, for hang reports
            seconds_of: times the operation, given the size of the message, the device and the
                repetitions; None if this rank has no partner, so that the seconds are None, too
        """
        self.note(f"preflight: {name}")
        probe = PROBE_BYTES[self.device.type]
        seconds = self._seconds(seconds_of, probe, repetitions=1)
        slowest = torch.tensor(seconds or 0.0, dtype=torch.float32, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        size = message_bytes(slowest.item(), probe, MESSAGE_BYTES[self.device.type])
        return self._seconds(seconds_of, size, repetitions=REPETITIONS), size

    def _seconds(
        self, seconds_of: Callable[..., float] | None, size: int, repetitions: int
    ) -> float | None:
        if seconds_of is None:
            return None
        return seconds_of(size, self.device, Repetitions(repetitions, choose=min))


def message_bytes(seconds: float, probe: int, most: int) -> int:
    """Return the size of the messages with which a round stays below SECONDS_PER_ROUND.

    Args:
        seconds: time of the slowest message of `probe` bytes
        probe: size of the first messages
    """
    size = most
    while size > probe and seconds * size / probe * (1 + REPETITIONS) > SECONDS_PER_ROUND:
        size //= 4
    return max(size, probe)
