"""Conversion between our parameters and those of transformers' classes.

The classes are Llama, Qwen3, Mixtral, Qwen3-MoE, Dots1 and GPT-2. Names of tensors are those of
files: transformers joins the experts of a layer when it loads them.

Those classes have no multipliers of "mup" and "completep", so weights are multiplied by them: the
output multiplier is in the final norm, because the head may be tied to the embedding, the residual
multiplier in the matrices that write into the residual stream and in their biases, and that of the
queries in their norm, or without one in the rows of the queries.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.config import ModelConfig
from models.hugging_face.config import family_of
from models.initialization import (
    output_multiplier,
    query_multiplier,
    residual_multiplier,
)
from models.sharding import writes_residual


@dataclass(frozen=True)
class Counterpart:
    """The tensors of transformers' model that correspond to one of our logical tensors.

    names: names in transformers, in the order in which our tensor joins them along dimension 0
    sizes: their sizes along dimension 0
    transposed: True for GPT-2's Conv1D, which stores weights as [in, out]; ours are [out, in]
    multiplier: factor of ours in theirs
    multiplied_rows: number of rows of our tensor, from the first one, that have the factor; None:
        all rows
    zero_bias: name of a bias that exists only in transformers and is written as zeros; empty if
        there is none
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    transposed: bool = False
    multiplier: float = 1.0
    multiplied_rows: int | None = None
    zero_bias: str = ""

    def shapes(self, ours: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return their shapes by name, given the shape of our tensor."""
        rows = self.sizes or (ours[0],)
        shapes = [(size, *ours[1:]) for size in rows]
        theirs = [shape[::-1] if self.transposed else shape for shape in shapes]
        bias = {self.zero_bias: (ours[0],)} if self.zero_bias else {}
        return dict(zip(self.names, theirs, strict=True)) | bias

    def split(self, ours: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield their names and tensors, given our tensor."""
        if self.multiplier != 1:
            ours = ours.clone()
            ours[: self.multiplied_rows].mul_(self.multiplier)
        parts = ours.split(self.sizes) if self.sizes else (ours,)
        for name, part in zip(self.names, parts, strict=True):
            yield name, part.t().contiguous() if self.transposed else part
        if self.zero_bias:
            yield self.zero_bias, ours.new_zeros(len(ours))

    def join(self, theirs: Iterable[Tensor]) -> Tensor:
        """Return our tensor, given their tensors in the order of `names`."""
        parts = [part.t() if self.transposed else part for part in theirs]
        ours = (torch.cat(parts) if len(parts) > 1 else parts[0]).contiguous()
        if self.multiplier != 1:
            ours = ours.clone()
            ours[: self.multiplied_rows].div_(self.multiplier)
        return ours


def to_hugging_face(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename and split our logical tensors, and multiply them by the model's multipliers.

    They may be weights, or without multipliers other tensors of the same shapes.
    """
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
    table = _gpt2(config) if family_of(config) == "gpt2" else _llama(config)
    queries = "attention.q_norm." if config.qk_norm else "attention.qkv."
    for name, counterpart in table.items():
        if name.startswith("final_norm."):
            table[name] = replace(counterpart, multiplier=output_multiplier(config))
        elif writes_residual(name):
            table[name] = replace(counterpart, multiplier=residual_multiplier(config))
        elif queries in name:
            table[name] = replace(
                counterpart,
                multiplier=query_multiplier(config),
                multiplied_rows=None if config.qk_norm else config.query_size,
            )
    return table


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
    if family_of(config) == "mixtral":
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
    """Return the counterparts of a GPT-2.

    transformers' GPT-2 always has biases; a model without biases is exported with zeros. The norms
    have biases in any case.
    """
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
            prefix, is_norm = f"transformer.h.{index}.{theirs}.", "norm" in ours
            has_bias = is_norm or config.bias
            for kind in ("weight", "bias") if has_bias else ("weight",):
                table[f"blocks.{index}.{ours}.{kind}"] = Counterpart(
                    (prefix + kind,),
                    transposed=kind == "weight" and not is_norm,
                    zero_bias="" if has_bias else f"{prefix}bias",
                )
    return table
