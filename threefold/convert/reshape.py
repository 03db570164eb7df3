"""Convert a run's checkpoint to another layout.

A checkpoint holds logical tensors, so any layout can read it without conversion. This command
checks the new layout ahead of time, records it in the checkpoint's recipe, and distributes the
tensors evenly over one set of files per new rank.
"""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

from models.errors import UserError
from models.layer_specs import logical_shapes
from threefold.checkpoint.compatibility import differences
from threefold.checkpoint.format import FileRecord, TensorFileWriter, tensor_key
from threefold.checkpoint.state import CheckpointReader
from threefold.checkpoint.writer import KINDS_OF_FILE, assign_owners
from threefold.config.deepspeed_json import build_deepspeed_config
from threefold.config.loading import apply_overrides, parse_recipe
from threefold.config.parallel_dims import Topology, World
from threefold.config.phases import recipe_at
from threefold.config.recipe import Recipe
from threefold.convert.verified_source import model_of
from threefold.convert.weight_files import RESHAPED_FROM
from threefold.run_folder.folder import layout_of, versions

# A change of these keys would make it another run.
FIXED_KEYS = ("model.", "seed", "data.", "optimizer.kind")


def new_recipe(
    source: CheckpointReader, overrides: list[str], *, ranks: int
) -> tuple[Recipe, Topology]:
    """Return the checkpoint's recipe with the overrides, and its topology on the new ranks.

    Raises:
        UserError: The new recipe describes another run, or its layout is not valid.
    """
    if "seed" not in source.manifest.recipe or not source.manifest.has_moments:
        raise UserError(
            f"{source.path} has only weights, so there is no run to reshape; name it in "
            f"training.initial_weights, which any layout can read"
        )
    table = deepcopy(source.manifest.recipe)
    table.pop("cluster", None)  # it describes the old machine
    before = parse_recipe(deepcopy(table), str(source.path))  # with the defaults of newer keys
    apply_overrides(table, overrides)
    recipe = parse_recipe(table, "".join(f"--set {override} " for override in overrides).strip())
    different = differences(before.model_dump(mode="json"), recipe.model_dump(mode="json"))
    changed = [key for key in different if key.startswith(FIXED_KEYS)]
    if changed:
        raise UserError(
            f"changing {changed[0]} would make it another run; keep the value in {source.path}"
        )
    stage = recipe_at(recipe, source.manifest.step + 1)  # in which the run resumes
    topology = stage.topology(World(size=ranks, local_size=ranks))
    build_deepspeed_config(stage, topology)
    return recipe, topology


def reshape(source: CheckpointReader, output: Path, *, recipe: Recipe, topology: Topology) -> None:
    """Write the tensors into files of the new ranks, with one tensor in memory at a time."""
    shapes = logical_shapes(model_of(source))
    files: dict[str, FileRecord] = {}
    tensors: dict[str, str] = {}
    owners = assign_owners(shapes, topology.world_size)
    for rank in range(topology.world_size):
        names = [name for name in shapes if owners[name] == rank]
        for label, kinds in KINDS_OF_FILE.items():
            keys = {
                key: (kind, name)
                for kind in kinds
                for name in names
                if (key := tensor_key(kind, name)) in source.manifest.tensors
            }
            file = f"{label}-{rank:05d}.safetensors"
            own = {key: shapes[name] for key, (_, name) in keys.items()}
            if not own:
                continue
            with TensorFileWriter(output / file, own, dtype="F32") as writer:
                for key, (kind, name) in keys.items():
                    writer.write(key, source.tensor(kind, name).numpy().data)
            files[file] = writer.record
            tensors |= dict.fromkeys(own, file)
    replace(
        source.manifest,
        recipe=recipe.model_dump(mode="json"),
        layout=layout_of(recipe_at(recipe, source.manifest.step + 1), topology)
        | {RESHAPED_FROM: str(source.path)},
        versions=versions(),
        tensors=tensors,
        files=files,
    ).write(output)
