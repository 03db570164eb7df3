"""What a model costs: parameters and FLOPs. The planner and the MFU metric share it."""

from models.config import ModelConfig


def parameter_count(config: ModelConfig) -> int:
    """Parameters of the logical model: no vocabulary padding, a tied embedding counted once."""
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    blocks = config.layers * block_parameters(config)
    return blocks + norm_parameters(config) + position_parameters(config) + embeddings


def block_parameters(config: ModelConfig, tensor: int = 1) -> int:
    """Parameters of one block on each of `tensor` ranks.

    What their matrix products split is split; norms and the biases of row-parallel layers are
    held by every rank (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
    """
    h, f = config.hidden_size, config.ffn_hidden_size
    query_size = config.heads * config.attention_head_size
    kv_size = config.kv_heads * config.attention_head_size
    gate_and_up = 2 * f if config.activation == "swiglu" else f

    columns = query_size + 2 * kv_size + gate_and_up
    split = h * columns + (query_size + f) * h + (columns if config.bias else 0)
    held_by_all = 2 * norm_parameters(config) + (2 * h if config.bias else 0)
    qk_norms = 2 * config.attention_head_size if config.qk_norm else 0
    return split // tensor + held_by_all + qk_norms


def norm_parameters(config: ModelConfig) -> int:
    """Parameters of one norm over the hidden size."""
    return config.hidden_size if config.norm == "rmsnorm" else 2 * config.hidden_size


def position_parameters(config: ModelConfig) -> int:
    """Parameters of learned positions, if the model has them."""
    return config.sequence_length * config.hidden_size if config.positions == "learned" else 0


def flops_per_token(config: ModelConfig) -> float:
    """FLOPs of one token's forward and backward pass, recomputation not counted.

    Matrix products only, two FLOPs per multiply-add, the backward pass twice the forward, and
    attention counted in full although half of it is masked, and more where documents are
    separate: Narayanan et al. 2021 (arXiv 2104.04473), equation 3 without its recomputation,
    generalised to grouped-query attention and gated MLPs. This is the count behind
    `tflops_per_gpu` and `mfu`.
    """
    h, f = config.hidden_size, config.ffn_hidden_size
    query_size = config.heads * config.attention_head_size
    kv_size = config.kv_heads * config.attention_head_size
    gate_and_up = 2 * f if config.activation == "swiglu" else f

    projections = h * (query_size + 2 * kv_size) + query_size * h + h * gate_and_up + f * h
    scores_and_values = 2 * config.sequence_length * query_size
    multiply_adds = config.layers * (projections + scores_and_values) + h * config.vocab_size
    return 3 * 2 * multiply_adds
