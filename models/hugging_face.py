"""Conversion between our parameters and those of transformers' classes.

The classes are Llama, Qwen3, Mixtral, Qwen3-MoE, Dots1 and GPT-2. Names of tensors are those of
files: transformers joins the experts of a layer when it loads them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig
from models.errors import UserError
from models.experts.settings import Experts
from models.rope_scaling import SCALING_KEYS, RopeScaling

LLAMA_LIKE = ("llama", "qwen3", "mixtral", "qwen3_moe", "dots1")
WITH_EXPERTS = ("mixtral", "qwen3_moe", "dots1")
WITH_QK_NORM = ("qwen3", "qwen3_moe", "dots1")
THEIR_ROPE_KEYS = {  # our key -> that of transformers, where they differ
    "original_sequence_length": "original_max_position_embeddings",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
}


@dataclass(frozen=True)
class Counterpart:
    """The tensors of transformers' model that correspond to one of our logical tensors.

    names: names in transformers, in the order in which our tensor joins them along dimension 0
    sizes: their sizes along dimension 0
    transposed: True for GPT-2's Conv1D, which stores weights as [in, out]; ours are [out, in]
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    transposed: bool = False

    def shapes(self, ours: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return their shapes by name, given the shape of our tensor."""
        rows = self.sizes or (ours[0],)
        shapes = [(size, *ours[1:]) for size in rows]
        theirs = [shape[::-1] if self.transposed else shape for shape in shapes]
        return dict(zip(self.names, theirs, strict=True))

    def split(self, ours: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield their names and tensors, given our tensor."""
        parts = ours.split(self.sizes) if self.sizes else (ours,)
        for name, part in zip(self.names, parts, strict=True):
            yield name, part.t().contiguous() if self.transposed else part

    def join(self, theirs: Iterable[Tensor]) -> Tensor:
        """Return our tensor, given their tensors in the order of `names`."""
        parts = [part.t() if self.transposed else part for part in theirs]
        return (torch.cat(parts) if len(parts) > 1 else parts[0]).contiguous()


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
    """Return the keyword arguments of transformers' config class, including `model_type`.

    Raises:
        UserError: no class of transformers has this architecture.
    """
    shared = {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.initial_std,
    }
    if _family(config) == "gpt2":
        return shared | {
            "model_type": "gpt2",
            "n_positions": config.sequence_length,
            "n_embd": config.hidden_size,
            "n_layer": config.layers,
            "n_head": config.heads,
            "n_inner": config.ffn_hidden_size,
            "layer_norm_epsilon": config.norm_epsilon,
            "activation_function": "gelu_new",
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.attention_dropout,
        }
    return shared | {
        "model_type": _family(config),
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        **_expert_settings(config),
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.attention_head_size,
        "max_position_embeddings": config.sequence_length,
        "rope_parameters": _rope_parameters(config),
        "rms_norm_eps": config.norm_epsilon,
        "hidden_act": "silu",
        "attention_dropout": config.attention_dropout,
    }


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
    _require(
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
    _require(rope, {"partial_rotary_factor": (1.0, None)})
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
        "rope_scaling": _rope_scaling(rope, theirs["max_position_embeddings"]),
        "experts": _experts(theirs),
        "norm_epsilon": theirs["rms_norm_eps"],
    }


def _expert_settings(config: ModelConfig) -> dict[str, Any]:
    """Return the keyword arguments of transformers' config class for experts."""
    experts = config.experts
    if experts is None:
        return {}
    family = _family(config)
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


def _experts(theirs: Mapping[str, Any]) -> Experts | None:
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
        _require(theirs, {"sliding_window": (None,)})
        ffn = theirs["intermediate_size"]
        return Experts(**settings, ffn_hidden_size=ffn, router="softmax-after-topk")
    dense = theirs.get("mlp_only_layers") or []
    _require(
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
    full = (["full_attention"] * theirs["num_hidden_layers"], None)
    _require(theirs, {"n_group": (1, None), "topk_group": (1, None), "layer_types": full})
    return Experts(
        count=theirs["n_routed_experts"],
        per_token=theirs["num_experts_per_tok"],
        ffn_hidden_size=theirs["moe_intermediate_size"],
        shared=theirs["n_shared_experts"],
        dense_layers=theirs["first_k_dense_replace"] or 0,
        router="sigmoid",
        normalize=bool(theirs["norm_topk_prob"]),
        output_scale=float(theirs["routed_scaling_factor"]),
    )


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
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


def _rope_scaling(theirs: Mapping[str, Any], positions: int) -> RopeScaling | None:
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


def _gpt2_settings(theirs: Mapping[str, Any]) -> dict[str, Any]:
    _require(
        theirs,
        {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
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
        "activation": "gelu",
        "bias": True,
        "tie_embeddings": theirs["tie_word_embeddings"],
        "norm_epsilon": theirs["layer_norm_epsilon"],
    }


def _require(theirs: Mapping[str, Any], known: dict[str, tuple[Any, ...]]) -> None:
    for name, values in known.items():
        if theirs.get(name) not in values:
            raise UserError(
                f"{name} = {theirs.get(name)!r} is not supported; use a model with {values[0]!r}"
            )


def to_hugging_face(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename and split our logical tensors: weights, or other tensors of the same shapes."""
    theirs: dict[str, Tensor] = {}
    for name, counterpart in counterparts(config).items():
        theirs |= dict(counterpart.split(tensors[name]))
    return theirs


def from_hugging_face(config: ModelConfig, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join and rename transformers' tensors into our logical tensors."""
    return {
        name: counterpart.join(theirs[part] for part in counterpart.names)
        for name, counterpart in counterparts(config).items()
    }


def counterparts(config: ModelConfig) -> dict[str, Counterpart]:
    """Return the counterpart of every parameter by our logical name."""
    family = _family(config)
    return _gpt2(config) if family == "gpt2" else _llama(config)


def _family(config: ModelConfig) -> str:
    shape = (config.norm, config.positions, config.activation, config.bias)
    if config.experts is not None:
        return _family_with_experts(config, config.experts)
    if shape == ("rmsnorm", "rope", "swiglu", False):
        return "qwen3" if config.qk_norm else "llama"
    multi_head = config.kv_heads == config.heads and config.head_size is None
    if shape == ("layernorm", "learned", "gelu", True) and multi_head and not config.qk_norm:
        return "gpt2"
    raise UserError(
        f"model: no class of transformers has norm, positions, activation, bias = {shape} with "
        f"qk_norm = {config.qk_norm}; use those of recipes/tiny.toml (Llama), or layernorm, "
        f"learned, gelu, true (GPT-2)"
    )


def _family_with_experts(config: ModelConfig, experts: Experts) -> str:
    shape = (config.norm, config.positions, config.activation)
    if shape != ("rmsnorm", "rope", "swiglu"):
        problem = f"model.norm, positions, activation = {shape}"
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
        f"no class of transformers has model.experts with {problem}; use the settings of "
        f"recipes/tiny-moe.toml (Mixtral), recipes/qwen3/30b-a3b.toml (Qwen3-MoE) or "
        f"recipes/dots/llm1.toml (Dots1)"
    )


def _llama(config: ModelConfig) -> dict[str, Counterpart]:
    d, f = config.attention_head_size, config.ffn_hidden_size
    qkv_sizes = (config.heads * d, config.kv_heads * d, config.kv_heads * d)
    table = {
        "embedding.weight": Counterpart(("model.embed_tokens.weight",)),
        "final_norm.weight": Counterpart(("model.norm.weight",)),
    }
    if not config.tie_embeddings:
        table["head.weight"] = Counterpart(("lm_head.weight",))
    for index in range(config.layers):
        ours, theirs = f"blocks.{index}.", f"model.layers.{index}."
        attention = theirs + "self_attn."
        qkv = tuple(f"{attention}{part}_proj.weight" for part in "qkv")
        gate_up = tuple(f"{theirs}mlp.{part}_proj.weight" for part in ("gate", "up"))
        table |= {
            ours + "attention_norm.weight": Counterpart((theirs + "input_layernorm.weight",)),
            ours + "attention.qkv.weight": Counterpart(qkv, qkv_sizes),
            ours + "attention.output.weight": Counterpart((attention + "o_proj.weight",)),
            ours + "mlp_norm.weight": Counterpart((theirs + "post_attention_layernorm.weight",)),
        }
        if config.has_experts(index):
            table |= _expert_tensors(config, ours, theirs)
        else:
            table |= {
                ours + "mlp.up.weight": Counterpart(gate_up, (f, f)),
                ours + "mlp.down.weight": Counterpart((theirs + "mlp.down_proj.weight",)),
            }
        if config.qk_norm:
            for part in "qk":
                name = f"{part}_norm.weight"
                table[f"{ours}attention.{name}"] = Counterpart((attention + name,))
    return table


def _expert_tensors(config: ModelConfig, ours: str, theirs: str) -> dict[str, Counterpart]:
    """Return the counterparts of a layer's router and experts, given the prefixes of the names."""
    assert config.experts is not None
    if _family(config) == "mixtral":
        theirs, gate, up, down = theirs + "block_sparse_moe.", "w1", "w3", "w2"
    else:
        theirs, gate, up, down = theirs + "mlp.", "gate_proj", "up_proj", "down_proj"
    f = config.experts.ffn_hidden_size
    table = {ours + "mlp.router.weight": Counterpart((theirs + "gate.weight",))}
    if config.experts.has_bias:
        bias = theirs + "gate.e_score_correction_bias"
        table[ours + "mlp.router.bias"] = Counterpart((bias,))
    if config.experts.shared:
        width, shared = config.experts.shared_ffn_hidden_size, theirs + "shared_experts."
        parts = tuple(f"{shared}{part}_proj.weight" for part in ("gate", "up"))
        table[ours + "mlp.shared.up.weight"] = Counterpart(parts, (width, width))
        table[ours + "mlp.shared.down.weight"] = Counterpart((shared + "down_proj.weight",))
    for number in range(config.experts.count):
        expert = f"{theirs}experts.{number}."
        gate_up = tuple(f"{expert}{part}.weight" for part in (gate, up))
        table[f"{ours}mlp.experts.up_{number}"] = Counterpart(gate_up, (f, f))
        table[f"{ours}mlp.experts.down_{number}"] = Counterpart((f"{expert}{down}.weight",))
    return table


def _gpt2(config: ModelConfig) -> dict[str, Counterpart]:
    table = {
        "embedding.weight": Counterpart(("transformer.wte.weight",)),
        "positions.weight": Counterpart(("transformer.wpe.weight",)),
        "final_norm.weight": Counterpart(("transformer.ln_f.weight",)),
        "final_norm.bias": Counterpart(("transformer.ln_f.bias",)),
    }
    if not config.tie_embeddings:
        table["head.weight"] = Counterpart(("lm_head.weight",))
    layers = {
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    for index in range(config.layers):
        for ours, theirs in layers.items():
            for kind in ("weight", "bias"):
                table[f"blocks.{index}.{ours}.{kind}"] = Counterpart(
                    (f"transformer.h.{index}.{theirs}.{kind}",),
                    transposed=kind == "weight" and "norm" not in ours,
                )
    return table
