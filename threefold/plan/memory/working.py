"""Working memory of the current operation and of Muon, in addition to the kept activations.

The operation is a block's forward or backward pass, or the loss.

Legend: s sequence (of a context rank), b sequences of a micro-batch, h hidden, f MLP, v vocabulary,
t tensor ranks; bytes.
"""

from functools import lru_cache
from math import ceil

from models.cost import (
    MUON_BATCH_ELEMENTS,
    MUON_ROUND_ELEMENTS,
    context_columns,
    kinds_of_layers,
    sums_head_in_fp32,
    tokens_at_a_time,
)
from threefold.config.deepspeed_json import BYTES
from threefold.pipeline.schedules import SCHEDULES
from threefold.plan.job import Job, once_per_job
from threefold.plan.memory.activations import block_bytes, core_bytes
from threefold.plan.stage_contents import (
    Matrices,
    blocks_share,
    elements_of,
    exchange_precision,
    last_stage,
    matrices_of_layers,
    ranks_of_exchange,
    reached_keys_of,
    routed_rows,
    table_parameters,
    tokens_per_micro_batch,
)

FORWARD_ROWS = 3  # at the end of a block: the outputs of its two halves, and their sum


@once_per_job
def forward_working_bytes(job: Job) -> float:
    """Return the bytes at the end of a block's forward pass, in addition to kept activations."""
    rows = FORWARD_ROWS * row_bytes(job) + routed_forward_bytes(job)
    return max(rows, context_bytes(job, backward=False))


def context_bytes(job: Job, *, backward: bool) -> float:
    """Return the bytes of keys, values and their gradients during attention over context ranks.

    "gather": keys and values of whole sequences, twice while they are put into the order of the
    sequence; backward also their fp32 gradients, twice while they are put into the order of the
    ranks. "ring": keys and values of two ranks; backward also the fp32 gradients of three. Both
    also have an fp32 output of this rank's queries. "ulysses": queries, keys and values before and
    after the exchange. With windows, the keys and values that they reach, twice, and backward
    their fp32 gradients, twice, and those of the rank's own keys.
    """
    if job.layout.context == 1:
        return 0.0
    return max(
        _context_bytes_of_block(job.with_model(kind), backward=backward)
        for kind in kinds_of_layers(job.model)
    )


def _context_bytes_of_block(job: Job, *, backward: bool) -> float:
    model, layout, size = job.model, job.layout, job.footprint.weight
    tokens, t = tokens_per_micro_batch(model, layout), layout.tensor
    keys = tokens * context_columns(model, t)
    queries = tokens * model.query_size / t
    wide = BYTES["fp32"]
    if layout.context_attention == "ulysses":
        return 2 * size * (queries + keys)
    reached = reached_keys_of(model, layout)
    if reached is not None:
        others = reached * layout.micro_sequences * context_columns(model, t)
        gradients = (2 * others + keys) * wide if backward else 0
        held = 2 * size * others + gradients
    elif layout.context_attention == "ring":
        held = keys * (2 * size + (3 * wide if backward else 0))
    else:
        whole = keys * layout.context
        held = whole * (size + (2 * wide if backward else 0))
        return max(2 * size * whole, held + queries * wide)
    return held + queries * wide


def row_bytes(job: Job) -> float:
    """Return the bytes of an unsharded tensor [s, b, h]."""
    tokens = tokens_per_micro_batch(job.model, job.layout)
    return job.footprint.weight * tokens * job.model.hidden_size


def block_working_bytes(job: Job, first_only: bool, *, reducing: bool = False) -> float:
    """Return the bytes that a block's backward pass needs in addition to its kept activations.

    Args:
        first_only: True for the first micro-batch of the step, when there are no earlier gradients
        reducing: True while gradients of weights are reduced, before or after the attention core's
            backward pass
    """
    needs = _needs_of_first_pass(job) if first_only else _needs_of_later_pass(job)
    if job.model.attention_dropout and not reducing:
        needs = max(needs, dropout_core_bytes(job))
    return _recomputed_bytes(job) + needs


@once_per_job
def _recomputed_bytes(job: Job) -> float:
    """Return the bytes of the activations that a block's backward pass computes again."""
    layout, footprint = job.layout, job.footprint
    if layout.recompute != "full":
        return 0.0
    recomputed = layout.recompute_interval * block_bytes(
        job.model, layout, footprint, not job.writes_scores, job.expert_imbalance,
        job.separate_documents,
    )  # fmt: skip
    if not footprint.stock_pipeline:  # the input of the first block was kept
        recomputed -= row_bytes(job) / layout.sequence_ranks
    return recomputed


@once_per_job
def _needs_of_first_pass(job: Job) -> float:
    return _needs_of_pass(job, first_only=True)


@once_per_job
def _needs_of_later_pass(job: Job) -> float:
    return _needs_of_pass(job, first_only=False)


def _needs_of_pass(job: Job, *, first_only: bool) -> float:
    """Return the bytes of a block's backward pass, without its attention's dropout."""
    footprint = job.footprint
    needs = footprint.working_tensors * row_bytes(job)
    needs += footprint.weight * mlp_working_elements(job, first_only)
    needs += routed_working_bytes(job)
    return max(needs, context_bytes(job, backward=True))


def dropout_core_bytes(job: Job) -> float:
    """Return the bytes that an attention core with dropout adds in its backward pass.

    They are the gradients of its scores and, with selective recomputation, the recomputed scores,
    dropout mask and gathered keys. They exist after the gradients of the block's MLP are freed.
    """
    layout, model, footprint = job.layout, job.model, job.footprint
    per_token = footprint.score * model.sequence_length * model.heads
    if layout.recompute == "selective" and footprint.selective is None:
        per_token += core_bytes(model, layout, footprint, fused_attention=False)
    return tokens_per_micro_batch(model, layout) * per_token / layout.tensor


def mlp_working_elements(job: Job, first_only: bool) -> float:
    """Return the peak number of gradient elements that an MLP's backward pass adds.

    Gradients that take the place of a kept activation do not count. The peak is the largest of
    three: the gradients of the output matrix and its input; of the inputs of the activation
    function; of the first matrix and its input, after the activation's backward pass. If weight
    gradients are deferred, only the gradients of activations count, and the input of the output
    matrix is still kept. If matmuls add weight gradients to their sums, only the gradients of
    activations count as well.
    """
    layout, model = job.layout, job.model
    tokens, t = tokens_per_micro_batch(model, layout), layout.tensor
    h, f, gate_and_up = model.hidden_size, model.mlp_size, model.gate_and_up_size
    if job.footprint.stock_pipeline:
        return (tokens * (gate_and_up + f) + (0 if first_only else h * gate_and_up)) / t
    if SCHEDULES[layout.schedule].splits:
        return tokens * (gate_and_up + f) / t
    counted = 0 if adds_in_matmul(job) else 1
    first_matrix = (counted * h * gate_and_up - tokens * f) / t + h * tokens
    return max(f * (tokens + counted * h) / t, tokens * gate_and_up / t, first_matrix)


def adds_in_matmul(job: Job) -> bool:
    """Return True if the weight gradients of linear layers have no tensors of their own.

    See `models/kernels/matmul.py`.
    """
    on_gpu = job.machine.gpu.device == "cuda"
    is_staged = job.footprint.loss_in_parts and not job.shards_in_passes  # Threefold's ZeRO-1 and 2
    in_fp32 = job.footprint.sum_bytes == BYTES["fp32"]
    return on_gpu and is_staged and in_fp32 and job.precision in ("bf16", "fp16")


def routed_forward_bytes(job: Job) -> float:
    """Return the bytes of the outputs of experts at the end of a layer, when they are exchanged."""
    if job.model.experts is None:
        return 0.0
    return job.footprint.weight * routed_rows(job) * job.model.hidden_size


def routed_working_bytes(job: Job) -> float:
    """Return the bytes that the backward pass of the experts adds to the kept activations.

    They are the gradients of the outputs, of the activation's output and input, and of the inputs;
    at most two of them exist at the same time.
    """
    experts = job.model.experts
    if experts is None:
        return 0.0
    h, f = job.model.hidden_size, experts.ffn_hidden_size // job.layout.expert_tensor
    columns = job.model.activation_columns(f)
    return job.footprint.weight * routed_rows(job) * max(2 * h, h + f, f + columns, columns + h)


def loss_bytes(job: Job, stage: int, first_only: bool) -> float:
    """Return the bytes of the loss or of the output matrix's gradient; 0 before the last stage.

    Args:
        first_only: True for the first micro-batch of the step; afterwards, DeepSpeed's pipeline
            still holds the logits of the previous one
    """
    if stage != last_stage(job.layout):
        return 0.0
    if job.footprint.loss_in_parts:
        return loss_in_parts_bytes(job)
    layout, model, footprint = job.layout, job.model, job.footprint
    tokens, size = tokens_per_micro_batch(model, layout), footprint.weight
    columns = model.padded_vocab_size(layout.tensor) / layout.tensor
    per_logit = footprint.logit
    if footprint.stock_pipeline:
        if job.shards_in_passes:  # no pipeline: the forward pass holds logits and softmax
            per_logit -= 2 * size
        elif first_only:
            per_logit -= size
    gradient = 0.0
    if not first_only and not job.shards_in_passes:
        gradient = tokens * columns * footprint.head + size * model.hidden_size * columns
    return max(tokens * columns * per_logit, gradient) + 2 * row_bytes(job)


def loss_in_parts_bytes(job: Job) -> float:
    """Return the working memory of a loss that computes logits for a part of the tokens at a time.

    It consists of the gradient of the output matrix, in fp32 if it has many parts; either the
    logits or a second copy of this gradient for the optimizer, whichever is larger; the input and
    output of the last norm and the gradient of its output; under sequence parallelism, the rows
    gathered from all tensor ranks; and the output of the last prediction module, with the gradients
    of the outputs of the others.
    """
    layout, model = job.layout, job.model
    tokens = tokens_per_micro_batch(model, layout)
    columns = model.padded_vocab_size(layout.tensor) // layout.tensor
    device, footprint = job.machine.gpu.device, job.footprint
    logits = tokens_at_a_time(tokens, columns, device) * columns
    table = table_parameters(model, layout.tensor)
    rows = 2 / layout.sequence_ranks + (2 if layout.sequence_ranks > 1 else 1)
    if model.prediction is not None:
        rows += (1 + model.prediction_depth) / layout.sequence_ranks
    labels = tokens * (1 + model.prediction_depth)
    sums = BYTES["fp32"] if sums_head_in_fp32(labels, columns, device) else footprint.weight
    return sums * table + footprint.weight * max(table, logits) + rows * row_bytes(job)


def waiting_loss_bytes(job: Job, stage: int) -> float:
    """Return the bytes of the loss that a stage keeps until the backward pass.

    The gradients of the head's inputs stay until the backward pass ends. In a folded schedule, the
    last virtual stage is on the first stage, and other passes run between the loss and its backward
    pass.
    """
    layout, model, footprint = job.layout, job.model, job.footprint
    if stage != last_stage(layout):
        return 0.0
    folded = SCHEDULES[layout.schedule].folded
    if footprint.loss_in_parts:
        table = footprint.weight * table_parameters(model, layout.tensor) if folded else 0.0
        inputs = 1 + model.prediction_depth
        return table + inputs * row_bytes(job) / layout.sequence_ranks
    if not folded:
        return 0.0
    columns = model.padded_vocab_size(layout.tensor) / layout.tensor
    softmax = footprint.logit - footprint.weight  # bytes per logit
    return softmax * columns * tokens_per_micro_batch(model, layout)


# Memory that Muon needs while it updates the weights.


def momentum_parameters(job: Job, stage: int) -> float:
    """Return the parameters of a tensor rank in a stage that have one state, not two; 0 with AdamW.

    `optimizer_ranks` ranks share these states.
    """
    if job.optimizer != "muon":
        return 0.0
    return elements_of(matrices_of_layers(job.model, blocks_share(job, stage))) / job.layout.tensor


def muon_working_bytes(job: Job, stage: int) -> float:
    """Return the bytes of exchanged matrices and of Newton-Schulz iterations; 0 with AdamW.

    The sent and received messages of a round and of the following one exist at the same time. Of a
    batch of matrices, the input, the current and the next iterate exist at the same time, and two
    square matrices: A = X X^T and its polynomial.
    """
    if job.optimizer != "muon":
        return 0.0
    matrices = matrices_of_layers(job.model, blocks_share(job, stage))
    elements = _working_elements(matrices, ranks_of_exchange(job))
    return BYTES[exchange_precision(job)] * elements


@lru_cache(maxsize=1024)
def _working_elements(matrices: Matrices, ranks: int) -> float:
    """Return the number of elements of the messages and of the largest batch of matrices."""
    own = elements_of(matrices) / ranks
    of_round = min(own, MUON_ROUND_ELEMENTS)
    messages = (1 if ranks == 1 else 2) * min(own, 2 * of_round)
    most = 0.0
    for shape, count in matrices:
        short, long = sorted(shape)
        of_rank = max(1, ceil(count / ranks))
        batch = max(1, min(of_rank, MUON_BATCH_ELEMENTS // (short * long)))
        most = max(most, batch * (3 * short * long + 2 * short * short))
    return messages + most
