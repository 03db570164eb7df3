"""Convert checkpoints of Megatron-LM, Megatron-DeepSpeed and GPT-NeoX to a checkpoint of a run.

The recipe follows from the settings in the checkpoint, as `convert.py recipe` translates them. With
the optimizer's state, the output resumes as a checkpoint of the run; without it, a run starts from
its weights.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.config import GATED, ModelConfig
from models.errors import UserError, a_few, counted
from models.layer_specs import logical_shapes
from threefold.checkpoint.format import (
    FileRecord,
    Manifest,
    TensorFileWriter,
    split_by_size,
    tensor_key,
)
from threefold.checkpoint.state import STATES, WEIGHTS
from threefold.convert.files import MANIFEST, OutputFiles, recorded_files, require_finite
from threefold.convert.foreign_checkpoint import (
    EMBEDDING,
    MASTER,
    ForeignCheckpoint,
)
from threefold.convert.foreign_files import Foreign, option, read_foreign
from threefold.convert.foreign_programs import PROGRAMS
from threefold.convert.translation import UNKNOWN, Translated, translate
from threefold.run_folder.folder import versions

IMPORTED_FROM = "imported_from"  # key of the layout
FOREIGN = OutputFiles(MANIFEST, f'"{IMPORTED_FROM}": ', recorded_files)
HEAD = "head.weight"
# A stored flag -> the option of Megatron-LM that clears it.
CLEARING = {
    "add_bias_linear": "disable-bias-linear", "bias_gelu_fusion": "no-bias-gelu-fusion",
    "add_position_embedding": "no-position-embedding",
}  # fmt: skip
# Settings that change what the model computes, so that its weights are useless without them.
DECISIVE = (
    "gpt_j_residual", "gpt_j_tied", "pos_emb", "position-embedding-type", "activation", "norm",
    "use_qk_layernorm", "qk-layernorm", "num_unique_layers", "sparsity_config", "embed-layernorm",
    "attention_config", "apply-residual-connection-post-layernorm", "window-attn-skip-freq",
    "use_bias_in_norms", "moe_num_experts", "num-experts", "multi-latent-attention",
    "mtp-num-layers", "softmax-type", "is-hybrid-model", "hybrid-override-pattern", "no-rope-freq",
    "opt_pos_emb_offset", "use_mup",
)  # fmt: skip


def foreign_settings(checkpoint: ForeignCheckpoint, files: Sequence[Path]) -> Foreign:
    """Return the settings of the run that saved the checkpoint.

    Args:
        files: configurations of the run, which replace the settings in the checkpoint

    Raises:
        UserError: no file has the settings, or they have interleaved rotary columns.
    """
    if not files and checkpoint.program == "neox":
        files = sorted(checkpoint.path.glob("configs/*.y*ml"))
    if files:
        return read_foreign(list(files))
    args = checkpoint.args
    if "num_layers" not in args or checkpoint.program == "neox":
        raise UserError(
            f"{checkpoint.path} does not hold the settings of its run; name their files with "
            f"--config FILE..., as for convert.py recipe"
        )
    if args.get("rotary_interleaved"):
        raise UserError(
            f"{checkpoint.path}: args.rotary_interleaved = True is not supported, because the "
            f"columns of a head have another order; only checkpoints saved with False can be "
            f"imported"
        )
    for clearing, name in CLEARING.items():
        args = {**args, name: args.get(clearing) is False}
    values = {  # 0 is a value: --hidden-dropout 0
        option(key): value
        for key, value in args.items()
        if value is not None and value is not False and value != []
    }
    for first in ("start-weight-decay", "end-weight-decay"):
        if values.get(first) == values.get("weight-decay"):
            values.pop(first, None)
    stages = args.get("pipeline_model_parallel_size") or 1
    if chunks := args.get("virtual_pipeline_model_parallel_size"):
        values["num-layers-per-virtual-pipeline-stage"] = args["num_layers"] // stages // chunks
    inactive = ("moe-", "expert-") if not values.get("num-experts") else ()
    dropped = [key for key in values if inactive and key.startswith(inactive)]
    dropped += [key for key in values if key.startswith("kd-") and "kd" not in values]
    for key in dropped:
        del values[key]
    return Foreign("megatron", values, ranks=args.get("world_size"))


def recipe_of(
    checkpoint: ForeignCheckpoint,
    foreign: Foreign,
    file: Path,
    *,
    ranks: int | None,
    overrides: Sequence[str],
) -> Translated:
    """Return the recipe that continues the run; the vocabulary is that of the embedding's rows.

    Args:
        file: path of the recipe; gives its name and folder
        overrides: `section.key=value`, applied last

    Raises:
        UserError: the model is not supported; the message names the setting.
    """
    if EMBEDDING not in checkpoint.names():
        raise UserError(
            f"{checkpoint.path} has no word_embeddings.weight; copy all files of the checkpoint"
        )
    rows = sum(len(part) for part in checkpoint.parts(WEIGHTS, EMBEDDING))
    translated = translate(
        foreign,
        PROGRAMS[foreign.program],
        name=file.stem,
        ranks=ranks,
        overrides=[f"model.vocab_size={rows}", *overrides],
        folder=file.parent,
    )
    for line in translated.warnings:
        if line.key in DECISIVE:
            raise UserError(
                f"{checkpoint.path}: {line.key} = {line.value} is not supported ({line.text}); "
                f"only checkpoints without it can be imported"
            )
    model = translated.recipe.model
    for key in ("experts", "latent", "prediction"):
        if getattr(model, key) is not None:
            raise UserError(
                f"{checkpoint.path}: weights of [model.{key}] are not imported; use a dense model"
            )
    if "params-dtype" in foreign.values:  # stored settings, most of them defaults without a rule
        kept = tuple(line for line in translated.lines if line.status != UNKNOWN)
        translated = replace(translated, lines=kept)
    return translated


class Conversion:
    """The tensors of a checkpoint as our logical tensors.

    Attributes:
        diverged: names of parameters whose replicas on the tensor ranks differ
    """

    def __init__(self, checkpoint: ForeignCheckpoint, model: ModelConfig):
        self.checkpoint, self.model = checkpoint, model
        self.shapes = logical_shapes(model)
        self.diverged: set[str] = set()
        self.is_neox = checkpoint.program == "neox"
        # Megatron's --apply-layernorm-1p stores the weights of norms minus 1.
        self.offset = float(bool(checkpoint.args.get("apply_layernorm_1p")))
        names, wanted = checkpoint.names(), set(self.shapes)
        if missing := sorted(wanted - names):
            raise UserError(
                f"{checkpoint.path} lacks {counted(len(missing), 'tensor')} of the recipe's model: "
                f"{a_few(missing)}; use the settings of the run that saved the checkpoint"
            )
        tied = {HEAD} if model.tie_embeddings else set()
        if unknown := sorted(names - wanted - tied):
            raise UserError(
                f"{checkpoint.where(unknown[0])}: {counted(len(unknown), 'tensor')} that the "
                f"recipe's model does not have: {a_few(unknown)}; use the settings of the run that "
                f"saved the checkpoint"
            )

    def tensor(self, kind: str, name: str) -> Tensor:
        """Return a logical tensor, fp32.

        Raises:
            UserError: it has another shape than in the recipe's model.
        """
        parts = [part.float() for part in self.checkpoint.parts(kind, name)]
        if ".attention.qkv." in name:
            pieces = [self._queries_keys_values(part, name) for part in parts]
            joined = torch.cat([torch.cat(piece) for piece in zip(*pieces, strict=True)])
        elif ".mlp.up." in name and self.model.activation in GATED:
            halves = [part.chunk(2) for part in parts]
            # Megatron activates the first half, GPT-NeoX the second.
            order = (1, 0) if self.is_neox else (0, 1)
            joined = torch.cat([half[n] for n in order for half in halves])
        elif name in (EMBEDDING, HEAD):
            joined = torch.cat(parts)[: self.model.vocab_size]
        elif ".mlp.up." in name:
            joined = torch.cat(parts)
        elif name.endswith((".attention.output.weight", ".mlp.down.weight")):
            joined = torch.cat(parts, dim=1)
        else:
            joined = self._replicas(parts, name)
        if "norm.weight" in name and kind in (WEIGHTS, MASTER) and self.offset:
            joined = joined + self.offset
        if tuple(joined.shape) != self.shapes[name]:
            raise UserError(
                f"{self.checkpoint.where(name)} has the shape {tuple(joined.shape)}, and the "
                f"recipe's model has {self.shapes[name]}; use the settings of the run that saved it"
            )
        return joined.contiguous()

    def _queries_keys_values(self, part: Tensor, name: str) -> tuple[Tensor, ...]:
        """Return the queries, keys and values of a tensor rank.

        Megatron joins the queries of a group with its key and its value; before its checkpoint
        version 2, the rows were [3, heads, columns] (0) or [heads, columns, 3] (1), as
        `fix_query_key_value_ordering` describes. GPT-NeoX joins those of a head; with grouped
        queries, a rank has all queries, then all keys, then all values.
        """
        model, columns = self.model, self.model.attention_head_size
        per_group = model.heads // model.kv_heads
        if len(part) % ((per_group + 2) * columns):
            raise UserError(
                f"{self.checkpoint.where(name)} has {len(part)} rows, which are not divisible into "
                f"groups of {per_group} queries, a key and a value of {columns} columns; use the "
                f"settings of the run that saved it"
            )
        groups = len(part) // ((per_group + 2) * columns)
        rest = part.shape[1:]
        blocks = [groups * per_group * columns, groups * columns, groups * columns]
        if self.is_neox and per_group > 1:
            return part.split(blocks)
        if not self.is_neox and self.checkpoint.version < 2:
            if self.checkpoint.version < 1:
                return part.split(blocks)
            return part.view(-1, 3, *rest).transpose(0, 1).reshape(3, -1, *rest).unbind()
        sizes = [per_group * columns, columns, columns]
        pieces = part.view(groups, -1, *rest).split(sizes, dim=1)
        return tuple(piece.reshape(-1, *rest) for piece in pieces)

    def _replicas(self, parts: list[Tensor], name: str) -> Tensor:
        """Return a tensor that all tensor ranks hold; the mean if the replicas diverged."""
        if all(torch.equal(part, parts[0]) for part in parts):
            return parts[0]
        self.diverged.add(name)
        return torch.stack(parts).double().mean(0).float()


def import_checkpoint(
    checkpoint: ForeignCheckpoint, translated: Translated, folder: Path
) -> set[str]:
    """Write the checkpoint, with one logical tensor in memory at a time.

    Returns:
        The parameters whose replicas on the tensor ranks differ, and whose mean is taken.

    Raises:
        UserError: the tensors do not fit the recipe.
    """
    recipe, model = translated.recipe, translated.recipe.model
    conversion = Conversion(checkpoint, model)
    files: dict[str, FileRecord] = {}
    tensors: dict[str, str] = {}
    groups = {"weights": (WEIGHTS,)} | ({"moments": STATES["adamw"]} if checkpoint.resumes else {})
    for label, kinds in groups.items():
        keys = {tensor_key(kind, n): (kind, n) for n in conversion.shapes for kind in kinds}
        shapes = {key: conversion.shapes[name] for key, (_, name) in keys.items()}
        for number, own in enumerate(split_by_size(shapes, dtype="F32")):
            file = f"{label}-{number:05d}.safetensors"
            declared = {key: shapes[key] for key in own}
            with TensorFileWriter(folder / file, declared, dtype="F32") as writer:
                for key in own:
                    kind, name = keys[key]
                    kind = MASTER if kind == WEIGHTS else kind
                    place = f"{checkpoint.where(name)} ({kind})"
                    tensor = require_finite(conversion.tensor(kind, name), place)
                    writer.write(key, tensor.numpy().data)
            files[file] = writer.record
            tensors |= dict.fromkeys(own, file)
    samples = checkpoint.args.get("consumed_train_samples")
    if samples is None:
        samples = checkpoint.step * recipe.batch.global_sequences
    facts: dict[str, Any] = {"step": 0, "samples": 0, "tokens": 0, "updates": 0}
    if checkpoint.resumes:
        facts = {
            "step": checkpoint.step, "samples": samples,
            "tokens": samples * model.sequence_length, "updates": checkpoint.updates,
        }  # fmt: skip
    Manifest(
        **facts,
        loss_scale=None,
        recipe=recipe.model_dump(mode="json") if checkpoint.resumes else {"model": asdict(model)},
        layout={IMPORTED_FROM: str(checkpoint.path)},
        data={},
        versions=versions(),
        tensors=tensors,
        files=files,
    ).write(folder)
    return conversion.diverged
