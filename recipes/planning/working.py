"""What the operation at hand needs beside what was kept: a block's backward pass, or the loss.

Legend: s sequence (of a context rank), b sequences of a micro-batch, h hidden, f MLP, v vocabulary,
t tensor ranks; bytes.
"""

from models.pipeline.order import SCHEDULES
from recipes.planning.activations import block_bytes
from recipes.planning.job import Job
from recipes.planning.stages import last_stage, tokens_per_micro_batch


def block_working_bytes(job: Job, first_only: bool) -> float:
    """What a block's backward pass needs beside what was kept for it.

    first_only: there are no gradients yet that a weight's new one is added to
    """
    spread, model = job.spread, job.model
    tokens, size = tokens_per_micro_batch(model, spread), job.footprint.weight
    again = 0.0
    if spread.recompute == "full":
        again = spread.recompute_interval * block_bytes(
            model, spread, job.footprint, not job.writes_scores
        )
    needs = 3 * tokens * model.hidden_size + mlp_working_elements(job, first_only)
    if model.attention_dropout:
        scores = tokens * model.sequence_length * model.heads / spread.tensor
        return again + max(size * needs, job.footprint.score * scores)
    return again + size * needs


def mlp_working_elements(job: Job, first_only: bool) -> float:
    """Gradients in an MLP's backward pass beside those that take the place of what was kept.

    Of its output matrix, with that of its input; or of its activation's two inputs, before they
    are one tensor.
    """
    spread, model = job.spread, job.model
    tokens, t = tokens_per_micro_batch(model, spread), spread.tensor
    h, f, gate_and_up = model.hidden_size, model.ffn_hidden_size, model.gate_and_up_size
    if job.footprint.stock_pipeline:
        return (tokens * (gate_and_up + f) + (0 if first_only else h * gate_and_up)) / t
    weight = 0 if SCHEDULES[spread.schedule].splits else h
    return max(f * (tokens + weight), gate_and_up * tokens) / t


def loss_bytes(job: Job, stage: int, first_only: bool) -> float:
    """What the loss needs, or the gradient of the output matrix; only the last stage has them.

    first_only: there was no micro-batch before, whose logits DeepSpeed's pipeline still holds
    """
    spread, model, footprint = job.spread, job.model, job.footprint
    if stage != last_stage(spread):
        return 0.0
    tokens, size = tokens_per_micro_batch(model, spread), footprint.weight
    columns = model.padded_vocab_size(spread.tensor) / spread.tensor
    each = footprint.logit
    if footprint.stock_pipeline:
        if spread.zero_stage > 1:  # without a pipeline, forward: logits, their softmax
            each -= 2 * size
        elif first_only:
            each -= size
    gradient = 0.0
    if not first_only and spread.zero_stage < 2:
        gradient = tokens * columns * footprint.head + size * model.hidden_size * columns
    return max(tokens * columns * each, gradient) + 2 * size * tokens * model.hidden_size


def waiting_loss_bytes(job: Job, stage: int) -> float:
    """What stays of a loss while the stage computes something else before it goes backward.

    Where the model leads back to the first stage, other passes come in between.
    """
    spread, model, footprint = job.spread, job.model, job.footprint
    if stage != last_stage(spread) or not SCHEDULES[spread.schedule].folded:
        return 0.0
    columns = model.padded_vocab_size(spread.tensor) / spread.tensor
    softmax = footprint.logit - footprint.weight  # bytes per logit
    return softmax * columns * tokens_per_micro_batch(model, spread)
