"""Read checkpoints of Megatron-LM, Megatron-DeepSpeed and GPT-NeoX, without executing their code.

| files in the folder of an iteration      | format                            |
|------------------------------------------|-----------------------------------|
| mp_rank_TT[_PPP]/model_optim_rng.pt      | Megatron-LM, "torch"              |
| .metadata, common.pt, *.distcp           | Megatron-LM, "torch_dist"         |
| layer_LL-model_TT-model_states.pt        | pipelines of DeepSpeed            |
| mp_rank_TT_model_states.pt               | DeepSpeed without pipeline stages |

TT is the tensor rank, PPP the pipeline rank, LL the number of a layer in the pipeline. The layouts
are those of Megatron-LM's training/checkpointing.py (d98e8a64), torch.distributed.checkpoint and
DeepSpeed's runtime/pipe/module.py.
"""

import io
import itertools
import pickle
import re
import struct
import zipfile
import zlib
from abc import ABC, abstractmethod
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner
from typing_extensions import override

from models.errors import UserError, a_few, counted, reason_of
from threefold.checkpoint.state import STATES, WEIGHTS

MASTER = "master"  # the fp32 weights of the optimizer
ITERATION = re.compile(r"iter_\d{7}|global_step\d+|release")
TRACKERS = ("latest_checkpointed_iteration.txt", "latest")
RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?")
LAYER_FILE = re.compile(r"layer_(\d+)-model_(\d+)-model_states\.pt")
STATES_FILE = re.compile(r"mp_rank_(\d+)_model_states\.pt")
# Tensors that are not parameters: buffers of old versions, and the state of FP8.
NO_PARAMETERS = re.compile(r"(_extra_state(/.*)?|inv_freq|masked_bias|attention\.bias)$")
EMBEDDING, POSITIONS = "embedding.weight", "positions.weight"
OUTSIDE = {  # name of a tensor outside of the layers -> ours
    "embedding.word_embeddings.weight": EMBEDDING, "word_embeddings.weight": EMBEDDING,
    "embedding.position_embeddings.weight": POSITIONS, "position_embeddings.weight": POSITIONS,
    "output_layer.weight": "head.weight", "lm_head.weight": "head.weight",
    "final_linear.weight": "head.weight", "word_embeddings_for_head.weight": "head.weight",
}  # fmt: skip
INSIDE = {  # prefix in a layer -> ours
    "input_layernorm.": "attention_norm.",
    "self_attention.linear_qkv.layer_norm_": "attention_norm.",
    "self_attention.linear_qkv.": "attention.qkv.",
    "self_attention.query_key_value.": "attention.qkv.",
    "attention.query_key_value.": "attention.qkv.",
    "self_attention.linear_proj.": "attention.output.",
    "self_attention.dense.": "attention.output.",
    "attention.dense.": "attention.output.",
    "self_attention.q_layernorm.": "attention.q_norm.",
    "self_attention.k_layernorm.": "attention.k_norm.",
    "pre_mlp_layernorm.": "mlp_norm.",
    "post_attention_layernorm.": "mlp_norm.",
    "mlp.linear_fc1.layer_norm_": "mlp_norm.",
    "mlp.linear_fc1.": "mlp.up.",
    "mlp.dense_h_to_4h.": "mlp.up.",
    "mlp.linear1.": "mlp.up.",
    "mlp.linear_fc2.": "mlp.down.",
    "mlp.dense_4h_to_h.": "mlp.down.",
    "mlp.linear2.": "mlp.down.",
}
FINAL_NORM = re.compile(r"(?:(?:final_layernorm|final_norm|norm)\.)?(weight|bias|scale)")
IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
PREFIXES = re.compile(r"(module|language_model|decoder|encoder|transformer)\.")


def our_name(theirs: str) -> str | None:
    """Return our logical name of a tensor; None if our models have no such tensor.

    theirs: the name in any of the formats, with "layers.N." for a tensor of layer N of the model
    """
    while match := PREFIXES.match(theirs):
        theirs = theirs[match.end() :]
    if match := IN_LAYER.fullmatch(theirs):
        number, rest = match.groups()
        for prefix, ours in INSIDE.items():
            if rest.startswith(prefix):
                kind = rest.removeprefix(prefix).replace("scale", "weight")
                return f"blocks.{number}.{ours}{kind}" if kind in ("weight", "bias") else None
        return None
    if match := FINAL_NORM.fullmatch(theirs):
        return f"final_norm.{match[1].replace('scale', 'weight')}"
    return OUTSIDE.get(theirs)


@dataclass
class ForeignCheckpoint(ABC):
    """A checkpoint of another program.

    Attributes:
        path: folder of the iteration
        program: "megatron" or "neox", as `foreign_programs.PROGRAMS` calls them
        args: the settings that the program stores, by name; empty if there are none
        step: number of completed steps; 0 if the files do not say
        updates: steps of the optimizer; None if the optimizer's state is not read
        version: Megatron's checkpoint_version, on which the order of queries, keys and values
            depends
        note: why the optimizer's state is not read
    """

    path: Path
    program: str = "megatron"
    args: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    updates: int | None = None
    version: float = 3.0
    note: str = ""

    @property
    def resumes(self) -> bool:
        """True if the optimizer's state is read, so that training continues."""
        return self.updates is not None

    @abstractmethod
    def names(self) -> set[str]:
        """Return our names of the parameters in the files."""

    @abstractmethod
    def parts(self, kind: str, name: str) -> list[Tensor]:
        """Return the parts that the tensor ranks hold of a parameter or a moment, in rank order.

        Args:
            kind: "weights", "master", "exp_avg" or "exp_avg_sq"; "master" may be the weights
            name: our name
        """

    @abstractmethod
    def where(self, name: str) -> str:
        """Return the file and the name of a parameter in it, for messages."""

    def _checked(self, names: Mapping[str, str | None]) -> dict[str, str]:
        """Return their name -> our name.

        Raises:
            UserError: our models do not have a tensor of the files.
        """
        if unknown := sorted(name for name, ours in names.items() if ours is None):
            raise UserError(
                f"{self.path}: {counted(len(unknown), 'tensor')} that no model of this program "
                f"has: {a_few(unknown)}; only dense decoders with the standard blocks can be "
                f"imported"
            )
        return {name: ours for name, ours in names.items() if ours is not None}


# Reading without executing: only these classes are created, and those of the programs are replaced
# by one that keeps its arguments.


class StandIn:
    """Takes the place of a class of another program, keeps its arguments, and executes nothing."""

    def __init__(self, *values: Any):
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.state = state


REPLACED = (
    "megatron.core.enums.ModelType", "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.AttnMaskType",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    "megatron.core.rerun_state_machine.RerunDiagnostic",
    "megatron.core.rerun_state_machine.RerunMode", "megatron.core.rerun_state_machine.RerunState",
    "megatron.enums.ModelType", "megatron.enums.PositionEmbeddingType", "megatron.enums.LayerType",
    "megatron.model.enums.ModelType", "megatron.model.enums.PositionEmbeddingType",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum", "signal.Signals",
)  # fmt: skip
RECONSTRUCT = np.ndarray(0).__reduce__()[0]  # with which numpy begins a pickled array
ALLOWED: list[Any] = [
    Namespace, SimpleNamespace, io.BytesIO, np.ndarray, np.dtype, type(np.dtype("uint32")),
    *((StandIn, name) for name in REPLACED),
    *((PosixPath, f"pathlib.{name}") for name in ("PosixPath", "Path")),
    *((RECONSTRUCT, f"numpy.{core}.multiarray._reconstruct")
      for core in ("core", "_core")),
]  # fmt: skip
METADATA = {  # module -> classes in .metadata of torch.distributed.checkpoint
    metadata.__name__: (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    planner.__name__: ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    filesystem.__name__: ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "strided", "float32", "float64", "bfloat16", "float16", "uint8", "int64",
              "int32", "bool"),
    "collections": ("OrderedDict",),
}  # fmt: skip
ADVICE = (
    "this class is not in the list of classes that are read without executing code; if you trust "
    "the file, load it with torch.load(weights_only=False), remove the object and save it again"
)


LOAD_ERRORS = (  # of torch.load, which interprets pickle opcodes: damaged ones raise any of these
    OSError, RuntimeError, EOFError, ValueError, KeyError, IndexError, AttributeError, TypeError,
    AssertionError, OverflowError, pickle.UnpicklingError, struct.error,
)  # fmt: skip


def load(file: Path) -> dict[str, Any]:
    """Load a file of torch.save, whose tensors stay on the disk until they are used.

    Raises:
        UserError: the file is missing or damaged, or needs a class that is not allowed.
    """
    _compare_checksums(file)
    try:
        with torch.serialization.safe_globals(ALLOWED):
            try:
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:  # files of torch before 1.6 cannot be mapped
                if "mmap" not in str(error):
                    raise
                content = torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{file} is missing; copy all files of the checkpoint") from None
    except LOAD_ERRORS as error:
        raise UserError(_damaged(file, error)) from None
    if not isinstance(content, dict):
        raise UserError(_damaged(file, TypeError(f"a {type(content).__name__}, not a table")))
    return content


def _compare_checksums(file: Path) -> None:
    """Compare the checksums of a file of torch.save, which torch does not do when it maps the file.

    Raises:
        UserError: a checksum differs. All differ if they were turned off for the save.
    """
    try:
        if not zipfile.is_zipfile(file):
            return
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(_damaged(file, error)) from None
    if damaged:
        raise UserError(
            f"{file}: {damaged} in it differs from its checksum; copy the file again from its "
            f"source. If it was saved with set_crc32_options(False), load and save it with torch"
        )


def _damaged(file: Path, error: Exception) -> str:
    """Describe a file that cannot be read, or that needs a class that is not allowed."""
    match = re.search(r"GLOBAL ([\w.]+)", str(error))
    if match and isinstance(error, pickle.UnpicklingError):
        return f"{file} needs {match[1]}; {ADVICE}"
    return f"{file} cannot be read ({reason_of(error)}); copy it again from its source"


class _MetadataReader(pickle.Unpickler):
    @override
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "megatron.core.dist_checkpointing.strategies.torch":
            return StandIn
        if global_name not in METADATA.get(module_name, ()):
            raise pickle.UnpicklingError(f"GLOBAL {module_name}.{global_name}")
        return super().find_class(module_name, global_name)


def table(value: Any) -> dict[str, Any]:
    """Return settings as a table; empty if there are none."""
    return vars(value) if isinstance(value, Namespace) else value if isinstance(value, dict) else {}


def tensors_of(content: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a nested state dict, in its order."""
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from tensors_of(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor) and not NO_PARAMETERS.search(str(key)):
            yield f"{prefix}{key}", value


# Files in which every rank holds its part of the model.


class RankFiles(ForeignCheckpoint):
    """A checkpoint whose tensor ranks have parts of their own.

    Attributes:
        tensors: kind -> our name -> the parts, in the order of the tensor ranks
        places: our name -> file and name in it
    """

    def __init__(self, path: Path, **facts: Any):
        super().__init__(path, **facts)
        self.tensors: dict[str, dict[str, list[Tensor]]] = {WEIGHTS: {}}
        self.places: dict[str, str] = {}

    @override
    def names(self) -> set[str]:
        return set(self.tensors[WEIGHTS])

    @override
    def parts(self, kind: str, name: str) -> list[Tensor]:
        return self.tensors.get(kind, {}).get(name) or self.tensors[WEIGHTS][name]

    @override
    def where(self, name: str) -> str:
        return self.places[name]

    def add(self, file: Path, rank: int, tensors: Mapping[str, Tensor]) -> None:
        """Add the tensors of a file, by their names.

        Raises:
            UserError: our models do not have a tensor of the files.
        """
        for theirs, ours in self._checked({name: our_name(name) for name in tensors}).items():
            parts = self.tensors[WEIGHTS].setdefault(ours, [])
            if len(parts) == rank:  # a tied copy in another stage comes later
                parts.append(tensors[theirs])
                self.places.setdefault(ours, f"{file}: {theirs}")


def read_torch(path: Path, *, weights_only: bool) -> ForeignCheckpoint:
    """Read Megatron-LM's format "torch", with the optimizer's state if it is not distributed.

    Args:
        weights_only: ignore an optimizer that does not fit the weights
    """
    folders = {
        (int(match[2] or 0), int(match[1])): folder
        for folder in sorted(path.glob("mp_rank_*"))
        if (match := RANK.fullmatch(folder.name))
    }
    contents = {key: load(folder / "model_optim_rng.pt") for key, folder in folders.items()}
    stages, ranks = (1 + max(key[n] for key in folders) for n in (0, 1))
    for stage, rank in itertools.product(range(stages), range(ranks)):
        if (stage, rank) not in folders:
            name = f"mp_rank_{rank:02d}_{stage:03d}" if stages > 1 else f"mp_rank_{rank:02d}"
            raise UserError(f"{path / name} is missing; copy all files of the checkpoint")
    first = contents[0, 0]
    checkpoint = RankFiles(
        path,
        args=table(first.get("args")),
        step=_step(path, {key: content.get("iteration") for key, content in contents.items()}),
        version=float(first.get("checkpoint_version", 0)),
    )
    chunks = [key for key in first if re.fullmatch(r"model\d*", key)]
    layers = 0  # those of the chunks before
    owners: dict[tuple[int, int], list[tuple[str, Tensor]]] = {key: [] for key in folders}
    for chunk, stage in itertools.product(sorted(chunks), range(stages)):
        own = 0
        for rank in range(ranks):
            file, named = folders[stage, rank] / "model_optim_rng.pt", dict[str, Tensor]()
            for name, tensor in tensors_of(contents[stage, rank].get(chunk, {})):
                match = re.search(r"layers\.(\d+)\.", name)
                if match:
                    own = max(own, int(match[1]) + 1)
                    name = name.replace(match[0], f"layers.{layers + int(match[1])}.")
                named[name] = tensor
            checkpoint.add(file, rank, named)
            owners[stage, rank] += named.items()
        layers += own
    if not any("optimizer" in content for content in contents.values()):
        checkpoint.note = "the files have no optimizer"
        return checkpoint
    lacking: list[Path] = []
    try:
        for (stage, rank), content in sorted(contents.items()):
            file, checkpoint.note = folders[stage, rank] / "model_optim_rng.pt", ""
            _add_optimizer(checkpoint, file, rank, content.get("optimizer"), owners[stage, rank])
            lacking += [file] if checkpoint.note else []
        if 0 < len(lacking) < len(contents):
            raise UserError(
                f"{lacking[0]} has no state of the optimizer, unlike the files of other ranks; "
                f"copy it again from its source, or use --weights-only"
            )
    except UserError:
        if not weights_only:
            raise
        checkpoint.tensors = {WEIGHTS: checkpoint.tensors[WEIGHTS]}
    return checkpoint


def _step(path: Path, iterations: Mapping[Any, Any]) -> int:
    """Return the step of a checkpoint whose files name their iterations.

    Raises:
        UserError: they differ, or are not numbers of steps.
    """
    steps = [0 if step is None else step for step in iterations.values()]
    for step in steps:
        if type(step) is not int or step < 0:
            raise UserError(
                f"the files of {path} have iteration = {step!r}, which is not a number of steps, "
                f"such as 1000; copy them again from their source"
            )
    if len(set(steps)) > 1:
        raise UserError(
            f"the files of {path} are of several iterations, "
            f"{a_few([str(step) for step in sorted(set(steps))])}; copy all files of one iteration"
        )
    return steps[0]


def _add_optimizer(
    checkpoint: RankFiles, file: Path, rank: int, state: Any, named: Sequence[tuple[str, Tensor]]
) -> None:
    """Add the moments and the fp32 weights of a file, which are numbered without names.

    Megatron numbers the parameters of each group in the order of the module's parameters; a group
    without weight decay holds biases and vectors (`_get_param_groups` of megatron-core).

    Raises:
        UserError: the numbers do not fit the parameters.
    """
    inner = state.get("optimizer", state) if isinstance(state, dict) else None
    if not isinstance(inner, dict) or not {"state", "param_groups"} <= inner.keys():
        checkpoint.note = "the file of a distributed or chained optimizer has no names"
        return
    if not inner["state"]:
        checkpoint.note = "the optimizer is distributed, with its state in distrib_optim.pt"
        return
    vectors = {name: name.endswith(".bias") or tensor.dim() == 1 for name, tensor in named}
    masters = state.get("fp32_from_fp16_params", state.get("fp32_from_fp16"))
    for number, group in enumerate(inner["param_groups"]):
        decays = group.get("wd_mult", 1.0) != 0
        own = [(name, tensor) for name, tensor in named if vectors[name] is not decays]
        if not group["params"]:
            continue
        if len(own) != len(group["params"]):
            raise UserError(
                f"{file}: optimizer.param_groups[{number}] has {len(group['params'])} parameters, "
                f"and the model has {len(own)} {'with' if decays else 'without'} weight decay; use "
                f"--weights-only"
            )
        for place, (identity, (name, weight)) in enumerate(zip(group["params"], own, strict=True)):
            moments = dict(inner["state"].get(identity, {}))
            if masters is not None:
                moments[MASTER] = masters[number][place]
            ours = our_name(name)
            assert ours is not None
            for kind in (MASTER, *STATES["adamw"]):
                if kind == MASTER and masters is None:
                    continue
                tensor = moments.get(kind)
                if tensor is None or tensor.shape != weight.shape:
                    shape = None if tensor is None else tuple(tensor.shape)
                    raise UserError(
                        f"{file}: optimizer.state[{identity}].{kind} has the shape {shape}, and "
                        f"{name} {tuple(weight.shape)}; use --weights-only"
                    )
                parts = checkpoint.tensors.setdefault(kind, {}).setdefault(ours, [])
                if len(parts) == rank:
                    parts.append(tensor)
            if masters is not None and not torch.equal(moments[MASTER].to(weight.dtype), weight):
                raise UserError(
                    f"{file}: fp32_from_fp16_params[{number}][{place}] rounds to other values than "
                    f"{name}; use --weights-only"
                )
            step = moments.get("step", group.get("step"))
            checkpoint.updates = checkpoint.step if step is None else int(step)


def read_layers(path: Path) -> ForeignCheckpoint:
    """Read a checkpoint of DeepSpeed: a file per layer, or one per tensor rank."""
    states = {
        int(match[1]): file
        for file in sorted(path.glob("mp_rank_*_model_states.pt"))
        if (match := STATES_FILE.fullmatch(file.name))
    }
    if not states:
        raise UserError(
            f"{path} has no mp_rank_00_model_states.pt; copy all files of the checkpoint"
        )
    first = load(states[min(states)])
    # GPT-NeoX stores a table of settings, Megatron-DeepSpeed the Namespace of all of them.
    program = "neox" if isinstance(first.get("args"), dict) else "megatron"
    checkpoint = RankFiles(
        path,
        program=program,
        args=table(first.get("args")),
        step=int(first.get("iteration") or first.get("global_steps") or 0),
        version=float(first.get("checkpoint_version", 3)),
        note="ZeRO's files hold flat parts of the optimizer's state, which are not read",
    )
    files = [
        (int(match[1]), int(match[2]), file)
        for file in sorted(path.glob("layer_*-model_states.pt"))
        if (match := LAYER_FILE.fullmatch(file.name))
    ]
    layers: dict[int, dict[int, tuple[Path, dict[str, Tensor]]]] = {}
    for number, rank, file in files:
        layers.setdefault(number, {})[rank] = file, dict(tensors_of(load(file)))
    for rank, file in states.items() if not files else ():
        module = load(file).get("module")
        if not isinstance(module, dict):
            raise UserError(f"{file} has no weights; copy all files of the checkpoint")
        for name, tensor in tensors_of(module):
            match = re.fullmatch(r"sequential\.(\d+)\.(.+)", name)
            number, rest = (int(match[1]), match[2]) if match else (0, name)
            layers.setdefault(number, {}).setdefault(rank, (file, {}))[1][rest] = tensor
    blocks = itertools.count()
    ranks = 1 + max(rank for parts in layers.values() for rank in parts)
    for number, parts in sorted(layers.items()):
        if set(parts) != set(range(ranks)):
            missing = min(set(range(ranks)) - set(parts))
            raise UserError(
                f"{path / f'layer_{number:02d}-model_{missing:02d}-model_states.pt'} is missing; "
                f"copy all files of the checkpoint"
            )
        is_block = any(re.match(r"(self_)?attention\.", name) for name in parts[0][1])
        prefix = f"layers.{next(blocks)}." if is_block else ""
        for rank, (file, named) in sorted(parts.items()):
            checkpoint.add(file, rank, {f"{prefix}{name}": x for name, x in named.items()})
    return checkpoint


# Files of torch.distributed.checkpoint, which hold whole tensors in pieces.

LAYERS = "decoder.layers."  # before the names of tensors that hold all layers along dimension 0
KINDS = {
    WEIGHTS: ("",),
    MASTER: ("optimizer.state.fp32_param.", "optimizer.state.param.", ""),
    "exp_avg": ("optimizer.state.exp_avg.",),
    "exp_avg_sq": ("optimizer.state.exp_avg_sq.",),
}


class DistributedFiles(ForeignCheckpoint):
    """A checkpoint in the format "torch_dist".

    Attributes:
        content: the metadata of torch.distributed.checkpoint
        keys: our name -> (key, layer); layer None for a tensor that does not hold all layers
    """

    def __init__(self, path: Path, content: metadata.Metadata, layers: int, **facts: Any):
        super().__init__(path, **facts)
        self.content = content
        theirs: dict[str, tuple[str, int | None]] = {}
        for key, saved in content.state_dict_metadata.items():
            is_tensor = isinstance(saved, metadata.TensorStorageMetadata)
            other = key.startswith(("optimizer.", "rng_state", "rerun_state", "chained_"))
            if not is_tensor or other or NO_PARAMETERS.search(key):
                continue
            if key.startswith(LAYERS) and not key.removeprefix(LAYERS)[0].isdigit():
                rest = key.removeprefix(LAYERS)
                theirs |= {f"layers.{n}.{rest}": (key, n) for n in range(layers)}
            else:
                theirs[key] = key, None
        names = self._checked({name: our_name(name) for name in theirs})
        self.keys = {ours: theirs[name] for name, ours in names.items()}
        moments = {
            f"{KINDS[kind][0]}{key}" for key, _ in self.keys.values() for kind in STATES["adamw"]
        }
        if moments <= content.state_dict_metadata.keys():
            self.updates = self.step
        elif any(key.startswith("optimizer") for key in content.state_dict_metadata):
            self.note = (
                "the distributed optimizer was saved in flat parts; save it with "
                "--dist-ckpt-optim-fully-reshardable"
            )
        else:
            self.note = "the files have no optimizer"

    @override
    def names(self) -> set[str]:
        return set(self.keys)

    @override
    def where(self, name: str) -> str:
        return f"{self.path / '.metadata'}: {self.keys[name][0]}"

    @override
    def parts(self, kind: str, name: str) -> list[Tensor]:
        key, layer = self.keys[name]
        saved = self.content.state_dict_metadata
        full = next(prefix + key for prefix in KINDS[kind] if prefix + key in saved)
        about = saved[full]
        assert isinstance(about, metadata.TensorStorageMetadata)
        whole = torch.empty(about.size if layer is None else about.size[1:], dtype=torch.float32)
        covered = 0
        for chunk in about.chunks:
            start, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if layer is not None and not start[0] <= layer < start[0] + sizes[0]:
                continue
            piece = self._piece(full, chunk.offsets)
            if layer is not None:
                piece, start, sizes = piece[layer - start[0]], start[1:], sizes[1:]
            places = tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))
            whole[places] = piece
            covered += piece.numel()
        if covered != whole.numel():
            raise UserError(
                f"{self.path / '.metadata'}: {full} has {covered} of {whole.numel()} elements; "
                f"copy all files of the checkpoint"
            )
        return [whole]

    def _piece(self, key: str, offsets: torch.Size) -> Tensor:
        """Read a piece of a tensor."""
        storage = self.content.storage_data
        place = storage[metadata.MetadataIndex(key, offsets)]
        file = self.path / place.relative_path
        if file.resolve().parent != self.path.resolve():
            raise UserError(f"{file} is outside of the checkpoint; use an unchanged .metadata")
        try:
            with file.open("rb") as stream:
                stream.seek(place.offset)
                data = io.BytesIO(stream.read(place.length))
            return torch.load(data, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise UserError(f"{file} is missing; copy all files of the checkpoint") from None
        except LOAD_ERRORS as error:
            raise UserError(_damaged(file, error)) from None


def read_distributed(path: Path) -> ForeignCheckpoint:
    """Read Megatron-LM's format "torch_dist"."""
    file = path / ".metadata"
    try:
        content = _MetadataReader(io.BytesIO(file.read_bytes())).load()
    except (
        OSError, EOFError, ValueError, TypeError, AttributeError, IndexError,
        pickle.UnpicklingError,
    ) as error:  # fmt: skip
        raise UserError(_damaged(file, error)) from None
    common = load(path / "common.pt")
    args = table(common.get("args"))
    rows = (
        saved.size[0]
        for key, saved in content.state_dict_metadata.items()
        if key.startswith(f"{LAYERS}self_attention")
        and isinstance(saved, metadata.TensorStorageMetadata)
    )
    checkpoint = DistributedFiles(
        path,
        content,
        layers=next(rows, 0),
        args=args,
        step=int(common.get("iteration") or 0),
        version=float(common.get("checkpoint_version", 3)),
    )
    if checkpoint.updates is not None:
        optimizer = table(common.get("optimizer"))
        inner = table(optimizer.get("optimizer")) or optimizer
        groups = inner.get("param_groups") or [{}]
        step = table(inner.get("state")).get("common_step", groups[0].get("step"))
        checkpoint.updates = checkpoint.step if step is None else int(step)
    return checkpoint


def _folder(path: Path) -> Path:
    """Return the folder of the iteration that a checkpoint's folder names as its newest."""
    for name in TRACKERS:
        if (tracker := path / name).is_file():
            text = tracker.read_text(encoding="utf-8", errors="replace").strip()
            tag = f"iter_{int(text):07d}" if text.isdecimal() else text
            if ITERATION.fullmatch(tag) is None:
                raise UserError(
                    f"{tracker} names {text[:40]!r}, which is not an iteration; name the folder of "
                    f"an iteration, such as {path / 'iter_0001000'}"
                )
            return path / tag
    return path


def open_foreign(path: Path, *, weights_only: bool = False) -> ForeignCheckpoint:
    """Open a checkpoint: the folder of an iteration, or of a run, whose newest one is read.

    Args:
        weights_only: leave the optimizer's state out, even if it does not fit the weights

    Raises:
        UserError: the folder has no checkpoint of a known format, or its files cannot be read.
    """
    folder = _folder(path)
    if (folder / ".metadata").is_file():
        checkpoint = read_distributed(folder)
    elif any(RANK.fullmatch(file.name) for file in folder.glob("mp_rank_*")):
        checkpoint = read_torch(folder, weights_only=weights_only)
    elif any(folder.glob("*model_states.pt")):
        checkpoint = read_layers(folder)
    else:
        raise UserError(
            f"{folder} has no checkpoint of Megatron-LM, Megatron-DeepSpeed or GPT-NeoX; name a "
            f"folder with {TRACKERS[0]}, or that of an iteration, with mp_rank_00, .metadata or "
            f"layer_00-model_00-model_states.pt"
        )
    if weights_only:
        checkpoint.updates, checkpoint.note = None, "--weights-only"
    return checkpoint
