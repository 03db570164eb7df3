"""Pipelines of layers that sleep instead of computing, so that only the engine needs the cores."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import DualPipeVModule, LayerSpec, PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import PipeInstruction
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

from benchmarks.pipelines.sleeping_layer import SHAPE, SleepingLayer, loss
from models.errors import UserError
from models.parallel.collectives import TensorAxis
from models.parallel.micro_batch_info import MicroBatchInfo
from tests.ranks import join_world, run_ranks
from threefold.config.parallel_dims import ParallelDims
from threefold.engine.axes import ProcessGrid
from threefold.engine.optimizer import UpdateRule, buckets_of_stage
from threefold.pipeline.channels import Boundary
from threefold.pipeline.engine import Event, EventRecorder, ScheduledEngine
from threefold.pipeline.schedules import BACKWARD, Pass, Pipeline
from threefold.pipeline.simulation import TimedPass, Timeline, pipeline_seconds, simulate
from threefold.pipeline.stage import Stage
from threefold.runtime.processes import quiet


class Contestant(NamedTuple):
    """A schedule and its engine."""

    schedule: str
    virtual_stages: int = 1
    is_stock: bool = False


CONTESTANTS = {
    "1f1b": Contestant("1f1b"),
    "interleaved, 2 chunks": Contestant("interleaved", 2),
    "interleaved, 3 chunks": Contestant("interleaved", 3),
    "zb-h1": Contestant("zb-h1"),
    "zb-v": Contestant("zb-v", 2),
    "dualpipev": Contestant("dualpipev", 2),
    "gpipe": Contestant("gpipe"),
    "DeepSpeed's 1f1b": Contestant("1f1b", is_stock=True),
    "DeepSpeed's dualpipev": Contestant("dualpipev", 2, is_stock=True),
}


@dataclass(frozen=True)
class Setting:
    """Settings of the measurement.

    forward: seconds of a micro-batch's forward pass through all chunks of a stage; of each of the
        two parts of its backward pass, too
    steps: of each contestant, after one that is not timed
    """

    stages: int
    micro_batches: int
    forward: float
    steps: int

    def pipeline(self, contestant: Contestant) -> Pipeline:
        """Return the pipeline that orders a contestant's passes."""
        return Pipeline(
            stages=self.stages,
            micro_batches=self.micro_batches,
            virtual_stages=contestant.virtual_stages,
            schedule=contestant.schedule,
        )

    def contestants(self) -> dict[str, Pipeline]:
        """Return the contestants that support this number of micro-batches."""
        found = {}
        for name, contestant in CONTESTANTS.items():
            try:
                found[name] = self.pipeline(contestant)
            except UserError:  # dualpipev
                continue
        return found

    def seconds(self, pipeline: Pipeline, work: Pass) -> float:
        """Return the seconds that a pass sleeps."""
        parts = 2 if work.kind == BACKWARD and not pipeline.splits else 1
        return parts * self.forward / pipeline.virtual_stages

    def theory(self, pipeline: Pipeline) -> float:
        """Return the seconds of a step by the table in `threefold/pipeline/schedules.py`."""
        p, m, v = pipeline.stages, pipeline.micro_batches, pipeline.virtual_stages
        forwards = {
            "1f1b": 3 * (m + p - 1),
            "interleaved": 3 * (m + (p - 1) / v),
            "zb-h1": 3 * m + p - 1,
            "zb-v": 3 * m + (p - 1) / 2,
            "dualpipev": 3 * m + 2 * (p - 1) - 1 / 2,
            "gpipe": 3 * (m + p - 1),
        }
        return forwards[pipeline.schedule] * self.forward


class Step(NamedTuple):
    """One step of all stages.

    seconds: from the barrier before it until the last rank is through, optimizer and loss included
    passes: start and end of each pass
    """

    seconds: float
    passes: Timeline

    @property
    def makespan(self) -> float:
        """Seconds from the first pass's start to the last one's end."""
        start = min(stage[0].start for stage in self.passes)
        return pipeline_seconds(self.passes) - start

    def simulated(self, pipeline: Pipeline) -> Timeline:
        """Simulate the passes with their measured durations and no other costs."""
        took = {timed.work: timed.end - timed.start for stage in self.passes for timed in stage}
        return simulate(pipeline, took.__getitem__)


class Found(NamedTuple):
    """A contestant's steps."""

    pipeline: Pipeline
    steps: list[Step]

    @property
    def best(self) -> Step:
        """The step with the shortest makespan."""
        return min(self.steps, key=lambda step: step.makespan)

    def ratios(self, setting: Setting) -> dict[str, float]:
        """Return the ratios and seconds of the best step."""
        best, theory = self.best, setting.theory(self.pipeline)
        simulated = pipeline_seconds(best.simulated(self.pipeline))
        return {
            "over_theory": best.makespan / theory,
            "over_simulated": best.makespan / simulated,
            "step_over_theory": min(step.seconds for step in self.steps) / theory,
            "makespan_seconds": best.makespan,
            "theory_seconds": theory,
        }


def time_all(setting: Setting) -> dict[str, Found]:
    """Return every contestant's steps, interleaved so that disturbances affect all contestants."""
    ranks = run_ranks(setting.stages, time_rank, setting)
    found = {}
    for name, pipeline in setting.contestants().items():
        steps = [rank[name] for rank in ranks]
        found[name] = Found(pipeline, [joined(pipeline, step) for step in zip(*steps, strict=True)])
    return found


RankStep = tuple[float, float, list[Event]]  # start, end and events of one rank's step


def joined(pipeline: Pipeline, ranks: tuple[RankStep, ...]) -> Step:
    """Join the ranks' recordings of a step."""
    start = min(rank[0] for rank in ranks)
    passes: Timeline = []
    for order, (_, _, events) in zip(pipeline.orders, ranks, strict=True):
        computed = [event for event in events if event.kind is not None]
        assert [work.kind for work in order] == [event.kind for event in computed]
        passes.append(
            [
                TimedPass(work, event.start - start, event.end - start)
                for work, event in zip(order, computed, strict=True)
            ]
        )
    return Step(max(rank[1] for rank in ranks) - start, passes)


def time_rank(setting: Setting) -> dict[str, list[RankStep]]:
    """Run every contestant's steps on a rank."""
    join_world()
    engines = {
        name: build(setting, pipeline, is_stock=CONTESTANTS[name].is_stock)
        for name, pipeline in setting.contestants().items()
    }
    for engine in engines.values():
        run_step(engine)
    recordings = {name: EventRecorder(engine) for name, engine in engines.items()}
    steps: dict[str, list[RankStep]] = {name: [] for name in engines}
    for _ in range(setting.steps):
        for name, engine in engines.items():
            recordings[name].clear()
            start, end = run_step(engine)
            steps[name].append((start, end, recordings[name].events))
    return steps


def run_step(engine: PipelineEngine) -> tuple[float, float]:
    """Run a step, and return its start and end."""
    micro_batch = torch.ones(SHAPE), torch.ones(SHAPE)
    if isinstance(engine.module, Stage):
        engine.module.take_micro_batch_infos([MicroBatchInfo()] * engine.micro_batches)
    dist.barrier()
    start = time.perf_counter()
    engine.train_batch(iter([micro_batch] * engine.micro_batches))
    return start, time.perf_counter()


def build(setting: Setting, pipeline: Pipeline, *, is_stock: bool) -> PipelineEngine:
    """Build a pipeline with one layer in each chunk."""
    layers = [
        LayerSpec(SleepingLayer, setting.forward / pipeline.virtual_stages)
    ] * pipeline.total_virtual_stages
    topology = PipeModelDataParallelTopology(num_pp=setting.stages, num_dp=1, num_mp=1)
    if is_stock:
        with quiet():
            module = DualPipeVModule if pipeline.virtual_stages == 2 else PipelineModule
            model = module(layers=layers, topology=topology, loss_fn=loss)
            engine, *_ = deepspeed.initialize(
                model=model, optimizer=adamw(model), config=deepspeed_config(setting.micro_batches)
            )
        add_observers(engine)
        return engine
    with quiet():
        model = Stage(
            layers,
            pipeline=pipeline,
            grid=ProcessGrid(ParallelDims(pipeline=setting.stages)),
            layers_of_virtual_stages=[1] * pipeline.total_virtual_stages,
            recompute_interval=0,
        )
        boundary = Boundary(SHAPE, torch.float32, TensorAxis())
        rules = dict.fromkeys(model.parameters(), UpdateRule("adamw", 1.0, 0.0, 1e-8))
        buckets = buckets_of_stage(model, rules, elements=2**24)
        optimizer = torch.optim.AdamW([{"params": bucket} for bucket in buckets])
        return ScheduledEngine(
            model, optimizer, deepspeed_config(setting.micro_batches), boundary=boundary
        )


def add_observers(engine: PipelineEngine) -> None:
    """Give DeepSpeed's own engine the list of observers that a ScheduledEngine has."""
    engine.observers = []

    def run_observed(
        kind: type[PipeInstruction],
        run: Callable[..., None],
        engine: PipelineEngine,
        **arguments: Any,
    ) -> None:
        with ExitStack() as observed:
            for observe in engine.observers:
                observed.enter_context(observe(kind(**arguments)))
            run(engine, **arguments)

    engine._INSTRUCTION_MAP = {
        kind: partial(run_observed, kind, run) for kind, run in engine._INSTRUCTION_MAP.items()
    }


def adamw(model: PipelineModule) -> torch.optim.AdamW:
    """Return the optimizer of a module."""
    return torch.optim.AdamW(model.parameters(), fused=True)


def deepspeed_config(micro_batches: int) -> dict[str, Any]:
    """Return a DeepSpeed configuration with ZeRO-1."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "zero_optimization": {"stage": 1},
        "steps_per_print": None,
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }
