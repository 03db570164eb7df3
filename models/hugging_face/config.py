"""Conversion between the settings of a model and the config of transformers."""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from models.config import (
    SCALING_KEYS,
    WITHOUT_ROTATION,
    AttentionKind,
    Experts,
    Latents,
    ModelConfig,
    RopeScaling,
    Window,
    shortest_pattern,
)
from models.errors import UserError
from models.hugging_face.families import BY_NAME, Family, family_of, features_of

# Conversion between our scaling of rotary positions and transformers' `rope_parameters`.

THEIR_ROPE_KEYS = {  # our key -> that of transformers, where they differ
    "original_sequence_length": "original_max_position_embeddings",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
}


FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' kinds of attention


def rope_parameters(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Return transformers' `rope_parameters`."""
    window = config.window
    usual = _rope_parameters(config.rope_theta, config.rope_scaling)
    if config.latent is not None and config.attention_scale is not None:
        usual |= _scales_of_yarn(config)
    if family.values("partial_rotary_factor") != (1.0,):
        usual["partial_rotary_factor"] = config.partial_rotary_factor
    if not family.rope_per_kind:
        return usual
    if window is None:
        return {FULL: usual, SLIDING: usual}
    scaling = config.rope_scaling if window.rope_scaled else None
    return {FULL: usual, SLIDING: _rope_parameters(window.rope_theta or config.rope_theta, scaling)}


def _rope_parameters(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    values = {
        THEIR_ROPE_KEYS.get(key, key): getattr(scaling, key) for key in SCALING_KEYS[scaling.type]
    }
    given = {key: value for key, value in values.items() if value is not None}
    return {"rope_type": scaling.type, "rope_theta": theta, "factor": scaling.factor, **given}


def _scales_of_yarn(config: ModelConfig) -> dict[str, Any]:
    """Return DeepSeek's `mscale` and `mscale_all_dim`, which also scale the attention scores.

    The scores are multiplied by the square of 0.1 mscale_all_dim ln(factor) + 1.
    """
    scaling = config.rope_scaling
    assert scaling is not None and config.attention_scale is not None
    under = math.sqrt(config.attention_scale * math.sqrt(config.score_size))
    if round(under - 1, 9) == 0:
        return {}
    if scaling.factor == 1:
        raise UserError(
            f"model.attention_scale = {config.attention_scale} cannot be written in transformers' "
            f"config with model.rope_scaling.factor = 1; use a factor above 1"
        )
    logarithm = 0.1 * math.log(scaling.factor)
    values = {"mscale": under * scaling.amplitude, "mscale_all_dim": under}
    exported = {key: round((value - 1) / logarithm, 9) for key, value in values.items()}
    # transformers treats mscale = 0 as missing.
    return {**exported, "attention_factor": None if exported["mscale"] else scaling.amplitude}


def rope_scaling_in(theirs: Mapping[str, Any], positions: int) -> RopeScaling | None:
    """Return the scaling in transformers' `rope_parameters`; None if there is none.

    positions: number of positions of the model, from which transformers derives a missing factor of
        YaRN

    Raises:
        UserError: a value is missing or not valid, or the type of scaling is not supported.
    """
    kind: Any = theirs.get("rope_type") or "default"
    if kind == "default":
        return None
    if kind not in SCALING_KEYS:
        raise UserError(
            f"rope_type = {kind!r} is not supported; use a model with one of "
            f"{', '.join(('default', *SCALING_KEYS))}"
        )
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
    names = {key: key for key in SCALING_KEYS[kind]} | {"factor": "factor", "type": "rope_type"}
    with their_names(names | THEIR_ROPE_KEYS, "model.rope_scaling"):
        return RopeScaling(type=kind, factor=float(factor), **given)


def _attention_factor(theirs: Mapping[str, Any], factor: float) -> float | None:
    """Return the attention factor that `mscale` and `mscale_all_dim` define (DeepSeek-V3).

    Returns:
        None unless both are set
    """
    over, under = theirs.get("mscale"), theirs.get("mscale_all_dim")
    if not (over and under):
        return None
    return _scale_of_yarn(factor, over) / _scale_of_yarn(factor, under)


def _scale_of_yarn(factor: float, multiplier: float) -> float:
    """Return transformers' `yarn_get_mscale`."""
    return multiplier * (0.1 * math.log(factor)) + 1.0


# Conversion between our other settings and the attributes of transformers' config classes.

# Our activation -> transformers' names, the one that an export has first.
ACTIVATIONS = {
    "swiglu": ("silu",),
    "geglu": ("gelu_pytorch_tanh",),
    "clamped_swiglu": ("silu",),  # the class of GPT-OSS does not read it
    "gelu": ("gelu_new", "gelu_pytorch_tanh"),
    "gelu_erf": ("gelu",),
    "squared_relu": ("relu2",),
}
SIZES = {  # our key -> attribute of all classes but GPT-2
    "layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "sequence_length": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
    "norm_epsilon": "rms_norm_eps",
}
GPT2_SIZES = {
    "layers": "n_layer",
    "hidden_size": "n_embd",
    "heads": "n_head",
    "ffn_hidden_size": "n_inner",
    "vocab_size": "vocab_size",
    "sequence_length": "n_positions",
    "tie_embeddings": "tie_word_embeddings",
    "norm_epsilon": "layer_norm_epsilon",
}
LATENT_SIZES = {  # our key in [model.latent] -> attribute
    "query_rank": "q_lora_rank",
    "key_value_rank": "kv_lora_rank",
    "rotary_size": "qk_rope_head_dim",
    "value_size": "v_head_dim",
}


def hugging_face_config(config: ModelConfig, family: Family | None = None) -> dict[str, Any]:
    """Return the keyword arguments of transformers' config class, including `model_type`.

    Args:
        family: the class; None: the first one with this architecture

    Raises:
        UserError: transformers has no model class with this architecture.
    """
    family = family or family_of(config)
    sizes = GPT2_SIZES if family.name == "gpt2" else SIZES
    settings = {theirs: getattr(config, ours) for ours, theirs in sizes.items()}
    settings |= {"model_type": family.name, "initializer_range": config.initial_std}
    settings |= family.constants
    activation = ACTIVATIONS[config.activation][0]
    if family.name == "gpt2":
        return settings | {
            "activation_function": activation,
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.attention_dropout,
        }
    if family.has_predictions:
        depth = config.prediction.depth if config.prediction else 0
        settings["num_nextn_predict_layers"] = depth
    biases = features_of(config)["biases"]
    settings |= {attribute: parts <= biases for attribute, parts in family.bias_attributes.items()}
    if family.values("qk_norm") == ("none", "head"):
        settings["use_qk_norm"] = config.qk_norm
    if family.values("logit_soft_cap") != (None,):
        settings["final_logit_softcapping"] = config.logit_soft_cap
    if config.latent is not None:
        settings |= {
            attribute: getattr(config.latent, key) for key, attribute in LATENT_SIZES.items()
        }
        settings["qk_nope_head_dim"] = config.attention_head_size
    elif family.values("attention_scale") != (None,):
        d = config.attention_head_size  # the multiplier of "mup" belongs to the scale
        scale = config.attention_scale or d**-0.5
        scale *= math.sqrt((config.base_head_size or d) / d)
        scalar = round(scale**-2)
        if not math.isclose(scale**-2, scalar, rel_tol=1e-6):
            raise UserError(
                f"{family.class_name} has no model.attention_scale = {scale}, only "
                f"n^-0.5 with a whole number n; use {(scalar or 1) ** -0.5}"
            )
        settings["query_pre_attn_scalar"] = scalar
    if family.values("head_size") != (None,) and config.latent is None:
        settings["head_dim"] = config.attention_head_size
    return settings | {
        family.activation_attribute: activation,
        "rope_parameters": rope_parameters(config, family),
        "attention_dropout": config.attention_dropout,
        **_window_attributes(config, family),
        **_expert_attributes(config, family),
    }


def _window_attributes(config: ModelConfig, family: Family) -> dict[str, Any]:
    """Return the attributes about the attention of each layer."""
    kinds = [config.attention_kind(layer) for layer in range(config.layers)]
    size = config.window.size if config.window is not None else None
    if family.windows == "no_rope_layers":  # 1 for a layer with rotary positions
        return {"no_rope_layers": [int(kind != "nope") for kind in kinds]}
    if family.windows == "sliding_window":
        return {"sliding_window": size}
    if family.values("attention_pattern") == ("full",):
        return {}
    settings: dict[str, Any] = {
        "layer_types": [SLIDING if kind == "window" else FULL for kind in kinds]
    }
    if size is not None:
        settings["sliding_window"] = size
        if family.windows == "use_sliding_window":
            settings["use_sliding_window"] = True
    return settings


def _expert_attributes(config: ModelConfig, family: Family) -> dict[str, Any]:
    experts = config.experts
    if experts is None:
        return {}
    settings = {theirs: getattr(experts, ours) for ours, theirs in family.experts.items()}
    if "normalize" in family.experts:
        settings[family.experts["normalize"]] = experts.weights_sum_to_one
    if family.experts.get("dense_layers") == "mlp_only_layers":
        settings["mlp_only_layers"] = list(range(experts.dense_layers))
    return settings


def export_problem(config: ModelConfig) -> str:
    """Return why a model cannot be exported to transformers; empty if it can."""
    try:
        hugging_face_config(config)
    except UserError as problem:
        return str(problem)
    return ""


@contextmanager
def their_names(attributes: Mapping[str, str], section: str = "model") -> Iterator[None]:
    """Reword an error about our keys, which a config.json does not have.

    Args:
        attributes: our key -> the attribute that it is read from; other keys are named with their
            section

    Raises:
        UserError: as in the block, with advice only if it is about attributes
    """
    try:
        yield
    except UserError as error:

        def renamed(text: str) -> str:
            keys = r"(?<![\w.])[a-z]\w*(\.\w+)?(?= = | is missing)"
            return re.sub(keys, lambda key: attributes.get(key[0], f"{section}.{key[0]}"), text)

        problem, _, advice = map(renamed, str(error).partition("; "))
        advice = re.sub(r"(, or |^)leave .*", "", advice)
        if not advice or f" {section}." in advice:
            advice = "use another model"
        raise UserError(f"{problem}; {advice}") from None


def imported_model(theirs: Mapping[str, Any]) -> ModelConfig:
    """Return our ModelConfig, given all attributes of transformers' config.

    `unsupported_attributes` finds the attributes that it does not reflect.

    Raises:
        UserError: our model does not support the architecture; the message names the attribute.
    """
    settings = _settings(theirs)
    family = BY_NAME[theirs["model_type"]]
    names = dict(GPT2_SIZES if family.name == "gpt2" else SIZES)
    names |= {
        "logit_soft_cap": "final_logit_softcapping",
        "partial_rotary_factor": "partial_rotary_factor",
        "rope_theta": "rope_theta",
        "rope_scaling.type": "rope_type",
    }
    if theirs.get("head_dim"):
        names["head_size"] = "head_dim"
    names |= {f"latent.{key}": attribute for key, attribute in LATENT_SIZES.items()}
    names |= {f"experts.{key}": attribute for key, attribute in family.experts.items()}
    with their_names(names):
        return ModelConfig(**settings)


def _settings(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of our ModelConfig.

    Raises:
        UserError: our model does not support the architecture; the message names the attribute.
    """
    family = BY_NAME.get(theirs["model_type"])
    if family is None:
        raise UserError(
            f"model_type = {theirs['model_type']!r} is not supported; use {', '.join(BY_NAME)}"
        )
    if family.name == "gpt2":
        return _gpt2_settings(theirs)
    head_size = theirs["hidden_size"] // theirs["num_attention_heads"]
    their_head_size = theirs.get("head_dim") or head_size
    biases = family.implied_biases.union(
        *(parts for attribute, parts in family.bias_attributes.items() if theirs[attribute])
    )
    bias = "mlp" in biases
    qk_norm = family.values("qk_norm")[-1]
    if theirs.get("use_qk_norm") is False:
        qk_norm = "none"
    settings = {ours: theirs[attribute] for ours, attribute in SIZES.items()}
    settings |= {
        "norm": "rmsnorm",
        "positions": "rope",
        "activation": family.values("activation")[0],
        "norm_placement": family.values("norm_placement")[0],
        "bias": bias,
        "qkv_bias": None if ("qkv" in biases) == bias else not bias,
        "attention_output_bias": None if ("output" in biases) == bias else not bias,
        "qk_norm": qk_norm != "none",
        "qk_norm_over": qk_norm if qk_norm != "none" else "head",
        "head_size": their_head_size if their_head_size != head_size else None,
        "attention_sinks": family.values("attention_sinks")[0],
        "logit_soft_cap": theirs.get("final_logit_softcapping"),
        "experts": _experts_in(theirs, family),
        **_attention_in(theirs, family),
    }
    if family.values("latent") == (True,):
        settings |= _latent_in(theirs)
    scalar = theirs.get("query_pre_attn_scalar")
    if scalar is not None and not scalar > 0:
        raise UserError(
            f"query_pre_attn_scalar = {scalar} is not above 0; use a model with "
            f"query_pre_attn_scalar = {their_head_size}"
        )
    if scalar is not None and scalar != their_head_size:
        settings["attention_scale"] = scalar**-0.5
    if family.values("embedding_multiplier") != (1.0,):
        settings["embedding_multiplier"] = theirs["hidden_size"] ** 0.5
    return settings


def _latent_in(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of latent attention."""
    with their_names(LATENT_SIZES, "model.latent"):
        latent = Latents(**{key: theirs[name] for key, name in LATENT_SIZES.items()})
    settings: dict[str, Any] = {"latent": latent, "head_size": theirs["qk_nope_head_dim"]}
    rope = theirs.get("rope_parameters") or {}
    under, factor = rope.get("mscale_all_dim"), rope.get("factor")
    if (rope.get("rope_type") or "default") != "default" and under and factor and factor > 1:
        size = settings["head_size"] + latent.rotary_size
        settings["attention_scale"] = size**-0.5 * _scale_of_yarn(factor, under) ** 2
    return settings


def _attention_in(theirs: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the settings of windows and positions."""
    layers, size = theirs["num_hidden_layers"], theirs.get("sliding_window")
    kinds: list[AttentionKind] = ["full"] * layers
    if family.windows == "no_rope_layers":
        has_rope = theirs["no_rope_layers"]
        if len(has_rope) < layers:
            raise UserError(
                f"no_rope_layers has {len(has_rope)} entries for num_hidden_layers = {layers}; use "
                f"an entry for each layer, such as {[1] * layers}"
            )
        kinds = ["full" if is_rotated else "nope" for is_rotated in has_rope[:layers]]
    elif family.windows == "sliding_window":
        kinds = ["full" if size is None else "window"] * layers
    elif types := theirs.get("layer_types"):
        kinds = ["window" if kind == SLIDING else "full" for kind in types]
    rope = window_rope = theirs.get("rope_parameters") or {}
    if family.rope_per_kind:  # transformers 5.23 reads `truncate` only next to the kinds
        truncate = rope.get("truncate", True)
        rope, window_rope = (rope[kind] | {"truncate": truncate} for kind in (FULL, SLIDING))
    shares = [table.get("partial_rotary_factor") for table in (rope, window_rope)]
    rotated, *others = (1.0 if share is None else share for share in shares)
    for share in (rotated, *others):
        if share != 1 and family.values("partial_rotary_factor") == (1.0,):
            raise UserError(
                f"partial_rotary_factor = {share} is not supported for {family.class_name}; use a "
                f"model with 1.0"
            )
    positions = theirs["max_position_embeddings"]
    theta = float(rope.get("rope_theta", 10000.0))
    scaling = rope_scaling_in(rope, positions)
    settings = {
        "attention_pattern": shortest_pattern(kinds),
        "window": None,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "partial_rotary_factor": rotated,
    }
    if "window" in kinds:
        own_theta = float(window_rope.get("rope_theta", 10000.0))
        own_scaling = rope_scaling_in(window_rope, positions)
        if own_scaling not in (None, scaling):
            raise UserError(
                f"rope_parameters: the scaling of {SLIDING} differs from that of {FULL}, which is "
                f"not supported; use a model in which it is the same or none"
            )
        if size is None:
            raise UserError(
                f"sliding_window = null, but layer_types has {SLIDING}; use a model with a window, "
                f"such as sliding_window = 4096"
            )
        with their_names({"size": "sliding_window", "rope_theta": "rope_theta"}, "model.window"):
            settings["window"] = Window(
                size=size,
                rope_theta=None if own_theta == theta else own_theta,
                rope_scaled=own_scaling == scaling,
            )
    if set(kinds) == {"nope"}:
        settings |= WITHOUT_ROTATION
    return settings


def _experts_in(theirs: Mapping[str, Any], family: Family) -> Experts | None:
    """Return the experts in transformers' config; None if the model is dense."""
    if not family.experts:
        return None
    given = {ours: theirs[attribute] for ours, attribute in family.experts.items()}
    for ours in ("count", "per_token"):
        if given[ours] is None:
            name = family.experts[ours]
            raise UserError(f"{name} = None is not supported; use a model with {name} = 8")
    if family.experts.get("dense_layers") == "mlp_only_layers":
        given["dense_layers"] = len(given["dense_layers"] or [])
    (router, *_) = family.values("experts.router")
    if router == "softmax, normalized":
        router = "softmax-after-topk"
    values: dict[str, Any] = {key: value or 0 for key, value in given.items()}
    values |= {key: values[key] or 1 for key in ("groups", "groups_per_token") if key in values}
    if "normalize" in values:
        values["normalize"] = bool(values["normalize"])
    for key in {"balance_loss", "output_scale"} & values.keys():
        values[key] = float(values[key])
    with their_names(family.experts, "model.experts"):
        return Experts(router=router, **values)


def _gpt2_settings(theirs: Mapping[str, Any]) -> dict[str, Any]:
    activation = theirs["activation_function"]
    ours = {name: ours for ours in ("gelu", "gelu_erf") for name in ACTIVATIONS[ours]}
    if activation not in ours:
        raise UserError(
            f"activation_function = {activation!r} is not supported; use a model with "
            f"{' or '.join(ours)}"
        )
    settings = {key: theirs[attribute] for key, attribute in GPT2_SIZES.items()}
    return settings | {
        "kv_heads": theirs["n_head"],
        "ffn_hidden_size": theirs["n_inner"] or 4 * theirs["n_embd"],
        "norm": "layernorm",
        "positions": "learned",
        "activation": ours[activation],
        "bias": True,
    }


# Attributes that do not change what a class computes in training, that a run sets anew, or of which
# `imported_model` itself rejects what is not supported; not in a class that has them as constants.
FREE_ATTRIBUTES = frozenset({
    "activation_function", "architectures", "attention_dropout", "attn_logit_softcapping",
    "attn_pdrop", "bos_token_id", "chunk_size_feed_forward", "dtype", "embd_pdrop", "eos_token_id",
    "head_dim", "id2label", "initializer_range", "is_encoder_decoder", "label2id",
    "max_window_layers", "n_ctx", "n_inner", "no_rope_layer_interval", "num_mtp_layers",
    "num_nextn_predict_layers", "original_max_position_embeddings", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp",
    "problem_type", "reorder_and_upcast_attn", "resid_pdrop", "return_dict", "rope_parameters",
    "router_aux_loss_coef", "router_jitter_noise", "sep_token_id", "sliding_window",
    "task_specific_params", "transformers_version", "use_cache", "use_sliding_window",
})  # fmt: skip
IGNORED_PREFIXES = ("_", "summary_")


def unsupported_attributes(
    theirs: Mapping[str, Any], exported: Mapping[str, Any], family: Family
) -> dict[str, tuple[Any, Any]]:
    """Return the attributes of a config that `imported_model` does not reflect.

    Args:
        theirs: all attributes of transformers' config
        exported: those of a config of the same class that has the `hugging_face_config` of the
            imported model

    Returns:
        attribute -> (value, value that our model has)
    """
    return {
        name: (theirs.get(name), value)
        for name, value in exported.items()
        if (name not in FREE_ATTRIBUTES | family.unread or name in family.constants)
        and not name.startswith(IGNORED_PREFIXES)
        and theirs.get(name) != value
    }
