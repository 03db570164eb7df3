"""All layouts of a recipe on up to N ranks that pass its validation."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from models.errors import UserError
from threefold.config.deepspeed_json import build_deepspeed_config, read_deepspeed_json
from threefold.config.layout import CONTEXT_ATTENTIONS, PAIRED_SCHEDULES
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import IN_TEXTS, LaunchEnvironment, ParallelDims
from threefold.config.recipe import Recipe

ZERO_STAGES = (1, 2, 3)
CONFIG = "ds_configs/zero{}_{}.json"
PRECISIONS = ("fp32", "bf16")  # that CPUs train in
SCHEDULES: dict[str, dict[str, Any]] = {  # name -> keys of the [layout] section
    "1f1b": {"schedule": "1f1b"},
    "interleaved x 2": {"schedule": "interleaved", "virtual_stages": 2},
    "interleaved x 3": {"schedule": "interleaved", "virtual_stages": 3},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-v": {"schedule": "zb-v"},
    "dualpipev": {"schedule": "dualpipev"},
    "gpipe": {"schedule": "gpipe"},
}


@dataclass(frozen=True)
class ProofCase:
    """A recipe with one layout, to be compared with the reference.

    precision: one of PRECISIONS
    perturbation: number of a perturbed run of the reference (`recording.py`); None: no perturbation
    recorded: True to record the activations and gradients of one step instead of training
    """

    recipe: Recipe
    dims: ParallelDims
    zero_stage: int
    precision: str = "fp32"
    perturbation: int | None = None
    recorded: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dims.world_size

    @property
    def axes(self) -> str:
        """Sizes of the axes: "tensor 2 x pipeline 2 x data 2", context and expert only above 1."""
        return self.dims.text

    @property
    def method(self) -> str:
        """All other settings of the layout: "zero1, 1f1b, recompute selective, micro-batch 2"."""
        layout = self.recipe.layout
        parts = [f"zero{self.zero_stage}"]
        if layout.pipeline > 1:
            parts.append(layout.schedule_name)
        if layout.reduce_every:
            parts.append(f"reduce every {layout.reduce_every}")
        if layout.dp_shard:
            parts.append(f"shard group {layout.dp_shard}")
        if layout.sequence_parallel:
            parts.append("sequence-parallel")
        if layout.context > 1:
            parts.append(layout.context_attention)
        if layout.expert_overlap:
            parts.append("expert overlap")
        if layout.recompute != "none":
            every = f" by {layout.recompute_interval}" if layout.recompute == "full" else ""
            parts.append(f"recompute {layout.recompute}{every}")
        return ", ".join([*parts, f"micro-batch {self.recipe.batch.micro_sequences}"])

    @property
    def settings(self) -> dict[str, Any]:
        """All settings of the layout by name."""
        layout, sizes = self.recipe.layout, self.dims
        return {
            **sizes.sizes,
            "expert_overlap": layout.expert_overlap,
            "zero": self.zero_stage,
            "reduce_every": layout.reduce_every,
            "dp_shard": layout.dp_shard,
            "schedule": layout.schedule_name if sizes.pipeline > 1 else "",
            "sequence_parallel": layout.sequence_parallel,
            "context_attention": layout.context_attention if sizes.context > 1 else "",
            "recompute": layout.recompute,
            "micro_sequences": self.recipe.batch.micro_sequences,
        }


def reference(recipe: Recipe, precision: str = "fp32") -> ProofCase:
    """Return the reference: one process, ZeRO-1, without recomputation."""
    return _case(recipe, ParallelDims(), precision=precision)


def perturbed(first: ProofCase, runs: int) -> list[ProofCase]:
    """Return perturbed runs of the reference."""
    return [replace(first, perturbation=number) for number in range(runs)]


def simpler(case: ProofCase) -> list[ProofCase]:
    """Return the valid cases that have one setting less than a case.

    A size of an axis becomes 1, and every other setting that of the reference. Settings that need
    the axis are given up with it.
    """
    layout = case.recipe.layout.model_dump(mode="json", exclude_none=True)
    alone: list[dict[str, Any]] = [
        {"reduce_every": 0},
        {"dp_shard": 0},
        {"expert_overlap": False},
        {"recompute": "none"},
        {"sequence_parallel": False},
        {"schedule": "1f1b", "virtual_stages": 1, "expert_overlap": False},
        {"context_attention": "gather"},
    ]
    kept = {key: layout[key] for keys in alone for key in keys if key in layout}
    changes = [(case.dims, case.zero_stage, kept | keys, 0) for keys in alone]
    changes += [(case.dims, case.zero_stage, kept, 1)]  # micro-batches of one sequence
    if case.zero_stage > 1:
        changes += [(case.dims, 1, kept | {"reduce_every": 0}, 0)]
    without: dict[str, dict[str, Any]] = {
        "tensor": {"sequence_parallel": False},
        "pipeline": {"schedule": "1f1b", "virtual_stages": 1, "expert_overlap": False},
        "context": {"context_attention": "gather"},
    }
    for axis in ("expert", "expert_tensor", *IN_TEXTS):
        if getattr(case.dims, axis) > 1:
            keys = kept | without.get(axis, {}) | {"dp_shard": 0}
            dims = replace(case.dims, **{axis: 1})
            if axis == "tensor":
                dims = replace(dims, expert_tensor=1)
            changes.append((dims, case.zero_stage, keys, 0))
    found = {}
    for dims, zero, keys, micro in changes:
        try:
            one = _case(
                case.recipe,
                dims,
                zero_stage=zero,
                precision=case.precision,
                layout=keys,
                micro_sequences=micro or None,
            )
        except UserError:  # the setting needs the one that was given up
            continue
        found[f"{one.axes}, {one.method}"] = one
    found.pop(f"{case.axes}, {case.method}", None)
    return list(found.values())


def settings_beyond(case: ProofCase, first: ProofCase) -> list[str]:
    """Return the names of the settings that a case does not share with the reference."""
    names = [name for name, value in case.settings.items() if value != first.settings[name]]
    if "context" in names and case.recipe.layout.context_attention == "gather":
        names.remove("context_attention")  # of the only attention that is always valid
    if "pipeline" in names and case.settings["schedule"] == "1f1b":
        names.remove("schedule")
    return names


def valid_cases(
    recipe: Recipe,
    *,
    ranks: int,
    micro_sequences: Iterable[int],
    recompute_intervals: Iterable[int] = (2,),
    precision: str = "fp32",
) -> list[ProofCase]:
    """Return all valid cases on up to `ranks` ranks, smallest worlds first."""
    recomputes = [{"recompute": "none"}, {"recompute": "selective"}] + [
        {"recompute": "full", "recompute_interval": interval} for interval in recompute_intervals
    ]
    for stage in ZERO_STAGES:
        read_deepspeed_json(CONFIG.format(stage, precision))  # raises here if the file is missing
    cases = []
    for dims in all_dims(ranks, experts=recipe.model.experts is not None):
        variants = layouts(dims, recomputes, experts=recipe.model.experts is not None)
        ways = product(ZERO_STAGES, variants, micro_sequences)
        for zero, layout, micro in ways:
            micro_batches = recipe.batch.global_sequences // (micro * dims.data)
            for reduction in reductions(zero, dims, layout, micro_batches):
                try:
                    cases.append(
                        _case(
                            recipe,
                            dims,
                            zero_stage=zero,
                            precision=precision,
                            layout=layout | reduction,
                            micro_sequences=micro,
                        )
                    )
                except UserError:  # a run would reject it too
                    continue
    return cases


def reductions(
    zero_stage: int, dims: ParallelDims, layout: dict[str, Any], micro_batches: int
) -> list[dict[str, int]]:
    """Return the keys of the [layout] section about the reduction of gradients.

    With ZeRO-2, gradients are reduced after 1, 2 or all micro-batches of a step. Shard groups have
    every possible size. Recomputation, the kind of attention and, for shard groups, sequence
    parallelism have no influence on that, so these numbers are tried with one of each. With one
    data rank ZeRO-2 is the same as ZeRO-1, so there are none.
    """
    if dims.dp_cp_size == 1 and zero_stage == 2:
        return []
    if zero_stage == 3 or layout["recompute"] != "none":
        return [{}]
    if layout.get("context_attention", "gather") != "gather":
        return [{}]
    possible = dims.expert == 1 and not layout["sequence_parallel"]
    sizes = range(1, dims.dp_cp_size // 2 + 1 if possible else 1)
    groups = [{}, *({"dp_shard": n} for n in sizes if dims.dp_cp_size % n == 0)]
    if zero_stage == 1:
        return groups
    numbers = sorted({1, min(2, micro_batches), micro_batches})
    return [{"reduce_every": number} | group for number in numbers for group in groups]


def only(cases: Sequence[ProofCase], chosen: Mapping[str, Sequence[str]]) -> list[ProofCase]:
    """Return the cases that have the chosen settings.

    Args:
        chosen: values by the name of a setting; a case needs one of the values of each name

    Raises:
        UserError: a setting does not exist, no case has one of the values, or no case has all of
            the settings.
    """
    for name, values in chosen.items():
        if name not in cases[0].settings:
            raise UserError(
                f"--only {name}={','.join(values)}: a layout has no setting {name}; use one of "
                f"{', '.join(cases[0].settings)}"
            )
        found = {_text(case.settings[name]): case.settings[name] for case in cases}
        for value in values:
            if value not in found:
                known = sorted(found, key=lambda text: (str(type(found[text])), found[text]))
                raise UserError(f"--only {name}={value}: no layout has it; use {', '.join(known)}")
    left = [
        case
        for case in cases
        if all(_text(case.settings[name]) in values for name, values in chosen.items())
    ]
    if not left:
        together = " ".join(f"--only {name}={','.join(values)}" for name, values in chosen.items())
        raise UserError(f"{together}: no layout has all of these settings; omit one of them")
    return left


def _text(setting: Any) -> str:
    """Return a setting as the command line has it."""
    return str(setting).lower() or "none"


def sample(cases: Sequence[ProofCase], count: int) -> list[ProofCase]:
    """Return `count` of the cases, in their order, which together have many pairs of settings.

    Most faults need at most two settings at once (Kuhn et al. 2004, "Software fault interactions
    and implications for software testing"). Each choice adds as many new pairs as possible.
    """
    if count >= len(cases):
        return list(cases)
    pairs = [frozenset(combinations(case.settings.items(), 2)) for case in cases]
    chosen: list[int] = []
    seen: set[Any] = set()
    left = set(range(len(cases)))
    while len(chosen) < count:
        best = max(left, key=lambda i: (len(pairs[i] - seen), -i))
        if pairs[best] <= seen:  # every pair has occurred: cover all of them once more
            seen = set()
            continue
        chosen.append(best)
        left.remove(best)
        seen |= pairs[best]
    return [cases[i] for i in sorted(chosen)]


def all_dims(ranks: int, *, experts: bool = False) -> Iterator[ParallelDims]:
    """Yield all sizes of the axes with up to `ranks` ranks, smallest worlds first.

    Args:
        ranks: maximum number of ranks
        experts: the model has experts, which ranks can divide
    """
    every = [
        replace(dims, expert=expert, expert_tensor=columns)
        for dims in _grids(IN_TEXTS, ranks)
        for expert in range(1, dims.dp_cp_size + 1 if experts else 2)
        if dims.dp_cp_size % expert == 0
        for columns in sorted({1, dims.tensor} if experts else {1})
    ]
    return iter(sorted(every, key=lambda dims: dims.world_size))


def _grids(axes: Sequence[str], ranks: int) -> Iterator[ParallelDims]:
    """Yield all sizes of some axes with up to `ranks` ranks."""
    if not axes:
        yield ParallelDims()
        return
    for size in range(1, ranks + 1):
        for others in _grids(axes[1:], ranks // size):
            yield replace(others, **{axes[0]: size})


def layouts(
    dims: ParallelDims, recomputes: list[dict[str, Any]], *, experts: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the [layout] sections for some axes, without those that would have equal effects."""
    schedules = SCHEDULES.values() if dims.pipeline > 1 else [SCHEDULES["1f1b"]]
    splits = (False, True) if dims.tensor > 1 else (False,)
    contexts = [{"context_attention": name} for name in CONTEXT_ATTENTIONS]
    for schedule, split, context, recompute in product(
        schedules, splits, contexts if dims.context > 1 else [{}], recomputes
    ):
        layout = {**schedule, "sequence_parallel": split, **context, **recompute}
        yield layout
        exchanges = dims.ep_size > 1
        if experts and exchanges and schedule.get("schedule") in PAIRED_SCHEDULES:
            yield layout | {"expert_overlap": True}


def _case(
    recipe: Recipe,
    dims: ParallelDims,
    *,
    zero_stage: int = 1,
    precision: str = "fp32",
    layout: dict[str, Any] | None = None,
    micro_sequences: int | None = None,
) -> ProofCase:
    table = recipe.model_dump(mode="json", exclude_none=True)
    table["layout"] = dims.layout_keys | (layout or {})
    table["batch"]["micro_sequences"] = micro_sequences or recipe.batch.micro_sequences
    table["deepspeed"] = CONFIG.format(zero_stage, precision)
    case = parse_recipe(table, recipe.name)
    world = LaunchEnvironment(size=dims.world_size, local_size=dims.world_size)
    dims = case.parallel_dims(world)
    build_deepspeed_config(case, dims)
    return ProofCase(case, dims, zero_stage, precision)
