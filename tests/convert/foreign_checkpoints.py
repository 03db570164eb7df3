"""Writers of checkpoints in the layouts of Megatron-LM, Megatron-DeepSpeed and GPT-NeoX.

The layouts follow the sources: megatron-core 0.16.1 and Megatron-LM d98e8a64 (training/
checkpointing.py), Megatron-DeepSpeed (model/gpt_model.py, `GPTModelPipe`), GPT-NeoX ea7aefd8
(model/gpt2_model.py, model/transformer.py), DeepSpeed (runtime/pipe/module.py). `test_import.py`
compares the files of Megatron's two formats with those that megatron-core itself writes.
"""

import io
import pickle
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata

from models.config import GATED, ModelConfig
from models.layer_specs import logical_shapes

Tensors = Mapping[str, Tensor]
LLAMA: dict[str, Any] = {
    "layers": 4, "hidden_size": 32, "heads": 4, "kv_heads": 2, "ffn_hidden_size": 48,
    "vocab_size": 128, "sequence_length": 16, "norm": "rmsnorm", "positions": "rope",
    "activation": "swiglu", "bias": False, "tie_embeddings": False,
}  # fmt: skip
GPT: dict[str, Any] = LLAMA | {
    "kv_heads": 4, "ffn_hidden_size": 128, "norm": "layernorm", "positions": "learned",
    "activation": "gelu_erf", "bias": True, "tie_embeddings": True,
}  # fmt: skip
CONFIGS = {"llama": ModelConfig(**LLAMA), "gpt": ModelConfig(**GPT)}
# Our name -> that of megatron-core in "torch" and in "torch_dist", in the order of its parameters.
CORE = {
    "attention_norm.": ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
    "attention.output.": ("self_attention.linear_proj.",) * 2,
    "attention.qkv.": ("self_attention.linear_qkv.",) * 2,
    "mlp_norm.": ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"),
    "mlp.up.": ("mlp.linear_fc1.",) * 2,
    "mlp.down.": ("mlp.linear_fc2.",) * 2,
}
LEGACY = {
    "attention_norm.": "input_layernorm.", "attention.qkv.": "self_attention.query_key_value.",
    "attention.output.": "self_attention.dense.", "mlp_norm.": "post_attention_layernorm.",
    "mlp.up.": "mlp.dense_h_to_4h.", "mlp.down.": "mlp.dense_4h_to_h.",
}  # fmt: skip
OUTSIDE = {
    "embedding.weight": "embedding.word_embeddings.weight",
    "positions.weight": "embedding.position_embeddings.weight",
    "final_norm.weight": "decoder.final_layernorm.weight",
    "final_norm.bias": "decoder.final_layernorm.bias",
    "head.weight": "output_layer.weight",
}


def random_tensors(config: ModelConfig) -> dict[str, dict[str, Tensor]]:
    """Return weights and moments of a model, all different."""
    generator = torch.Generator().manual_seed(1)
    return {
        kind: {
            name: torch.rand(shape, generator=generator) + 0.5
            for name, shape in logical_shapes(config).items()
        }
        for kind in ("weights", "exp_avg", "exp_avg_sq")
    }


def part(
    x: Tensor, name: str, config: ModelConfig, *, rank: int, ranks: int, neox: bool = False
) -> Tensor:
    """Return the part of a tensor that a tensor rank of the other program holds."""
    if "qkv." in name:
        size, kv = config.query_size, config.key_value_size
        columns = config.attention_head_size
        q, k, v = (piece.chunk(ranks)[rank] for piece in x.split([size, kv, kv]))
        per_group = config.heads // config.kv_heads
        if neox and per_group > 1:
            return torch.cat([q, k, v])
        pieces = [
            piece.unflatten(0, (-1, count * columns))
            for piece, count in ((q, per_group), (k, 1), (v, 1))
        ]
        return torch.cat(pieces, dim=1).flatten(0, 1).contiguous()
    if ".mlp.up." in name and config.activation in GATED:
        gate, up = (half.chunk(ranks)[rank] for half in x.chunk(2))
        return torch.cat([up, gate] if neox else [gate, up])
    if ".mlp.up." in name or name in ("embedding.weight", "head.weight"):
        return x.chunk(ranks)[rank].clone()
    if name.endswith((".attention.output.weight", ".mlp.down.weight")):
        return x.chunk(ranks, dim=1)[rank].clone()
    return x.clone()


def of_layer(name: str, table: Mapping[str, Any]) -> tuple[int, str, Any] | None:
    """Return (layer, rest of our name, entry of the table) of a tensor in a layer."""
    if not name.startswith("blocks."):
        return None
    _, number, rest = name.split(".", 2)
    prefix = next(key for key in table if rest.startswith(key))
    return int(number), rest.removeprefix(prefix), table[prefix]


def core_names(config: ModelConfig, layers: range, *, first: bool, last: bool) -> Iterator[str]:
    """Yield our names of a stage's parameters, in the order of megatron-core's modules."""
    names = list(logical_shapes(config))
    if first:
        yield from (n for n in ("embedding.weight", "positions.weight") if n in names)
    for layer in layers:
        for prefix in CORE:
            for kind in ("weight", "bias"):
                if (name := f"blocks.{layer}.{prefix}{kind}") in names:
                    yield name
    if last:
        yield from (n for n in ("final_norm.weight", "final_norm.bias") if n in names)
        if "head.weight" in names or not first:
            yield "head.weight"  # of the last stage also if it is tied to the embedding


def write_torch(
    root: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensors],
    args: Namespace,
    *,
    step: int = 3,
    precision: torch.dtype = torch.float32,
) -> None:
    """Write Megatron-LM's format "torch", with an optimizer that is not distributed."""
    tensor, stages = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    chunks = args.virtual_pipeline_model_parallel_size or 1
    own = config.layers // stages // chunks
    for stage in range(stages):
        for rank in range(tensor):
            content: dict[str, Any] = {
                "args": args, "checkpoint_version": 3.0, "iteration": step
            }  # fmt: skip
            ordered: list[str] = []
            for chunk in range(chunks):
                start = (chunk * stages + stage) * own
                first, last = (chunk, stage) == (0, 0), (chunk, stage) == (chunks - 1, stages - 1)
                names = list(core_names(config, range(start, start + own), first=first, last=last))
                state: dict[str, Tensor] = {}
                for name in names:
                    source = "embedding.weight" if name not in tensors["weights"] else name
                    x = part(tensors["weights"][source], name, config, rank=rank, ranks=tensor)
                    place = of_layer(name, CORE)
                    theirs = OUTSIDE.get(name) or (
                        f"decoder.layers.{place[0] - start}.{place[2][0]}{place[1]}"
                        if place
                        else ""
                    )
                    state[theirs] = x.to(precision)
                content["model" if chunks == 1 else f"model{chunk}"] = state
                ordered += names
            content["optimizer"] = _optimizer(
                ordered, config, tensors, rank, tensor, step, precision
            )
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "")
            folder = root / f"iter_{step:07d}" / name
            folder.mkdir(parents=True)
            torch.save(content, folder / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))


def _optimizer(
    names: list[str], config: ModelConfig, tensors: Mapping[str, Tensors], rank: int, ranks: int,
    step: int, precision: torch.dtype,
) -> dict[str, Any]:  # fmt: skip
    """Return the optimizer's state of a file, whose parameters have numbers."""
    groups: list[dict[str, Any]] = []
    states: dict[int, Any] = {}
    masters: list[list[Tensor]] = []
    number = 0
    for decays in (True, False):
        group: dict[str, Any] = {"params": list[int](), "wd_mult": float(decays), "lr_mult": 1.0}
        masters.append([])
        for name in names:
            source = "embedding.weight" if name not in tensors["weights"] else name
            vector = name.endswith(".bias") or tensors["weights"][source].dim() == 1
            if vector is decays:
                continue
            held = {
                kind: part(tensors[kind][source], name, config, rank=rank, ranks=ranks)
                for kind in tensors
            }
            masters[-1].append(held.pop("weights"))
            states[number] = {"step": torch.tensor(float(step)), **held}
            group["params"].append(number)
            number += 1
        groups.append(group)
    state = {"state": states, "param_groups": groups}
    if precision == torch.float32:
        return state
    return {"optimizer": state, "fp32_from_fp16_params": masters}


def write_distributed(
    root: Path, config: ModelConfig, tensors: Mapping[str, Tensors], args: Namespace, step: int = 3
) -> None:
    """Write Megatron-LM's format "torch_dist": one file, with a piece per layer and tensor rank."""
    folder, ranks = root / f"iter_{step:07d}", args.tensor_model_parallel_size
    folder.mkdir(parents=True)
    saved: dict[str, metadata.TensorStorageMetadata] = {}
    storage: dict[metadata.MetadataIndex, filesystem._StorageInfo] = {}
    with (folder / "__0_0.distcp").open("wb") as file:
        for kind, own in tensors.items():
            prefix = "" if kind == "weights" else f"optimizer.state.{kind}."
            for name, whole in own.items():
                place = of_layer(name, CORE)
                key = prefix + (
                    OUTSIDE[name] if place is None else f"decoder.layers.{place[2][1]}{place[1]}"
                )
                if "qkv." in name:  # in groups; gate and up are whole
                    whole = part(whole, name, config, rank=0, ranks=1)
                pieces = _pieces(whole, name, ranks, gated=config.activation in GATED)
                layer = None if place is None else place[0]
                for offset, piece in pieces:
                    offsets, sizes, size = tuple(offset), tuple(piece.shape), tuple(whole.shape)
                    if layer is not None:
                        offsets, sizes = (layer, *offsets), (1, *sizes)
                        size, piece = (config.layers, *size), piece[None]
                    about = saved.setdefault(
                        key,
                        metadata.TensorStorageMetadata(
                            metadata.TensorProperties(), torch.Size(size), []
                        ),
                    )
                    chunk = metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
                    about.chunks.append(chunk)
                    data = io.BytesIO()
                    torch.save(piece.clone(), data)
                    index = metadata.MetadataIndex(key, chunk.offsets)
                    storage[index] = filesystem._StorageInfo(
                        "__0_0.distcp", file.tell(), len(data.getvalue())
                    )
                    file.write(data.getvalue())
    content = metadata.Metadata(dict(saved), storage_data=storage)
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    optimizer = {"param_groups": [{"wd_mult": 1.0}], "state": {"common_step": torch.tensor(3.0)}}
    common = {"args": args, "checkpoint_version": 3.0, "iteration": step, "optimizer": optimizer}
    torch.save(common, folder / "common.pt")
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))


def _pieces(x: Tensor, name: str, ranks: int, *, gated: bool) -> Iterator[tuple[list[int], Tensor]]:
    """Yield (offsets, piece) of a tensor, as the tensor ranks hold it."""
    dimension: int | None = None
    if any(text in name for text in ("qkv.", ".mlp.up.")) or name in (
        "embedding.weight", "head.weight",
    ):  # fmt: skip
        dimension = 0
    elif name.endswith((".attention.output.weight", ".mlp.down.weight")):
        dimension = 1
    count = 1 if dimension is None else ranks * (2 if ".mlp.up." in name and gated else 1)
    for number, piece in enumerate(x.chunk(count, dimension or 0)):
        offsets = [0] * x.dim()
        offsets[dimension or 0] = number * piece.shape[dimension or 0]
        yield offsets, piece


def write_layers(
    folder: Path,
    config: ModelConfig,
    weights: Tensors,
    states: dict[str, Any],
    *,
    ranks: int,
    neox: bool,
    pipeline: bool = True,
) -> None:
    """Write the files of DeepSpeed, in a pipeline one per layer and tensor rank."""
    folder.mkdir(parents=True)
    last = config.layers + (3 if neox else 2)  # number of the final norm
    names = dict(LEGACY)
    if neox:
        names = {key: name.removeprefix("self_") for key, name in LEGACY.items()}
    for rank in range(ranks):
        layers: dict[int, dict[str, Tensor]] = {}
        for name, whole in weights.items():
            x = part(whole, name, config, rank=rank, ranks=ranks, neox=neox)
            if place := of_layer(name, names):
                kind = place[1]
                if neox and config.norm == "rmsnorm" and "norm" in name:
                    kind = "scale"
                layers.setdefault(2 + place[0], {})[f"{place[2]}{kind}"] = x
            elif name in ("embedding.weight", "positions.weight"):
                key = OUTSIDE[name].removeprefix("embedding.")
                layers.setdefault(0 if neox else 1, {})[key] = x
            elif name == "head.weight":
                layers[last + 1] = {"final_linear.weight" if neox else "lm_head.weight": x}
            else:
                kind = name.removeprefix("final_norm.")
                key = f"norm.{'scale' if config.norm == 'rmsnorm' else kind}" if neox else kind
                layers.setdefault(last, {})[key] = x
        module = {
            f"sequential.{number}.{name}": x
            for number, state in layers.items()
            for name, x in state.items()
        }
        for number, state in layers.items() if pipeline else ():
            torch.save(state, folder / f"layer_{number:02d}-model_{rank:02d}-model_states.pt")
        torch.save(
            {"module": None if pipeline else module, "global_steps": 3, **states},
            folder / f"mp_rank_{rank:02d}_model_states.pt",
        )
    (folder.parent / "latest").write_text(folder.name)
