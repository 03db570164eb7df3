"""Passes of a pipeline, their order on each stage, and messages between stages. Arithmetic only.

The same objects drive the engine (`threefold/pipeline/engine.py`), the simulator
(`simulation.py`) and the planner.

| schedule    | chunks of a stage      | backward | length of a step                    |
|-------------|------------------------|----------|-------------------------------------|
| 1f1b        | 1                      | whole    | (m + p - 1) (F + B + W)             |
| interleaved | v, all forward         | whole    | (m + (p - 1) / v) (F + B + W)       |
| zb-h1       | 1                      | split    | m (F + B + W) + (p - 1) (F + B - W) |
| zb-v        | 2, forward and back     | split    | m (F + B + W) + (p - 1) F / 2       |
| dualpipev   | 2, forward and back     | whole    | m (F + B + W) + (p - 1) (B + W) - F / 2 |
| gpipe       | 1                      | whole    | (m + p - 1) (F + B + W)             |

p stages, v chunks per stage, m >= p micro-batches; F, B and W are the times of the forward pass,
the backward pass for the input and the backward pass for the weights of a micro-batch through all
chunks of a stage. The length for zb-v holds if the three are equal; otherwise the step is somewhat
longer. The virtual stage of a chunk is its index in the whole model, from 0 to p v - 1.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import chain, pairwise
from typing import NamedTuple

from models.errors import UserError

# Passes of a pipeline: one micro-batch through one chunk of a stage. Standard library only.


class Kind(StrEnum):
    """The kind of a pass; an undivided backward pass computes the weight gradients, too."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"


class Pass(NamedTuple):
    """One micro-batch through one chunk of a stage."""

    kind: Kind
    stage: int
    chunk: int
    micro_batch: int


Order = Sequence[Pass]  # all passes of a stage in a step
FORWARD, BACKWARD, WEIGHT = Kind


def group_ends(order: Iterable[Pass], every: int = 0) -> dict[Pass, bool]:
    """Return the passes after which gradients of a chunk are reduced over the data ranks.

    Each ends a group of micro-batches. The gradients of a group are complete after its last
    backward pass or, if backward passes are split and the gradients deferred, after its last weight
    pass.

    Args:
        order: the passes of a stage
        every: number of micro-batches in a group; 0: all of the step

    Returns:
        By pass: True if it is the last of its kind through its chunk in the step.
    """
    passes: dict[tuple[Kind, int], list[Pass]] = {}
    for work in order:
        if work.kind != FORWARD:
            passes.setdefault((work.kind, work.chunk), []).append(work)
    return {
        work: number == len(of_chunk)
        for of_chunk in passes.values()
        for number, work in enumerate(of_chunk, start=1)
        if number == len(of_chunk) or (every and number % every == 0)
    }


class Schedule(NamedTuple):
    """A pipeline schedule.

    orders: returns the order of passes of each stage
    folded: the second chunks pass through the stages in reverse order
    splits: weight gradients have separate passes
    virtual_stages: the only possible number of chunks per stage; None: any number
    """

    orders: Callable[["Pipeline"], list[Order]]
    folded: bool = False
    splits: bool = False
    virtual_stages: int | None = 1


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A pipeline: its stages, chunks, micro-batches and schedule, which decide the order of passes.

    proportions: relative durations of forward, backward and weight passes, on which the order may
        depend if the backward pass is split
    reduce_every: number of micro-batches after which the gradients of a chunk are reduced over the
        data ranks; 0: once per step
    paired: a forward pass and the following backward pass run at the same time (`units`)

    Raises:
        UserError: the schedule needs more micro-batches.
    """

    stages: int
    micro_batches: int
    virtual_stages: int = 1
    schedule: str = "1f1b"
    proportions: tuple[int, int, int] = (1, 1, 1)
    reduce_every: int = 0
    paired: bool = False

    def __post_init__(self) -> None:
        if self.micro_batches < self.min_micro_batches:
            raise UserError(
                f"{self.schedule} with {self.stages} stages and {self.micro_batches} "
                f"micro-batches; use {self.min_micro_batches}"
            )

    @property
    def min_micro_batches(self) -> int:
        """The smallest number of micro-batches with which the stages can run."""
        return min_micro_batches(self.schedule, self.stages, paired=self.paired)

    @property
    def total_virtual_stages(self) -> int:
        """Number of chunks of all stages together."""
        return self.stages * self.virtual_stages

    @property
    def splits(self) -> bool:
        """True if weight gradients have separate passes."""
        return SCHEDULES[self.schedule].splits

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Return the virtual stage of a chunk, its index in the whole model."""
        return virtual_stage_of(self.schedule, self.stages, stage, chunk)

    def stage_and_chunk(self, virtual_stage: int) -> tuple[int, int]:
        """Return the stage and the chunk of a virtual stage."""
        return stage_and_chunk(self.schedule, self.stages, virtual_stage)

    def needed(self, work: Pass) -> Pass | None:
        """Return the pass whose result is the input of `work`; None: its input is tokens."""
        if work.kind == WEIGHT:
            return work._replace(kind=BACKWARD)
        virtual_stage = self.virtual_stage(work.stage, work.chunk)
        if work.kind == BACKWARD and virtual_stage == self.total_virtual_stages - 1:
            return work._replace(kind=FORWARD)
        before = virtual_stage - 1 if work.kind == FORWARD else virtual_stage + 1
        return (
            Pass(work.kind, *self.stage_and_chunk(before), work.micro_batch)
            if before >= 0
            else None
        )

    def receiver(self, work: Pass) -> Pass | None:
        """Return the pass whose input is the result of `work`; None if there is none."""
        virtual_stage = self.virtual_stage(work.stage, work.chunk)
        after = virtual_stage + 1 if work.kind == FORWARD else virtual_stage - 1
        if work.kind == WEIGHT or not 0 <= after < self.total_virtual_stages:
            return None
        return Pass(work.kind, *self.stage_and_chunk(after), work.micro_batch)

    @cached_property
    def orders(self) -> list[Order]:
        """The order of passes of each stage in a training step."""
        return SCHEDULES[self.schedule].orders(self)

    def units(self, order: Order) -> list[tuple[Pass, ...]]:
        """Group an order into units, which run one after the other: passes, or pairs of passes.

        The two passes of a pair run together: a forward pass and the backward pass that follows it,
        unless that needs its result. A pair starts when both of its inputs have arrived. Its
        results are available when both passes have ended.
        """
        orders: list[tuple[Pass, ...]] = []
        for work in order:
            last = orders[-1][-1] if orders else None
            kinds = (last.kind if last else None, work.kind)
            if self.paired and kinds == (FORWARD, BACKWARD) and self.needed(work) != last:
                assert last is not None
                orders[-1] = (last, work)
            else:
                orders.append((work,))
        return orders

    def orders_of_step(self, *, training: bool) -> list[Order]:
        """Return the orders of all stages, in training or in validation."""
        return self.orders if training else self.forward_orders

    @cached_property
    def forward_orders(self) -> list[Order]:
        """The order of passes of each stage in a validation step."""
        return [[work for work in order if work.kind == FORWARD] for order in self.orders]


def stage_and_chunk(schedule: str, stages: int, virtual_stage: int) -> tuple[int, int]:
    """Return the stage and the chunk of a virtual stage."""
    chunk, stage = divmod(virtual_stage, stages)
    return (stages - 1 - stage if _leads_back(schedule, chunk) else stage), chunk


@lru_cache(maxsize=1024)
def last_stage(schedule: str, stages: int, virtual_stages: int) -> int:
    """Return the stage that computes the logits and the loss."""
    return stage_and_chunk(schedule, stages, stages * virtual_stages - 1)[0]


def virtual_stage_of(schedule: str, stages: int, stage: int, chunk: int) -> int:
    """Return the virtual stage of a chunk of a stage."""
    return chunk * stages + (stages - 1 - stage if _leads_back(schedule, chunk) else stage)


def _leads_back(schedule: str, chunk: int) -> bool:
    return SCHEDULES[schedule].folded and chunk % 2 == 1


def schedule_name(schedule: str, virtual_stages: int) -> str:
    """Return a schedule's name with the number of chunks if it is variable: "interleaved x 2"."""
    return schedule if SCHEDULES[schedule].virtual_stages else f"{schedule} x {virtual_stages}"


def default_group(schedule: str, stages: int) -> int:
    """Return the micro-batches after which ZeRO-2 reduces gradients, unless a recipe sets it.

    An interleaved schedule runs one micro-batch per stage through a chunk consecutively.
    """
    return stages if schedule == "interleaved" else 1


def min_micro_batches(schedule: str, stages: int, *, paired: bool = False) -> int:
    """Return the smallest number of micro-batches that a schedule can run.

    With fewer, the stages of an interleaved schedule may wait for each other: the backward pass of
    a pair may need the result of the same pair's forward pass, through other stages.
    """
    return 2 * stages if schedule == "dualpipev" or (paired and stages > 1) else 1


def _one_forward_one_backward(pipeline: "Pipeline") -> list[Order]:
    """1F1B and, with chunks, interleaved 1F1B.

    Narayanan et al. 2021 (arXiv 2104.04473), section 2.2 and figure 4; Megatron-LM's warm-up
    (megatron/core/pipeline_parallel/schedules.py). A round of p micro-batches passes through a
    stage's first chunk, then its second, and so on, before the next round begins; backward passes
    run from the last chunk to the first. If p does not divide m, rounds have more than p.
    """
    p, v, m = pipeline.stages, pipeline.virtual_stages, pipeline.micro_batches
    rounds = max(1, m // p)
    # The first rounds may have one micro-batch more than the others.
    starts = [-(-m * number // rounds) for number in range(rounds + 1)]

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
    """Return 1F1B in which stage i delays its weight passes by i micro-batches.

    Qi et al. 2023 (arXiv 2401.10241), section 2.1 and figure 2. No stage holds more micro-batches
    than the first one, p, and the delayed passes fill the bubble while the pipeline drains.
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
    """Return the orders in which each stage runs the best available pass whenever it is idle.

    The V shape of Qi et al. 2023 (arXiv 2401.10241), section 6, with its memory limit of 2 p chunks
    of half a stage each. Backward passes come first, those of the first chunk before those of the
    second; then forward passes, those of the second chunk first, because they are closer to the
    loss; weight passes fill idle time. One slot is reserved for the second chunk, because without
    it no micro-batch could return.
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
    ends: dict[Pass, int] = {}  # the time at which a pass ends
    next_ones = [{(kind, chunk): 0 for kind in Kind for chunk in (0, 1)} for _ in range(p)]
    orders: list[list[Pass]] = [[] for _ in range(p)]
    free = [0] * p  # the time from which a stage is idle

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
    return list(orders)


def _there_and_back(pipeline: "Pipeline") -> list[Order]:
    """Return the orders of DeepSpeed's DualPipeVSchedule (runtime/pipe/schedule.py)."""
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


def _all_forward_then_all_backward(pipeline: "Pipeline") -> list[Order]:
    """Return the orders of GPipe: Huang et al. 2018 (arXiv 1811.06965), figure 2.

    The backward passes begin with the last micro-batch.
    """
    numbers = range(pipeline.micro_batches)
    return [
        [Pass(FORWARD, stage, 0, number) for number in numbers]
        + [Pass(BACKWARD, stage, 0, number) for number in reversed(numbers)]
        for stage in range(pipeline.stages)
    ]


SCHEDULES = {
    "1f1b": Schedule(_one_forward_one_backward),
    "interleaved": Schedule(_one_forward_one_backward, virtual_stages=None),
    "zb-h1": Schedule(_zero_bubble_h1, splits=True),
    "zb-v": Schedule(_zero_bubble_v, folded=True, splits=True, virtual_stages=2),
    "dualpipev": Schedule(_there_and_back, folded=True, virtual_stages=2),
    "gpipe": Schedule(_all_forward_then_all_backward),
}


# The messages between the stages.
#
# Over the communicator of an ordered pair of stages, activations and gradients arrive in the order
# of the sender's passes, and the receiver posts its receives in that same order, whatever the order
# in which it needs the messages.

Route = tuple[int, int]  # (sending stage, receiving stage)


class Action(StrEnum):
    """An action of a stage within a step."""

    POST_RECEIVE = "post receive"
    WAIT = "wait"
    COMPUTE = "compute"
    SEND = "send"


class StageAction(NamedTuple):
    """One action of a stage.

    work: the pass that is computed, whose input is received, or whose result is sent
    """

    action: Action
    work: Pass


def routes(pipeline: Pipeline) -> list[Route]:
    """Return the pairs of a sending and a receiving stage, in the same order on every rank."""
    stages = [pipeline.stage_and_chunk(index)[0] for index in range(pipeline.total_virtual_stages)]
    forward = {(a, b) for a, b in pairwise(stages) if a != b}
    return sorted(forward | {(b, a) for a, b in forward})


def rounds(pipeline: Pipeline) -> list[list[Route]]:
    """Divide the routes into rounds in which each stage is in one route at most.

    The process groups of a round are disjoint, so that one call creates all of them.
    """
    result: list[list[Route]] = []
    for route in routes(pipeline):
        free = (
            candidate
            for candidate in result
            if not set(route) & {stage for pair in candidate for stage in pair}
        )
        target = next(free, None)
        if target is None:
            result.append(target := [])
        target.append(route)
    return result


def is_remote(stage: int, other: Pass | None) -> bool:
    """Return True if `other` exists and runs on another stage."""
    return other is not None and other.stage != stage


def program(pipeline: Pipeline, stage: int, *, training: bool) -> Iterator[StageAction]:
    """Yield the actions of a stage in a step, in their order.

    Before a stage waits for a message, it posts the receive of the message that it needs next,
    after all earlier receives from the same sender. A send comes after the pass that computed its
    message or, if two passes run as a pair, after both.
    """
    order = pipeline.orders_of_step(training=training)[stage]
    needed = iter([work for work in order if is_remote(stage, pipeline.needed(work))])
    receives = _Receives(pipeline, stage, training=training)
    yield from receives.up_to(next(needed, None))
    for unit in pipeline.units(order):
        for work in unit:
            if is_remote(stage, pipeline.needed(work)):
                yield from receives.up_to(next(needed, None))
                yield StageAction(Action.WAIT, work)
        for work in unit:
            yield StageAction(Action.COMPUTE, work)
        for work in unit:
            if is_remote(stage, pipeline.receiver(work)):
                yield StageAction(Action.SEND, work)


class _Receives:
    """The receives of a stage, grouped by sender and in the order of that sender."""

    def __init__(self, pipeline: Pipeline, stage: int, *, training: bool):
        self.pipeline = pipeline
        self.messages: dict[int, list[Pass]] = {}  # by sender: the passes that its messages are for
        for sender, order in enumerate(pipeline.orders_of_step(training=training)):
            receivers = map(pipeline.receiver, order)
            if sender != stage:
                self.messages[sender] = [w for w in receivers if w is not None and w.stage == stage]
        self.indices = {w: n for messages in self.messages.values() for n, w in enumerate(messages)}
        self.posted = dict.fromkeys(self.messages, 0)

    def up_to(self, work: Pass | None) -> Iterator[StageAction]:
        """Yield the receives that must be posted for the message of `work` to arrive."""
        if work is None:
            return
        source = self.pipeline.needed(work)
        assert source is not None
        sender = source.stage
        end = max(self.indices[work] + 1, self.posted[sender])
        for message in self.messages[sender][self.posted[sender] : end]:
            yield StageAction(Action.POST_RECEIVE, message)
        self.posted[sender] = end
