"""Use every route, group and kernel of a step once, before the first receive is posted.

A posted receive is a kernel that runs until its message arrives. A call that waits for the whole
device in the meantime (compiling or loading a kernel, autotuning, cudaFree) waits for that message
too. If the peer needs the result of this very pass before it can send, the stages hang. They also
hang if two stages first use two groups in different orders, because the first collective of a group
blocks the host.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from models.layer_specs import observed_scores
from models.parallel.micro_batch_info import MicroBatchInfo
from threefold.pipeline.passes import BACKWARD, FORWARD, WEIGHT, Pass

if TYPE_CHECKING:
    from threefold.pipeline.engine import ScheduledEngine

MICRO_BATCHES = 2  # the second one uses the kernels that add to an existing loss and gradients


def warm_up(
    engine: "ScheduledEngine",
    tokens: Tensor | None,
    labels: Tensor | None,
    info: MicroBatchInfo,
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
        info: the information about a training micro-batch
        note: called before each part with a description, so that a hang is not suspected while
            kernels are compiled
    """
    note("connecting stages")
    engine.channels.connect()
    inputs = _on_device(tokens, engine.device), _on_device(labels, engine.device)
    engine.module.train()
    _run_passes(engine, inputs, info, note)
    note("warming up: reduction of gradients")
    engine.gradients.finish()  # the next step's first gradients replace these
    if engine.grid.optimizer_group is not None:
        note("warming up: group of the optimizer")
        _connect_all(engine.grid.optimizer_group, engine.device)
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
    once more with documents, before its first receive is posted.

    Args:
        engine: the engine, whose stages are connected
        tokens: as for `warm_up`
        labels: as for `warm_up`
        info: the information about a micro-batch of the evaluation
        note: as for `warm_up`
    """
    inputs = _on_device(tokens, engine.device), _on_device(labels, engine.device)
    engine.module.eval()
    with torch.no_grad(), observed_scores(engine.module):
        _run_passes(engine, inputs, replace(info, dropout=None), note)
    engine.module.train()
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)


def _connect_all(group: dist.ProcessGroup, device: torch.device) -> None:
    """Send one number from each rank of a group to each other one; collective."""
    numbers = torch.ones(dist.get_world_size(group), device=device)
    dist.all_to_all_single(torch.empty_like(numbers), numbers, group=group)


def _on_device(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else tensor.to(device)


def _run_passes(
    engine: "ScheduledEngine",
    inputs: tuple[Tensor | None, Tensor | None],
    info: MicroBatchInfo,
    note: Callable[[str], None],
) -> None:
    """Run forward passes and, if gradients are enabled, backward passes of every chunk."""
    # With ZeRO-2, one more micro-batch whose sums are added to those of the first two.
    micro_batches = MICRO_BATCHES + 1 if engine.gradients.sharded else MICRO_BATCHES
    engine.module.take_micro_batch_infos([info] * micro_batches)
    chunks = range(engine.pipeline.chunks)
    kinds = (BACKWARD, WEIGHT) if engine.pipeline.splits else (BACKWARD,)
    engine.group_ends = {
        Pass(kind, engine.stage_id, chunk, number): number == micro_batches - 1
        for chunk in chunks
        for kind in kinds
        for number in range(MICRO_BATCHES - 1, micro_batches)
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
                        engine.gradients.end_group()
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
    if virtual_stage == engine.pipeline.virtual_stages - 1:
        assert labels is not None
        engine.labels[number] = labels


def _begin_backward(engine: "ScheduledEngine", chunk: int, number: int) -> None:
    """Provide the gradient of a chunk's output as the engine would have received it."""
    if engine.pipeline.virtual_stage(engine.stage_id, chunk) < engine.pipeline.virtual_stages - 1:
        work = Pass(BACKWARD, engine.stage_id, chunk, number)
        engine.handed_on[work] = engine.channels.zero_message()
