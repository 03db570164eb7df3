"""Trials of a sweep: a recipe in one layout, its measurement, and the parts of a step."""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

from pydantic import TypeAdapter

from models.config import Experts, ModelConfig
from threefold.config.deepspeed_json import read_deepspeed_json
from threefold.config.layout import Cluster
from threefold.config.phases import RENAMED
from threefold.config.recipe import Recipe
from threefold.gpus.datasheet import is_cpu
from threefold.plan.job import Job, Machine, job_of
from threefold.plan.memory.peak import GIB, fullest_stage
from threefold.plan.time.step import TIME_PARTS, StepTime, step_time
from threefold.sweep.links.fit import Measurements

# The parts of a measured step, and their comparison with the plan.

SPLIT_STEPS = 3  # instrumented steps of a trial, after the measured ones
PARTS = (
    "compute", "tensor", "context", "expert", "pipeline", "bubble", "data", "optimizer", "other",
)  # fmt: skip

PartSeconds = Mapping[str, float]  # part -> seconds


@dataclass(frozen=True, kw_only=True)
class Split:
    """The split of a step on one rank. The parts, in seconds, add up to the measured step.

    Attributes:
        compute: forward, backward and weight-gradient passes without their collectives
        tensor: collectives of the tensor group in the passes
        context: communication of the context group in the passes
        expert: exchange of tokens between expert ranks in the passes
        pipeline: starting sends and receives, and gathering messages that arrive in parts
        bubble: waiting for messages and collectives of other stages
        data: collectives over the data ranks
        optimizer: gradient norm, clipping, update, and the sum of tied gradients over the stages
        other: the rest, such as copying the samples to the device
        rank: the slowest rank, to which the parts belong
        instrumented_seconds: sum of the parts before the normalisation
    """

    compute: float
    tensor: float
    context: float = 0.0  # missing in the results of older sweeps, like the next one
    expert: float = 0.0
    pipeline: float
    bubble: float
    data: float
    optimizer: float
    other: float
    rank: int
    instrumented_seconds: float

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part."""
        return {part: getattr(self, part) for part in PARTS}


def split_of_slowest(of_ranks: Sequence[PartSeconds], step_seconds: float) -> Split:
    """Return the split of the rank that is busy for the longest time.

    Args:
        of_ranks: parts of an instrumented step on each rank, by rank
        step_seconds: measured duration of a step, to which the parts are normalised
    """
    totals = [sum(parts.values()) for parts in of_ranks]
    busy = [total - parts["bubble"] for total, parts in zip(totals, of_ranks, strict=True)]
    rank = busy.index(max(busy))
    scale = step_seconds / totals[rank]
    parts = {part: of_ranks[rank][part] * scale for part in PARTS}
    return Split(**parts, rank=rank, instrumented_seconds=totals[rank])


def planned_parts(time: StepTime) -> dict[str, float]:
    """Return the predicted seconds of each part."""
    return {part: getattr(time, part) for part in TIME_PARTS}


# A trial and its result.

Outcome = Literal["ok", "out_of_memory", "hung", "crashed", "rejected", "too_large"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
FAULTS: tuple[Outcome, ...] = ("hung", "crashed")  # outcomes that the user should look into
KEY_DIGITS = 16
# Keys of [model] that older versions lacked. With their defaults, they are not part of a trial's
# identity, so that results in older folders count.
LATER_MODEL_KEYS = (
    "attention_output_bias", "attention_pattern", "attention_scale", "attention_sinks",
    "attention_soft_cap", "embedding_multiplier", "latent", "logit_soft_cap", "norm_placement",
    "partial_rotary_factor", "prediction", "qk_norm_over", "qkv_bias", "window", "z_loss",
)  # fmt: skip
LATER_EXPERT_KEYS = ("groups", "groups_per_token")  # of [model.experts]


class WorkerKind(NamedTuple):
    """The properties of workers. Trials share workers if they need the same kind."""

    nodes: int
    gpus_per_node: int
    gpu: str
    deterministic: bool
    pipelined: bool  # on GPUs, a pipeline needs different environment variables

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Trial:
    """A recipe to measure.

    Attributes:
        source: file of the recipe, as on the command line
        recipe: the recipe in the layout to measure, with a [cluster] section
        warm_up: number of steps before the measured ones
        split: True if the split of a step is measured, too
        round: number of the round, from 1 (`sweep.py --rounds`)
    """

    source: str
    recipe: Recipe
    warm_up: int
    steps: int
    split: bool = False
    round: int = 1

    @property
    def cluster(self) -> Cluster:
        """The nodes and GPUs on which the trial runs."""
        assert self.recipe.cluster is not None
        return self.recipe.cluster

    @cached_property
    def job(self) -> Job:
        """The planner's description of the trial."""
        return job_of(self.recipe, Machine.of_cluster(self.cluster))

    @cached_property
    def planned_time(self) -> StepTime:
        """The predicted time of a step and its parts."""
        return step_time(self.job)

    @property
    def planned_seconds(self) -> float:
        """The predicted time of a step."""
        return self.planned_time.total

    @cached_property
    def planned_gib(self) -> float:
        """The predicted memory of the fullest rank."""
        return fullest_stage(self.job).total / GIB

    @property
    def workers(self) -> WorkerKind:
        """The processes that the trial needs."""
        cluster = self.cluster
        return WorkerKind(
            nodes=cluster.nodes,
            gpus_per_node=cluster.gpus_per_node,
            gpu=cluster.gpu,
            deterministic=self.recipe.training.deterministic,
            pipelined=not is_cpu(cluster.gpu) and self.recipe.layout.pipeline > 1,
        )

    @cached_property
    def identity(self) -> str:
        """A hash of everything that affects the speed of a step.

        It excludes the name, the data and the tracking of the recipe.
        """
        recipe = self.recipe
        table = recipe.model_dump(mode="json")
        # Keys without effect are left out, so that they do not change the trial's identity.
        table["model"] = without_later_keys(recipe.model, table["model"])
        if recipe.model.rope_scaling is None:
            del table["model"]["rope_scaling"]
        if recipe.layout.context == 1:
            del table["layout"]["context"], table["layout"]["context_attention"]
        if recipe.model.experts is None:
            del table["model"]["experts"], table["layout"]["expert"]
        for key in ("expert_tensor_parallel", "expert_overlap"):
            if not table["layout"][key]:
                del table["layout"][key]
        for old, new in RENAMED.items():  # the identity in sweep folders has the former names
            old_key, key = old.removeprefix("layout."), new.removeprefix("layout.")
            table["layout"][old_key] = table["layout"].pop(key)
        blocks = {"layers_per_stage": list(recipe.blocks_of_virtual_stages)}
        optimizer = recipe.optimizer
        # Only other values than the defaults count, so that earlier trials keep their keys.
        defaults = {
            "matmul_precision": (recipe.training.matmul_precision, "weights"),
            "optimizer": (optimizer.kind, "adamw"),
            "limits_logits": (optimizer.qk_clip is not None, False),
            "average_every": (optimizer.average.every if optimizer.average else 0, 0),
        }
        later = {name: value for name, (value, default) in defaults.items() if value != default}
        return digest(
            {
                "model": table["model"],
                "layout": table["layout"] | blocks,
                "batch": table["batch"],
                "cluster": table["cluster"],
                "compile": recipe.training.compile,
                "deterministic": recipe.training.deterministic,
                "separate_documents": recipe.data.separate_documents,
                "deepspeed": read_deepspeed_json(recipe.deepspeed),
                **later,
            }
        )

    @cached_property
    def key(self) -> str:
        """The name of the trial in the sweep folder: a hash of its identity, steps and round.

        It does not depend on `split`, which does not change the step time.
        """
        # Round 1 keeps the key of a sweep without rounds.
        later = {"round": self.round} if self.round > 1 else {}
        return digest(
            {"identity": self.identity, "steps": self.steps, "warm_up": self.warm_up} | later
        )

    def request(self, corpus: Callable[[int, int], Path]) -> dict[str, Any]:
        """Return what the ranks read: the recipe on synthetic data, and the steps to measure.

        Args:
            corpus: returns the folder of a synthetic corpus, given the sizes of vocabulary and
                sequences
        """
        table = self.recipe.model_dump(mode="json", exclude_none=True)
        table["data"] |= data_in(corpus, self.recipe)
        table["training"] |= {"evaluate_every": 0}
        table["training"].pop("initial_weights", None)
        table["tracking"] = {"mode": "disabled"}
        return {
            "key": self.key,
            "recipe": table,
            "warm_up": self.warm_up,
            "steps": self.steps,
            "split": self.split,
        }

    def with_steps(self, steps: int) -> "Trial":
        """Return the trial with another number of measured steps."""
        return replace(self, steps=steps)

    def in_round(self, number: int) -> "Trial":
        """Return the trial in another round, counted from 1."""
        other = replace(self, round=number)
        # The identity does not depend on the round, so it is not computed again.
        vars(other)["identity"] = self.identity
        return other


@dataclass(frozen=True)
class Rejection:
    """A combination of settings that cannot run, or that the plan rules out.

    Attributes:
        settings: settings that identify the combination, such as "layout.tensor=3, 2 nodes"
        trial: the trial, if the combination is a valid recipe
    """

    source: str
    settings: str
    reason: str
    trial: Trial | None = None

    @property
    def outcome(self) -> Outcome:
        """The outcome to record: "too_large" for a valid recipe, otherwise "rejected"."""
        return "too_large" if self.trial else "rejected"

    @cached_property
    def key(self) -> str:
        """The name of the combination in the sweep folder."""
        return self.trial.key if self.trial else digest([self.source, self.settings])


@dataclass(frozen=True, kw_only=True)
class Result:
    """The end of a trial.

    Attributes:
        reason: explanation in one line, if the outcome is not "ok"
        log: last lines of the ranks' output after a failure
        warm_up_seconds: total duration of the warm-up steps
        memory_gib: peak memory of the fullest rank, including that of CUDA and its libraries
        allocated_gib: peak memory of torch's allocator on the fullest rank; None on CPUs
        device: name of the device, as the driver reports it
        split: the split of a step; None if it was not measured
        seconds: duration of the whole trial, as measured by the scheduler
        links: the measurements of `sweep.py links`; None for a trial
        training: the losses or the activation sizes of a trial of `transfer`; None for others
    """

    outcome: Outcome
    reason: str = ""
    log: str = ""
    step_seconds: list[float] = field(default_factory=list)
    warm_up_seconds: float = 0.0
    memory_gib: float | None = None
    allocated_gib: float | None = None
    device: str = ""
    split: Split | None = None
    seconds: float = 0.0
    links: Measurements | None = None
    training: dict[str, Any] | None = None

    @property
    def median_seconds(self) -> float | None:
        """The median time of a measured step; None if no step was measured."""
        return median(self.step_seconds) if self.step_seconds else None

    @property
    def stepping_seconds(self) -> float:
        """The duration of all steps, including the warm-up and the instrumented ones."""
        instrumented = SPLIT_STEPS * self.split.instrumented_seconds if self.split else 0.0
        return self.warm_up_seconds + sum(self.step_seconds) + instrumented

    def as_json(self) -> dict[str, Any]:
        """Return a table for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> "Result":
        """Return the result of a table, which may lack the attributes of newer versions."""
        return _result_adapter().validate_python(table)

    def answers(self, trial: Trial) -> bool:
        """Return True unless the trial asks for a split, which a measurement did not include."""
        return self.outcome != "ok" or not trial.split or self.split is not None


@cache  # building its schema takes milliseconds
def _result_adapter() -> TypeAdapter[Result]:
    return TypeAdapter(Result)


def preference(*, outcome: str, split: bool, seconds: float | None) -> tuple[bool, bool, float]:
    """Return a sort key of a trial's rounds; the last one in this order represents the trial.

    It is a round that failed, because a layout that fails at times is not usable; otherwise the
    fastest one, among those with a split if there are any.
    """
    return outcome != "ok", split, -(seconds or math.inf)


def competitors(
    results: Iterable[tuple[Trial, Result]],
) -> dict[tuple[str, int], list[tuple[float, Trial]]]:
    """Group measured trials by recipe file and number of ranks; trials compete within a group.

    Returns:
        (recipe file, number of ranks) -> (median seconds of a step, trial) of each measured trial
    """
    groups: dict[tuple[str, int], list[tuple[float, Trial]]] = {}
    for trial, result in results:
        if result.median_seconds is not None:
            group = groups.setdefault((trial.source, trial.workers.size), [])
            group.append((result.median_seconds, trial))
    return groups


def data_in(corpus: Callable[[int, int], Path], recipe: Recipe) -> dict[str, Any]:
    """Return the keys of the [data] section that select a synthetic corpus for a recipe."""
    folder = corpus(recipe.model.vocab_size, recipe.model.sequence_length).resolve()
    return {
        "train": [{"path": str(folder / "train")}],
        "validation": str(folder / "validation"),
        "tokenizer": str(folder / "tokenizer"),
    }


def without_later_keys(model: ModelConfig, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the [model] section of a recipe without later keys that have the default.

    Args:
        table: the section in the form of JSON
    """
    kept = _without_defaults(model, table, LATER_MODEL_KEYS)
    if model.experts is not None:
        kept["experts"] = _without_defaults(model.experts, table["experts"], LATER_EXPERT_KEYS)
    return kept


def _without_defaults(
    section: ModelConfig | Experts, table: Mapping[str, Any], keys: Iterable[str]
) -> dict[str, Any]:
    fields = type(section).__dataclass_fields__
    unset = {key for key in keys if getattr(section, key) == fields[key].default}
    return {key: value for key, value in table.items() if key not in unset}


def digest(value: Any) -> str:
    """Return a hash of a value that JSON can express."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]
