"""The class of transformers that has the architecture of a model."""

from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig
from models.errors import UserError
from models.experts_settings import Experts

LLAMA_LIKE = ("llama", "qwen3", "mixtral", "qwen3_moe", "dots1")
WITH_EXPERTS = ("mixtral", "qwen3_moe", "dots1")
WITH_QK_NORM = ("qwen3", "qwen3_moe", "dots1")

BlockDesign = tuple[str, str, str]  # model.norm, model.positions and model.activation
LLAMA_DESIGN: BlockDesign = ("rmsnorm", "rope", "swiglu")
GPT2_DESIGN: BlockDesign = ("layernorm", "learned", "gelu")


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
    elif design == GPT2_DESIGN:
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
