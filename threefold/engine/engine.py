"""The engine of a run: the same interface over a pipeline and over one sequence of layers."""

import contextlib
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.schedule import ForwardPass, PipeInstruction
from torch import nn
from typing_extensions import override

from models.experts.layer import expert_layers
from models.kernels.attention import cumulative_lengths
from models.kernels.compile import are_compiled
from models.layer_specs import logical_parameters, observed_scores, vocabulary_tables
from models.parallel.collectives import all_gather_single
from models.parallel.micro_batch_info import MaskKey, MicroBatchInfo
from models.sharding import sharding_of
from threefold.checkpoint.state import CheckpointReader, Fragment, TrainingState, training_state
from threefold.config.recipe import Recipe
from threefold.data.dataset import MicroBatch
from threefold.engine.axes import ParallelAxes
from threefold.engine.experts import (
    ExpertReport,
    expert_report,
    is_marked,
    update_biases,
)
from threefold.engine.optimizer import QueryKeyClip, rules_of
from threefold.engine.weight_average import WeightAverage
from threefold.pipeline.engine import ScheduledEngine
from threefold.supervision.hang_report import Breadcrumb
from threefold.supervision.rank_comparison import ReplicaGroup, diverged_replicas

# The time that a rank spends in forward passes, to find slow ranks.


class Stopwatch:
    """Sum of the times of forward passes; on a GPU, measured by events of the device.

    A forward pass waits for the ranks in lockstep (`ParallelDims.lockstep_size`); the first passes
    of a step also wait for gathered weights. Those that run in pairs with backward passes are not
    measured. Under ZeRO-3, each forward pass gathers weights from all data ranks, so a slow rank
    slows all of them equally and is not found.
    """

    def __init__(self, device: torch.device, *, off: bool = False):
        self.device, self.on_gpu, self.off = device, device.type == "cuda", off
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Add the time of this context."""
        if self.off:
            yield
            return
        if self.on_gpu:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            yield
            last.record()
            self._events.append((first, last))
            return
        started = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - started

    def take(self) -> float:
        """Return the seconds since the last call."""
        for first, last in self._events:
            last.synchronize()
            self._seconds += first.elapsed_time(last) / 1e3
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds

    def take_of_all_ranks(self) -> list[float]:
        """Return the seconds since the last call on every rank, by rank; collective."""
        own = torch.tensor([self.take()], dtype=torch.float64, device=self.device)
        everyones = own.new_empty(dist.get_world_size())
        all_gather_single(everyones, own)
        return everyones.tolist()


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    Attributes:
        loss: in nats per token, mean of the global batch
        grad_norm: norm of the gradients before clipping
        prediction_losses: in nats per token, mean over the labels of each further token that count
        largest_logit: largest attention logit of any head, if the optimizer limits logits
    """

    loss: float
    grad_norm: float
    experts: ExpertReport | None = None
    prediction_losses: list[float] | None = None
    largest_logit: float | None = None


class Engine(ABC):
    """A model in training: the same interface over a pipeline and over one sequence of layers."""

    def __init__(
        self,
        wrapped: deepspeed.DeepSpeedEngine,
        recipe: Recipe,
        axes: ParallelAxes,
        crumb: Breadcrumb,
    ):
        self.wrapped, self.recipe, self.axes, self.crumb = wrapped, recipe, axes, crumb
        self.stopwatch = Stopwatch(self.device, off=not recipe.supervision.compare_speed_every)
        self.expert_layers = expert_layers(wrapped.module)
        self.tables = vocabulary_tables(wrapped.module)
        parameters = dict(self.parameters())
        # `wrapped.optimizer` is DeepSpeed's ZeRO optimizer; its own `optimizer` is AdamW or Muon.
        rules = rules_of(parameters.items(), recipe.model, recipe.optimizer)
        self.state: TrainingState = training_state(
            wrapped.optimizer,
            parameters,
            {name: rules[parameter].algorithm for name, parameter in parameters.items()},
            has_average=recipe.optimizer.average is not None,
        )
        self._report: ExpertReport | None = None  # of this step
        # On all data ranks. A phase may change the number of micro-batches, but not their size.
        self._tokens_per_micro_batch = recipe.tokens_per_step // self.micro_batches
        if recipe.model.experts and recipe.model.experts.bias_update:
            wrapped.optimizer.optimizer.register_step_pre_hook(self._update_biases)
        self.qk_clip: QueryKeyClip | None = None
        if (limit := recipe.optimizer.qk_clip) is not None:
            self.qk_clip = clip = QueryKeyClip(
                wrapped.module, recipe.model, limit=limit, tensor=axes.tensor
            )
            wrapped.optimizer.optimizer.register_step_post_hook(
                lambda optimizer, *_: clip.rescale(optimizer, self.state)
            )
        self.average: WeightAverage | None = None
        if (settings := recipe.optimizer.average) is not None:
            # Hooks run in the order of their registration: the average is of rescaled weights.
            self.average = average = WeightAverage(self.state, settings)
            wrapped.optimizer.optimizer.register_step_post_hook(
                lambda optimizer, *_: average.update(optimizer)
            )

    @property
    def compiled(self) -> bool:
        """True if the element-wise operations between matmuls are compiled."""
        return are_compiled(self.wrapped.module)

    def train_step(self, micro_batches: Iterable[MicroBatch], learning_rate: float) -> StepResult:
        """Run the forward passes, the backward passes and the update of one global batch.

        The number of micro-batches may differ from that of the last step, but is the same on all
        ranks.
        """
        micro_batches = list(micro_batches)
        if len(micro_batches) != self.micro_batches:
            size = self.wrapped.train_micro_batch_size_per_gpu() * self.wrapped.dp_world_size
            self.wrapped.set_train_batch_size(len(micro_batches) * size)
            # ZeRO's optimizers hold a copy. They only ask whether it is above 1, to offload.
            self.wrapped.optimizer.gradient_accumulation_steps = len(micro_batches)
        for group in self.wrapped.optimizer.param_groups:
            group["lr"] = learning_rate * group["learning_rate_factor"]
        self._reset_statistics()
        loss = self._train(micro_batches)
        return StepResult(
            loss=float(loss),
            grad_norm=float(self.wrapped.get_global_grad_norm()),
            experts=self._expert_report() if self.recipe.model.experts else None,
            prediction_losses=self._prediction_losses() if self.recipe.model.prediction else None,
            largest_logit=float(self.qk_clip.largest(self.device).max()) if self.qk_clip else None,
        )

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step, on each rank."""
        return self.wrapped.gradient_accumulation_steps()

    def _reset_statistics(self) -> None:
        self._report = None
        for layer in self.expert_layers:
            layer.statistics.reset()
        for table in self.tables:
            table.prediction_sums = None
        if self.qk_clip is not None:
            self.qk_clip.reset()

    def _expert_report(self) -> ExpertReport:
        """Return the report of this step; collective when it is called for the first time."""
        if self._report is None:
            self._report = expert_report(
                self.expert_layers,
                self.recipe.model,
                tokens=self._tokens_per_micro_batch * self.micro_batches,
                replicas=dist.get_world_size(self.data_group),
                micro_batches=self.micro_batches,
                device=self.device,
            )
        return self._report

    def _prediction_losses(self) -> list[float]:
        """Return the mean loss of each further token in this step; collective, one all-reduce."""
        sums = torch.zeros(self.recipe.model.prediction_depth, 2, dtype=torch.float64)
        sums = sums.to(self.device)
        for table in self.tables:
            if table.prediction_sums is not None:
                sums += table.prediction_sums
        dist.all_reduce(sums)  # over tensor ranks, too, which adds equal numbers and counts
        losses, counts = sums.unbind(1)
        return (losses / counts).tolist()

    def _update_biases(self, *_: Any) -> None:
        """Update the routers' biases before the optimizer's first call of a step.

        DeepSpeedZeroOptimizer calls the optimizer once per group, BF16_Optimizer once per step.
        Neither calls it if gradients overflow.
        """
        model = self.recipe.model
        assert model.experts is not None
        if self._report is None:
            report = self._expert_report()
            amount = model.experts.bias_update
            update_biases(self.state, report.counts, model=model, amount=amount)

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> float:
        """Return the mean loss, in nats per token, over all data ranks' micro-batches."""
        sums = torch.zeros(2, dtype=torch.float64)
        for _, scores in self.token_scores(micro_batches):
            if scores is not None:
                sums += torch.stack([scores[0].double().sum(), torch.tensor(scores[0].numel())])
        total, count = self.sum_over_ranks(sums)
        return float(total / count)

    @abstractmethod
    def token_scores(
        self, micro_batches: Iterable[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, torch.Tensor | None]]:
        """Run forward passes without dropout, and yield each micro-batch with its labels' scores.

        All ranks take all items. The number of micro-batches is a multiple of those of a step.

        Returns:
            The micro-batches in their order. The scores are fp32 [2, b, s/c] on the host: the loss
            of each label in nats, and 1 where no token has a higher logit than the label, otherwise
            0. They are None except on one of the tensor ranks that compute the loss, so that their
            sum over all ranks counts each label once.
        """

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor on the host over all ranks, on the host; collective."""
        total = values.to(self.device)
        dist.all_reduce(total)
        return total.cpu()

    def _on_host(self, scores: torch.Tensor) -> torch.Tensor | None:
        """Return the scores of a micro-batch on the host, on one tensor rank only."""
        return scores.cpu() if self.axes.tensor.rank == 0 else None

    @abstractmethod
    def warm_up_for(self, micro_batch: MicroBatch) -> None:
        """Prepare for evaluations that need other kernels than training; called on all ranks.

        micro_batch: like those of the evaluation; its scores are not used
        """

    @abstractmethod
    def _train(self, micro_batches: Iterable[MicroBatch]) -> torch.Tensor:
        """Run a step and return the mean loss over all data ranks' micro-batches."""

    @abstractmethod
    def finish_communication(self) -> None:
        """Wait for communication that the last step has left running."""

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return (logical name, parameter) of all parameters that this rank holds.

        Waits for communication that changes them.
        """
        self.finish_communication()
        return logical_parameters(self.wrapped.module, self.recipe.model)

    def diverged_replicas(self) -> list[str]:
        """Return a few sentences if replicas of weights differ; the same on all ranks."""
        self.finish_communication()

        def noted() -> Iterator[ReplicaGroup]:
            for group in self._copies():
                self.crumb.note(f"comparing replicas of {group.kind}")
                yield group

        return diverged_replicas(noted(), self.wrapped.device)

    def _from_disk(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield micro-batches as they are read from disk, which does not count as a hang.

        On a GPU they are in page-locked memory, so that kernels run during their copies.
        """
        iterator = iter(micro_batches)
        for number in itertools.count():
            with self.crumb.waiting_for_disk("reading data", micro_batch=number):
                micro_batch = next(iterator, None)
            if micro_batch is None:
                return
            yield micro_batch.pinned() if self.on_gpu else micro_batch

    def _copies(self) -> list[ReplicaGroup]:
        tensor, group, expert_group = (
            self.axes.tensor,
            self.data_group,
            self.axes.expert_data_group,
        )
        data_rank = dist.get_rank(group)
        held = [(n, held_values(p, data_rank), p) for n, p in self.parameters()]
        copies = []
        if tensor.group is not None:
            replicated = [(n, values) for n, values, p in held if sharding_of(p).replicated]
            copies.append(ReplicaGroup("tensor ranks", tensor.group, replicated))
        if dist.get_world_size(group) > 1:
            whole = [(n, values, p) for n, values, p in held if not is_partitioned(p)]
            shared = [(n, values) for n, values, p in whole if not is_marked(p)]
            copies.append(ReplicaGroup("data ranks", group, shared))
            experts = [(n, values) for n, values, p in whole if is_marked(p)]
            if expert_group is not None and dist.get_world_size(expert_group) > 1:
                kind = "data ranks with the same experts"
                copies.append(ReplicaGroup(kind, expert_group, experts))
        return copies

    @property
    def data_group(self) -> dist.ProcessGroup:
        """This rank's group of ranks with the same part of the model."""
        return self.axes.data_group

    def load(self, reader: CheckpointReader, *, weights_only: bool = False) -> None:
        """Read this rank's share of a checkpoint, whichever layout wrote it.

        weights_only: leave the state of the optimizer as it is initialised
        """

        def read(kind: str, fragment: Fragment) -> torch.Tensor:
            self.crumb.note(f"loading {kind} of {fragment.name}")
            return sharding_of(self.state.parameters[fragment.name]).local_elements(
                partial(reader.rows, kind, fragment.name),
                fragment.elements,
                tensor=self.axes.tensor,
            )

        self.finish_communication()
        manifest = reader.manifest
        self.state.restore(
            read,
            file_of=reader.file_of,
            updates=None if weights_only else manifest.updates,
            loss_scale=None if weights_only else manifest.loss_scale,
            reads_average=manifest.has_average and not weights_only,
        )
        reader.close()
        if self.average is not None:
            self.average.resume(0 if weights_only else manifest.updates)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Let evaluations use the average of the weights, which must exist; collective."""
        assert self.average is not None
        self.finish_communication()
        self.crumb.note("exchanging weights and average")
        with self.average.in_model():
            yield
        self.finish_communication()

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        return self.wrapped.device

    @property
    def on_gpu(self) -> bool:
        """True if the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def device_name(self) -> str:
        """The name of the device: "cpu", "NVIDIA H100 80GB HBM3", ..."""
        return torch.cuda.get_device_name(self.device) if self.on_gpu else self.device.type


class StageEngine(Engine):
    """Engine of a pipeline stage, which may be the only one, with ZeRO-1 or ZeRO-2."""

    def __init__(self, wrapped: ScheduledEngine, *parts: Any):
        super().__init__(wrapped, *parts)
        wrapped.observers.append(self._observe)
        self._to_warm_up: MicroBatch | None = None

    @override
    def warm_up_for(self, micro_batch: MicroBatch) -> None:
        self._to_warm_up = micro_batch

    def _observe(self, instruction: PipeInstruction) -> contextlib.AbstractContextManager[None]:
        """Note each instruction as this rank's activity, and time forward passes."""
        self.crumb.note(instruction.name, micro_batch=instruction.kwargs.get("buffer_id"))
        if isinstance(instruction, ForwardPass):
            return self.stopwatch.running()
        return contextlib.nullcontext()

    def _train(self, micro_batches: Iterable[MicroBatch]) -> torch.Tensor:
        return self._run(self.wrapped.train_batch, list(micro_batches))

    @override
    def finish_communication(self) -> None:
        self.wrapped.gathering.finish()

    def _copies(self) -> list[ReplicaGroup]:
        tied = [
            ReplicaGroup("stages", comm["group"], list(comm["module"].named_parameters(prefix=key)))
            for key, comm in self.wrapped.module.tied_comms.items()
        ]
        return super()._copies() + tied

    @override
    def token_scores(
        self, micro_batches: Iterable[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, torch.Tensor | None]]:
        # DeepSpeed would average the losses of each call, and broadcast the mean to all stages.
        evaluate = partial(self.wrapped.eval_batch, compute_loss=False, reduce_output=None)
        coming = self._from_disk(micro_batches)
        while together := list(itertools.islice(coming, self.wrapped.micro_batches)):
            values: list[torch.Tensor] = []
            self._run(evaluate, together, scores=values)
            for number, micro_batch in enumerate(together):
                yield micro_batch, self._on_host(values[number]) if values else None

    def _run(
        self,
        run_batch: Callable[..., torch.Tensor],
        micro_batches: list[MicroBatch],
        *,
        scores: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Run DeepSpeed's train_batch or eval_batch on micro-batches and return its result.

        DeepSpeed passes tokens and labels to the ends of the pipeline; every stage needs the
        information about the micro-batches.

        scores: list that receives the scores of each micro-batch's labels
        """
        prepare_documents([batch.info for batch in micro_batches], self.device)
        if self.wrapped.needs_warm_up:
            first = micro_batches[0]
            infos = self._infos_of_all_kinds(first.info.dropout)
            prepare_documents(infos, self.device)
            self.wrapped.warm_up(first.tokens, first.labels, infos, note=self.crumb.note)
            self._reset_statistics()
        if self._to_warm_up is not None:
            expected, self._to_warm_up = self._to_warm_up, None
            prepare_documents([expected.info], self.device)
            self.wrapped.warm_up_evaluation(expected.tokens, expected.labels, expected.info)
            self._reset_statistics()
        self.wrapped.module.take_micro_batch_infos([batch.info for batch in micro_batches])
        pairs = iter([(batch.tokens, batch.labels) for batch in micro_batches])
        if scores is None:
            result = run_batch(pairs)
        else:
            with observed_scores(self.wrapped.module) as observed:
                result = run_batch(pairs)
            scores += observed
        self.wrapped.module.check_all_taken()
        return result

    def _infos_of_all_kinds(self, dropout: MaskKey | None) -> list[MicroBatchInfo]:
        """Return the information about training micro-batches that use different kernels.

        With separate documents, the windows of a micro-batch may have one document each, for which
        attention needs no mask, or several.
        """
        recipe, context = self.recipe, self.axes.context
        length, rows = recipe.model.sequence_length, recipe.batch.micro_sequences
        kinds = [(length,), (length // 2, length - length // 2)]
        return [
            MicroBatchInfo.of_windows((window,) * rows, context.rank, context.size, dropout=dropout)
            for window in (kinds if recipe.data.separate_documents else kinds[:1])
        ]


class Zero3Engine(Engine):
    """Engine with ZeRO-3: all layers are on every rank, and their weights are gathered in turn."""

    def _train(self, micro_batches: Iterable[MicroBatch]) -> torch.Tensor:
        self.wrapped.train()
        # DeepSpeed updates when this count is a multiple of the number of micro-batches, which may
        # have changed.
        self.wrapped.micro_steps = 0
        losses = []
        for number, micro_batch in enumerate(micro_batches):
            self.crumb.note("forward pass", micro_batch=number)
            with self.stopwatch.running():
                loss = self._loss(micro_batch)
            self.crumb.note("backward pass", micro_batch=number)
            self.wrapped.backward(loss)
            self.wrapped.step()
            losses.append(loss.detach())
        total = torch.stack(losses).mean()
        dist.all_reduce(total, group=self.data_group)
        return total / dist.get_world_size(self.data_group)

    @override
    def warm_up_for(self, micro_batch: MicroBatch) -> None:
        """Do nothing: no receive is posted ahead, for which loading a kernel would wait."""

    @override
    def finish_communication(self) -> None:
        """Do nothing: ZeRO-3 waits for its collectives in each step."""

    @override
    def token_scores(
        self, micro_batches: Iterable[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, torch.Tensor | None]]:
        self.wrapped.eval()
        for number, micro_batch in enumerate(self._from_disk(micro_batches)):
            self.crumb.note("validation pass", micro_batch=number)
            with torch.no_grad(), observed_scores(self.wrapped.module) as scores:
                self._loss(micro_batch)
            yield micro_batch, self._on_host(scores[0])

    def _loss(self, micro_batch: MicroBatch) -> torch.Tensor:
        here = micro_batch.on(self.wrapped.device)
        return self.wrapped(here.tokens, here.labels, here.info)


def prepare_documents(micro_batch_infos: Iterable[MicroBatchInfo], device: torch.device) -> None:
    """Make the tables of all micro-batches for attention within documents, before the first pass.

    They are copied from pinned memory. Allocating that memory may wait for the whole device, and in
    a pipeline for a posted receive.
    """
    for info in micro_batch_infos:
        if info.documents is not None and device.type == "cuda":
            cumulative_lengths(info.documents.lengths, device)


def held_values(parameter: nn.Parameter, data_rank: int) -> torch.Tensor:
    """Return the values of a parameter that this rank holds: under ZeRO-3 a shard of its part.

    The padding at the end of a shard is dropped, because DeepSpeed never writes it.
    """
    if not is_partitioned(parameter):
        return parameter
    attributes = vars(parameter)  # DeepSpeed adds the following two
    shard: torch.Tensor = attributes["ds_tensor"]
    return shard[: max(0, attributes["ds_numel"] - data_rank * shard.numel())]


def is_partitioned(parameter: nn.Parameter) -> bool:
    """Return True if ZeRO-3 has divided the parameter among the data ranks."""
    return hasattr(parameter, "ds_tensor")
