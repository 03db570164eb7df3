"""Convert weights of transformers to a checkpoint from which a run in any layout can start."""

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from models.config import ModelConfig, Prediction
from models.errors import UserError, a_few, counted, reason_of, why_no_folder
from models.hugging_face.config import (
    hugging_face_config,
    imported_model,
    unsupported_attributes,
)
from models.hugging_face.families import BY_NAME, Family, described, differences
from models.hugging_face.weights import Counterpart, counterparts
from models.layer_specs import logical_shapes
from threefold.checkpoint.format import Manifest
from threefold.convert.files import require_finite, write_weights
from threefold.convert.to_hugging_face import their_config
from threefold.run_folder.folder import versions

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING = (
    "lm_head.weight",
    "embedding.weight",
)  # name in transformers, name in our checkpoints
BLOCK_ROWS = 4096  # rows of two tensors that are compared at once
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)
PREFIXES = ("", "transformer.", "model.")  # of tensor names; files of a base model have none
BUFFER_SUFFIXES = ("rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # in old files


class TheirFiles:
    """The tensors of a folder's safetensors files, by name.

    Raises:
        UserError: The folder has no such files, or a file is damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        names = self._names()
        self.files: dict[str, str] = {}
        for name in sorted(names):
            try:
                with safe_open(folder / name, framework="pt") as file:
                    self.files |= dict.fromkeys(file.keys(), name)
            except (SafetensorError, OSError) as error:
                raise UserError(f"{folder / name} cannot be read: {reason_of(error)}") from None

    def _names(self) -> set[str]:
        """Return the names of the files that transformers would load."""
        index = self.folder / INDEX
        if (self.folder / WHOLE).is_file():
            return {WHOLE}
        if not index.is_file():
            raise UserError(
                f"{self.folder} has neither {WHOLE} nor {INDEX}; save the model with "
                f"save_pretrained(..., safe_serialization=True)"
            )
        try:
            content = json.loads(index.read_bytes())
            return {str(name) for name in content["weight_map"].values()}
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{index} is not an index of tensors ({reason_of(error)}); save the model again"
            ) from None

    def find(self, name: str) -> str:
        """Return a tensor's name in the files, which may have another prefix.

        Raises:
            UserError: The files do not have the tensor.
        """
        for prefix in PREFIXES:
            for candidate in (name.removeprefix(prefix), prefix + name):
                if candidate in self.files:
                    return candidate
        raise UserError(f"{self.folder}: {name} is in none of {sorted(set(self.files.values()))}")

    def has(self, name: str) -> bool:
        """Return whether the files have a tensor, perhaps with another prefix."""
        try:
            return bool(self.find(name))
        except UserError:
            return False

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, by its name in the files."""
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def blocks(self, name: str) -> Iterator[Tensor]:
        """Yield the rows of a tensor in blocks, by its name in the files."""
        rows = self.shape(name)[0]
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            for start in range(0, rows, BLOCK_ROWS):
                yield file.get_slice(name)[start : min(start + BLOCK_ROWS, rows)]

    def read(
        self, name: str, shape: tuple[int, ...], expert: tuple[int, int] | None = None
    ) -> Tensor:
        """Read a tensor as fp32.

        Args:
            expert: (number, count) to read only one of the entries of a joined tensor

        Raises:
            UserError: The tensor is missing, or has another shape or an unsupported precision.
        """
        found = self.find(name)
        try:
            with safe_open(self.folder / self.files[found], framework="pt") as file:
                their_shape = tuple(file.get_slice(found).get_shape())
                if expert is not None and their_shape == (expert[1], *shape):
                    tensor, their_shape = file.get_slice(found)[expert[0]], shape
                else:
                    tensor = file.get_tensor(found)
        except SafetensorError as error:  # for example, torch does not have its type
            raise UserError(
                f"{self.folder / self.files[found]}: {found} cannot be read ({reason_of(error)}); "
                f"use a model in bf16, fp16 or fp32"
            ) from None
        if tensor.dtype not in PRECISIONS:
            raise UserError(
                f"{self.folder / self.files[found]}: {found} is {tensor.dtype}, which is not "
                f"supported; use a model in bf16, fp16 or fp32"
            )
        if their_shape != shape:
            expected = shape if expert is None else (expert[1], *shape)
            raise UserError(
                f"{self.folder / self.files[found]}: {found} has the shape {their_shape} but "
                f"config.json implies {expected}"
            )
        return tensor.to(torch.float32)


def read_config(folder: Path) -> tuple[ModelConfig, Family]:
    """Return the architecture in a folder's config.json, and the class that wrote the files.

    Raises:
        UserError: The file is missing, transformers cannot read it, or the architecture is not
            supported.
    """
    if not folder.is_dir():
        raise UserError(
            f"{folder} {why_no_folder(folder)}; use a folder written by save_pretrained"
        )
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder} has no config.json; use a folder written by save_pretrained")
    try:
        # Without the argument, transformers asks on the terminal whether to run the folder's code.
        theirs = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers' configs raise many classes
        advice = "correct config.json, or write it again with save_pretrained of transformers"
        if "trust_remote_code" in str(error):
            advice = "use a model without code of its own, such as one of the families"
        elif "does not recognize this architecture" in str(error):
            advice = f"use one of {', '.join(BY_NAME)}"
        raise UserError(f"{folder / 'config.json'}: {reason_of(error)}; {advice}") from None
    try:
        return imported_config(theirs.to_dict()), BY_NAME[theirs.model_type]
    except UserError as problem:
        raise UserError(f"{folder / 'config.json'}: {problem}") from None


def special_tokens_in(folder: Path) -> dict[str, Any]:
    """Return the BOS and EOS ids of a model folder; several EOS ids are a list.

    generation_config.json has precedence over config.json, which `read_config` has checked.

    Raises:
        UserError: generation_config.json cannot be read.
    """
    ids = json.loads((folder / "config.json").read_bytes())
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            generation = json.loads(file.read_bytes())
            ids |= {name: value for name, value in generation.items() if value is not None}
        except (ValueError, RecursionError, AttributeError) as error:
            raise UserError(
                f"{file} cannot be read: {reason_of(error)}; save the model again with "
                f"save_pretrained"
            ) from None
    tokens = {name: ids.get(name) for name in ("bos_token_id", "eos_token_id")}
    return {name: value if _are_ids(value) else None for name, value in tokens.items()}


def _are_ids(value: Any) -> bool:
    return all(isinstance(each, int) for each in (value if isinstance(value, list) else [value]))


def imported_config(theirs: dict[str, Any]) -> ModelConfig:
    """Return the architecture in transformers' config.

    Raises:
        UserError: it is not supported; the message lists all attributes that are not.
    """
    if theirs.get("quantization_config"):
        raise UserError(
            "quantization_config: quantized weights are not supported; load the model with "
            "transformers, dequantize it, and save it in bf16"
        )
    # Every class reads these keys, but their configs have them only if they are set.
    if theirs.get("is_causal") is False:
        raise UserError("is_causal = false: not supported; use a model with is_causal = true")
    if theirs.get("per_layer_config"):
        raise UserError("per_layer_config: not supported; use a model whose layers are alike")
    model = imported_model(theirs)
    family = BY_NAME[theirs["model_type"]]
    if different := differences(model, family):
        ours, others = described(different, model)
        raise UserError(
            f"{', '.join(ours)} is not supported for {family.class_name}; use a model with "
            f"{', '.join(others)}"
        )
    exported = their_config(hugging_face_config(model, family)).to_dict()
    unsupported = unsupported_attributes(theirs, exported, family)
    if unsupported:
        texts = (f"{name} = {json.dumps(value)}" for name, (value, _) in unsupported.items())
        remedies = (f"{name} = {json.dumps(value)}" for name, (_, value) in unsupported.items())
        raise UserError(
            f"{', '.join(texts)}: not supported; use a model with {', '.join(remedies)}"
        )
    return model


def _has_own_head(table: Mapping[str, Counterpart], theirs: TheirFiles) -> bool:
    """Return whether the files have an embedding and a head with different values.

    transformers compares them too (5.23, PreTrainedModel.tie_weights), because files may hold a
    tied embedding under both names.
    """
    embedding = table[EMBEDDING].names[0]
    if HEAD not in theirs.files or not theirs.has(embedding):
        return False
    pairs = zip(theirs.blocks(HEAD), theirs.blocks(theirs.find(embedding)), strict=False)
    same_shape = theirs.shape(HEAD) == theirs.shape(theirs.find(embedding))
    return not same_shape or not all(
        torch.equal(one.float(), other.float()) for one, other in pairs
    )


def _prediction_depth(model: ModelConfig, family: Family, theirs: TheirFiles) -> int:
    """Return the number of prediction modules in the files."""
    if not family.has_predictions:
        return 0
    layers = itertools.count(model.layers)
    projections = (f"model.layers.{layer}.eh_proj.weight" for layer in layers)
    return len(list(itertools.takewhile(theirs.has, projections)))


def import_model(folder: Path, output: Path) -> ModelConfig:
    """Write the checkpoint with one tensor in memory at a time, and return the architecture.

    Modules that predict further tokens are part of the model if the files have them. As in
    transformers, a head that config.json ties to the embedding is untied if the files have a
    head with other values.

    Raises:
        UserError: The tensors do not match the config.
    """
    (model, family), theirs = read_config(folder), TheirFiles(folder)
    special_tokens = special_tokens_in(folder)
    if depth := _prediction_depth(model, family, theirs):
        model = replace(model, prediction=Prediction(depth=depth))
    if model.tie_embeddings and _has_own_head(counterparts(model, family), theirs):
        model = replace(model, tie_embeddings=False)
    table, shapes = counterparts(model, family), logical_shapes(model)
    if model.tie_embeddings and HEAD in theirs.files and not theirs.has(table[EMBEDDING].names[0]):
        table[EMBEDDING] = Counterpart((HEAD,))  # the tied tensor, saved by its other name
    used = {theirs.find(part) for counterpart in table.values() for part in counterpart.names}
    copies = {name for counterpart in table.values() for name in counterpart.copies}
    table = {name: replace(counterpart, copies=()) for name, counterpart in table.items()}
    tied = {HEAD} if model.tie_embeddings else set()
    unknown = {
        name
        for name in theirs.files.keys() - used - tied - copies
        if not name.endswith(BUFFER_SUFFIXES)
    }
    if unknown:
        raise UserError(
            f"{folder}: {counted(len(unknown), 'tensor')} without a place in a model with this "
            f"config.json: {a_few(sorted(unknown))}"
        )

    def joined(name: str) -> Tensor:
        parts = table[name].shapes(shapes[name])
        expert = table[name].expert
        tensor = table[name].join(theirs.read(part, shape, expert) for part, shape in parts.items())
        return require_finite(tensor, f"{folder}: {', '.join(parts)}")

    files, tensors = write_weights(output, shapes, joined)
    Manifest(
        step=0,
        samples=0,
        tokens=0,
        updates=0,
        loss_scale=None,
        recipe={"model": asdict(model)},
        layout={},
        data={},
        versions=versions(),
        tensors=tensors,
        files=files,
        special_tokens=special_tokens,
    ).write(output)
    return model
