"""Conversion between our parameters and those of transformers' classes.

`families.py` lists the classes. Names of tensors are those of files: transformers joins the experts
of a layer when it loads them.

Those classes have no multipliers of "mup" and "completep", so weights are multiplied by them: the
output multiplier is in the final norm, because the head may be tied to the embedding, the residual
multiplier in the matrices that write into the residual stream and in their biases, or in the norm
after them, and that of the queries in their norm, or without one in the rows of the queries.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.config import GATED, Latents, ModelConfig
from models.hugging_face.families import Family, family_of
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
    transposed: True if they store a matrix as [in, out], such as GPT-2's Conv1D; ours are [out, in]
    multiplier: factor of ours in theirs
    multiplied_rows: number of rows of our tensor, from the first one, that have the factor; None:
        all rows
    offset: number that is subtracted from ours in theirs, because their class adds it
    zero_bias: name of a bias that exists only in transformers and is written as zeros; empty if
        there is none
    alternating: (rows of a unit, number of its last rows): in these, the rows of the two halves of
        ours alternate in theirs; a unit is a head, or gate and up of an expert
    expert: (number, count) if ours is one of the entries of a joined tensor [count, ...]
    copies: names under which transformers has the first tensor once more
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    transposed: bool = False
    multiplier: float = 1.0
    multiplied_rows: int | None = None
    offset: float = 0.0
    zero_bias: str = ""
    alternating: tuple[int, int] | None = None
    expert: tuple[int, int] | None = None
    copies: tuple[str, ...] = ()

    def shapes(self, ours: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return their shapes by name, given the shape of our tensor; of one entry if joined."""
        rows = self.sizes or (ours[0],)
        shapes = [(size, *ours[1:]) for size in rows]
        theirs = [shape[::-1] if self.transposed else shape for shape in shapes]
        bias = {self.zero_bias: (ours[0],)} if self.zero_bias else {}
        named = dict(zip(self.names, theirs, strict=True))
        return named | dict.fromkeys(self.copies, theirs[0]) | bias

    def split(self, ours: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield their names and tensors, given our tensor; one entry if joined."""
        if self.multiplier != 1:
            ours = ours.clone()
            ours[: self.multiplied_rows].mul_(self.multiplier)
        if self.offset:
            ours = ours - self.offset
        if self.alternating:
            ours = _rearranged(ours, *self.alternating, halves=(2, -1))
        parts = ours.split(self.sizes) if self.sizes else (ours,)
        for name, part in zip(self.names, parts, strict=True):
            yield name, part.t().contiguous() if self.transposed else part
        for name in self.copies:
            yield name, ours
        if self.zero_bias:
            yield self.zero_bias, ours.new_zeros(len(ours))

    def join(self, theirs: Iterable[Tensor]) -> Tensor:
        """Return our tensor, given their tensors in the order of `names`; one entry if joined."""
        parts = [part.t() if self.transposed else part for part in theirs]
        ours = (torch.cat(parts) if len(parts) > 1 else parts[0]).contiguous()
        if self.alternating:
            ours = _rearranged(ours, *self.alternating, halves=(-1, 2))
        if self.offset:
            ours = ours + self.offset
        if self.multiplier != 1:
            ours = ours.clone()
            ours[: self.multiplied_rows].div_(self.multiplier)
        return ours


def _rearranged(x: Tensor, unit: int, last: int, *, halves: tuple[int, int]) -> Tensor:
    """Return x with the last rows of each unit in another order.

    halves: (2, -1) lets the rows of two halves alternate, (-1, 2) reverses it
    """
    kept, moved = x.unflatten(0, (-1, unit)).split([unit - last, last], dim=1)
    moved = moved.unflatten(1, halves).transpose(1, 2).flatten(1, 2)
    return torch.cat([kept, moved], dim=1).flatten(0, 1)


def counterparts(config: ModelConfig, family: Family | None = None) -> dict[str, Counterpart]:
    """Return the counterpart of every parameter by our logical name.

    family: the class; None: the first one with this architecture, which an export uses
    """
    family = family or family_of(config)
    table = _gpt2(config) if family.name == "gpt2" else _usual(config, family)
    queries = "attention.q_norm." if config.qk_norm else "attention.qkv."
    has_output_norms = config.norm_placement != "before"
    for name, counterpart in table.items():
        if name.endswith("norm.weight") and family.norm_offset:
            table[name] = counterpart = replace(counterpart, offset=family.norm_offset)
        if name.startswith("final_norm."):
            table[name] = replace(counterpart, multiplier=output_multiplier(config))
        elif "_output_norm." in name if has_output_norms else writes_residual(name):
            table[name] = replace(counterpart, multiplier=residual_multiplier(config))
        elif queries in name and "attention_scale" not in family.features:
            table[name] = replace(
                counterpart,
                multiplier=query_multiplier(config),
                multiplied_rows=None if config.qk_norm else config.query_size,
            )
    return table


# Our norms of a block -> names in transformers, for each placement of the norms.
NORMS = {
    "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
    "both": {
        "attention_norm": "input_layernorm",
        "attention_output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    },
}


def _usual(config: ModelConfig, family: Family) -> dict[str, Counterpart]:
    """Return the counterparts of a class other than GPT-2."""
    table = {
        "embedding.weight": Counterpart(("model.embed_tokens.weight",)),
        "final_norm.weight": Counterpart(("model.norm.weight",)),
    }
    if not config.tie_embeddings:
        table["head.weight"] = Counterpart(("lm_head.weight",))
    for index in range(config.layers):
        table |= _layer_tensors(config, family, f"blocks.{index}.", index)
    return table | (_prediction_tensors(config, family, table) if family.has_predictions else {})


def _layer_tensors(
    config: ModelConfig, family: Family, ours: str, index: int
) -> dict[str, Counterpart]:
    """Return the counterparts of a layer, given our prefix and its number in transformers."""
    theirs = f"model.layers.{index}."
    table = {
        f"{ours}{name}.weight": Counterpart((f"{theirs}{their_name}.weight",))
        for name, their_name in NORMS[config.norm_placement].items()
    }
    attention = f"{ours}attention.", f"{theirs}self_attn."
    if config.latent is not None:
        table |= _latent_tensors(config, config.latent, *attention)
    else:
        table |= _attention_tensors(config, family, *attention)
    if config.has_experts(index):
        return table | _expert_tensors(config, family, ours + "mlp.", theirs)
    size = config.ffn_hidden_size
    return table | _mlp_tensors(config, family, ours + "mlp.", theirs + "mlp.", size)


PREDICTION = {  # our modules of a prediction module -> names in the files of DeepSeek-V3
    "embedding_norm": "enorm", "hidden_norm": "hnorm", "projection": "eh_proj",
    "output_norm": "shared_head.norm",
}  # fmt: skip


def _prediction_tensors(
    config: ModelConfig, family: Family, table: Mapping[str, Counterpart]
) -> dict[str, Counterpart]:
    """Return the counterparts of the prediction modules and of the tables that they share.

    The files hold a copy of the embedding and of the output matrix for each module.

    table: the counterparts of the rest of the model
    """
    layers = range(config.layers, config.layers + config.prediction_depth)
    found: dict[str, Counterpart] = {}
    for depth, index in enumerate(layers):
        ours, theirs = f"predictions.{depth}.", f"model.layers.{index}."
        for name, their_name in PREDICTION.items():
            found[f"{ours}{name}.weight"] = Counterpart((f"{theirs}{their_name}.weight",))
        found |= _layer_tensors(config, family, f"{ours}block.", index)
    head = "embedding.weight" if config.tie_embeddings else "head.weight"
    for name, part in (("embedding.weight", "embed_tokens"), (head, "shared_head.head")):
        copies = tuple(f"model.layers.{index}.{part}.weight" for index in layers)
        shared = found.get(name, table[name])
        found[name] = replace(shared, copies=(*shared.copies, *copies))
    return found


def _attention_tensors(
    config: ModelConfig, family: Family, ours: str, theirs: str
) -> dict[str, Counterpart]:
    """Return the counterparts of a layer's attention, given the prefixes of the names."""
    sizes = (config.query_size, config.key_value_size, config.key_value_size)
    table: dict[str, Counterpart] = {}
    for kind, has_bias in {"weight": True, "bias": config.has_qkv_bias}.items():
        qkv = tuple(f"{theirs}{part}_proj.{kind}" for part in "qkv")
        if has_bias:
            table[f"{ours}qkv.{kind}"] = Counterpart(qkv, sizes)
        if has_bias and family.joined:
            table[f"{ours}qkv.{kind}"] = Counterpart((f"{theirs}qkv_proj.{kind}",))
    table[f"{ours}output.weight"] = Counterpart((f"{theirs}o_proj.weight",))
    if config.has_attention_output_bias:
        table[f"{ours}output.bias"] = Counterpart((f"{theirs}o_proj.bias",))
    if config.qk_norm:
        for part in "qk":
            table[f"{ours}{part}_norm.weight"] = Counterpart((f"{theirs}{part}_norm.weight",))
    if config.attention_sinks:
        table[f"{ours}sinks"] = Counterpart((f"{theirs}sinks",))
    return table


def _latent_tensors(
    config: ModelConfig, latent: Latents, ours: str, theirs: str
) -> dict[str, Counterpart]:
    """Return the counterparts of a layer's latent attention, given the prefixes of the names.

    DeepSeek rotates the pairs (2 i, 2 i + 1), ours are (i, i + r/2) of r rotated columns.
    """
    r = latent.rotary_size
    names = {
        "q_down": "q_a_proj", "q_latent_norm": "q_a_layernorm", "q_up": "q_b_proj",
        "kv_down": "kv_a_proj_with_mqa", "kv_latent_norm": "kv_a_layernorm", "kv_up": "kv_b_proj",
        "output": "o_proj",
    }  # fmt: skip
    if latent.query_rank is None:
        names = {"q": "q_proj"} | {key: names[key] for key in names if not key.startswith("q_")}
    head = config.score_size
    rotated = {"q": (head, r), "q_up": (head, r), "kv_down": (config.latent_columns, r)}
    return {
        f"{ours}{name}.weight": Counterpart(
            (f"{theirs}{their_name}.weight",), alternating=rotated.get(name)
        )
        for name, their_name in names.items()
    }


def _mlp_tensors(
    config: ModelConfig, family: Family, ours: str, theirs: str, size: int
) -> dict[str, Counterpart]:
    """Return the counterparts of an MLP whose activations have `size` columns."""
    table: dict[str, Counterpart] = {}
    parts = ("gate", "up") if config.activation in GATED else ("up",)
    for kind in ("weight", "bias") if config.bias else ("weight",):
        names = tuple(f"{theirs}{part}_proj.{kind}" for part in parts)
        table[f"{ours}up.{kind}"] = Counterpart(names, (size,) * len(parts))
        if family.joined:
            table[f"{ours}up.{kind}"] = Counterpart((f"{theirs}gate_up_proj.{kind}",))
        table[f"{ours}down.{kind}"] = Counterpart((f"{theirs}down_proj.{kind}",))
    return table


def _expert_tensors(
    config: ModelConfig, family: Family, ours: str, theirs: str
) -> dict[str, Counterpart]:
    """Return the counterparts of a layer's router and experts, given the prefixes of the names."""
    experts = config.experts
    assert experts is not None
    f, router = experts.ffn_hidden_size, theirs + family.router
    table = {f"{ours}router.weight": Counterpart((f"{router}.weight",))}
    if experts.has_bias:
        table[f"{ours}router.bias"] = Counterpart((f"{router}.e_score_correction_bias",))
    elif config.bias:
        table[f"{ours}router.bias"] = Counterpart((f"{router}.bias",))
    prefix, gate, up, down = family.expert_names
    if experts.shared:
        shared = f"{theirs}{prefix}shared_experts."
        size = experts.shared_ffn_hidden_size
        table |= _mlp_tensors(config, family, f"{ours}shared.", shared, size)
    if not gate:
        return table | _joined_experts(config, f"{ours}experts.", theirs + prefix)
    for number in range(experts.count):
        expert = f"{theirs}{prefix}experts.{number}."
        gate_up = tuple(f"{expert}{part}.weight" for part in (gate, up))
        table[f"{ours}experts.up_{number}"] = Counterpart(gate_up, (f, f))
        table[f"{ours}experts.down_{number}"] = Counterpart((f"{expert}{down}.weight",))
    return table


def _joined_experts(config: ModelConfig, ours: str, theirs: str) -> dict[str, Counterpart]:
    """Return the counterparts of experts that are one tensor [count, in, out] in transformers."""
    assert config.experts is not None
    count, f = config.experts.count, config.experts.ffn_hidden_size
    table: dict[str, Counterpart] = {}
    for part, name in {"up": "gate_up_proj", "down": "down_proj"}.items():
        for suffix in ("", "_bias"):
            for number in range(count):
                table[f"{ours}{part}_{number}{suffix}"] = Counterpart(
                    (f"{theirs}{name}{suffix}",),
                    transposed=not suffix,
                    alternating=(2 * f, 2 * f) if part == "up" else None,
                    expert=(number, count),
                )
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
