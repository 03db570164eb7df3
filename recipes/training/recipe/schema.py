"""The recipe: one TOML file, one complete experiment. The only reader of TOML."""

import json
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from models.config import ModelConfig, nearest_divisors, nearest_multiples
from models.errors import UserError
from models.pipeline.schedule.balance import divide_blocks, head_in_blocks
from models.pipeline.schedule.order import SCHEDULES, last_stage, least_micro_batches, schedule_name
from recipes.training.recipe.blend_weights import check_weights
from recipes.training.recipe.errors import explain, root_causes
from recipes.training.recipe.topology import Topology, World

REPOSITORY = Path(__file__).resolve().parents[3]
DEFAULT_RECIPE = REPOSITORY / "recipes" / "tiny.toml"
CLUSTER_RECIPE = REPOSITORY / "recipes" / "llama" / "7b.toml"  # has the sections that tiny lacks

SEVERAL_CHUNKS = [name for name, kind in SCHEDULES.items() if kind.chunks != 1]

Count = Annotated[int, Field(ge=1, le=10**9)]
NonNegative = Annotated[int, Field(ge=0, le=10**9)]
Probability = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """What all sections share: nothing unknown, nothing converted, nothing changed later."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Layout(Section):
    """How the model is spread; data parallelism takes what is left of the world."""

    tensor: Count = 1
    pipeline: Count = 1
    schedule: Literal["1f1b", "interleaved", "zb-h1", "zb-v", "dualpipev"] = "1f1b"
    chunks: Count = 1  # parts of the model that a stage holds; the schedule decides all but some
    layers_per_stage: list[Count] | None = None  # blocks of each part, in order; None: by cost
    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_interval: Count = 1  # of "full": blocks that are kept and computed again as one

    @model_validator(mode="before")
    @classmethod
    def _fill_in_chunks(cls, values: Any) -> Any:
        """Two where the schedule needs several and none are given."""
        if isinstance(values, dict) and values.get("schedule") in SEVERAL_CHUNKS:
            return {"chunks": 2} | values
        return values

    @model_validator(mode="after")
    def _check(self) -> "Layout":
        if self.recompute_interval > 1 and self.recompute != "full":
            raise UserError(
                f"layout.recompute_interval = {self.recompute_interval} does not go with "
                f'layout.recompute = "{self.recompute}"; use layout.recompute = "full", or leave '
                f"layout.recompute_interval out"
            )
        if self.schedule != "1f1b" and self.pipeline == 1:
            raise UserError(
                f'layout.schedule = "{self.schedule}" needs stages and layout.pipeline = 1 is one; '
                f'use layout.pipeline = 2 or more, or layout.schedule = "1f1b"'
            )
        possible = SCHEDULES[self.schedule].chunks
        if self.chunks != (possible or max(2, self.chunks)):
            raise UserError(
                f"layout.chunks = {self.chunks} does not go with layout.schedule = "
                f'"{self.schedule}"; use layout.chunks = {possible or 2}'
                + ("" if possible else " or more")
            )
        return self

    @property
    def schedule_name(self) -> str:
        """The schedule, with its chunks where they are chosen: "interleaved x 2"."""
        return schedule_name(self.schedule, self.chunks)

    @property
    def ends(self) -> set[int]:
        """The stages with the model's first layers, which take tokens, and last, which labels."""
        return {0, last_stage(self.schedule, self.pipeline, self.chunks)}


class Batch(Section):
    """Sequences per optimizer step and per micro-batch."""

    global_sequences: Count
    micro_sequences: Count

    @model_validator(mode="after")
    def _check(self) -> "Batch":
        if self.global_sequences % self.micro_sequences:
            raise UserError(
                f"batch.global_sequences = {self.global_sequences} is not divisible by "
                f"batch.micro_sequences = {self.micro_sequences}; use batch.global_sequences = "
                f"{nearest_multiples(self.global_sequences, self.micro_sequences)}"
            )
        return self


class Schedule(Section):
    """The learning rate over the steps; `learning_rate.py` has the formula."""

    warmup_steps: NonNegative
    decay: Literal["cosine", "linear", "wsd"]
    decay_steps: NonNegative = 0  # of "wsd"; the others decay over all that follows the warm-up
    minimum_learning_rate: Annotated[float, Field(ge=0)] = 0.0


class Optimizer(Section):
    """AdamW (arXiv 1711.05101); norms and biases are not decayed."""

    learning_rate: Annotated[float, Field(gt=0)]
    betas: tuple[Probability, Probability] = (0.9, 0.95)
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0  # by global norm; 0: none
    schedule: Schedule

    @model_validator(mode="after")
    def _check(self) -> "Optimizer":
        schedule = self.schedule
        if schedule.minimum_learning_rate > self.learning_rate:
            raise UserError(
                f"optimizer.schedule.minimum_learning_rate = {schedule.minimum_learning_rate} is "
                f"above optimizer.learning_rate = {self.learning_rate}; "
                f"use {self.learning_rate / 10:g}"
            )
        if (schedule.decay == "wsd") != (schedule.decay_steps > 0):
            raise UserError(
                f"optimizer.schedule.decay_steps = {schedule.decay_steps} does not go with "
                f'optimizer.schedule.decay = "{schedule.decay}"; use decay_steps = 1 or more with '
                f'"wsd" and leave it out otherwise'
            )
        return self


class Training(Section):
    """Number of steps, and how often to validate and to compare replicas (0: never)."""

    steps: Count
    evaluate_every: NonNegative
    evaluation_batches: Count = 4  # global batches of the validation file
    compare_copies_every: NonNegative = 100  # steps; `copies.py`
    initial_weights: str | None = None  # a checkpoint to start from; None: drawn from the seed
    # Compile the element-wise operations; "auto": on GPUs if there is a compiler. The first time,
    # compiling takes 10 to 20 seconds.
    compile: Literal[True, False, "auto"] = "auto"
    # On GPUs, use only algorithms with reproducible results, which are slower. On CPUs results are
    # always reproducible.
    deterministic: bool = False


class Source(Section):
    """One corpus (path without .bin/.idx) and its share of the samples."""

    path: str
    weight: Annotated[float, Field(gt=0)] = 1.0


class Data(Section):
    """Token files and the tokenizer that made them; windows go across documents."""

    train: Annotated[tuple[Source, ...], Field(min_length=1)]
    validation: str
    tokenizer: str
    separate_documents: bool = False  # attention stays within each (arXiv 2402.13991)

    @model_validator(mode="after")
    def _check(self) -> "Data":
        paths = [repository_path(source.path) for source in self.train]
        if len(set(paths)) < len(paths):
            raise UserError(
                f"data.train = {[source.path for source in self.train]} names a corpus twice; use "
                f"each path once, with its weight"
            )
        if repository_path(self.validation) in paths:
            raise UserError(
                f'data.validation = "{self.validation}" is trained on too (data.train); use a file '
                f"of its own, as prepare_data.py writes it"
            )
        check_weights([source.weight for source in self.train])
        return self


class Checkpoint(Section):
    """How often the run is saved (steps; the last step always) and which saves stay."""

    every: Count
    keep: Count = 2  # the newest so many
    keep_every: NonNegative = 0  # and those of every so many steps; 0: no more
    on_failure: Literal["continue", "stop"] = "continue"  # what a save that fails means for the run


class Supervision(Section):
    """Time limits without progress, and the limits for bad steps and slow ranks."""

    # End the run after this many seconds without progress in training; 0: never. On GPUs,
    # collectives of subgroups time out after 600 seconds in any case.
    hang_seconds: NonNegative = 300
    # The same limit before the first step (with compiled kernels, until its end), which covers
    # building the model, loading a checkpoint and compiling; 0: never.
    startup_seconds: NonNegative = 1800
    bad_steps: Count = 3  # in a row without finite numbers: it goes back to the last checkpoint
    loss_spike: Annotated[float, Field(ge=0)] = 3.0  # nats above the usual: likewise; 0: never
    # Rollbacks without a new checkpoint in between, then the run stops; 0: never roll back.
    rollbacks: NonNegative = 2
    compare_speed_every: NonNegative = 100  # steps between looks for slow ranks; 0: never
    slow_rank: Annotated[float, Field(gt=1)] = 1.5  # times its peers' time, to be named

    @property
    def patience_seconds(self) -> int | None:
        """The longest time that a rank may wait for others before supervision ends the run.

        None if there is no limit.
        """
        limits = self.hang_seconds, self.startup_seconds
        return max(limits) if all(limits) else None


class Tracking(Section):
    """Weights & Biases: "auto" is online with a key and offline without one."""

    project: Annotated[str, Field(pattern=r"^[^/\\#?%:]{1,128}$")] = "threefold"
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    tags: tuple[str, ...] = ()
    timeline_step: NonNegative = 0  # the first step of a measured timeline; 0: none
    timeline_steps: Count = 3


class Cluster(Section):
    """The machine this recipe is meant for; a run on any other size is refused."""

    nodes: Count
    gpus_per_node: Count
    gpu: str


class Recipe(Section):
    """One complete experiment."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
    seed: Annotated[int, Field(ge=0, lt=2**31)]
    deepspeed: str
    model: ModelConfig
    layout: Layout
    batch: Batch
    optimizer: Optimizer
    training: Training
    data: Data
    checkpoint: Checkpoint
    supervision: Supervision = Supervision()
    tracking: Tracking = Tracking()
    cluster: Cluster | None = None

    @model_validator(mode="after")
    def _check_timeline(self) -> "Recipe":
        first, steps = self.tracking.timeline_step, self.training.steps
        if first > steps:
            raise UserError(
                f"tracking.timeline_step = {first} comes after training.steps = {steps}; use "
                f"tracking.timeline_step = {steps}"
            )
        return self

    @model_validator(mode="after")
    def _check(self) -> "Recipe":
        model, tensor = self.model, self.layout.tensor
        divisible = math.gcd(model.heads, model.kv_heads, model.ffn_hidden_size)
        for key in ("heads", "kv_heads", "ffn_hidden_size"):
            size = getattr(model, key)
            if size % tensor:
                raise UserError(
                    f"model.{key} = {size} is not divisible by layout.tensor = {tensor}; use "
                    f"layout.tensor = {nearest_divisors(divisible, tensor)}"
                )
        if self.layout.sequence_parallel and model.sequence_length % tensor:
            raise UserError(
                f"model.sequence_length = {model.sequence_length} is not divisible by "
                f"layout.tensor = {tensor}, which layout.sequence_parallel needs; use "
                f"model.sequence_length = {nearest_multiples(model.sequence_length, tensor)}"
            )
        parts = self.layout.pipeline * self.layout.chunks
        if parts > model.layers:
            each = f" with {self.layout.chunks} parts each" if self.layout.chunks > 1 else ""
            most = model.layers // self.layout.chunks
            fewer = f"layout.pipeline = {most}" + (" or fewer" if most > self.layout.chunks else "")
            raise UserError(
                f"layout.pipeline = {self.layout.pipeline}{each} has more stages than "
                f"model.layers = {model.layers}; use "
                + (fewer if most >= self.layout.chunks else f"model.layers = {parts} or more")
            )
        dealt = self.layout.layers_per_stage
        if dealt is not None and (len(dealt) != parts or sum(dealt) != model.layers):
            raise UserError(
                f"layout.layers_per_stage = {dealt} deals {sum(dealt)} blocks to {len(dealt)} "
                f"parts, and model.layers = {model.layers} go to layout.pipeline = "
                f"{self.layout.pipeline} x layout.chunks = {self.layout.chunks}; use "
                f"layout.layers_per_stage = {list(self._dealt_by_cost)}, or leave it out"
            )
        schedule = self.optimizer.schedule
        if schedule.decay == "wsd" and (
            schedule.warmup_steps + schedule.decay_steps > self.training.steps
        ):
            raise UserError(
                f"optimizer.schedule.warmup_steps = {schedule.warmup_steps} and decay_steps = "
                f"{schedule.decay_steps} do not fit into training.steps = {self.training.steps}; "
                f"use training.steps = {schedule.warmup_steps + schedule.decay_steps} or more"
            )
        return self

    @property
    def blocks_of_positions(self) -> tuple[int, ...]:
        """Blocks of each part of the pipeline, in the model's order."""
        if self.layout.layers_per_stage is not None:
            return tuple(self.layout.layers_per_stage)
        return self._dealt_by_cost

    @property
    def head_in_blocks(self) -> float:
        """What the logits cost, as a multiple of a block."""
        return head_in_blocks(self.model, self.layout.recompute)

    @property
    def _dealt_by_cost(self) -> tuple[int, ...]:
        layout = self.layout
        return divide_blocks(
            self.model.layers,
            schedule=layout.schedule,
            stages=layout.pipeline,
            chunks=layout.chunks,
            head=self.head_in_blocks,
        )

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.batch.global_sequences * self.model.sequence_length

    def micro_batches(self, data_size: int) -> int:
        """Micro-batches per step of each of `data_size` data ranks."""
        return self.batch.global_sequences // (self.batch.micro_sequences * data_size)

    def topology(self, world: World) -> Topology:
        """The axes of this recipe on this world.

        Raises:
            UserError: the world is not one that the recipe can run on.
        """
        if self.cluster is not None:
            meant = self.cluster.nodes * self.cluster.gpus_per_node
            if (meant, self.cluster.gpus_per_node) != (world.size, world.local_size):
                nodes = max(1, world.size // world.local_size)
                raise UserError(
                    f"cluster.nodes = {self.cluster.nodes} x cluster.gpus_per_node = "
                    f"{self.cluster.gpus_per_node} are {meant} ranks, and {world.size} were "
                    f"started, {world.local_size} on this node; start {meant}, or use "
                    f"--set cluster.nodes={nodes} --set cluster.gpus_per_node={world.local_size}"
                )
        topology = Topology.for_world(
            world.size, pipeline=self.layout.pipeline, tensor=self.layout.tensor
        )
        if world.local_size % topology.tensor:
            raise UserError(
                f"layout.tensor = {topology.tensor} does not divide the {world.local_size} ranks "
                f"of a node, and tensor groups belong inside one; use layout.tensor = "
                f"{nearest_divisors(world.local_size, topology.tensor)}"
            )
        together = self.batch.micro_sequences * topology.data
        if self.batch.global_sequences % together:
            raise UserError(
                f"batch.global_sequences = {self.batch.global_sequences} is not divisible by "
                f"batch.micro_sequences = {self.batch.micro_sequences} x {topology.data} data "
                f"ranks; use batch.global_sequences = "
                f"{nearest_multiples(self.batch.global_sequences, together)}"
            )
        least = least_micro_batches(self.layout.schedule, topology.pipeline)
        if self.micro_batches(topology.data) < least:
            raise UserError(
                f'layout.schedule = "{self.layout.schedule}" needs {least} micro-batches or more '
                f"for layout.pipeline = {topology.pipeline}, and batch.global_sequences = "
                f"{self.batch.global_sequences} makes {self.micro_batches(topology.data)} on each "
                f"of {topology.data} data ranks; use batch.global_sequences = {least * together}"
            )
        return topology

    def toml(self) -> str:
        """The resolved recipe, every default written out."""
        return tomli_w.dumps(self.model_dump(mode="json", exclude_none=True))


def shipped_recipes() -> list[Path]:
    """The recipes of this repository, the default first, then family by family."""
    return [DEFAULT_RECIPE, *sorted((REPOSITORY / "recipes").glob("*/*.toml"))]


def repository_path(path: str) -> Path:
    """A path of a recipe: relative ones count from the repository's root."""
    return (REPOSITORY / path).resolve()


def short(path: Path) -> Path:
    """A path as a person here would write it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def origin(path: Path, overrides: Sequence[str]) -> str:
    """What errors call a recipe: its file and what --set has changed."""
    return f"{short(path)}" + "".join(f" --set {override}" for override in overrides)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe and apply `section.key=value` overrides (TOML values; a bare word is a string).

    Raises:
        UserError: one message for all that is wrong, naming file, key, value and a value that
            works.
    """
    table = _read_toml(path)
    apply_overrides(table, overrides)
    return parse_recipe(table, origin(path, overrides))


def parse_recipe(table: dict[str, Any], name: str) -> Recipe:
    """Validate a recipe's table; `name` is what errors call it."""
    try:
        # As JSON, because pydantic's strict mode takes a TOML array for a tuple and a table for
        # a dataclass only there.
        return Recipe.model_validate_json(json.dumps(table, default=_refuse_date))
    except ValidationError as error:
        example = _read_toml(CLUSTER_RECIPE) | _read_toml(DEFAULT_RECIPE)
        problems = [explain(problem, table, Recipe, example) for problem in root_causes(error)]
    if len(problems) == 1:
        raise UserError(f"{name}: {problems[0]}")
    raise UserError("\n  ".join([f"{name}: {len(problems)} problems", *problems]))


def _refuse_date(value: Any) -> Any:
    raise UserError(f'{value} is a date in TOML and no key wants one; write "{value}"')


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (FileNotFoundError, IsADirectoryError):
        shipped = ", ".join(str(file.relative_to(REPOSITORY)) for file in shipped_recipes())
        raise UserError(f"{short(path)}: no such recipe; these are here: {shipped}") from None
    except OSError as error:
        raise UserError(
            f"{short(path)} cannot be read ({error.strerror}); use a file that you may read"
        ) from None
    except (ValueError, RecursionError) as error:  # a plain ValueError for 4,301 digits
        raise UserError(
            f'{short(path)}: this is not valid TOML: {error}; write lines such as  name = "tiny"'
        ) from None


def apply_overrides(table: dict[str, Any], overrides: Sequence[str]) -> None:
    """Set keys of a recipe's table, as --set does.

    What was dealt for another schedule leaves with it: the recipe in a run folder has every default
    written out.
    """
    for override in overrides:
        apply_override(table, override)
    given = {override.partition("=")[0].strip() for override in overrides}
    if "layout.schedule" in given:
        for key in ("chunks", "layers_per_stage"):
            if f"layout.{key}" not in given and isinstance(table["layout"], dict):
                table["layout"].pop(key, None)


def apply_override(table: dict[str, Any], override: str) -> None:
    """Set one key of a recipe's table."""
    name, equals, text = override.partition("=")
    *sections, key = (part.strip() for part in name.split("."))
    if not equals or not key or not all(sections):
        raise UserError(f"--set {override}: write it as --set section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text.strip()  # a bare word
    for depth, section in enumerate(sections, start=1):
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            path = ".".join(sections[:depth])
            raise UserError(
                f"--set {override}: {path} is a value, not a section; write --set {path}=..."
            )
    table[key] = value
