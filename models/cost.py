"""Costs of a model: parameters, FLOPs, logits. Used by the planner, the model and the metrics."""

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from models.config import ModelConfig

# Maximum number of logits that the loss computes at a time, by kind of device. With a vocabulary of
# 128k it allows 512 tokens on a CPU, where larger matmuls are not faster, and 2,048 on a GPU, where
# matmuls of 512 tokens are bound by reading the weights.
MAX_LOGITS = {"cpu": 2**26, "cuda": 2**28}
# The loss sums the gradients of the output matrix of more parts than these in fp32, because the
# rounding of each sum to 16 bits would add up.
MAX_PARTS_IN_16_BITS = 64
NEWTON_SCHULZ_ITERATIONS = 5  # for an update of Muon
MUON_ROUND_ELEMENTS = 2**25  # of matrices that are exchanged together, on average per rank
MUON_BATCH_ELEMENTS = 2**24  # of matrices of equal shape that are orthogonalized together


def parameter_count(config: ModelConfig) -> int:
    """Return the parameters of the model, without padding; a tied embedding counts once.

    Those of prediction modules are included.
    """
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    blocks = sum(block_parameters(model) * n for model, n in kinds_of_layers(config).items())
    blocks += config.prediction_depth * prediction_parameters(config)
    return blocks + norm_parameters(config) + position_parameters(config) + embeddings


@lru_cache
def kinds_of_layers(config: ModelConfig) -> Mapping[ModelConfig, int]:
    """Return the number of layers of each kind, beginning with the kind of the last layer.

    A kind is the same model with all layers like these, as in `ModelConfig.uniform_models`.
    """
    return Counter(reversed(config.uniform_models))


def active_parameter_count(config: ModelConfig) -> int:
    """Return the parameters that compute a token: of the experts of a layer only `per_token`."""
    if config.experts is None:
        return parameter_count(config)
    idle = config.experts.count - config.experts.per_token
    return parameter_count(config) - config.routed_layers * idle * expert_parameters(config)


def expert_parameters(config: ModelConfig) -> int:
    """Return the parameters of one expert."""
    assert config.experts is not None
    biases = config.activation_columns(config.experts.ffn_hidden_size) + config.hidden_size
    return expert_weights(config) + (biases if config.bias else 0)


def expert_weights(config: ModelConfig) -> int:
    """Return the parameters in the matrices of one expert."""
    assert config.experts is not None
    f = config.experts.ffn_hidden_size
    return config.hidden_size * (config.activation_columns(f) + f)


def block_parameters(config: ModelConfig, tensor: int = 1, expert: int = 1) -> int:
    """Return the parameters of the last block on each of `tensor` x `expert` ranks.

    Weights of matmuls are split; norms, the router and the biases of row-parallel layers are
    replicated (Shoeybi et al. 2019, arXiv 1909.08053, section 3). For other blocks, `config` is
    that of their kind (`kinds_of_layers`).
    """
    parameters = _common_parameters(config, tensor)
    if config.experts is not None:
        biases = config.experts.has_bias + config.bias
        parameters += config.experts.count * (config.hidden_size + biases)  # the router
        parameters += routed_parameters(config, tensor, expert)
    return parameters


def prediction_parameters(config: ModelConfig, tensor: int = 1, expert: int = 1) -> int:
    """Return the parameters of a prediction module on each of `tensor` x `expert` ranks.

    All tensor ranks hold the projection.
    """
    block = block_parameters(kind_of_predictions(config), tensor, expert)
    return block + projection_parameters(config) + 3 * norm_parameters(config)


def projection_parameters(config: ModelConfig) -> int:
    """Return the parameters of the projection of a prediction module: [h, 2h]."""
    return 2 * config.hidden_size**2


def kind_of_predictions(config: ModelConfig) -> ModelConfig:
    """Return the kind of the layers of prediction modules, that of the last layer."""
    return next(iter(kinds_of_layers(config)))


def routed_parameters(config: ModelConfig, tensor: int = 1, expert: int = 1) -> int:
    """Return the parameters of a block's experts on each of `tensor` x `expert` ranks."""
    if config.experts is None:
        return 0
    return config.experts.count // (tensor * expert) * expert_parameters(config)


def _common_parameters(config: ModelConfig, tensor: int) -> int:
    """Return the parameters of one block on each tensor rank, without router and experts."""
    h, mlp = config.hidden_size, config.gate_and_up_size
    matrices = attention_matrices(config)
    split = sum(rows * columns for name, (rows, columns) in matrices.items() if name not in DOWN)
    split += h * (mlp + config.mlp_size) + mlp * config.bias
    if config.has_qkv_bias:
        split += config.query_size + 2 * config.key_value_size
    held_by_all = norms_per_block(config) * norm_parameters(config)
    for name, (rows, columns) in matrices.items():
        held_by_all += rows * columns if name in DOWN else 0
    if config.latent is not None:  # the norms of the latents
        held_by_all += config.latent.key_value_rank + (config.latent.query_rank or 0)
    held_by_all += h * config.has_attention_output_bias
    held_by_all += h * (config.bias and config.mlp_size > 0)
    if config.attention_sinks:
        split += config.heads
    if config.qk_norm and config.qk_norm_over == "projection":
        split += config.query_size + config.key_value_size
    elif config.qk_norm:
        held_by_all += 2 * config.attention_head_size
    return split // tensor + held_by_all


DOWN = ("q_down", "kv_down")  # the matrices of the attention that all tensor ranks hold


def attention_matrices(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return the matrices of a layer's attention: rows and columns by name."""
    h, latent = config.hidden_size, config.latent
    output = (h, config.attention_output_size)
    if latent is None:
        key = (config.key_value_size, h)
        return {"q": (config.query_size, h), "k": key, "v": key, "output": output}
    queries = {"q": (config.query_size, h)}
    if latent.query_rank is not None:
        queries = {
            "q_down": (latent.query_rank, h),
            "q_up": (config.query_size, latent.query_rank),
        }
    rows = config.heads * (config.attention_head_size + latent.value_size)
    return queries | {
        "kv_down": (config.latent_columns, h),
        "kv_up": (rows, latent.key_value_rank),
        "output": output,
    }


def sends_latents(config: ModelConfig, tensor: int, *, shares: int = 1) -> bool:
    """Return True if context ranks exchange latents; False: keys and values.

    A rank receives keys and values of its heads only, but the latents serve all heads. Keys and
    values are sent in one tensor, so that values have as many columns as keys.

    Args:
        tensor: number of tensor ranks
        shares: number of context ranks that divide the heads, with Ulysses; otherwise 1
    """
    keys_and_values = 2 * config.query_size // (tensor * shares)
    return config.latent is not None and config.latent_columns < keys_and_values


def context_columns(config: ModelConfig, tensor: int, *, shares: int = 1) -> float:
    """Return the columns that context ranks exchange for a token: keys and values, or latents.

    Args:
        tensor: number of tensor ranks
        shares: as in `sends_latents`
    """
    if sends_latents(config, tensor, shares=shares):
        return config.latent_columns
    keys = config.key_value_size if config.latent is None else config.query_size
    return 2 * keys / tensor


def norms_per_block(config: ModelConfig) -> int:
    """Return the number of norms over the hidden size in a block."""
    return 4 if config.norm_placement == "both" else 2


def hidden_matrices(config: ModelConfig) -> dict[tuple[int, int], int]:
    """Return the number of matrices inside the layers by shape, rows x columns.

    These are the matrices that Muon updates: q, k, v, gate and up count separately; embeddings,
    output layer and routers do not count.
    """
    h = config.hidden_size
    inputs = config.activation_columns(1)  # gate and up, or only up
    counts: Counter[tuple[int, int]] = Counter()
    for shape in attention_matrices(config).values():
        counts[shape] += config.layers + config.prediction_depth
    if config.prediction_depth:
        counts[h, 2 * h] += config.prediction_depth
    predictions = (kind_of_predictions(config),) * config.prediction_depth
    for model in (*config.uniform_models, *predictions):
        mlps = {model.mlp_size: 1} if model.mlp_size else {}
        if model.experts is not None:
            f = model.experts.ffn_hidden_size
            mlps[f] = mlps.get(f, 0) + model.experts.count
        for f, count in mlps.items():
            counts[f, h] += inputs * count
            counts[h, f] += count
    return dict(counts)


def hidden_matrix_parameters(config: ModelConfig) -> int:
    """Return the parameters in the matrices inside the layers."""
    return sum(rows * columns * n for (rows, columns), n in hidden_matrices(config).items())


def checkpoint_elements(config: ModelConfig, optimizer: str, *, has_average: bool = False) -> int:
    """Return the elements of weights and optimizer state: two states with AdamW, one with Muon.

    has_average: the average of the weights is one more state of every parameter
    """
    with_momentum = hidden_matrix_parameters(config) if optimizer == "muon" else 0
    return (3 + has_average) * parameter_count(config) - with_momentum


def norm_parameters(config: ModelConfig) -> int:
    """Return the parameters of one norm over the hidden size."""
    return config.hidden_size if config.norm == "rmsnorm" else 2 * config.hidden_size


def position_parameters(config: ModelConfig) -> int:
    """Return the parameters of learned positions, 0 if the model has none."""
    return config.sequence_length * config.hidden_size if config.positions == "learned" else 0


def flops_per_token(config: ModelConfig) -> float:
    """Return the FLOPs of one token's forward and backward pass, without recomputation.

    Only matmuls count, with two FLOPs per multiply-add, and the backward pass counts twice the
    forward pass. Prediction modules and their logits count, too. Attention counts in full, although
    at least half of it is masked, and a sliding window in proportion to its unmasked scores
    (`attention_columns`). This is equation 3 of Narayanan et al. 2021 (arXiv 2104.04473) without
    its recomputation, generalised to grouped-query attention, windows, gated MLPs and experts, of
    which only those that compute the token count. `tflops_per_gpu` and `mfu` are computed from it.
    """
    multiply_adds = sum(block_multiply_adds(m) * n for m, n in kinds_of_layers(config).items())
    multiply_adds += config.prediction_depth * prediction_multiply_adds(config)
    return 3 * 2 * (multiply_adds + (1 + config.prediction_depth) * head_multiply_adds(config))


def recomputed_flops_per_token(config: ModelConfig, recompute: str) -> float:
    """Return the FLOPs that are recomputed for a token's backward pass.

    "full": the forward pass of all blocks and prediction modules (Narayanan et al. 2021, equation
    3); "selective": that of the attention core (Korthikanti et al. 2022, arXiv 2205.05198,
    appendix A), which begins at the latents if the model has them.
    """
    if recompute == "full":
        heads = 1 + config.prediction_depth
        return flops_per_token(config) / 3 - 2 * heads * head_multiply_adds(config)
    if recompute != "selective":
        return 0
    up = math.prod(attention_matrices(config).get("kv_up", (0,)))
    cores = {m: attention_multiply_adds(m) + up for m in kinds_of_layers(config)}
    predicted = config.prediction_depth * cores[kind_of_predictions(config)]
    return 2 * (predicted + sum(cores[m] * n for m, n in kinds_of_layers(config).items()))


def block_multiply_adds(config: ModelConfig) -> float:
    """Return the multiply-adds of a token's forward pass through the last block.

    For other blocks, `config` is that of their kind (`kinds_of_layers`).
    """
    mlp = config.gate_and_up_size + config.mlp_size
    projections = sum(math.prod(shape) for shape in attention_matrices(config).values())
    total = config.hidden_size * mlp + projections + attention_multiply_adds(config)
    if config.experts is not None:
        total += config.hidden_size * config.experts.count  # the router
        total += config.experts.per_token * expert_weights(config)
    return total


def prediction_multiply_adds(config: ModelConfig) -> float:
    """Return the multiply-adds of a token's forward pass through a prediction module."""
    return block_multiply_adds(kind_of_predictions(config)) + projection_parameters(config)


def head_multiply_adds(config: ModelConfig) -> int:
    """Return the multiply-adds of a token's logits."""
    return config.hidden_size * config.vocab_size


def attention_multiply_adds(config: ModelConfig) -> float:
    """Return the multiply-adds of a token's attention scores and values in the last block."""
    return attention_columns(config) * (config.query_size + config.attention_output_size)


def attention_columns(config: ModelConfig) -> float:
    """Return the keys per query that count as computed in the last block's attention.

    Full attention counts all keys of the sequence, twice as many as a query sees on average. A
    window counts twice the keys that a query sees on average, too: with s tokens and a window of
    w, s queries see w s - w^2 / 2 keys, of which a window of s is the full attention.
    """
    return columns_of_window(config.sequence_length, config.window_size(config.layers - 1))


def columns_of_window(length: int, window: int | None) -> float:
    """Return `attention_columns` of a sequence and a window; None: attention without a window."""
    return length if window is None or window >= length else 2 * window - window**2 / length


def tokens_at_a_time(tokens: int, columns: int, device: str) -> int:
    """Return the number of tokens whose logits the loss computes together.

    The tokens are divided into equal parts (the last may be smaller) of at most MAX_LOGITS logits.

    Args:
        columns: vocabulary entries of one tensor rank
        device: kind of device, as in `torch.device.type`; other kinds count as GPUs
    """
    most = MAX_LOGITS.get(device, MAX_LOGITS["cuda"])
    return math.ceil(tokens / math.ceil(tokens * columns / most))


def sums_head_in_fp32(labels: int, columns: int, device: str) -> bool:
    """Return True if the loss sums the gradients of the output matrix in fp32.

    Args:
        labels: tokens of a micro-batch, times the losses per token
        columns: as in `tokens_at_a_time`
    """
    return labels > MAX_PARTS_IN_16_BITS * tokens_at_a_time(labels, columns, device)
