"""The classes of transformers that have the architecture of a model, one table entry each.

To add a family, add an entry to FAMILIES. It lists how the class differs from Llama: the features
that it has, and the names of its attributes and tensors.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.config import ModelConfig
from models.errors import UserError, toml_value

ANY = object()  # every value of a feature
NO_BIAS: frozenset[str] = frozenset()
ATTENTION_BIAS = frozenset({"qkv", "output"})
ALL_BIASES = ATTENTION_BIAS | {"mlp"}
BIAS_KEYS = {"qkv": "qkv_bias", "output": "attention_output_bias"}  # part -> key; default: `bias`

# Features of a model -> values that a class has, unless its entry says otherwise: those of Llama.
LLAMA_FEATURES: dict[str, tuple[Any, ...]] = {
    "norm": ("rmsnorm",),
    "positions": ("rope",),
    "activation": ("swiglu",),
    "norm_placement": ("before",),
    "biases": (NO_BIAS, ATTENTION_BIAS, frozenset({"mlp"}), ALL_BIASES),
    "qk_norm": ("none",),
    "attention_pattern": ("full",),
    "window.rope_theta": (None,),
    "window.rope_scaled": (True,),
    "rope_scaling.type": (ANY,),
    "rope_scaling.truncate": (ANY,),
    "partial_rotary_factor": (1.0,),
    "attention_sinks": (False,),
    "attention_scale": (None,),
    "attention_soft_cap": (None,),
    "logit_soft_cap": (None,),
    "embedding_multiplier": (1.0,),
    "kv_heads": (ANY,),
    "head_size": (ANY,),
    "latent": (False,),
    "norm_epsilon": (ANY,),
    "experts.router": ("none",),
    "experts.shared": (False,),
    "experts.dense_layers": (False,),
    "experts.output_scale": (1.0,),
}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A class of transformers.

    Attributes:
        name: `model_type`
        features: features that differ from LLAMA_FEATURES, with the values that the class has
        bias_attributes: attribute -> parts of the model that have a bias if it is true
        windows: attributes that say which layers have a window: "layer_types" with
            `sliding_window`, "use_sliding_window" with both, only `sliding_window` for all layers
            ("sliding_window"), or "no_rope_layers" for layers without positions
        rope_per_kind: `rope_parameters` has a table for each kind of attention
        experts: our key -> attribute
        constants: attributes that our model cannot change, with the only accepted values
        norm_offset: number that the class adds to the weights of its norms
        unread: attributes that the class ignores, so that any value is accepted
        joined: q, k and v are one tensor, and gate and up are another
        expert_names: prefix of the experts, then gate, up and down; "" for joined experts, which
            are one tensor for all experts
        router: prefix of the router
        has_predictions: files have the modules that predict further tokens as layers after the
            others, in the names of DeepSeek-V3; transformers does not load them
    """

    name: str
    class_name: str
    features: Mapping[str, tuple[Any, ...]]
    bias_attributes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    windows: str = "layer_types"
    rope_per_kind: bool = False
    experts: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    activation_attribute: str = "hidden_act"
    norm_offset: float = 0.0
    joined: bool = False
    expert_names: tuple[str, str, str, str] = ("mlp.", "gate_proj", "up_proj", "down_proj")
    router: str = "mlp.gate"
    has_predictions: bool = False

    def values(self, feature: str) -> tuple[Any, ...]:
        """Return the values of a feature that the class has."""
        return self.features.get(feature, LLAMA_FEATURES[feature])

    @property
    def implied_biases(self) -> frozenset[str]:
        """The parts of a model that have a bias whatever the attributes say."""
        return frozenset.intersection(*self.values("biases"))


MIXTRAL_EXPERTS = {
    "count": "num_local_experts",
    "per_token": "num_experts_per_tok",
    "ffn_hidden_size": "intermediate_size",
    "balance_loss": "router_aux_loss_coef",
}
QWEN3_EXPERTS = MIXTRAL_EXPERTS | {
    "ffn_hidden_size": "moe_intermediate_size",
    "normalize": "norm_topk_prob",
    "dense_layers": "mlp_only_layers",
}
SHARED_EXPERTS = {
    "count": "n_routed_experts",
    "per_token": "num_experts_per_tok",
    "ffn_hidden_size": "moe_intermediate_size",
    "shared": "n_shared_experts",
    "dense_layers": "first_k_dense_replace",
    "normalize": "norm_topk_prob",
    "output_scale": "routed_scaling_factor",
    "groups": "n_group",
    "groups_per_token": "topk_group",
}
SIGMOID_ROUTER = {
    "experts.router": ("sigmoid",),
    "experts.shared": (True,),
    "experts.dense_layers": (False, True),
    "experts.output_scale": (ANY,),
}
OF_ATTENTION = {"attention_bias": ATTENTION_BIAS}
HAS_ATTENTION_BIAS = (NO_BIAS, ATTENTION_BIAS)
NONE = "no "  # before a key that a model does not have
LATENT_FEATURES = {
    "biases": (NO_BIAS,),
    "kv_heads": ("heads",),
    "latent": (True,),
    "norm_epsilon": (1e-6,),  # the norms of the latents have no other
    "attention_scale": (None, "of YaRN"),
}
ROPE_PER_KIND_FEATURES = {
    "window.rope_theta": (ANY,),
    "window.rope_scaled": (ANY,),
    "rope_scaling.truncate": (True,),  # transformers 5.23 does not read it in a table of a kind
}
WITH_WINDOWS = ("full", "window", "full and window")
OLMO_FEATURES = {
    "norm_placement": ("after",),
    "biases": HAS_ATTENTION_BIAS,
    "qk_norm": ("projection",),
    "head_size": (None,),
}

# The first class with all features of a model is the one that the model is exported to.
FAMILIES = (
    Family(
        name="llama",
        class_name="LlamaForCausalLM",
        features={},
        bias_attributes={**OF_ATTENTION, "mlp_bias": frozenset({"mlp"})},
    ),
    Family(
        name="arcee",
        class_name="ArceeForCausalLM",
        features={"activation": ("squared_relu",)},
        bias_attributes={**OF_ATTENTION, "mlp_bias": frozenset({"mlp"})},
    ),
    Family(
        name="mistral",
        class_name="MistralForCausalLM",
        features={"biases": (NO_BIAS,), "attention_pattern": ("full", "window")},
        windows="sliding_window",
    ),
    Family(
        name="qwen2",
        class_name="Qwen2ForCausalLM",
        features={
            "biases": (frozenset({"qkv"}),),
            "attention_pattern": WITH_WINDOWS,
            "head_size": (None,),
        },
        windows="use_sliding_window",
    ),
    Family(
        name="qwen3",
        class_name="Qwen3ForCausalLM",
        features={
            "biases": HAS_ATTENTION_BIAS,
            "qk_norm": ("head",),
            "attention_pattern": WITH_WINDOWS,
        },
        bias_attributes=OF_ATTENTION,
        windows="use_sliding_window",
    ),
    Family(
        name="olmo2",
        class_name="Olmo2ForCausalLM",
        features=OLMO_FEATURES,
        bias_attributes=OF_ATTENTION,
    ),
    Family(
        name="olmo3",
        class_name="Olmo3ForCausalLM",
        features={
            **OLMO_FEATURES,
            **ROPE_PER_KIND_FEATURES,
            "attention_pattern": WITH_WINDOWS,
        },
        bias_attributes=OF_ATTENTION,
        rope_per_kind=True,
    ),
    Family(
        name="smollm3",
        class_name="SmolLM3ForCausalLM",
        features={"attention_pattern": ("full", "nope", "full and nope"), "head_size": (None,)},
        bias_attributes={**OF_ATTENTION, "mlp_bias": frozenset({"mlp"})},
        windows="no_rope_layers",
        constants={"use_sliding_window": False},
    ),
    Family(
        name="phi3",
        class_name="Phi3ForCausalLM",
        features={
            "biases": (NO_BIAS,),
            "attention_pattern": ("full", "window"),
            "partial_rotary_factor": (ANY,),
            "rope_scaling.type": (None,),  # transformers 5.23 has only "longrope"
            "head_size": (None,),
        },
        windows="sliding_window",
        constants={"resid_pdrop": 0.0, "embd_pdrop": 0.0},
        joined=True,
    ),
    Family(
        name="gemma3_text",
        class_name="Gemma3ForCausalLM",
        features={
            "activation": ("geglu",),
            "norm_placement": ("both",),
            "biases": HAS_ATTENTION_BIAS,
            "qk_norm": ("head",),
            "attention_pattern": WITH_WINDOWS,
            **ROPE_PER_KIND_FEATURES,
            "attention_scale": (ANY,),
            "logit_soft_cap": (ANY,),
            "embedding_multiplier": ("sqrt(hidden_size)",),
        },
        bias_attributes=OF_ATTENTION,
        rope_per_kind=True,
        constants={"use_bidirectional_attention": False, "attn_logit_softcapping": None},
        activation_attribute="hidden_activation",
        norm_offset=1.0,
    ),
    Family(
        name="mixtral",
        class_name="MixtralForCausalLM",
        features={
            "biases": (NO_BIAS,),
            "attention_pattern": ("full", "window"),
            "experts.router": ("softmax, normalized",),
        },
        windows="sliding_window",
        experts=MIXTRAL_EXPERTS,
        expert_names=("block_sparse_moe.", "w1", "w3", "w2"),
        router="block_sparse_moe.gate",
    ),
    Family(
        name="qwen3_moe",
        class_name="Qwen3MoeForCausalLM",
        features={
            "biases": HAS_ATTENTION_BIAS,
            "qk_norm": ("head",),
            "experts.router": ("softmax", "softmax, normalized"),
            "experts.dense_layers": (False, True),
        },
        bias_attributes=OF_ATTENTION,
        windows="sliding_window",
        experts=QWEN3_EXPERTS,
        constants={"decoder_sparse_step": 1, "use_sliding_window": False},
    ),
    Family(
        name="gpt_oss",
        class_name="GptOssForCausalLM",
        features={
            "activation": ("clamped_swiglu",),
            "biases": (frozenset({"mlp"}), ALL_BIASES),
            "attention_pattern": WITH_WINDOWS,
            "attention_sinks": (True,),
            "experts.router": ("softmax, normalized",),
        },
        bias_attributes=OF_ATTENTION,
        experts=MIXTRAL_EXPERTS,
        constants={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        expert_names=("mlp.experts.", "", "", ""),
        router="mlp.router",
    ),
    Family(
        name="dots1",
        class_name="Dots1ForCausalLM",
        features={
            **SIGMOID_ROUTER,
            "biases": HAS_ATTENTION_BIAS,
            "qk_norm": ("head",),
            "attention_pattern": WITH_WINDOWS,
        },
        bias_attributes=OF_ATTENTION,
        experts=SHARED_EXPERTS,
    ),
    Family(
        name="glm4_moe",
        class_name="Glm4MoeForCausalLM",
        features={
            **SIGMOID_ROUTER,
            "biases": (NO_BIAS, frozenset({"qkv"})),
            "qk_norm": ("none", "head"),
            "partial_rotary_factor": (ANY,),
        },
        bias_attributes={"attention_bias": frozenset({"qkv"})},
        experts=SHARED_EXPERTS,
        has_predictions=True,
    ),
    Family(
        name="deepseek_v2",
        class_name="DeepseekV2ForCausalLM",
        features={
            **SIGMOID_ROUTER,
            **LATENT_FEATURES,
            "experts.router": ("softmax",),
        },
        experts={key: name for key, name in SHARED_EXPERTS.items() if not key.startswith("groups")},
        constants={"topk_method": "greedy"},
        unread=frozenset({"n_group", "topk_group"}),  # only for other methods
    ),
    Family(
        name="deepseek_v3",
        class_name="DeepseekV3ForCausalLM",
        features={**SIGMOID_ROUTER, **LATENT_FEATURES},
        experts=SHARED_EXPERTS,
        constants={"rope_interleave": True},
        has_predictions=True,
    ),
    Family(
        name="gpt2",
        class_name="GPT2LMHeadModel",
        features={
            "norm": ("layernorm",),
            "positions": ("learned",),
            "activation": ("gelu", "gelu_erf"),
            "biases": (NO_BIAS, ALL_BIASES),
            "kv_heads": ("heads",),
            "head_size": (None,),
        },
        constants={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
)
BY_NAME = {family.name: family for family in FAMILIES}


def features_of(config: ModelConfig) -> dict[str, Any]:
    """Return the features of a model, as LLAMA_FEATURES names them."""
    experts = config.experts
    pattern = config.attention_pattern[: config.layers]
    parts = {"qkv": config.has_qkv_bias, "output": config.has_attention_output_bias}
    parts["mlp"] = config.bias
    router = "none"
    if experts is not None:
        router = "sigmoid" if experts.router == "sigmoid" else "softmax"
        router += ", normalized" * (router == "softmax" and experts.weights_sum_to_one)
    scale: float | str | None = config.attention_scale
    window, scaling = config.window, config.rope_scaling
    if config.latent and scaling and scaling.type == "yarn":
        scale = scale and "of YaRN"
    has_own_base = window is not None and window.rope_theta not in (None, config.rope_theta)
    multiplier = config.embedding_multiplier
    is_root = math.isclose(multiplier, math.sqrt(config.hidden_size), rel_tol=1e-6)
    return {
        "norm": config.norm,
        "positions": config.positions,
        "activation": config.activation,
        "norm_placement": config.norm_placement,
        "biases": frozenset(part for part, has_bias in parts.items() if has_bias),
        "qk_norm": config.qk_norm_over if config.qk_norm else "none",
        "attention_pattern": " and ".join(sorted(set(pattern))),
        "window.rope_theta": window.rope_theta if window is not None and has_own_base else None,
        "window.rope_scaled": window is None or scaling is None or window.rope_scaled,
        "rope_scaling.type": scaling.type if scaling is not None else None,
        "rope_scaling.truncate": scaling is None or scaling.truncate,
        "partial_rotary_factor": config.partial_rotary_factor,
        "attention_sinks": config.attention_sinks,
        "attention_scale": scale,
        "attention_soft_cap": config.attention_soft_cap,
        "logit_soft_cap": config.logit_soft_cap,
        "embedding_multiplier": "sqrt(hidden_size)" if is_root else multiplier,
        "kv_heads": "heads" if config.kv_heads == config.heads else config.kv_heads,
        "head_size": config.head_size,
        "latent": config.latent is not None,
        "norm_epsilon": config.norm_epsilon,
        "experts.router": router,
        "experts.shared": experts is not None and experts.shared > 0,
        "experts.dense_layers": experts is not None and experts.dense_layers > 0,
        "experts.output_scale": 1.0 if experts is None else experts.output_scale,
    }


def differences(config: ModelConfig, family: Family) -> dict[str, tuple[Any, Any]]:
    """Return the features of a model that a class does not have.

    Returns:
        feature -> (its value in the model, a value that the class has)
    """
    return {
        feature: (value, family.values(feature)[0])
        for feature, value in features_of(config).items()
        if not {value, ANY} & set(family.values(feature))
    }


def family_of(config: ModelConfig) -> Family:
    """Return the class that has the architecture of a model.

    Raises:
        UserError: transformers has no such class; the message lists what differs from the class
            with the fewest differences.
    """
    different = {family.name: differences(config, family) for family in FAMILIES}
    nearest = BY_NAME[min(different, key=lambda name: _distance(different[name]))]
    if not different[nearest.name]:
        return nearest
    ours, theirs = described(different[nearest.name], config)
    keys = [each.removeprefix(NONE) for each in theirs if each.startswith(NONE)]
    settings = [each for each in theirs if not each.startswith(NONE)]
    advice = [f"use {', '.join(settings)}"] * bool(settings)
    advice += [f"leave {', '.join(keys)} out"] * bool(keys)
    raise UserError(
        f"transformers has no model class with {', '.join(ours)}; {' and '.join(advice)} "
        f"({nearest.class_name})"
    )


def _distance(different: Mapping[str, tuple[Any, Any]]) -> float:
    """Return the number of differences.

    One between a dense model and one with experts is large, and so is one of latent attention.
    One of the rotary scaling is small, because a run can change the scaling of imported weights.
    """
    is_large = "none" in different.get("experts.router", ()) or "latent" in different
    return len(different) + len(FAMILIES) * is_large - 0.5 * ("rope_scaling.type" in different)


def described(
    different: Mapping[str, tuple[Any, Any]], config: ModelConfig
) -> tuple[list[str], list[str]]:
    """Return the settings of a model that differ from those of a class, and the class's settings.

    different: the result of `differences`
    """
    ours = [_setting(feature, value, config) for feature, (value, _) in different.items()]
    _, pattern = different.get("attention_pattern", ("", "window"))
    theirs = [
        _setting(feature, value, config)
        for feature, (_, value) in different.items()
        if "window" in pattern or not feature.startswith("window.")  # without a section
    ]
    if "window" not in pattern and config.window is not None:
        theirs.append(f"{NONE}model.window")
    _, biases = different.get("biases", ("", NO_BIAS))
    for part, key in BIAS_KEYS.items() if "biases" in different else ():
        if getattr(config, key) is not None and (part in biases) == ("mlp" in biases):
            theirs.append(f"{NONE}model.{key}")
    return ours, theirs


def _setting(feature: str, value: Any, config: ModelConfig) -> str:
    """Return the keys of a recipe that give a feature a value."""
    if feature == "biases":
        settings = {"bias": "mlp" in value}
        settings |= {
            key: part in value
            for part, key in BIAS_KEYS.items()
            if (part in value) != ("mlp" in value)
        }
        return ", ".join(f"model.{key} = {str(is_on).lower()}" for key, is_on in settings.items())
    if feature == "qk_norm":
        has_norm = f"model.qk_norm = {str(value != 'none').lower()}"
        return has_norm + ', model.qk_norm_over = "projection"' * (value == "projection")
    if feature == "attention_pattern":
        own = " and ".join(sorted(set(config.attention_pattern))) == value
        pattern = config.attention_pattern if own else value.split(" and ")
        return f"model.attention_pattern = {toml_value(pattern)}"
    if feature == "experts.router":
        if value == "none":
            return f"{NONE}model.experts"
        value = {"softmax, normalized": "softmax-after-topk"}.get(value, value)
    elif value == "sqrt(hidden_size)":
        value = math.sqrt(config.hidden_size)
    elif value == "heads":
        value = config.heads
    elif feature in ("experts.shared", "experts.dense_layers"):
        own = getattr(config.experts, feature.removeprefix("experts."), 0)
        value = (own or 1) if value else 0
    if value is None and feature == "rope_scaling.type":
        return f"{NONE}model.rope_scaling"
    if value is None or (feature == "latent" and not value):
        return f"{NONE}model.{feature}"
    if feature == "latent":
        return "model.latent"
    return f"model.{feature} = {json.dumps(value)}"
