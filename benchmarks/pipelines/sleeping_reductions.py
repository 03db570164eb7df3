"""Reductions of gradients between data ranks, over links that sleep, in pipelines that sleep.

The engine is the real one, and so is the order in which it starts collectives and waits for them.
Layers and links sleep instead of using the cores: each collective sleeps for a fixed time, a link
runs one at a time, and no data is sent. A step is measured with such links and with infinitely fast
ones. The difference is the exposed communication, which the planner predicts.
"""

import time
from dataclasses import dataclass
from queue import Queue
from statistics import median
from threading import Event, Thread
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec

from benchmarks.pipelines.sleeping_layer import SHAPE, SleepingLayer
from benchmarks.pipelines.sleeping_stages import deepspeed_config
from models.parallel.collectives import TensorAxis
from models.parallel.micro_batch_info import MicroBatchInfo
from tests.ranks import join_world, run_ranks
from threefold.config.parallel_dims import ParallelDims
from threefold.engine.axes import ProcessGrid
from threefold.engine.optimizer import UpdateRule, buckets_of_stage
from threefold.pipeline import gradients, weight_gathering
from threefold.pipeline.channels import Boundary
from threefold.pipeline.engine import ScheduledEngine
from threefold.pipeline.schedules import Pipeline
from threefold.pipeline.stage import Stage
from threefold.plan.time.update import DataTraffic
from threefold.runtime.processes import quiet

DATA_RANKS = 2
STEPS = 2  # that are timed together


class Way(NamedTuple):
    """A schedule with its reductions; `every` is `reduce_every` of ZeRO-2, and 0 for ZeRO-1."""

    schedule: str
    virtual_stages: int
    every: int

    @property
    def name(self) -> str:
        """The name in the table."""
        zero = f"ZeRO-2, reduce_every = {self.every}" if self.every else "ZeRO-1"
        interleaving = f" x {self.virtual_stages}" if self.virtual_stages > 1 else ""
        return f"{self.schedule}{interleaving}, {zero}"


@dataclass(frozen=True)
class Setting:
    """Settings of the measurement.

    Attributes:
        stages: number of stages, each with two data ranks
        micro_batches: of a step
        forward: seconds of a micro-batch's forward pass through a stage; its backward pass takes
            twice as long
        layers: of a stage, each with one bucket
        reductions: seconds of reducing all buckets of a stage, relative to a backward pass; a
            gathering takes as long
        rounds: measured steps of each kind
    """

    stages: int = 2
    micro_batches: int = 8
    forward: float = 0.04
    layers: int = 4
    reductions: tuple[float, ...] = (0.5, 0.9, 1.5, 3.0)
    rounds: int = 3

    def ways(self) -> list[Way]:
        """Return the schedules and reductions that are compared."""
        m, p = self.micro_batches, self.stages
        return [
            Way("1f1b", 1, 0),
            Way("interleaved", 2, 0),
            *(Way("1f1b", 1, every) for every in (1, m // p)),
            *(Way("interleaved", 2, every) for every in (p, m // p)),
            Way("gpipe", 1, 1),
        ]

    def traffic(self, way: Way, reduction: float) -> DataTraffic:
        """Return the communication of a way as the planner describes it.

        reduction: one of `reductions`
        """
        every = way.every or self.micro_batches
        seconds = 2 * self.forward * reduction
        return DataTraffic(
            reduced=seconds,
            gathered=seconds,
            buckets=self.layers,
            groups=-(-self.micro_batches // every),
            every=every,
            virtual_stages=way.virtual_stages,
            in_a_row=self.stages if way.schedule == "interleaved" else 1,
            alternating=way.schedule != "gpipe",
        )

    def row(
        self, way: Way, reduction: float, steps: list[float], without: list[float]
    ) -> dict[str, Any]:
        """Return the measured and predicted exposed communication, as shares of the step.

        Args:
            way: the schedule with its reductions
            reduction: one of `reductions`
            steps: seconds of the steps, by round
            without: of the steps with infinitely fast links, by round
        """
        step = median(without)
        measured = median(one - other for one, other in zip(steps, without, strict=True))
        traffic = self.traffic(way, reduction)
        predicted = traffic.exposed_reductions(2 * self.forward)
        predicted += traffic.exposed_gathering(self.forward)
        return {
            "way": way.name,
            "reduction": reduction,
            "step_seconds": step,
            "all_over_step": (traffic.reductions + traffic.gathered) / step,
            "predicted_over_step": predicted / step,
            "measured_over_step": measured / step,
        }


class SleepingLink:
    """A link that transfers one message after the other, in a thread that only sleeps.

    seconds: of a message
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.messages: Queue[Event] = Queue()
        Thread(target=self._transfer, daemon=True).start()

    def _transfer(self) -> None:
        while True:
            done = self.messages.get()
            time.sleep(self.seconds)
            done.set()

    def send(self, *_: Any, **__: Any) -> "Message":
        """Begin a collective; the arguments are those of a function of torch.distributed."""
        done = Event()
        if self.seconds:
            self.messages.put(done)
        else:
            done.set()
        return Message(done)


class Message(dist.Work):
    """A collective that runs on a SleepingLink."""

    def __init__(self, done: Event):
        super().__init__()
        self.done = done

    def wait(self, *_: Any) -> bool:
        """Wait until it is transferred."""
        return self.done.wait()


def compare(setting: Setting) -> list[dict[str, Any]]:
    """Measure every way on every link, and return a row for each."""
    ranks = run_ranks(setting.stages * DATA_RANKS, time_rank, setting, seconds=1200)
    rows = []
    for number, way in enumerate(setting.ways()):
        slowest = [
            [max(seconds) for seconds in zip(*steps, strict=True)]
            for steps in zip(*(rank[number] for rank in ranks), strict=True)
        ]
        without, *on_links = slowest
        for reduction, steps in zip(setting.reductions, on_links, strict=True):
            rows.append(setting.row(way, reduction, steps, without))
    return rows


def time_rank(setting: Setting) -> list[list[list[float]]]:
    """Return a rank's seconds by way, link (infinitely fast first) and round.

    The links take turns, so that disturbances affect all of them.
    """
    join_world()
    found = []
    shares = (0.0, *setting.reductions)
    links = [SleepingLink(2 * setting.forward * share / setting.layers) for share in shares]
    for way in setting.ways():
        engine = build(setting, way)
        run_steps(engine, links[0])
        rounds = [[run_steps(engine, link) for link in links] for _ in range(setting.rounds)]
        found.append([list(steps) for steps in zip(*rounds, strict=True)])
    return found


def run_steps(engine: ScheduledEngine, link: SleepingLink) -> float:
    """Return the mean seconds of two steps, each of which begins while weights are gathered."""
    micro_batch = torch.ones(SHAPE), torch.ones(SHAPE)
    with (
        mock.patch.object(gradients, "reduce_scatter_single", link.send),
        mock.patch.object(weight_gathering, "all_gather_single", link.send),
    ):
        start = 0.0
        for step in range(1 + STEPS):
            if step == 1:  # the first one begins without a gathering
                start = time.perf_counter()
            engine.module.take_micro_batch_infos([MicroBatchInfo()] * engine.micro_batches)
            engine.train_batch(iter([micro_batch] * engine.micro_batches))
        seconds = (time.perf_counter() - start) / STEPS
        engine.gathering.finish()
    dist.barrier()
    return seconds


def build(setting: Setting, way: Way) -> ScheduledEngine:
    """Build the engine of a rank."""
    pipeline = Pipeline(
        stages=setting.stages,
        micro_batches=setting.micro_batches,
        virtual_stages=way.virtual_stages,
        schedule=way.schedule,
        reduce_every=way.every or setting.micro_batches,
    )
    layer = LayerSpec(SleepingLayer, setting.forward / setting.layers)
    with quiet():
        model = Stage(
            [layer] * (setting.stages * setting.layers),
            pipeline=pipeline,
            grid=ProcessGrid(ParallelDims(pipeline=setting.stages, data=DATA_RANKS)),
            layers_of_virtual_stages=[setting.layers // way.virtual_stages]
            * pipeline.total_virtual_stages,
            recompute_interval=0,
        )
        rules = dict.fromkeys(model.parameters(), UpdateRule("adamw", 1.0, 0.0, 1e-8))
        buckets = buckets_of_stage(model, rules, elements=SHAPE[-1])
        optimizer = torch.optim.AdamW([{"params": bucket} for bucket in buckets], fused=True)
        config = deepspeed_config(setting.micro_batches)
        boundary = Boundary(SHAPE, torch.float32, TensorAxis())
        return ScheduledEngine(
            model, optimizer, config, boundary=boundary, shard_gradients=bool(way.every)
        )
