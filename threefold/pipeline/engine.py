"""DeepSpeed's PipelineEngine, running any order of passes with communication in the background.

The state that a forward pass keeps for later passes is stored under its chunk and micro-batch,
until the last pass that needs it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    BufferOpInstruction,
    CommitP2P,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    SendActivation,
    SendGrad,
)
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from models.experts.layer import expert_layers
from models.experts.overlap import Turns
from models.layer_specs import observed_scores
from models.parallel.collectives import matches_by_order
from models.parallel.layers import Deferral, ImmediateAddition, defer_weights
from models.parallel.micro_batch_info import MicroBatchInfo
from threefold.pipeline.channels import Boundary, Channels
from threefold.pipeline.gradients import gradients_of
from threefold.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    Action,
    Kind,
    Pass,
    Pipeline,
    group_ends,
    is_remote,
    last_stage,
    program,
)
from threefold.pipeline.simulation import TimedPass
from threefold.pipeline.stage import Stage
from threefold.pipeline.weight_gathering import WeightGathering

# Use every route, group and kernel of a step once, before the first receive is posted.
#
# A posted receive is a kernel that runs until its message arrives. A call that waits for the whole
# device in the meantime (compiling or loading a kernel, autotuning, cudaFree) waits for that
# message too. If the peer needs the result of this very pass before it can send, the stages hang.
# They also hang if two stages first use two groups in different orders, because the first
# collective of a group blocks the host.

WARM_UP_MICRO_BATCHES = (
    2  # the second one uses the kernels that add to an existing loss and gradients
)


def warm_up(
    engine: "ScheduledEngine",
    tokens: Tensor | None,
    labels: Tensor | None,
    infos: Sequence[MicroBatchInfo],
    *,
    note: Callable[[str], None],
) -> None:
    """Run the passes and the reduction of a short step, without messages and without an update.

    Collective: all ranks connect routes, use groups and run chunks in the same order. The weights
    and the optimizer are not changed, and the gradients are discarded.

    Args:
        engine: the engine, before its first step
        tokens: [b, s] where the stage has the start of the model
        labels: [b, s] where the stage has the end of the model
        infos: the information about a training micro-batch of each kind
        note: called before each part with a description, so that a hang is not suspected while
            kernels are compiled
    """
    note("connecting stages")
    engine.channels.connect()
    inputs = _on_device(tokens, engine.device), _on_device(labels, engine.device)
    engine.module.train()
    _run_passes(engine, inputs, infos, note)
    note("warming up: reduction of gradients")
    engine.gradients.finish()  # the next step's first gradients replace these
    if engine.grid.optimizer_group is not None:
        note("warming up: group of the optimizer")
        group = engine.grid.optimizer_group
        numbers = torch.ones(dist.get_world_size(group), device=engine.device)
        dist.all_to_all_single(torch.empty_like(numbers), numbers, group=group)
    for info in infos:
        warm_up_evaluation(engine, tokens, labels, info, note=note)


def warm_up_evaluation(
    engine: "ScheduledEngine",
    tokens: Tensor | None,
    labels: Tensor | None,
    info: MicroBatchInfo,
    *,
    note: Callable[[str], None],
) -> None:
    """Run forward passes as in an evaluation, without messages; collective.

    An evaluation whose micro-batches have documents, in a run whose training has none, needs it
    once more with documents, before its first receive is posted. The arguments are those of
    `warm_up`, with the information about one micro-batch of the evaluation.
    """
    inputs = _on_device(tokens, engine.device), _on_device(labels, engine.device)
    engine.module.eval()
    with torch.no_grad(), observed_scores(engine.module):
        _run_passes(engine, inputs, [replace(info, dropout=None)], note)
    engine.module.train()
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)


def _on_device(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _run_passes(
    engine: "ScheduledEngine",
    inputs: tuple[Tensor | None, Tensor | None],
    infos: Sequence[MicroBatchInfo],
    note: Callable[[str], None],
) -> None:
    """Run forward passes and, if gradients are enabled, backward passes of every chunk."""
    of_micro_batches = [info for info in infos for _ in range(WARM_UP_MICRO_BATCHES)]
    groups = 1
    if engine.gradients.sharded:  # one more, whose gradients are added to those of the first group
        groups = 2
        of_micro_batches.append(infos[0])
    micro_batches = len(of_micro_batches)
    engine.module.take_micro_batch_infos(of_micro_batches)
    chunks = range(engine.pipeline.virtual_stages)
    kinds = (BACKWARD, WEIGHT) if engine.pipeline.splits else (BACKWARD,)
    engine.group_ends = {
        Pass(kind, engine.stage_id, chunk, number): number == micro_batches - 1
        for chunk in chunks
        for kind in kinds
        for number in range(micro_batches - groups, micro_batches)
    }
    engine.partners = {}
    engine.total_loss, engine.fwd_outputs = None, []
    for number in range(micro_batches):
        for chunk in chunks:
            note("warming up: forward pass")
            _begin_forward(engine, inputs, chunk, number)
            forward = partial(engine.run_forward, number, chunk)
            if engine.pipeline.paired and number and torch.is_grad_enabled():
                # Kernels need handles and workspaces in the thread of paired passes, too.
                engine.turns.take(forward, lambda: None)
            else:
                forward()
            if torch.is_grad_enabled():
                note("warming up: backward pass")
                _begin_backward(engine, chunk, number)
                for kind in kinds:
                    run = engine.run_backward if kind == BACKWARD else engine.run_weight
                    run(number, chunk)
                    work = Pass(kind, engine.stage_id, chunk, number)
                    if work in engine.group_ends:
                        engine.gradients.end_reducing_pass()
            for result in engine.handed_on.values():
                engine.channels.part_to_send(result)
            engine.handed_on.clear()
    engine.total_loss, engine.fwd_outputs = None, []
    engine.module.check_all_taken()


def _begin_forward(
    engine: "ScheduledEngine",
    inputs: tuple[Tensor | None, Tensor | None],
    chunk: int,
    number: int,
) -> None:
    """Provide the input of a forward pass as the engine would have received it."""
    tokens, labels = inputs
    virtual_stage = engine.pipeline.virtual_stage(engine.stage_id, chunk)
    if virtual_stage == 0:
        assert tokens is not None
        engine.tokens[number] = tokens
    else:
        work = Pass(FORWARD, engine.stage_id, chunk, number)
        message = engine.channels.zero_message()
        # Of zeros, all tokens would choose the same experts, and ranks without tokens no kernels.
        same = torch.Generator(message.device).manual_seed(number)  # on all tensor ranks
        engine.handed_on[work] = message.normal_(generator=same)
    if virtual_stage == engine.pipeline.total_virtual_stages - 1:
        assert labels is not None
        engine.labels[number] = labels


def _begin_backward(engine: "ScheduledEngine", chunk: int, number: int) -> None:
    """Provide the gradient of a chunk's output as the engine would have received it."""
    if (
        engine.pipeline.virtual_stage(engine.stage_id, chunk)
        < engine.pipeline.total_virtual_stages - 1
    ):
        work = Pass(BACKWARD, engine.stage_id, chunk, number)
        engine.handed_on[work] = engine.channels.zero_message()


# Translate an order of passes into DeepSpeed's instructions: receive, compute, send, reduce.


class WeightPass(BufferOpInstruction):
    """The weight gradients of a backward pass that was split."""


COMPUTE: dict[Kind, type[PipeInstruction]] = {
    FORWARD: ForwardPass,
    BACKWARD: BackwardPass,
    WEIGHT: WeightPass,
}
RECEIVE: dict[Kind, type[PipeInstruction]] = {FORWARD: RecvActivation, BACKWARD: RecvGrad}
SEND: dict[Kind, type[PipeInstruction]] = {FORWARD: SendActivation, BACKWARD: SendGrad}


class PassSchedule(PipeSchedule):
    """The instructions of a stage in a step, as DeepSpeed's engines read them.

    RecvActivation and RecvGrad start to receive, as `schedules.program` orders them, and CommitP2P
    waits for one message; the last one waits for all sends of the step. ReduceGrads of a pass
    follows the last pass of a group of micro-batches, when the group's gradients are reduced over
    the data ranks (`gradients.py`); without a pass it ends all reductions, tied weights included.
    DeepSpeed's buffer is a micro-batch here.
    """

    def __init__(self, pipeline: Pipeline, stage: int, *, training: bool):
        super().__init__(pipeline.micro_batches, pipeline.stages, stage)
        self.pipeline, self.training = pipeline, training

    def num_pipe_buffers(self) -> int:
        """Return 0: the engine keeps tensors in flight by their pass."""
        return 0

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Return the instructions of one action after the other, then those that end the step."""
        return iter(self._steps)

    @cached_property
    def _steps(self) -> list[list[PipeInstruction]]:
        return list(self._make_steps())

    def _make_steps(self) -> Iterator[list[PipeInstruction]]:
        order = self.pipeline.orders_of_step(training=self.training)[self.stage_id]
        ends = group_ends(order, self.pipeline.reduce_every)
        for action, work in program(self.pipeline, self.stage_id, training=self.training):
            yield list(self._instructions(action, work))
            is_sent = is_remote(self.stage_id, self.pipeline.receiver(work))
            is_over = action == (Action.SEND if is_sent else Action.COMPUTE)
            if is_over and work in ends:
                yield [ReduceGrads(kind=work.kind, buffer_id=work.micro_batch, chunk=work.chunk)]
        yield [CommitP2P()]
        if self.training:
            yield [ReduceGrads(), OptimizerStep()]

    def _instructions(self, action: Action, work: Pass) -> Iterator[PipeInstruction]:
        arguments = {"buffer_id": work.micro_batch, "chunk": work.chunk}
        if action == Action.POST_RECEIVE:
            yield RECEIVE[work.kind](**arguments)
        elif action == Action.WAIT:
            yield CommitP2P(kind=work.kind, **arguments)
        elif action == Action.SEND:
            yield SEND[work.kind](**arguments)
        else:
            if work.kind == FORWARD and self._reads_data(work):
                yield LoadMicroBatch(**arguments)
            yield COMPUTE[work.kind](**arguments)

    def _reads_data(self, work: Pass) -> bool:
        """Return True if a pass is the first of its micro-batch on the stage that needs tokens."""
        virtual_stage = self.pipeline.virtual_stage(work.stage, work.chunk)
        if virtual_stage == 0:
            return True
        first_stage, _ = self.pipeline.stage_and_chunk(0)
        return virtual_stage == self.pipeline.total_virtual_stages - 1 and work.stage != first_stage


InstructionObserver = Callable[[PipeInstruction], AbstractContextManager[None]]


@dataclass
class SavedMicroBatch:
    """A micro-batch in a chunk, between its passes.

    x: the input of the forward pass, whose gradient the previous chunk waits for
    end: the loss, or the node of the graph at which the backward pass begins, without the output
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
        chunks = range(self.pipeline.virtual_stages)
        parameters = {chunk: list(stage.parameters_of_chunk(chunk)) for chunk in chunks}
        self.gradients = gradients_of(self, parameters, sharded=shard_gradients)
        self.gathering = WeightGathering(
            stage.layers_of_chunks, self.gradients.bucket_of, self.optimizer
        )
        self.deferral = Deferral()
        if self.pipeline.splits:
            defer_weights(self.module, self.deferral)
        elif self.gradients.adds_in_matmul():
            defer_weights(self.module, ImmediateAddition(self.gradients.add))
        experts = expert_layers(self.module)
        self.turns = experts[0].expert.turns if experts else Turns()
        self.schedules: dict[tuple[Pipeline, bool], PassSchedule] = {}
        self.needs_warm_up = matches_by_order() and self.pipeline.stages > 1
        self._begin_step()

    def _configure_distributed_model(self, model: nn.Module) -> None:
        """Let the optimizer divide its state among the right ranks.

        DeepSpeed divides experts among the ranks that hold the same ones, but only if
        `has_moe_layers` is set, which it does for its own modules. It divides all other weights
        among the ranks of `seq_data_parallel_group`.
        """
        super()._configure_distributed_model(model)
        if self.mpu.dp_shard_group is not None:
            self.seq_data_parallel_group = self.mpu.dp_shard_group
        self.has_moe_layers = any(is_moe_param(parameter) for parameter in model.parameters())

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches of a step, and the order of passes with it."""
        super().set_train_batch_size(train_batch_size)
        self.pipeline = replace(self.pipeline, micro_batches=self.micro_batches)
        self.channels.set_pipeline(self.pipeline)

    def warm_up(
        self,
        tokens: Tensor | None,
        labels: Tensor | None,
        infos: Sequence[MicroBatchInfo],
        *,
        note: Callable[[str], None],
    ) -> None:
        """Use every route, group and kernel once, before the first step; see `warm_up`."""
        warm_up(self, tokens, labels, infos, note=note)
        self.needs_warm_up = False

    def warm_up_evaluation(
        self, tokens: Tensor | None, labels: Tensor | None, info: MicroBatchInfo
    ) -> None:
        """Use the kernels of an evaluation once, before its first receive is posted."""
        if matches_by_order() and self.pipeline.stages > 1:
            warm_up_evaluation(self, tokens, labels, info, note=lambda activity: None)

    def _begin_step(self) -> None:
        self.in_flight: dict[tuple[int, int], SavedMicroBatch] = {}
        self.deferred: dict[tuple[int, int], list] = {}  # for the weights' passes
        self.handed_on: dict[
            Pass, Tensor
        ] = {}  # inputs of coming passes; and results to send, by the pass that receives them
        self.labels: dict[int, Tensor] = {}
        self.tokens: dict[int, Tensor] = {}
        self.waiting_forward_passes: dict[
            Pass, Callable[[], None]
        ] = {}  # forward passes, by their partners
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
        return last_stage(
            self.pipeline.schedule, self.pipeline.stages, self.pipeline.virtual_stages
        )

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
        assert not (
            self.in_flight or self.deferred or self.handed_on or self.waiting_forward_passes
        )

    def _pass(self, kind: Kind, buffer_id: int, chunk: int) -> Pass:
        return Pass(kind, self.stage_id, chunk, buffer_id)

    def _is_end(self, chunk: int) -> bool:
        """Return True for the last virtual stage, which computes the loss."""
        return (
            self.pipeline.virtual_stage(self.stage_id, chunk)
            == self.pipeline.total_virtual_stages - 1
        )

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
            self.waiting_forward_passes[partner] = partial(self._run_forward, buffer_id, chunk)
        else:
            self._run_forward(buffer_id, chunk)

    def _run_forward(self, buffer_id: int, chunk: int) -> None:
        if self.device.type == "cuda":  # the thread of paired passes starts on device 0
            torch.cuda.set_device(self.device)
        work = self._pass(FORWARD, buffer_id, chunk)
        if self.pipeline.needed(work) is None:
            x = self.tokens.pop(buffer_id)
        else:
            x = self.handed_on.pop(work).requires_grad_(torch.is_grad_enabled())
        if self._is_end(chunk):
            output = self.module(x, chunk, self.labels.pop(buffer_id))
            loss = output.detach()
            self.fwd_outputs.append(loss)  # this list and total_loss are what DeepSpeed reads
            self.total_loss = loss if self.total_loss is None else self.total_loss + loss
        else:
            output = self.module(x, chunk)
            self._hand_on(work, output.detach())
        if torch.is_grad_enabled():
            end = output if self._is_end(chunk) else get_gradient_edge(output)
            self.in_flight[chunk, buffer_id] = SavedMicroBatch(x, end)

    def run_backward(self, buffer_id: int, chunk: int) -> None:
        """Run the backward pass, without the weight gradients if the schedule splits it."""
        forward = self.waiting_forward_passes.pop(self._pass(BACKWARD, buffer_id, chunk), None)
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
            self.gradients.begin_reducing_pass(BACKWARD, chunk, is_last=is_last)
        if self._is_end(chunk):
            loss = self.optimizer.scale_if_loss(passing.end / self.micro_batches)
            torch.autograd.backward(loss)
        else:
            torch.autograd.backward(passing.end, self.handed_on.pop(work))
        self.gradients.take_after_pass()
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
            self.gradients.begin_reducing_pass(WEIGHT, chunk, is_last=self.group_ends[work])
        while deferred:  # pop, so that the inputs of a gradient are freed before the next
            weight, gradient = deferred.pop()
            self.gradients.add(weight, gradient)

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
        """Reduce what the last pass of a group has not; without a pass, end all reductions."""
        if kind is None:
            self.gradients.finish()
        else:
            self.gradients.end_reducing_pass()

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


# Recordings of the instructions of a pipeline's engine, with their times.

KIND_OF_INSTRUCTION = {instruction: kind for kind, instruction in COMPUTE.items()}


class Event(NamedTuple):
    """An instruction of the engine and its times.

    start, end: seconds on the monotonic clock of this host, which all its processes share; on a
        GPU the host waits for the device after each instruction
    kind: the kind of the pass, if the instruction computes one
    """

    instruction: str
    kind: Kind | None
    chunk: int | None
    micro_batch: int | None
    start: float
    end: float


class EventRecorder:
    """The events of an engine, from its creation until `stop`."""

    def __init__(self, engine: ScheduledEngine):
        self.engine = engine
        self.events: list[Event] = []
        engine.observers.append(self._observe)

    def clear(self) -> None:
        """Discard the events that were recorded so far."""
        self.events = []

    def stop(self) -> None:
        """Stop recording."""
        self.engine.observers.remove(self._observe)

    @contextmanager
    def _observe(self, instruction: PipeInstruction) -> Iterator[None]:
        start = self._now()
        yield
        arguments = instruction.kwargs
        self.events.append(
            Event(
                instruction=instruction.name,
                kind=KIND_OF_INSTRUCTION.get(type(instruction)),
                chunk=arguments.get("chunk"),
                micro_batch=arguments.get("buffer_id"),
                start=start,
                end=self._now(),
            )
        )

    def _now(self) -> float:
        if self.engine.device.type == "cuda":
            # Synchronizing the whole device would wait for receives that were posted ahead, whose
            # messages may depend on later instructions of this rank.
            torch.cuda.current_stream(self.engine.device).synchronize()
        return time.perf_counter()


def passes_of(events: Iterable[Event], stage: int) -> list[TimedPass]:
    """Return the passes among the events of a stage."""
    passes = []
    for event in events:
        if event.kind is not None:
            assert event.chunk is not None and event.micro_batch is not None
            work = Pass(event.kind, stage, event.chunk, event.micro_batch)
            passes.append(TimedPass(work, event.start, event.end))
    return passes
