"""The class of transformers that has the architecture of a model."""

from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig
from models.errors import UserError
from models.experts.settings import Experts

LLAMA_LIKE = ("llama", "qwen3", "mixtral", "qwen3_moe", "dots1")
WITH_EXPERTS = ("mixtral", "qwen3_moe", "dots1")
WITH_QK_NORM = ("qwen3", "qwen3_moe", "dots1")


def family_of(config: ModelConfig) -> str:
    """Return the `model_type` of the class.

    Raises:
        UserError: no class of transformers has this architecture.
    """
    shape = (config.norm, config.positions, config.activation)
    if config.experts is not None:
        return _family_with_experts(config, config.experts)
    problems: list[str] = []
    if shape == ("rmsnorm", "rope", "swiglu"):
        if not config.bias:
            return "qwen3" if config.qk_norm else "llama"
        problems = ["bias = true"]
    elif shape == ("layernorm", "learned", "gelu"):
        if config.kv_heads != config.heads:
            problems.append(f"kv_heads = {config.kv_heads}")
        if config.head_size is not None:
            problems.append(f"head_size = {config.head_size}")
        if config.qk_norm:
            problems.append("qk_norm = true")
        if not problems:
            return "gpt2"
    described = f" with {' and '.join(problems)}" if problems else ""
    raise UserError(
        f"no class of transformers has model.norm, positions, activation = {shape}{described}; "
        f"use those of recipes/tiny.toml (Llama) without bias, or layernorm, learned, gelu with "
        f"kv_heads = heads (GPT-2)"
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


def require(theirs: Mapping[str, Any], known: dict[str, tuple[Any, ...]]) -> None:
    """Check that attributes of transformers' config have values that our model supports.

    Args:
        theirs: the attributes
        known: the supported values of some of them

    Raises:
        UserError: an attribute has another value.
    """
    for name, values in known.items():
        if theirs.get(name) not in values:
            raise UserError(
                f"{name} = {theirs.get(name)!r} is not supported; use a model with {values[0]!r}"
            )
