"""Translate an order of passes into DeepSpeed's instructions: receive, compute, send, reduce."""

from collections.abc import Iterator
from functools import cached_property

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

from threefold.pipeline.communication import Action, is_remote, program
from threefold.pipeline.passes import BACKWARD, FORWARD, WEIGHT, Kind, Pass, group_ends
from threefold.pipeline.schedules import Pipeline


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

    RecvActivation and RecvGrad start to receive, as `communication.program` orders them, and
    CommitP2P waits for one message; sends start and are not waited for. ReduceGrads of a pass
    follows the last pass of a group of micro-batches, when the group's gradients are reduced over
    the data ranks (`gradients/`); without a pass it ends all reductions, tied weights included.
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
        """Return True if a pass is the first of its stage that needs tokens or labels."""
        virtual_stage = self.pipeline.virtual_stage(work.stage, work.chunk)
        if virtual_stage == 0:
            return True
        first_stage, _ = self.pipeline.stage_and_chunk(0)
        return virtual_stage == self.pipeline.virtual_stages - 1 and work.stage != first_stage
