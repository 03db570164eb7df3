"""Conversion between the settings of a model and the config of transformers."""

import math
from collections.abc import Mapping
from typing import Any

from models.config import SCALING_KEYS, Experts, ModelConfig, RopeScaling
from models.errors import UserError

# Conversion between our scaling of rotary positions and transformers' `rope_parameters`.

THEIR_ROPE_KEYS = {  # our key -> that of transformers, where they differ
    "original_sequence_length": "original_max_position_embeddings",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
}


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """Return transformers' `rope_parameters`."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    values = {
        THEIR_ROPE_KEYS.get(key, key): getattr(scaling, key) for key in SCALING_KEYS[scaling.type]
    }
    given = {key: value for key, value in values.items() if value is not None}
    return {
        "rope_type": scaling.type,
        "rope_theta": config.rope_theta,
        "factor": scaling.factor,
        **given,
    }


def rope_scaling_in(theirs: Mapping[str, Any], positions: int) -> RopeScaling | None:
    """Return the scaling in transformers' `rope_parameters`; None if there is none.

    positions: number of positions of the model, from which transformers derives a missing factor of
        YaRN

    Raises:
        UserError: a value is missing or not valid.
    """
    kind = theirs.get("rope_type")
    if kind not in SCALING_KEYS:
        return None
    factor, original = theirs.get("factor"), theirs.get("original_max_position_embeddings")
    if factor is None and kind == "yarn" and original:
        factor = positions / original
    if not isinstance(factor, (int, float)) or factor < 1:
        raise UserError(
            f"rope_parameters: factor = {factor!r} is not a number of at least 1; use the length "
            f'of the new sequences divided by the original one, such as "factor": 8.0'
        )
    values = {key: theirs.get(THEIR_ROPE_KEYS.get(key, key)) for key in SCALING_KEYS[kind]}
    if kind == "yarn" and values["attention_factor"] is None:
        values["attention_factor"] = _attention_factor(theirs, factor)
    given = {key: value for key, value in values.items() if value is not None}
    return RopeScaling(type=kind, factor=float(factor), **given)


def _attention_factor(theirs: Mapping[str, Any], factor: float) -> float | None:
    """Return the attention factor that `mscale` and `mscale_all_dim` define (DeepSeek-V3).

    Returns:
        None unless both are set
    """
    over, under = theirs.get("mscale"), theirs.get("mscale_all_dim")
    if not (over and under):
        return None
    logarithm = 0.1 * math.log(factor)
    return (over * logarithm + 1.0) / (under * logarithm + 1.0)


# The class of transformers that has the architecture of a model.

LLAMA_LIKE = ("llama", "qwen3", "mixtral", "qwen3_moe", "dots1")
WITH_EXPERTS = ("mixtral", "qwen3_moe", "dots1")
WITH_QK_NORM = ("qwen3", "qwen3_moe", "dots1")

BlockDesign = tuple[str, str, str]  # model.norm, model.positions and model.activation
LLAMA_DESIGN: BlockDesign = ("rmsnorm", "rope", "swiglu")
GPT2_DESIGN: BlockDesign = ("layernorm", "learned", "gelu")
# transformers' name -> ours
OUR_GELU = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}


def family_of(config: ModelConfig) -> str:
    """Return the `model_type` of the class.

    Raises:
        UserError: transformers has no model class with this architecture.
    """
    design = (config.norm, config.positions, config.activation)
    if config.experts is not None:
        return _family_with_experts(config, config.experts)
    name, problems = "", dict[str, str]()  # setting that the class lacks -> setting that it has
    if design == LLAMA_DESIGN:
        if not config.bias:
            return "qwen3" if config.qk_norm else "llama"
        problems["model.bias = true"] = "model.bias = false"
        name = "Llama"
    elif design in (GPT2_DESIGN, (*GPT2_DESIGN[:2], "gelu_erf")):
        if config.kv_heads != config.heads:
            problems[f"model.kv_heads = {config.kv_heads}"] = f"model.kv_heads = {config.heads}"
        if config.head_size is not None:
            problems[f"model.head_size = {config.head_size}"] = "no model.head_size"
        if config.qk_norm:
            problems["model.qk_norm = true"] = "model.qk_norm = false"
        if not problems:
            return "gpt2"
        name = "GPT-2"
    llama, gpt2 = f"{_described(LLAMA_DESIGN)}, model.bias = false (Llama)", _described(GPT2_DESIGN)
    remedy = f"{llama}, or {gpt2} (GPT-2)"
    if problems:
        remedy = f"{' and '.join(problems.values())} ({name})"
    raise UserError(
        f"transformers has no model class with {', '.join([_described(design), *problems])}; use "
        f"{remedy}"
    )


def _described(design: BlockDesign) -> str:
    norm, positions, activation = design
    return (
        f'model.norm = "{norm}", model.positions = "{positions}", model.activation = "{activation}"'
    )


def _family_with_experts(config: ModelConfig, experts: Experts) -> str:
    design = (config.norm, config.positions, config.activation)
    if design != LLAMA_DESIGN:
        problem = _described(design)
    elif experts.router == "sigmoid":
        if config.qk_norm and experts.shared:
            return "dots1"
        missing = "model.qk_norm" if experts.shared else "shared experts"
        problem = f'model.experts.router = "sigmoid" without {missing}'
    elif experts.shared:
        problem = f"model.experts.shared = {experts.shared} without a sigmoid router"
    elif experts.output_scale != 1.0:
        problem = f"model.experts.output_scale = {experts.output_scale} without a sigmoid router"
    elif config.qk_norm:
        return "qwen3_moe"
    elif experts.dense_layers:
        problem = f"model.experts.dense_layers = {experts.dense_layers} without model.qk_norm"
    elif not experts.weights_sum_to_one:
        problem = "model.experts.normalize = false without model.qk_norm"
    else:
        return "mixtral"
    raise UserError(
        f"transformers has no model class with model.experts and {problem}; use the settings of "
        f"recipes/tiny-moe.toml (Mixtral), recipes/qwen3/30b-a3b.toml (Qwen3-MoE) or "
        f"recipes/dots/llm1.toml (Dots1)"
    )


def require(theirs: Mapping[str, Any], known: dict[str, tuple[Any, ...]]) -> None:
    """Check that attributes of transformers' config have values that our model supports.

    Args:
        known: the supported values of some of them

    Raises:
        UserError: an attribute has another value.
    """
    for name, values in known.items():
        if theirs.get(name) not in values:
            raise UserError(
                f"{name} = {theirs.get(name)!r} is not supported; use a model with {values[0]!r}"
            )


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
    """Return the keyword arguments of transformers' config class, including `model_type`.

    Raises:
        UserError: transformers has no model class with this architecture.
    """
    shared = {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initial_std,
    }
    if family_of(config) == "gpt2":
        return shared | {
            "model_type": "gpt2",
            "n_positions": config.sequence_length,
            "n_embd": config.hidden_size,
            "n_layer": config.layers,
            "n_head": config.heads,
            "n_inner": config.ffn_hidden_size,
            "layer_norm_epsilon": config.norm_epsilon,
            "activation_function": "gelu" if config.activation == "gelu_erf" else "gelu_new",
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.attention_dropout,
        }
    return shared | {
        "model_type": family_of(config),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        **expert_settings(config),
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.attention_head_size,
        "max_position_embeddings": config.sequence_length,
        "rope_parameters": rope_parameters(config),
        "rms_norm_eps": config.norm_epsilon,
        "hidden_act": "silu",
        "attention_dropout": config.attention_dropout,
    }


def export_problem(config: ModelConfig) -> str:
    """Return why a model cannot be exported to transformers; empty if it can."""
    try:
        hugging_face_config(config)
    except UserError as problem:
        return str(problem)
    return ""


def model_settings(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of our ModelConfig, given all attributes of transformers' config.

    Raises:
        UserError: our model does not support the architecture; the message names the attribute.
    """
    family = theirs["model_type"]
    if family == "gpt2":
        return _gpt2_settings(theirs)
    if family not in LLAMA_LIKE:
        raise UserError(
            f"model_type = {family!r} is not supported; use {', '.join(LLAMA_LIKE)} or gpt2"
        )
    rope = theirs.get("rope_parameters") or {}
    require(
        theirs,
        {"hidden_act": ("silu",), "attention_bias": (False, None), "mlp_bias": (False, None),
         "use_sliding_window": (False, None)},
    )  # fmt: skip
    kinds = ("default", *SCALING_KEYS)
    if (rope.get("rope_type") or "default") not in kinds:
        raise UserError(
            f"rope_type = {rope['rope_type']!r} is not supported; use a model with one of "
            f"{', '.join(kinds)}"
        )
    require(rope, {"partial_rotary_factor": (1.0, None)})
    head_size = theirs["hidden_size"] // theirs["num_attention_heads"]
    their_head_size = theirs.get("head_dim") or head_size
    return {
        "layers": theirs["num_hidden_layers"],
        "hidden_size": theirs["hidden_size"],
        "heads": theirs["num_attention_heads"],
        "kv_heads": theirs["num_key_value_heads"],
        "ffn_hidden_size": theirs["intermediate_size"],
        "vocab_size": theirs["vocab_size"],
        "sequence_length": theirs["max_position_embeddings"],
        "norm": "rmsnorm",
        "positions": "rope",
        "activation": "swiglu",
        "bias": False,
        "tie_embeddings": theirs["tie_word_embeddings"],
        "qk_norm": family in WITH_QK_NORM,
        "head_size": their_head_size if their_head_size != head_size else None,
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
        "rope_scaling": rope_scaling_in(rope, theirs["max_position_embeddings"]),
        "experts": experts_in(theirs),
        "norm_epsilon": theirs["rms_norm_eps"],
    }


def expert_settings(config: ModelConfig) -> dict[str, Any]:
    """Return the keyword arguments of transformers' config class for experts."""
    experts = config.experts
    if experts is None:
        return {}
    family = family_of(config)
    settings: dict[str, Any] = {
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
    }
    if family != "dots1":
        settings["router_aux_loss_coef"] = experts.balance_loss
    if family == "mixtral":
        return settings | {"intermediate_size": experts.ffn_hidden_size, "sliding_window": None}
    settings |= {
        "moe_intermediate_size": experts.ffn_hidden_size,
        "norm_topk_prob": experts.weights_sum_to_one,
    }
    if family == "dots1":
        return settings | {
            "n_shared_experts": experts.shared,
            "first_k_dense_replace": experts.dense_layers,
            "routed_scaling_factor": experts.output_scale,
            "n_group": 1,
            "topk_group": 1,
            "sliding_window": None,
        }
    return settings | {
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(experts.dense_layers)),
    }


def experts_in(theirs: Mapping[str, Any]) -> Experts | None:
    """Return the experts in transformers' config; None if the model is dense.

    Raises:
        UserError: our model does not support the architecture; the message names the attribute.
    """
    family = theirs["model_type"]
    if family not in WITH_EXPERTS:
        return None
    if family == "dots1":
        return _experts_of_dots1(theirs)
    settings: dict[str, Any] = {
        "count": theirs["num_local_experts"],
        "per_token": theirs["num_experts_per_tok"],
        "balance_loss": float(theirs["router_aux_loss_coef"]),
    }
    if family == "mixtral":
        require(theirs, {"sliding_window": (None,)})
        ffn = theirs["intermediate_size"]
        return Experts(**settings, ffn_hidden_size=ffn, router="softmax-after-topk")
    dense = theirs.get("mlp_only_layers") or []
    require(
        theirs, {"decoder_sparse_step": (1,), "mlp_only_layers": (list(range(len(dense))), None)}
    )
    return Experts(
        **settings,
        ffn_hidden_size=theirs["moe_intermediate_size"],
        dense_layers=len(dense),
        normalize=theirs["norm_topk_prob"],
    )


def _experts_of_dots1(theirs: Mapping[str, Any]) -> Experts:
    """Return the experts in a config of Dots1, which has DeepSeek-V3's router."""
    for name in ("n_routed_experts", "num_experts_per_tok"):
        if theirs[name] is None:
            raise UserError(f"{name} = None is not supported; use a model with {name} = 8")
    full = (["full_attention"] * theirs["num_hidden_layers"], None)
    require(theirs, {"n_group": (1, None), "topk_group": (1, None), "layer_types": full})
    return Experts(
        count=theirs["n_routed_experts"],
        per_token=theirs["num_experts_per_tok"],
        ffn_hidden_size=theirs["moe_intermediate_size"],
        shared=theirs["n_shared_experts"] or 0,
        dense_layers=theirs["first_k_dense_replace"] or 0,
        router="sigmoid",
        normalize=bool(theirs["norm_topk_prob"]),
        output_scale=float(theirs["routed_scaling_factor"]),
    )


def _gpt2_settings(theirs: Mapping[str, Any]) -> dict[str, Any]:
    require(
        theirs,
        {"activation_function": tuple(OUR_GELU), "scale_attn_weights": (True,),
         "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    )  # fmt: skip
    return {
        "layers": theirs["n_layer"],
        "hidden_size": theirs["n_embd"],
        "heads": theirs["n_head"],
        "kv_heads": theirs["n_head"],
        "ffn_hidden_size": theirs["n_inner"] or 4 * theirs["n_embd"],
        "vocab_size": theirs["vocab_size"],
        "sequence_length": theirs["n_positions"],
        "norm": "layernorm",
        "positions": "learned",
        "activation": OUR_GELU[theirs["activation_function"]],
        "bias": True,
        "tie_embeddings": theirs["tie_word_embeddings"],
        "norm_epsilon": theirs["layer_norm_epsilon"],
    }
