"""Use every route, group and kernel of a step once, before the first receive is posted.

A posted receive is a kernel that runs until its message comes. Whatever waits for the whole device
meanwhile (compiling or loading a kernel, autotuning, cudaFree) waits for that message too, and the
peer may need this very pass before it can send: the stages hang. So does the first collective of a
group, which blocks the host, where two stages first use two groups in different order.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from models.parallel.context import Context

if TYPE_CHECKING:
    from models.pipeline.engine import ScheduledEngine


def warm_up(
    engine: "ScheduledEngine", tokens: Tensor | None, labels: Tensor | None, context: Context
) -> None:
    """Run the passes of one micro-batch and the reduction, without messages; keep nothing.

    Collective: all ranks connect routes, use groups and run chunks in the same order. The weights,
    the optimizer and the gradients are as before.

    Args:
        engine: the engine, before its first step
        tokens: [b, s] where the stage has the start of the model
        labels: [b, s] where the stage has the end of the model
        context: of a training micro-batch
    """
    engine.channels.connect()
    inputs = [each if each is None else each.to(engine.device) for each in (tokens, labels)]
    engine.module.train()
    _run_chunks(engine, *inputs, context)
    for chunk in range(engine.pipeline.chunks):
        engine.gradients.begin(engine.module.parameters_of_chunk(chunk))
    engine.gradients.finish()
    engine.gradients.discard()
    engine.module.eval()
    with torch.no_grad():
        _run_chunks(engine, *inputs, replace(context, dropout=None))
    engine.module.train()
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)


def _run_chunks(
    engine: "ScheduledEngine", tokens: Tensor | None, labels: Tensor | None, context: Context
) -> None:
    engine.module.take_contexts([context])
    boundary = engine.channels.boundary
    for chunk in range(engine.pipeline.chunks):
        position = engine.pipeline.position(engine.stage_id, chunk)
        is_end = position == engine.pipeline.positions - 1
        x = tokens
        if position > 0:
            x = torch.zeros(boundary.shape, dtype=boundary.dtype, device=engine.device)
            x.requires_grad_(torch.is_grad_enabled())
        output = engine.module(x, chunk, labels) if is_end else engine.module(x, chunk)
        if torch.is_grad_enabled():
            torch.autograd.backward(output, None if is_end else torch.zeros_like(output))
            deferred = engine.deferral.take()
            with torch.no_grad():
                for weight, gradient in deferred:
                    engine.gradients.add(weight, gradient())
    engine.module.check_contexts_taken()
