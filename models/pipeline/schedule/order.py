"""The order in which the stages of a pipeline run their passes. Arithmetic only.

The same objects drive the engine (`engine.py`), the simulator (`simulation.py`) and the planner.

| schedule    | chunks of a stage      | backward | a step's length                     |
|-------------|------------------------|----------|-------------------------------------|
| 1f1b        | 1                      | whole    | (m + p - 1) (F + B + W)             |
| interleaved | v, always the same way | whole    | (m + (p - 1) / v) (F + B + W)       |
| zb-h1       | 1                      | split    | m (F + B + W) + (p - 1) (F + B - W) |
| zb-v        | 2, there and back      | split    | m (F + B + W) + (p - 1) F / 2       |
| dualpipev   | 2, there and back      | whole    | m (F + B + W) + (p - 1) (B + W) - F / 2 |

p stages, v chunks of a stage, m >= p micro-batches; F forward pass, B backward pass for the input
and W for the weights, of a micro-batch through all chunks of a stage; for zb-v equally long, and
otherwise it is somewhat longer. A position is a chunk's place in the model, from 0 to p v - 1.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import chain, pairwise
from typing import NamedTuple

from models.errors import UserError


class Kind(StrEnum):
    """What a pass computes; a whole backward pass computes the weights' part too."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"


class Pass(NamedTuple):
    """One micro-batch through one chunk of a stage."""

    kind: Kind
    stage: int
    chunk: int
    micro_batch: int


Order = Sequence[Pass]  # all that a stage does in a step
FORWARD, BACKWARD, WEIGHT = Kind


class Schedule(NamedTuple):
    """One way to order passes.

    orders: of a pipeline's stages
    folded: the model goes through the stages there and back
    splits: weights have backward passes of their own
    chunks: of a stage, if only that many are possible
    """

    orders: Callable[["Pipeline"], list[Order]]
    folded: bool = False
    splits: bool = False
    chunks: int | None = 1


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What decides the order of passes.

    proportions: how long forward, backward and weights' passes take, to each other; where the
        backward pass is split, an order may depend on it

    Raises:
        UserError: there is no such order.
    """

    stages: int
    micro_batches: int
    chunks: int = 1
    schedule: str = "1f1b"
    proportions: tuple[int, int, int] = (1, 1, 1)

    def __post_init__(self) -> None:
        least = least_micro_batches(self.schedule, self.stages)
        if self.micro_batches < least:
            raise UserError(
                f"{self.schedule} with {self.stages} stages and {self.micro_batches} "
                f"micro-batches; use {least}"
            )

    @property
    def positions(self) -> int:
        """How many chunks all stages have together."""
        return self.stages * self.chunks

    @property
    def splits(self) -> bool:
        """Whether weights have backward passes of their own."""
        return SCHEDULES[self.schedule].splits

    def position(self, stage: int, chunk: int) -> int:
        """Where in the model a chunk is."""
        return place_in_model(self.schedule, self.stages, stage, chunk)

    def place(self, position: int) -> tuple[int, int]:
        """The stage and the chunk that are there."""
        return place(self.schedule, self.stages, position)

    def needed(self, work: Pass) -> Pass | None:
        """The pass whose result another one starts with; None: it starts with tokens."""
        if work.kind == WEIGHT:
            return work._replace(kind=BACKWARD)
        position = self.position(work.stage, work.chunk)
        if work.kind == BACKWARD and position == self.positions - 1:
            return work._replace(kind=FORWARD)
        before = position - 1 if work.kind == FORWARD else position + 1
        return Pass(work.kind, *self.place(before), work.micro_batch) if before >= 0 else None

    def receiver(self, work: Pass) -> Pass | None:
        """The pass that starts with this one's result, on this stage or another; None: none."""
        position = self.position(work.stage, work.chunk)
        after = position + 1 if work.kind == FORWARD else position - 1
        if work.kind == WEIGHT or not 0 <= after < self.positions:
            return None
        return Pass(work.kind, *self.place(after), work.micro_batch)

    @cached_property
    def orders(self) -> list[Order]:
        """Of each stage, all that it does in a step."""
        return SCHEDULES[self.schedule].orders(self)

    def orders_of_step(self, *, training: bool) -> list[Order]:
        """Return the orders of all stages, in training or in validation."""
        return self.orders if training else self.forward_orders

    @cached_property
    def forward_orders(self) -> list[Order]:
        """The same without backward passes."""
        return [[work for work in order if work.kind == FORWARD] for order in self.orders]


def place(schedule: str, stages: int, position: int) -> tuple[int, int]:
    """The stage and the chunk at a position of the model."""
    chunk, stage = divmod(position, stages)
    return (stages - 1 - stage if _leads_back(schedule, chunk) else stage), chunk


def last_stage(schedule: str, stages: int, chunks: int) -> int:
    """The stage with the end of the model, its logits and loss."""
    return place(schedule, stages, stages * chunks - 1)[0]


def place_in_model(schedule: str, stages: int, stage: int, chunk: int) -> int:
    """The position of a stage's chunk in the model."""
    return chunk * stages + (stages - 1 - stage if _leads_back(schedule, chunk) else stage)


def _leads_back(schedule: str, chunk: int) -> bool:
    return SCHEDULES[schedule].folded and chunk % 2 == 1


def schedule_name(schedule: str, chunks: int) -> str:
    """With its chunks where they are chosen: "interleaved x 2"."""
    return schedule if SCHEDULES[schedule].chunks else f"{schedule} x {chunks}"


def least_micro_batches(schedule: str, stages: int) -> int:
    """Fewer the schedule cannot run."""
    return 2 * stages if schedule == "dualpipev" else 1


def last_passes(order: Sequence[Pass]) -> list[Pass]:
    """Return the last pass of each kind through each chunk of a stage, in the order of the passes.

    All gradients of a chunk are complete after the last of its passes. If backward passes are
    split, the gradients that are not deferred are already complete after the last backward pass.
    """
    last = {(work.kind, work.chunk): work for work in order}
    return [work for work in order if work == last[work.kind, work.chunk]]


def most_in_flight(order: Iterable[Pass]) -> int:
    """Chunks whose activations an order holds at once, at most; until all backward is done."""
    order = list(order)
    ending = WEIGHT if any(work.kind == WEIGHT for work in order) else BACKWARD
    held = most = 0
    for work in order:
        held += (work.kind == FORWARD) - (work.kind == ending)
        most = max(most, held)
    return most


def _one_forward_one_backward(pipeline: "Pipeline") -> list[Order]:
    """1F1B and, with chunks, interleaved 1F1B.

    Narayanan et al. 2021 (arXiv 2104.04473), section 2.2 and figure 4; Megatron-LM's warm-up
    (megatron/core/pipeline_parallel/schedules.py). p micro-batches go through a stage's first
    chunk, then through its second, and so on, before the next p; backward from the last chunk to
    the first. Where p does not divide m, rounds are of more than p.
    """
    p, v, m = pipeline.stages, pipeline.chunks, pipeline.micro_batches
    rounds = max(1, m // p)
    starts = [-(-m * each // rounds) for each in range(rounds + 1)]  # the first ones one more

    def order(stage: int) -> Order:
        forwards, backwards = [], []
        for start, end in pairwise(starts):
            for chunk in range(v):
                for number in range(start, end):
                    forwards.append(Pass(FORWARD, stage, chunk, number))
                    backwards.append(Pass(BACKWARD, stage, v - 1 - chunk, number))
        after = p - stage - 1
        ahead = min(after if v == 1 else starts[1] * (v - 1) + 2 * after, m * v)
        pairs = chain.from_iterable(zip(forwards[ahead:], backwards, strict=False))
        return [*forwards[:ahead], *pairs, *backwards[m * v - ahead :]]

    return [order(stage) for stage in range(p)]


def _zero_bubble_h1(pipeline: "Pipeline") -> list[Order]:
    """1F1B in which the weights' part of stage i comes i micro-batches later, or at the end.

    Qi et al. 2023 (arXiv 2401.10241), section 2.1 and figure 2: no stage holds more than the first
    one, p micro-batches, and what is put off fills the bubble as the pipeline drains.
    """

    whole = _one_forward_one_backward(pipeline)

    def order(stage: int) -> Iterator[Pass]:
        done = 0
        for work in whole[stage]:
            yield work
            if work.kind == BACKWARD and work.micro_batch >= stage:
                yield work._replace(kind=WEIGHT, micro_batch=done)
                done += 1
        for number in range(done, pipeline.micro_batches):
            yield Pass(WEIGHT, stage, 0, number)

    return [list(order(stage)) for stage in range(pipeline.stages)]


@lru_cache(maxsize=8)
def _zero_bubble_v(pipeline: "Pipeline") -> list[Order]:
    """Stages that take the best pass there is whenever they are free.

    The V-shape of Qi et al. 2023 (arXiv 2401.10241), section 6, with its memory: 2 p chunks, each
    half a stage. Best is a backward pass, the first chunk's before the second's, then a forward
    pass, the second chunk's first, which brings the loss nearer; weights fill what would be idle.
    One of the chunks is the second, or there is room for it, without which nothing would come back.
    """
    p, m = pipeline.stages, pipeline.micro_batches
    takes = dict(zip(Kind, pipeline.proportions, strict=True))
    best_first = [
        (BACKWARD, 0),
        (BACKWARD, 1),
        (FORWARD, 1),
        (FORWARD, 0),
        (WEIGHT, 0),
        (WEIGHT, 1),
    ]
    ends: dict[Pass, int] = {}  # when a pass ends
    next_ones = [{(kind, chunk): 0 for kind in Kind for chunk in (0, 1)} for _ in range(p)]
    orders: list[Order] = [[] for _ in range(p)]
    free = [0] * p  # from when on

    def best(stage: int, now: int) -> Pass | None:
        counts = next_ones[stage]
        held = [counts[FORWARD, chunk] - counts[WEIGHT, chunk] for chunk in (0, 1)]
        room = (2 * p - (held[1] == 0), 2 * p)
        for kind, chunk in best_first:
            work = Pass(kind, stage, chunk, counts[kind, chunk])
            if work.micro_batch == m or (kind == FORWARD and sum(held) >= room[chunk]):
                continue
            needed = pipeline.needed(work)
            if needed is None or ends.get(needed, now + 1) <= now:
                return work
        return None

    events = [0]
    while events:
        now = heappop(events)
        while events and events[0] == now:
            heappop(events)
        for stage in range(p):
            work = best(stage, now) if free[stage] <= now else None
            if work is not None:
                ends[work] = free[stage] = now + takes[work.kind]
                heappush(events, free[stage])
                orders[stage].append(work)
                next_ones[stage][work.kind, work.chunk] += 1
    return orders


def _there_and_back(pipeline: "Pipeline") -> list[Order]:
    """DualPipeV, step by step as DeepSpeed's DualPipeVSchedule (runtime/pipe/schedule.py)."""
    p, m = pipeline.stages, pipeline.micro_batches

    def order(stage: int) -> Order:
        counts = {(kind, chunk): 0 for kind in (FORWARD, BACKWARD) for chunk in (0, 1)}
        passes = []

        def run(times: int, *kinds: tuple[Kind, int]) -> None:
            for kind, chunk in kinds * times:
                passes.append(Pass(kind, stage, chunk, counts[kind, chunk]))
                counts[kind, chunk] += 1

        out, back = 0, 1
        after = p - stage - 1
        run(2 * after, (FORWARD, out))
        run(stage + 1, (FORWARD, out), (FORWARD, back))
        run(after, (BACKWARD, back), (FORWARD, back))
        both = (FORWARD, out), (BACKWARD, back), (FORWARD, back), (BACKWARD, out)
        run(m - 2 * p + stage + 1, *both)
        run(after, (BACKWARD, back), (FORWARD, back), (BACKWARD, out))
        run(stage + 1, (BACKWARD, back), (BACKWARD, out))
        run(after, (BACKWARD, out))
        return passes

    return [order(stage) for stage in range(p)]


SCHEDULES = {
    "1f1b": Schedule(_one_forward_one_backward),
    "interleaved": Schedule(_one_forward_one_backward, chunks=None),
    "zb-h1": Schedule(_zero_bubble_h1, splits=True),
    "zb-v": Schedule(_zero_bubble_v, folded=True, splits=True, chunks=2),
    "dualpipev": Schedule(_there_and_back, folded=True, chunks=2),
}
