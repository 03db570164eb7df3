"""The measurements of a preflight: the device, transfers and all-reduces of the ranks.

All ranks measure at the same time and in the same order, so that the duration hardly depends on
their number. The transfers use the communicator of the world, and the all-reduces the groups that
training needs anyway: no group is created. Only one communicator is busy at a time, because each
rank waits for its device after every operation. Of several repetitions, the fastest one counts,
because disturbances only make them slower, and a faulty device or link is slow in all of them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import torch
import torch.distributed as dist

from threefold.engine.build import DTYPES
from threefold.pretrain.preflight.evaluate import DeviceReport, LinkReport, Scope, pair_rounds

# Timing of matmuls, transfers and all-reduces, for the preflight and for `sweep.py links`.

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
        calls: number of calls that are timed together, so that reading the clock does not matter
        repetitions: number of times that the calls are timed
    """
    times = []
    for _ in range(1 + repetitions):
        synchronize(device)
        before = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        times.append((time.perf_counter() - before) / calls)
    return choose(times[1:])


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
    """
    first, second = pair

    def send_and_receive() -> None:
        dist.send(message, second)
        dist.recv(message, second)

    def receive_and_send() -> None:
        dist.recv(message, first)
        dist.send(message, first)

    return send_and_receive if rank == first else receive_and_send


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
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else "cpu"
    rate = free = None
    try:
        free = torch.cuda.mem_get_info(device)[0] / GIB if is_gpu else None
        rate = matmul_tflops(matmul_size(device, precision), precision, device, choose=min)
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
            seconds, size = self._time(axis, partial(all_reduce, group=group))
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
        seconds, size = self._time(
            f"{measure} between rank {pair[0]} and rank {pair[1]}",
            partial(transfer, pair=pair, rank=self.rank),
        )
        return (None if seconds is None else seconds / 2), size  # there and back

    def _time(
        self, name: str, prepare: Callable[[torch.Tensor], Callable[[], object]] | None
    ) -> tuple[float | None, int]:
        """Time an operation; return the seconds and the size of its message.

        First send a message of PROBE_BYTES untimed, which connects the ranks, and then a timed one.
        The slowest rank's time sets the size of the measured messages, so that a round stays below
        SECONDS_PER_ROUND.

        Args:
            name: the measurement, for hang reports
            prepare: returns the operation with a message; None if this rank has no partner, so that
                the seconds are None, too
        """
        self.note(f"preflight: {name}")
        probe = PROBE_BYTES[self.device.type]
        seconds = self._seconds(prepare, probe, repetitions=1)
        slowest = torch.tensor(seconds or 0.0, dtype=torch.float32, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        size = message_bytes(slowest.item(), probe, MESSAGE_BYTES[self.device.type])
        return self._seconds(prepare, size, repetitions=REPETITIONS), size

    def _seconds(
        self,
        prepare: Callable[[torch.Tensor], Callable[[], object]] | None,
        size: int,
        repetitions: int,
    ) -> float | None:
        if prepare is None:
            return None
        message = torch.zeros(size // 4, dtype=torch.float32, device=self.device)  # [size / 4]
        return timed(prepare(message), 1, self.device, repetitions=repetitions, choose=min)


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
