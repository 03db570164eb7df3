"""DeepSpeed's PipelineEngine, running any order of passes with communication in the background.

The state that a forward pass keeps for later passes is stored under its chunk and micro-batch,
until the last pass that needs it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import PipeInstruction
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from models.experts.layer import expert_layers
from models.experts.overlap import Turns
from models.parallel.layers import Deferral, defer_weights
from models.parallel.micro_batch_info import MicroBatchInfo
from models.parallel.process_groups import matches_by_order
from threefold.pipeline.channels import Boundary, Channels
from threefold.pipeline.gradients import gradients_of
from threefold.pipeline.instructions import PassSchedule, WeightPass
from threefold.pipeline.passes import BACKWARD, FORWARD, WEIGHT, Kind, Pass, group_ends
from threefold.pipeline.schedules import Pipeline, last_stage
from threefold.pipeline.stage import Stage
from threefold.pipeline.warm_up import warm_up, warm_up_evaluation
from threefold.pipeline.weight_gathering import WeightGathering

InstructionObserver = Callable[[PipeInstruction], AbstractContextManager[None]]


@dataclass
class InFlight:
    """A micro-batch in a chunk, between its passes.

    x: the input of the forward pass, whose gradient the previous chunk waits for
    end: the node of the graph at which the backward pass begins; the output itself is not kept
    """

    x: Tensor
    end: GradientEdge | Tensor


class ScheduledEngine(PipelineEngine):
    """The engine of a Stage, which runs passes in the order of its Pipeline.

    It is constructed directly, because `deepspeed.initialize` has no argument for the class of a
    pipeline's engine.

    Attributes:
        observers: functions that are called with each instruction, and return a context in which
            the instruction runs

    Args:
        stage: this rank's part of the model
        optimizer: the optimizer of its parameters
        config: the DeepSpeed configuration
        boundary: the tensors that pass from one chunk to the next
        shard_gradients: keep only this rank's shard of the gradients, as ZeRO-2 does
    """

    def __init__(
        self,
        stage: Stage,
        optimizer: torch.optim.Optimizer,
        config: dict[str, Any],
        *,
        boundary: Boundary,
        shard_gradients: bool = False,
    ):
        self.is_built = False
        grid = stage.mpu()
        super().__init__(
            args=None,
            model=stage,
            optimizer=optimizer,
            mpu=grid,
            config=config,
            config_class=DeepSpeedConfig(config, grid),
        )
        self._configure_python_gc()
        self.is_built = True
        self.observers: list[InstructionObserver] = []
        self.total_loss: Tensor | None = None
        self.pipeline = self.module.pipeline
        assert self.pipeline.micro_batches == self.micro_batches
        self.channels = Channels(self.pipeline, self.grid, boundary, self.device)
        chunks = range(self.pipeline.chunks)
        parameters = {chunk: list(stage.parameters_of_chunk(chunk)) for chunk in chunks}
        self.gradients = gradients_of(self, parameters, sharded=shard_gradients)
        self.gathering = WeightGathering(
            stage.layers_of_chunks, self.gradients.bucket_of, self.optimizer
        )
        self.deferral = Deferral()
        if self.pipeline.splits:
            defer_weights(self.module, self.deferral)
        experts = expert_layers(self.module)
        self.turns = experts[0].expert_axis.turns if experts else Turns()
        self.schedules: dict[tuple[Pipeline, bool], PassSchedule] = {}
        self.needs_warm_up = matches_by_order() and self.pipeline.stages > 1
        self._begin_step()

    def _configure_distributed_model(self, model: nn.Module) -> None:
        """Let the optimizer divide its state among the right ranks.

        DeepSpeed divides experts among the ranks that hold the same ones, but only if the attribute
        says so, which it sets for its own modules. It divides all other weights among the ranks of
        `seq_data_parallel_group`.
        """
        super()._configure_distributed_model(model)
        if self.mpu.shard_group is not None:
            self.seq_data_parallel_group = self.mpu.shard_group
        self.has_moe_layers = any(is_moe_param(each) for each in model.parameters())

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches of a step, and the order of passes with it."""
        super().set_train_batch_size(train_batch_size)
        self.pipeline = replace(self.pipeline, micro_batches=self.micro_batches)
        self.channels.set_pipeline(self.pipeline)

    def warm_up(
        self,
        tokens: Tensor | None,
        labels: Tensor | None,
        info: MicroBatchInfo,
        *,
        note: Callable[[str], None],
    ) -> None:
        """Use every route, group and kernel once, before the first step; see `warm_up.py`."""
        warm_up(self, tokens, labels, info, note=note)
        self.needs_warm_up = False

    def warm_up_evaluation(
        self, tokens: Tensor | None, labels: Tensor | None, info: MicroBatchInfo
    ) -> None:
        """Use the kernels of an evaluation once, before its first receive is posted."""
        if matches_by_order() and self.pipeline.stages > 1:
            warm_up_evaluation(self, tokens, labels, info, note=lambda activity: None)

    def _begin_step(self) -> None:
        self.in_flight: dict[tuple[int, int], InFlight] = {}
        self.deferred: dict[tuple[int, int], list] = {}  # for the weights' passes
        self.handed_on: dict[Pass, Tensor] = {}  # from one chunk of this stage to another
        self.labels: dict[int, Tensor] = {}
        self.tokens: dict[int, Tensor] = {}
        self.begun: dict[Pass, Callable[[], None]] = {}  # forward passes, by their partners
        order = self.pipeline.orders[self.stage_id]
        self.group_ends = group_ends(order, self.pipeline.reduce_every)
        pairs = (unit for unit in self.pipeline.units(order) if len(unit) > 1)
        self.partners: dict[Pass, Pass] = dict(pairs)

    def is_last_stage(self) -> bool:
        """Return True on the stage of the loss; while DeepSpeed sets up, on the last stage."""
        if not self.is_built:
            return super().is_last_stage()
        return self.stage_id == self._stage_of_loss()

    def _stage_of_loss(self) -> int:
        return last_stage(self.pipeline.schedule, self.pipeline.stages, self.pipeline.chunks)

    def _loss_stage_global_rank(self) -> int:
        return self.grid.stage_to_global(self._stage_of_loss())

    def _schedule(self, *, training: bool) -> PassSchedule:
        """Return the instructions of a step, planned once."""
        key = self.pipeline, training
        if key not in self.schedules:
            self.schedules[key] = PassSchedule(self.pipeline, self.stage_id, training=training)
        return self.schedules[key]

    def _train_schedule(self) -> PassSchedule:
        return self._schedule(training=True)

    def _inference_schedule(self, micro_batches: int) -> PassSchedule:
        assert micro_batches == self.pipeline.micro_batches
        return self._schedule(training=False)

    def _exec_schedule(self, pipe_schedule: PassSchedule) -> None:
        self.fwd_outputs: list[Tensor] = []
        self._begin_step()
        for step in pipe_schedule.steps():
            for instruction in step:
                with ExitStack() as observed:
                    for observe in self.observers:
                        observed.enter_context(observe(instruction))
                    self._INSTRUCTION_MAP[type(instruction)](self, **instruction.kwargs)
        assert not (self.in_flight or self.deferred or self.handed_on or self.begun)

    def _pass(self, kind: Kind, buffer_id: int, chunk: int) -> Pass:
        return Pass(kind, self.stage_id, chunk, buffer_id)

    def _is_end(self, chunk: int) -> bool:
        """Return True for the last virtual stage, which computes the loss."""
        return self.pipeline.virtual_stage(self.stage_id, chunk) == self.pipeline.virtual_stages - 1

    def _exec_load_micro_batch(self, buffer_id: int, chunk: int) -> None:
        tokens, labels = self._next_batch()
        if self.is_first_stage():
            self.tokens[buffer_id] = tokens.to(self.device, non_blocking=True)
        if self.is_last_stage():
            self.labels[buffer_id] = labels.to(self.device, non_blocking=True)

    def _exec_receive(self, kind: Kind, buffer_id: int, chunk: int) -> None:
        self.channels.expect(self._pass(kind, buffer_id, chunk))

    def _exec_commit_p2p(
        self, kind: Kind | None = None, buffer_id: int = 0, chunk: int = 0
    ) -> None:
        """Wait for the input of a pass; without a pass, wait for all sends."""
        if kind is None:
            self.channels.wait_for_sends()
        else:
            work = self._pass(kind, buffer_id, chunk)
            self.handed_on[work] = self.channels.receive(work)

    def run_forward(self, buffer_id: int, chunk: int) -> None:
        """Run the forward pass of a micro-batch (`buffer_id`) through a chunk.

        If the pass is one of a pair, `run_backward` runs both.
        """
        partner = self.partners.get(self._pass(FORWARD, buffer_id, chunk))
        if partner is not None and torch.is_grad_enabled():
            self.begun[partner] = partial(self._run_forward, buffer_id, chunk)
        else:
            self._run_forward(buffer_id, chunk)

    def _run_forward(self, buffer_id: int, chunk: int) -> None:
        if self.device.type == "cuda":  # the helper's thread starts on device 0
            torch.cuda.set_device(self.device)
        work = self._pass(FORWARD, buffer_id, chunk)
        if self.pipeline.needed(work) is None:
            x = self.tokens.pop(buffer_id)
        else:
            x = self.handed_on.pop(work).requires_grad_(torch.is_grad_enabled())
        if self._is_end(chunk):
            output = self.module(x, chunk, self.labels.pop(buffer_id))
            self._note_loss(output.detach())
        else:
            output = self.module(x, chunk)
            self._hand_on(work, output.detach())
        if torch.is_grad_enabled():
            end = output if self._is_end(chunk) else get_gradient_edge(output)
            self.in_flight[chunk, buffer_id] = InFlight(x, end)

    def _note_loss(self, loss: Tensor) -> None:
        """Add a micro-batch's loss to the attributes that DeepSpeed reads."""
        self.fwd_outputs.append(loss)
        self.total_loss = loss if self.total_loss is None else self.total_loss + loss

    def run_backward(self, buffer_id: int, chunk: int) -> None:
        """Run the backward pass, without the weight gradients if the schedule splits it."""
        forward = self.begun.pop(self._pass(BACKWARD, buffer_id, chunk), None)
        backward = partial(self._run_backward, buffer_id, chunk)
        if forward is None:
            backward()
        else:
            self.turns.take(forward, backward)

    def _run_backward(self, buffer_id: int, chunk: int) -> None:
        work = self._pass(BACKWARD, buffer_id, chunk)
        passing = self.in_flight.pop((chunk, buffer_id))
        if work in self.group_ends:
            is_last = self.group_ends[work]
            self.gradients.begin_end_of_group(BACKWARD, chunk, is_last=is_last)
        if self._is_end(chunk):
            loss = self.optimizer.scale_if_loss(passing.end / self.micro_batches)
            torch.autograd.backward(loss)
        else:
            torch.autograd.backward(passing.end, self.handed_on.pop(work))
        if self.pipeline.receiver(work) is not None:
            assert passing.x.grad is not None
            self._hand_on(work, passing.x.grad)
        if self.pipeline.splits:
            self.deferred[chunk, buffer_id] = self.deferral.take()

    @torch.no_grad()  # otherwise each gradient would keep its inputs alive
    def run_weight(self, buffer_id: int, chunk: int) -> None:
        """Compute the weight gradients that the backward pass has deferred."""
        deferred = self.deferred.pop((chunk, buffer_id))
        deferred.reverse()
        work = self._pass(WEIGHT, buffer_id, chunk)
        if work in self.group_ends:
            self.gradients.begin_end_of_group(WEIGHT, chunk, is_last=self.group_ends[work])
        while deferred:  # pop, so that the inputs of a gradient are freed before the next
            weight, gradient = deferred.pop()
            self.gradients.add(weight, gradient())

    def _hand_on(self, work: Pass, result: Tensor) -> None:
        """Keep the result of a pass for the pass that continues with it, or until it is sent."""
        receiver = self.pipeline.receiver(work)
        assert receiver is not None
        self.handed_on[receiver] = result

    def _exec_send(self, kind: Kind, buffer_id: int, chunk: int) -> None:
        work = self._pass(kind, buffer_id, chunk)
        receiver = self.pipeline.receiver(work)
        assert receiver is not None
        self.channels.send(work, self.handed_on.pop(receiver))

    def _exec_reduce_grads(
        self, kind: Kind | None = None, buffer_id: int = 0, chunk: int = 0
    ) -> None:
        """Reduce the gradients of a group that ends with a pass; without a pass, end the step's."""
        if kind is None:
            self.gradients.finish()
        else:
            self.gradients.end_group()

    @torch.no_grad()
    def _exec_optimizer_step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Average the loss over the data ranks, and update the weights.

        DeepSpeed averages the loss after the update. It would then wait for the gathers that the
        update starts, because collectives of a group run one after the other.
        """
        self.loss_of_step = super()._aggregate_total_loss()
        super()._exec_optimizer_step(lr_kwargs)

    def _aggregate_total_loss(self) -> Tensor:
        """Return the mean loss of the step, which `_exec_optimizer_step` has computed."""
        return self.loss_of_step

    _INSTRUCTION_MAP: ClassVar[dict] = {
        schedule.LoadMicroBatch: _exec_load_micro_batch,
        schedule.RecvActivation: partial(_exec_receive, kind=FORWARD),
        schedule.RecvGrad: partial(_exec_receive, kind=BACKWARD),
        schedule.CommitP2P: _exec_commit_p2p,
        schedule.ForwardPass: run_forward,
        schedule.BackwardPass: run_backward,
        WeightPass: run_weight,
        schedule.SendActivation: partial(_exec_send, kind=FORWARD),
        schedule.SendGrad: partial(_exec_send, kind=BACKWARD),
        schedule.ReduceGrads: _exec_reduce_grads,
        schedule.OptimizerStep: _exec_optimizer_step,
    }
