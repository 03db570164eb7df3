"""Trace of one rank of a full-size job: the memory it allocates and the data it communicates.

The model, DeepSpeed's engine, its optimizer and its schedule are the real ones, built by
`build_from_recipe`, on fake tensors and a process group that does nothing (`fake_cluster.py`). The
second step is counted, because Adam's moments exist by then, as in all later steps. It is shortened
to the micro-batches that reach the peak memory.

Not counted: memory inside kernels and libraries (cuBLAS' workspace, NCCL's buffers, flash
attention's fp32 accumulators in its backward pass), the CUDA context, and fragmentation in the
caching allocator. DeepSpeed runs on its CPU accelerator, which has the same engines and optimizers
as CUDA but no side streams; on a GPU a few buffers live longer because of them. Unless
training.compile is false, a compiled kernel allocates only its results.

Each sequence is one document here, whatever data.separate_documents says.
"""

import math
import operator
import os
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.context_parallel.division import Division, divide
from models.errors import UserError
from models.layer_specs import logical_parameters
from models.parallel.micro_batch_info import MaskKey, MicroBatchInfo
from threefold.config.deepspeed_json import build_deepspeed_config, zero_stage
from threefold.config.parallel_dims import AXES, Coordinates, LaunchEnvironment, ParallelDims
from threefold.config.recipe import Recipe
from threefold.data.dataset import MicroBatch
from threefold.engine.build import build_from_recipe, pipeline_of, tensors_in
from threefold.engine.engine import Engine, StageEngine
from threefold.pipeline.schedules import BACKWARD, FORWARD, WEIGHT, Order
from threefold.supervision.hang_report import Breadcrumb
from threefold.trace.fake_cluster import fake_tensors, kernels_of_a_gpu, one_rank_of

# Counter of a rank's allocated memory, operation by operation.


@dataclass(frozen=True)
class Allocation:
    """A storage that an operation has allocated.

    shape, dtype: shape and type of the first tensor that uses the storage
    phase: the rank's activity at that time
    """

    operation: str
    shape: tuple[int, ...]
    dtype: str
    memory_bytes: int
    phase: str


@dataclass
class AllocationCounter(TorchDispatchMode):
    """Count the bytes of all live storages that operations have allocated, and their peak.

    granularity: sizes are rounded up to a multiple; 512 bytes in CUDA's caching allocator
    known: live storages (`_cdata`), with None for storages that are not counted
    phase: the rank's current activity
    """

    granularity: int = 1
    live: int = 0
    peak: int = 0
    known: dict[int, int | None] = field(default_factory=dict)  # storage -> index in `made`
    made: list[Allocation] = field(default_factory=list)
    phase: str = ""
    peaks: dict[str, int] = field(default_factory=dict)  # phase -> peak
    _events: list[int] = field(default_factory=list)  # n: allocation n was made; ~n: it was freed
    _peak_event: int = 0
    _peak_phase: str = ""

    def __post_init__(self):
        super().__init__()

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do not count the storages of these tensors."""
        self.known |= {tensor.untyped_storage()._cdata: None for tensor in tensors}

    def restart(self) -> None:
        """Restart the search for the peak."""
        self.peak, self._peak_event, self._peak_phase = self.live, len(self._events), self.phase
        self.peaks.clear()

    def number(self, tensor: torch.Tensor) -> int | None:
        """Return the index in `made` of a tensor's storage; None if it is not counted."""
        return self.known.get(tensor.untyped_storage()._cdata)

    def alive(self) -> set[int]:
        """Return the live allocations."""
        return self._alive_after(len(self._events))

    def alive_at_peak(self) -> tuple[set[int], str]:
        """Return the allocations that were live at the peak, and its phase."""
        return self._alive_after(self._peak_event), self._peak_phase

    def _alive_after(self, events: int) -> set[int]:
        alive: set[int] = set()
        for event in self._events[:events]:
            alive.add(event) if event >= 0 else alive.remove(~event)
        return alive

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Count the storages that the operation has allocated."""
        if function is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].device  # half of all operations; other modes would answer it slowly
        result = function(*args, **(kwargs or {}))
        leaves = (result,) if isinstance(result, torch.Tensor) else tree_leaves(result)
        for tensor in leaves:
            if isinstance(tensor, torch.Tensor):
                self._count(tensor, function)
        return result

    def _count(self, tensor: torch.Tensor, function: object) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known or tensor.device.type == "meta":
            return
        number = len(self.made)
        size = -(-storage.nbytes() // self.granularity) * self.granularity
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.made.append(Allocation(str(function), tuple(tensor.shape), dtype, size, self.phase))
        self.known[key] = number
        self._events.append(number)
        self.live += size
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.live)
        if self.live > self.peak:
            self.peak, self._peak_event = self.live, len(self._events)
            self._peak_phase = self.phase
        weakref.finalize(storage, self._freed, key, number)

    def _freed(self, key: int, number: int) -> None:
        del self.known[key]
        self._events.append(~number)
        self.live -= self.made[number].memory_bytes


# Counter of a rank's communication by axis and kind of collective.

# Operator of torch.distributed -> its kind, and the index of the argument with the whole data, the
# output of an all-gather and the input of a reduce-scatter.
COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
}
POINT_TO_POINT = ("send", "recv")  # only stages use these, in the group of all ranks


@dataclass(frozen=True)
class Traffic:
    """Communication of one kind on one axis.

    axis: "tensor", "context", "expert" (x tensor), "data" (all replicas, or those with the same
        experts), "pipeline", "model" (tensor x pipeline) or "world"
    memory_bytes: size of the whole tensors: all parts of a gather or scatter, otherwise the tensor
        that is reduced, sent or received
    """

    axis: str
    kind: str
    count: int
    memory_bytes: int


@dataclass
class CollectiveCounter(TorchDispatchMode):
    """Count collectives, except those in groups of one rank, which transfer nothing.

    axes: axis by the ranks of its group
    named: axis by the name of its group, if another group may have the same ranks
    """

    axes: Mapping[frozenset[int], str]
    named: dict[str, str] = field(default_factory=dict)
    phase: str = ""
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # phase, axis, kind
    totals: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def __post_init__(self):
        super().__init__()

    def restart(self) -> None:
        """Restart the counts."""
        self.counts.clear()
        self.totals.clear()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Count the data that the operation transfers."""
        if function.namespace == "c10d":
            self._count(function._schema.name.removeprefix("c10d::"), args)
        return function(*args, **(kwargs or {}))

    def _count(self, name: str, arguments: tuple) -> None:
        if name in ("barrier", "monitored_barrier_"):
            return
        kind, argument = COLLECTIVES[name]
        if kind in POINT_TO_POINT:
            axis = "pipeline"
        else:
            scripted = next(a for a in arguments if isinstance(a, torch.ScriptObject))
            group = dist.ProcessGroup.unbox(scripted)
            ranks = frozenset(dist.get_process_group_ranks(group))
            if len(ranks) == 1:
                return
            axis = self.named.get(group.group_name) or self.axes[ranks]
        tensors = (t for t in tree_leaves(arguments[argument]) if isinstance(t, torch.Tensor))
        key = (self.phase, axis, kind)
        self.counts[key] += 1
        self.totals[key] += sum(t.numel() * t.element_size() for t in tensors)


# A step with few micro-batches that reaches the peak memory of the whole step.
#
# Its communication is scaled to all micro-batches of the step.

# Phases that occur once per step; all others occur once per micro-batch.
PHASES_ONCE_PER_STEP = ("", "ReduceGrads", "OptimizerStep", "optimizer step")
# Passes of a pipeline. Data ranks communicate only in the last of them in a step.
BACKWARD_PHASES = ("BackwardPass", "WeightPass")


def enough_micro_batches(recipe: Recipe, dims: ParallelDims, rank: int) -> int:
    """Return the number of micro-batches with which this rank reaches its peak memory.

    With this number the stage passes through all states that may be the fullest, each with and
    without gradients of an earlier micro-batch. A larger number adds only one loss per micro-batch.
    """
    pipeline = pipeline_of(recipe, dims)
    stage = dims.coordinates(rank).pipeline
    wanted = fullest_moments(pipeline.orders[stage])
    least = pipeline.min_micro_batches
    for fewer in range(least, pipeline.micro_batches):
        if fullest_moments(replace(pipeline, micro_batches=fewer).orders[stage]) == wanted:
            return fewer
    return pipeline.micro_batches


def fullest_moments(order: Order) -> set[tuple[int, ...]]:
    """Return the contents of a stage at its fullest moments; no moment is exceeded by another.

    A moment counts, for each chunk, the micro-batches before their backward pass, those before
    their weight pass, and 1 if gradients exist.
    """
    virtual_stages = 1 + max(work.chunk for work in order)
    before = [0] * virtual_stages
    left = [0] * virtual_stages
    ended = [0] * virtual_stages
    ending = WEIGHT if any(work.kind == WEIGHT for work in order) else BACKWARD
    moments = set()
    for work in order:
        before[work.chunk] += (work.kind == FORWARD) - (work.kind == BACKWARD)
        if ending == WEIGHT:
            left[work.chunk] += (work.kind == BACKWARD) - (work.kind == WEIGHT)
        ended[work.chunk] |= work.kind == ending
        moments.add((*before, *left, *ended))
    return {
        moment
        for moment in moments
        if not any(moment != other and all(map(operator.le, moment, other)) for other in moments)
    }


def with_micro_batches(recipe: Recipe, dims: ParallelDims, count: int) -> Recipe:
    """Return the recipe with `count` micro-batches per step."""
    sequences = count * recipe.batch.micro_sequences * dims.data
    batch = recipe.batch.model_copy(update={"global_sequences": sequences})
    every = recipe.layout.reduce_every
    layout = recipe.layout.model_copy(update={"reduce_every": min(every, count)})
    return recipe.model_copy(update={"batch": batch, "layout": layout})


def per_step(
    counted: CollectiveCounter, micro_batches: int, traced: int, *, every: int = 0
) -> tuple[Traffic, ...]:
    """Return the traffic of a step with all its micro-batches.

    Every micro-batch communicates the same, except that a pipeline reduces its gradients once, or
    with ZeRO-2 once per group of micro-batches.

    every: number of micro-batches in a group; 0: all of the step
    """
    groups = math.ceil(micro_batches / every) / math.ceil(traced / every) if every else 1.0
    counts: Counter[tuple[str, str]] = Counter()
    totals: Counter[tuple[str, str]] = Counter()
    for (phase, axis, kind), count in counted.counts.items():
        size = counted.totals[phase, axis, kind]
        is_reduction = axis == "data" and phase in (*BACKWARD_PHASES, "ReduceGrads")
        if is_reduction:
            count, size = (round(n * groups) for n in (count, size))
        elif phase not in PHASES_ONCE_PER_STEP:
            count, size = (round(n * micro_batches / traced) for n in (count, size))
        counts[axis, kind] += count
        totals[axis, kind] += size
    return tuple(Traffic(*key, counts[key], totals[key]) for key in sorted(counts))


# Observation of the purpose of a rank's memory while it trains.


class Observer(Breadcrumb):
    """A breadcrumb that, at each activity, notes which allocations are weights, gradients, ...

    roles: category by allocation, for all allocations that are not activations
    """

    def __init__(self, counter: AllocationCounter, collectives: CollectiveCounter):
        self.counter, self.collectives = counter, collectives
        self.roles: dict[int, str] = {}
        self.engine: Engine | None = None

    def watch(self, engine: Engine) -> None:
        """Observe the tensors of an engine from now on."""
        self.engine = engine
        step = engine.wrapped.optimizer.step

        def noted_step(*arguments, **settings):
            self.note("optimizer step")
            step(*arguments, **settings)

        engine.wrapped.optimizer.step = noted_step

    def note(self, doing: str, *, micro_batch: int | None = None, step: int | None = None) -> None:
        """Begin a phase."""
        if self.engine is not None:
            for tensor, role in roles_of(self.engine):
                number = self.counter.number(tensor)
                if number is not None:
                    self.roles.setdefault(number, role)
        of = "" if micro_batch is None else f" of micro-batch {micro_batch}"
        self.counter.phase, self.collectives.phase = f"{doing}{of}", doing


def roles_of(engine: Engine) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield the tensors of an engine that are not activations, with their roles."""
    optimizer = engine.wrapped.optimizer
    for state in optimizer.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                yield value, "optimizer"
    parameters = [p for _, p in logical_parameters(engine.wrapped.module, engine.recipe.model)]
    for parameter in parameters:  # before the optimizer's, which in fp32 may be the same tensors
        yield parameter, "weights"
    for flat in engine.state.weights:
        yield flat, "optimizer"
        if flat.grad is not None:
            yield flat.grad, "gradients"
    for parameter in parameters:
        if hasattr(parameter, "ds_tensor"):
            yield parameter.ds_tensor, "weights"
        for name in ("grad", "grad_accum", "_hp_grad"):
            gradient = getattr(parameter, name, None)
            if gradient is not None:
                yield gradient, "gradients"
    for name, value in vars(optimizer).items():
        if "grad" in name:
            for tensor in tensors_in(value):
                yield tensor, "gradients"


os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or DeepSpeed says that it looks for one


ALLOCATOR_BYTES = 512  # CUDA's caching allocator rounds sizes up to a multiple (kMinBlockSize)
MAX_LISTED_ALLOCATIONS = 15


@dataclass(frozen=True)
class Categories:
    """Bytes of memory by purpose.

    weights: tensors that the forward pass reads
    gradients: of all precisions
    optimizer: fp32 master weights, Adam's two moments, and the average of the weights
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
    dims: ParallelDims
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
    dims = recipe.parallel_dims(
        LaunchEnvironment(rank=rank, size=world_size, local_size=gpus_per_node)
    )
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank} is not in 0 .. {world_size - 1}; use 0")
    compiled = recipe.training.compile is not False
    with one_rank_of(world_size, rank), fake_tensors(), kernels_of_a_gpu(compiled):
        return measure(recipe, dims, rank, at_most=enough_micro_batches(recipe, dims, rank))


def measure(recipe: Recipe, dims: ParallelDims, rank: int, *, at_most: int) -> Trace:
    """Build the engine in the current process group and count its second step.

    The tensors may be fake or real; the tests compare the two.
    """
    coordinates = dims.coordinates(rank)
    micro_batches = recipe.micro_batches(dims.data)
    traced = min(micro_batches, at_most)
    stage = zero_stage(build_deepspeed_config(recipe, dims))
    every = recipe.layout.micro_batches_per_reduction(stage)
    recipe = as_written(with_micro_batches(recipe, dims, traced))
    config = build_deepspeed_config(recipe, dims)
    division = None
    if dims.context > 1:
        division = divide(recipe.model.sequence_length, coordinates.context, dims.context)
    batch = [micro_batch(recipe, number, division) for number in range(traced)]
    counter = AllocationCounter(granularity=ALLOCATOR_BYTES)
    counter.ignore(t for item in batch for t in (item.tokens, item.labels) if t is not None)
    collectives = CollectiveCounter(axes_of(dims, coordinates))
    with collectives, counter:
        observer = Observer(counter, collectives)
        engine = build_from_recipe(recipe, dims, config, observer)
        observer.watch(engine)
        collectives.named = engine.axes.axis_of_group
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
        dims=dims,
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
    tokens = torch.zeros(shape, dtype=torch.long)
    further = recipe.model.prediction_depth
    labels = torch.zeros((*shape, 1 + further) if further else shape, dtype=torch.long)
    info = MicroBatchInfo(dropout=MaskKey(recipe.seed, samples), division=division)
    return MicroBatch(tokens, labels, info)


def first_step(engine: Engine, batch: list[MicroBatch]) -> None:
    """Run the step that allocates lasting tensors, in a pipeline with few micro-batches."""
    rate = engine.recipe.optimizer.learning_rate
    if not isinstance(engine, StageEngine):
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


def axes_of(dims: ParallelDims, coordinates: Coordinates) -> dict[frozenset[int], str]:
    """Return the axis of each of this rank's groups; of several names the narrowest wins."""
    rank = dims.rank(coordinates)
    last = dims.pipeline - 1
    ends = [dims.rank(replace(coordinates, pipeline=stage)) for stage in (0, last)]
    groups = [
        ("expert", dims.expert_groups()),
        ("data", dims.expert_data_groups()),
        ("data", dims.dp_shard_groups()),
        ("data", dims.dp_replicate_groups()),
        ("tied", [ends]),  # the two replicas of a tied embedding
        ("world", dims.groups(*AXES)),
        ("model", dims.groups("pipeline", "tensor")),
        *((axis, dims.groups(axis)) for axis in AXES),
        ("data", dims.groups("data", "context")),
        ("tensor", dims.groups("tensor")),
    ]
    return {frozenset(ranks): axis for axis, lists in groups for ranks in lists if rank in ranks}


# Reports of a trace: text for a terminal and a dict for --json.


def text(trace: Trace) -> str:
    """Return the report for a terminal: categories, largest allocations and communication."""
    sizes, own = trace.dims, trace.coordinates
    lines = [
        f"{trace.name}, rank {trace.rank} of {sizes.world_size}: "
        + ", ".join(f"{axis} {getattr(own, axis)} of {n}" for axis, n in sizes.shown_sizes.items()),
        f"{trace.micro_batches} micro-batches a step, {trace.traced} traced",
        "",
        f"{'memory, MiB':28}{'between steps':>16}{'at the peak':>16}",
    ]
    for memory_field in fields(Categories):
        between, peak = (
            getattr(c, memory_field.name) for c in (trace.between_steps, trace.at_peak)
        )
        lines.append(f"{memory_field.name:28}{_mib(between):>16}{_mib(peak):>16}")
    lines += [
        f"{'total':28}{_mib(trace.between_steps.total):>16}{_mib(trace.at_peak.total):>16}",
        "",
        "The most in each phase, MiB",
        *(f"  {phase:26}{_mib(size):>16}" for phase, size in trace.phase_bytes),
        "",
        f"The largest allocations at the peak, in {trace.peak_phase}",
        f"{'MiB':>12}  {'category':12} {'dtype':9} {'shape':24} {'operation':36} made in",
    ]
    for category, made in trace.largest:
        shape = " x ".join(map(str, made.shape))
        lines.append(
            f"{_mib(made.memory_bytes):>12}  {category:12} {made.dtype:9} {shape:24} "
            f"{made.operation:36} {made.phase or 'start'}"
        )
    lines += ["", f"{'communication of a step':28}{'calls':>10}{'MiB':>16}"]
    for traffic in trace.traffic:
        name = f"{traffic.axis} {traffic.kind}"
        lines.append(f"{name:28}{traffic.count:>10}{_mib(traffic.memory_bytes):>16}")
    return "\n".join(lines)


def table(trace: Trace) -> dict[str, Any]:
    """Return the report for programs; all sizes are in bytes."""
    return {
        "name": trace.name,
        "rank": trace.rank,
        "world_size": trace.dims.world_size,
        "dims": asdict(trace.dims),
        "coordinates": asdict(trace.coordinates),
        "micro_batches": trace.micro_batches,
        "traced_micro_batches": trace.traced,
        "between_steps_bytes": asdict(trace.between_steps) | {"total": trace.between_steps.total},
        "peak_bytes": trace.peak_bytes,
        "peak_phase": trace.peak_phase,
        "at_peak_bytes": asdict(trace.at_peak),
        "phase_bytes": dict(trace.phase_bytes),
        "largest": [{"category": name} | asdict(made) for name, made in trace.largest],
        "traffic": [asdict(message) for message in trace.traffic],
    }


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f}"
