"""Trace of one rank of a full-size job: the memory it allocates and the data it communicates.

The model, DeepSpeed's engine, its optimizer and its schedule are the real ones, built by
`build_from_recipe`, on fake tensors and a process group that does nothing (`fake_cluster.py`). The
second step is counted, because Adam's moments exist by then, as in all later steps. It is shortened
to the micro-batches that reach the peak memory (`shortened_step.py`).

Not counted: memory inside kernels and libraries (cuBLAS' workspace, NCCL's buffers, flash
attention's fp32 accumulators in its backward pass), the CUDA context, and fragmentation in the
caching allocator. DeepSpeed runs on its CPU accelerator, which has the same engines and optimizers
as CUDA but no side streams; on a GPU a few buffers live longer because of them. Unless
training.compile is false, a compiled kernel allocates only its results.

Each sequence is one document here, whatever data.separate_documents says.
"""

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed says that it looks for one

import torch

from models.context_parallel.division import Division, divide
from models.errors import UserError
from models.parallel.micro_batch_info import MaskKey, MicroBatchInfo
from threefold.config.deepspeed_json import build_deepspeed_config, zero_stage
from threefold.config.parallel_dims import Coordinates, Topology, World
from threefold.config.recipe import Recipe
from threefold.data.dataset import MicroBatch
from threefold.engine.build import build_from_recipe
from threefold.engine.engine import Engine, PipelinedEngine
from threefold.trace.collective_counter import CollectiveCounter, Traffic
from threefold.trace.counters import Allocation, AllocationCounter
from threefold.trace.fake_cluster import fake_tensors, kernels_of_a_gpu, one_rank_of
from threefold.trace.observer import Observer
from threefold.trace.shortened_step import enough_micro_batches, per_step, with_micro_batches

ALLOCATOR_BYTES = 512  # CUDA's caching allocator rounds sizes up to a multiple (kMinBlockSize)
MAX_LISTED_ALLOCATIONS = 15


@dataclass(frozen=True)
class Categories:
    """Bytes of memory by purpose.

    weights: tensors that the forward pass reads
    gradients: of all precisions
    optimizer: fp32 master weights, and Adam's two moments
    buffers: all other tensors that live from step to step: reduction buckets, tables
    activations: tensors that live within a step, including gradients of activations
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """Sum of all categories."""
        return self.state + self.activations

    @property
    def state(self) -> int:
        """Sum of all categories but activations."""
        return self.weights + self.gradients + self.optimizer + self.buffers


@dataclass(frozen=True)
class Trace:
    """Memory and communication of one optimizer step of one rank.

    micro_batches: number of micro-batches of the step; `traced` of them were run, which suffices
        for the peak, and their communication was scaled to all
    between_steps: memory that lives from step to step
    at_peak: memory at the peak, which occurs in `peak_phase`
    phase_bytes: peak of each phase
    largest: the largest allocations at the peak, with their categories
    traffic: communication of the step
    """

    name: str
    rank: int
    coordinates: Coordinates
    topology: Topology
    micro_batches: int
    traced: int
    between_steps: Categories
    at_peak: Categories
    peak_phase: str
    phase_bytes: tuple[tuple[str, int], ...]
    largest: tuple[tuple[str, Allocation], ...]
    traffic: tuple[Traffic, ...]

    @property
    def peak_bytes(self) -> int:
        """Peak memory."""
        return self.at_peak.total


def trace(recipe: Recipe, world_size: int, gpus_per_node: int, rank: int) -> Trace:
    """Build rank `rank` of the recipe's job and trace one of its steps.

    Only as many micro-batches are run as this stage needs to reach its peak memory.

    Raises:
        UserError: the layout does not fit the world size, or the rank is not in it.
    """
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank} is not in 0 .. {world_size - 1}; use 0")
    topology = recipe.topology(World(rank=rank, size=world_size, local_size=gpus_per_node))
    compiled = recipe.training.compile is not False
    with one_rank_of(world_size, rank), fake_tensors(), kernels_of_a_gpu(compiled):
        return measure(recipe, topology, rank, at_most=enough_micro_batches(recipe, topology, rank))


def measure(recipe: Recipe, topology: Topology, rank: int, *, at_most: int) -> Trace:
    """Build the engine in the current process group and count its second step.

    The tensors may be fake or real; the tests compare the two.

    at_most: maximum number of micro-batches to run
    """
    coordinates = topology.coordinates(rank)
    micro_batches = recipe.micro_batches(topology.data)
    traced = min(micro_batches, at_most)
    stage = zero_stage(build_deepspeed_config(recipe, topology))
    every = recipe.layout.micro_batches_per_reduction(stage)
    recipe = as_written(with_micro_batches(recipe, topology, traced))
    config = build_deepspeed_config(recipe, topology)
    division = None
    if topology.context > 1:
        division = divide(recipe.model.sequence_length, coordinates.context, topology.context)
    batch = [micro_batch(recipe, number, division) for number in range(traced)]
    counter = AllocationCounter(granularity=ALLOCATOR_BYTES)
    counter.ignore(t for each in batch for t in (each.tokens, each.labels) if t is not None)
    collectives = CollectiveCounter(axes_of(topology, coordinates))
    with counter, collectives:
        observer = Observer(counter, collectives)
        engine = build_from_recipe(recipe, topology, config, observer)
        observer.watch(engine)
        collectives.named = engine.axes_by_group
        first_step(engine, batch)
        before = counter.alive()
        counter.restart()
        collectives.restart()
        engine.train_step(batch, recipe.optimizer.learning_rate)
        observer.note("")
        after = counter.alive()
    at_peak, phase = counter.alive_at_peak()
    roles = observer.roles | dict.fromkeys((before & after) - observer.roles.keys(), "buffers")
    by_size = sorted(at_peak, key=lambda number: -counter.made[number].memory_bytes)
    largest = by_size[:MAX_LISTED_ALLOCATIONS]
    return Trace(
        name=recipe.name,
        rank=rank,
        coordinates=coordinates,
        topology=topology,
        micro_batches=micro_batches,
        traced=traced,
        between_steps=categories(after, roles, counter),
        at_peak=categories(at_peak, roles, counter),
        peak_phase=phase,
        phase_bytes=most_in_phases(counter),
        largest=tuple((roles.get(n, "activations"), counter.made[n]) for n in largest),
        traffic=per_step(collectives, micro_batches, traced, every=every),
    )


def as_written(recipe: Recipe) -> Recipe:
    """Return the recipe without compiled kernels, which fake tensors and counters cannot run."""
    training = recipe.training.model_copy(update={"compile": False})
    return recipe.model_copy(update={"training": training})


def micro_batch(recipe: Recipe, number: int, division: Division | None = None) -> MicroBatch:
    """Return a micro-batch of the recipe's shape, without documents.

    division: division of the sequences among context ranks; None: this rank has whole sequences
    """
    shape = (recipe.batch.micro_sequences, recipe.tokens_per_rank)
    first = number * recipe.batch.micro_sequences
    samples = range(first, first + recipe.batch.micro_sequences)
    tokens, labels = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
    info = MicroBatchInfo(dropout=MaskKey(recipe.seed, samples), division=division)
    return MicroBatch(tokens, labels, info)


def first_step(engine: Engine, batch: list[MicroBatch]) -> None:
    """Run the step that allocates lasting tensors, in a pipeline with few micro-batches."""
    rate = engine.recipe.optimizer.learning_rate
    if not isinstance(engine, PipelinedEngine):
        engine.train_step(batch, rate)
        return
    wrapped, pipeline = engine.wrapped, engine.wrapped.pipeline
    few = pipeline.min_micro_batches
    wrapped.pipeline, wrapped.micro_batches = replace(pipeline, micro_batches=few), few
    engine.train_step(batch[:few], rate)
    wrapped.pipeline, wrapped.micro_batches = pipeline, pipeline.micro_batches


def categories(
    alive: Iterable[int], roles: dict[int, str], counter: AllocationCounter
) -> Categories:
    """Return the bytes of allocations by role."""
    totals: Counter[str] = Counter()
    for number in alive:
        totals[roles.get(number, "activations")] += counter.made[number].memory_bytes
    return Categories(**totals)


def most_in_phases(counter: AllocationCounter) -> tuple[tuple[str, int], ...]:
    """Return the peak of each phase, over all micro-batches."""
    most: dict[str, int] = {}
    for phase, size in counter.peaks.items():
        name = phase.partition(" of micro-batch ")[0]
        most[name] = max(most.get(name, 0), size)
    return tuple(most.items())


def axes_of(topology: Topology, coordinates: Coordinates) -> dict[frozenset[int], str]:
    """Return the axis of each of this rank's groups; of several names the narrowest wins."""

    def ranks(**free: range) -> frozenset[int]:
        group = [coordinates]
        for axis, indices in free.items():
            group = [replace(each, **{axis: index}) for each in group for index in indices]
        return frozenset(topology.rank(each) for each in group)

    pipeline, data, tensor = (range(n) for n in (topology.pipeline, topology.data, topology.tensor))
    context = range(topology.context)
    ends = range(0, topology.pipeline, max(1, topology.pipeline - 1))
    rank = topology.rank(coordinates)
    groups = {"expert": topology.expert_groups(), "data": topology.expert_data_groups()}
    of_experts = {
        frozenset(ranks): axis for axis, lists in groups.items() for ranks in lists if rank in ranks
    }
    shards = [*topology.shard_groups(), *topology.same_shard_groups()]
    of_shards = {frozenset(ranks): "data" for ranks in shards if rank in ranks}
    return (
        of_experts
        | of_shards
        | {
            ranks(pipeline=ends): "tied",  # the two replicas of a tied embedding
            ranks(pipeline=pipeline, data=data, context=context, tensor=tensor): "world",
            ranks(pipeline=pipeline, tensor=tensor): "model",
            ranks(pipeline=pipeline): "pipeline",
            ranks(data=data, context=context): "data",
            ranks(tensor=tensor): "tensor",
        }
    )
