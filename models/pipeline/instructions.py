"""An order of passes as DeepSpeed's instructions: when to receive, compute, send and reduce."""

from collections.abc import Iterator

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

from models.pipeline.order import BACKWARD, FORWARD, WEIGHT, Kind, Pass, Pipeline


class WeightPass(BufferOpInstruction):
    """The weights' part of a backward pass."""


COMPUTE: dict[Kind, type[PipeInstruction]] = {
    FORWARD: ForwardPass,
    BACKWARD: BackwardPass,
    WEIGHT: WeightPass,
}
RECEIVE: dict[Kind, type[PipeInstruction]] = {FORWARD: RecvActivation, BACKWARD: RecvGrad}
SEND: dict[Kind, type[PipeInstruction]] = {FORWARD: SendActivation, BACKWARD: SendGrad}


class PassSchedule(PipeSchedule):
    """What a stage does in a step, as DeepSpeed's engines read it.

    RecvActivation and RecvGrad start to receive, one message before it is needed, and CommitP2P
    waits for it; sends start and are not waited for. ReduceGrads of a chunk comes as soon as its
    last backward pass is over, and the reduction over the data ranks may begin (`gradients.py`);
    without a chunk it ends what was begun, tied weights included. What DeepSpeed calls a buffer is
    a micro-batch here.
    """

    def __init__(self, pipeline: Pipeline, stage: int, *, training: bool):
        super().__init__(pipeline.micro_batches, pipeline.stages, stage)
        self.pipeline, self.training = pipeline, training

    def num_pipe_buffers(self) -> int:
        """None: the engine keeps what is in flight by its pass."""
        return 0

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """The instructions of one pass after the other, then those that end the step."""
        pipeline = self.pipeline
        order = (pipeline.orders if self.training else pipeline.forward_orders)[self.stage_id]
        last_pass = {work.chunk: work for work in order}
        remote = iter([work for work in order if self._is_remote(pipeline.needed(work))])
        awaited = next(remote, None)
        yield from self._receive(awaited)
        for work in order:
            is_received = work == awaited
            if is_received:
                awaited = next(remote, None)
                yield from self._receive(awaited)
            yield list(self._run(work, is_received))
            if self.training and work == last_pass[work.chunk]:
                yield [ReduceGrads(chunk=work.chunk)]
        yield [CommitP2P()]
        if self.training:
            yield [ReduceGrads(), OptimizerStep()]

    def _run(self, work: Pass, is_received: bool) -> Iterator[PipeInstruction]:
        arguments = {"buffer_id": work.micro_batch, "chunk": work.chunk}
        if work.kind == FORWARD and self._reads_data(work):
            yield LoadMicroBatch(**arguments)
        if is_received:
            yield CommitP2P(kind=work.kind, **arguments)
        yield COMPUTE[work.kind](**arguments)
        if self._is_remote(self.pipeline.receiver(work)):
            yield SEND[work.kind](**arguments)

    def _receive(self, work: Pass | None) -> Iterator[list[PipeInstruction]]:
        if work is not None:
            yield [RECEIVE[work.kind](work.micro_batch, chunk=work.chunk)]

    def _is_remote(self, other: Pass | None) -> bool:
        return other is not None and other.stage != self.stage_id

    def _reads_data(self, work: Pass) -> bool:
        """Whether a pass is its stage's first that needs tokens or labels."""
        position = self.pipeline.position(work.stage, work.chunk)
        if position == 0:
            return True
        first_stage, _ = self.pipeline.place(0)
        return position == self.pipeline.positions - 1 and work.stage != first_stage
