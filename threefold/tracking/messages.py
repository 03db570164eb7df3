"""Messages of a run: skipped checkpoints, its beginning and its summary."""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from models.cost import parameter_count
from models.errors import counted
from models.hugging_face.config import export_problem
from threefold.checkpoint.compatibility import changed_positions
from threefold.config.deepspeed_json import deepspeed_notes
from threefold.config.loading import value_text
from threefold.config.optimization import MAX_RATE_CHANGE, learning_rate
from threefold.config.parallel_dims import LaunchEnvironment, ParallelDims, rank_map
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.data.manifest import unchecked_tokenizer, unused_rows
from threefold.pipeline.balance import balance_text
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import WallTime, shares_text
from threefold.run_folder.json_lines import number, task_accuracies, validation_losses
from threefold.tracking.wandb_connection import WandbStatus

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from threefold.checkpoint.resume import ResumePoint


def tell_skipped(folder: RunFolder, start: "ResumePoint") -> None:
    """Report the damaged checkpoints that were skipped."""
    for path, damage in start.skipped.items():
        folder.event("skip", start.progress.step, checkpoint=str(path), reason=damage)
        print(f"{path} is damaged and skipped: {damage}", file=sys.stderr)


def tell_unsaved_attempt(folder: RunFolder, start: "ResumePoint") -> None:
    """Say that an earlier attempt on this branch has done steps, if it has saved none of them."""
    if start.progress.step:
        return
    events = folder.read_events()
    branches = [index for index, event in enumerate(events) if event["event"] == "branch"]
    own = events[branches[-1] :] if branches else events
    # A "repeat" event counts the steps in the metrics, and other events may record later ones.
    reached = max(
        (
            event["step"] + int(number(event.get("steps")) or 0) * (event["event"] == "repeat")
            for event in own
        ),
        default=0,
    )
    if reached and not folder.history().saved:
        print(
            f"  an earlier attempt reached step {reached} and saved no checkpoint; the run starts "
            f"again at step 1",
            flush=True,
        )


NOT_COMPILED = (
    'training.compile = "auto": a node lacks a C compiler or the headers of Python, so no kernel '
    "is compiled; steps are slower, need more memory than planned and round differently; install "
    "both on all nodes, or set training.compile = false"
)


MAX_NODES_IN_MESSAGE = 8
MIN_HOURS_IN_GOODPUT = 0.1  # a shorter time is shown in seconds
MIN_SECONDS_SHOWN = 10.0  # in which a run was stopped; a shorter time is left out
MAX_IMBALANCE = 1.1  # of context ranks; above it, the run prints a message


def announce(
    recipe: Recipe,
    dims: ParallelDims,
    hosts: list[str],
    folder: RunFolder,
    found: "ResumePoint",
    imbalance: float = 1.0,
) -> None:
    """Print the model, the layout, the run folder and the nodes of a run.

    imbalance: work in attention of the busiest context rank, relative to the mean
    """
    print(
        f"{recipe.name}: {parameter_count(recipe.model) / 1e6:,.1f} M parameters, "
        f"{dims}, "
        f"{recipe.deepspeed}, into {folder.path}"
        + (f", resumed after step {found.progress.step}" if found.progress.step else "")
        + (", from a snapshot in memory" if found.in_memory else "")
        + (f", from the weights of {found.path}" if found.weights_only else ""),
        flush=True,
    )
    nodes = list(dict.fromkeys(hosts))
    print(f"  {nodes_and_ranks(nodes, len(hosts))}", flush=True)
    for note in deepspeed_notes(recipe, dims):
        print(f"  {recipe.deepspeed}: {note}", flush=True)
    if found.weights_only and (changed := changed_positions(found.reader().manifest, recipe)):
        print(f"  positions differ from those of the weights: {changed}", flush=True)
    layout = recipe.layout
    if layout.pipeline > 1:
        balance = balance_text(
            recipe.blocks_of_virtual_stages,
            recipe.layer_costs,
            schedule=layout.schedule,
            stages=layout.pipeline,
        )
        print(f"  {layout.schedule_name}: {balance}", flush=True)
    for note in filter(None, (unchecked_tokenizer(recipe), unused_rows(recipe))):
        print(f"  {note}", flush=True)
    if problem := export_problem(recipe.model):
        print(f"  convert.py to-hf cannot export this model: {problem}", flush=True)
    if imbalance > MAX_IMBALANCE:
        print(
            f"  context {dims.context}: documents of different lengths are divided unevenly: "
            f"the busiest rank has {imbalance:.2f} times the mean work in attention, and the "
            f"others wait for it; a smaller layout.context is more even",
            flush=True,
        )
    if len(set(hosts)) > 1:
        print("\n".join(f"  {line}" for line in rank_map(dims, hosts)), flush=True)


def nodes_and_ranks(nodes: Sequence[str], ranks: int) -> str:
    """Return the numbers of nodes and ranks, with the names of the nodes."""
    more = len(nodes) - MAX_NODES_IN_MESSAGE
    names = ", ".join(nodes[:MAX_NODES_IN_MESSAGE]) + (f" and {more} more" if more > 0 else "")
    return f"{counted(len(nodes), 'node')}, {counted(ranks, 'rank')}: {names}"


def tell_changes(folder: RunFolder, start: "ResumePoint", recipe: Recipe) -> None:
    """Print the keys that have changed since the save, and warn of a learning rate that jumps."""
    for key, change in change_texts(start, recipe).items():
        without_effect = ""
        if key == "training.initial_weights":
            without_effect = (
                ", which has no effect, because the run resumes from its own checkpoint; to start "
                "from these weights, use another --run-dir, or --resume never"
            )
        print(f"  {change}{without_effect}", flush=True)
    if change := start.change_of_average(recipe):
        print(f"  {change}", flush=True)
    if jump := start.learning_rate_jump(recipe):
        warn(folder, start.progress.step, jump)


def change_texts(start: "ResumePoint", recipe: Recipe) -> dict[str, str]:
    """Return key -> text for the keys that have changed since the save."""
    texts = {}
    for key, values in start.changes(recipe).items():
        old, new = ("unset" if value is None else value_text(value) for value in values)
        texts[key] = f"{key}: {old} -> {new}"
    return texts


# Sections and keys that do not change what a run learns.
KEYS_OF_THE_MACHINE = ("checkpoint.", "cluster.", "layout.", "name", "supervision.", "tracking.")


def warn_of_changes_after_the_end(start: "ResumePoint", recipe: Recipe) -> None:
    """Print a warning about the keys that have changed since a finished run was saved."""
    changes = change_texts(start, recipe)
    if of_training := [changes[key] for key in changes if not key.startswith(KEYS_OF_THE_MACHINE)]:
        print(
            f"warning: the run is already finished, so these changes have no effect: "
            f"{', '.join(of_training)}; to train with them, use another --run-dir, or another "
            f"`name` in the recipe",
            file=sys.stderr,
            flush=True,
        )


def warn(folder: RunFolder, step: int, message: str) -> None:
    """Record and print a warning before the run's tracker is open."""
    folder.event("warning", step, message=message)
    print(f"warning: {message}", file=sys.stderr, flush=True)


def thread_excess(ranks: int, threads: int, cores: int) -> str:
    """Return a message if the threads of a node's ranks exceed its cores; otherwise "".

    Args:
        ranks: number of ranks of the node
        threads: number of threads of all its ranks
        cores: number of cores that the ranks may use
    """
    if threads <= cores:
        return ""
    remedy = f"set OMP_NUM_THREADS={cores // ranks}, or unset it"
    if ranks > cores:
        remedy = f"start {cores} ranks per node"
        remedy += " with OMP_NUM_THREADS=1" if threads > ranks else ""
    return (
        f"{counted(ranks, 'rank')} on this node run{'s' * (ranks == 1)} {threads} threads on "
        f"{counted(cores, 'core')}, which slows {'them' if ranks > 1 else 'it'} down; {remedy}"
    )


def saves_after_the_end(recipe: Recipe) -> str:
    """Return a message if `checkpoint.also_at` names steps after the last one; otherwise ""."""
    late = [step for step in recipe.checkpoint.also_at if step > recipe.training.steps]
    if not late:
        return ""
    steps = f"step{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
    return (
        f"checkpoint.also_at: no checkpoint is saved at {steps}, because the run ends at "
        f"training.steps = {recipe.training.steps}"
    )


SUMMARIZED = {
    "loss",
    "tokens",
    "tokens_per_second",
    "step_seconds",
}  # keys of a metrics line; a user may edit the file


def summarize(
    recipe: Recipe, folder: RunFolder, world: LaunchEnvironment, found: "ResumePoint | None" = None
) -> None:
    """Print the results of a finished run, from its metrics; on rank 0.

    Args:
        found: the checkpoint from which the run would resume; None at the end of training
    """
    if world.rank != 0:
        return
    metrics, events = folder.read_metrics(), folder.read_events()
    lines = [line for line in metrics if line.keys() >= SUMMARIZED]
    evaluations: dict[str, str] = {}  # the newest of each validation set and task
    for line in lines:
        when = f"at step {line['step']}"
        for title, averaged in (("validation ", False), ("averaged   ", True)):
            for name, loss in validation_losses(line, averaged=averaged).items():
                evaluations[" ".join(filter(None, [title, name]))] = f"{loss:.4f} {when}"
        for name, accuracy in task_accuracies(line).items():
            evaluations[f"task        {name}"] = f"{accuracy:.1%} {when}"
    steps = recipe.training.steps
    title, advice = f"is finished: {counted(steps, 'step')}", longer_training(recipe)
    if found and found.progress.step > steps:
        title = (
            f"is at step {found.progress.step}, beyond the requested training.steps = {steps}; "
            f"nothing is left to train"
        )
        advice = longer_training_than_requested(found, recipe)
    print(f"{recipe.name} {title}")
    if lines:
        first, last = lines[0], lines[-1]
        seconds = sum(line["step_seconds"] for line in lines) or 1e-9
        speed = sum(line["tokens_per_second"] * line["step_seconds"] for line in lines) / seconds
        print(f"  loss        {first['loss']:.4f} at step {first['step']}, ", end="")
        print(f"{last['loss']:.4f} at step {last['step']}")
        epochs = f", {last['epoch']:.2f} epochs" if "epoch" in last else ""
        print(f"  tokens      {last['tokens']:,} at {speed:,.0f} tokens/s{epochs}")
    for name, value in evaluations.items():
        print(f"  {name} {value}")
    if goodput := goodput_line(events, metrics):
        print(goodput)
    print(f"  checkpoints {folder.checkpoints}")
    print(f"  metrics     {folder.metrics} (next to it: events.jsonl and recipe.toml)")
    if status := WandbStatus.read(folder.path):
        print(f"  W&B         {status.summary}")
    print(f"  {advice}; to start over, use --resume never", flush=True)


def longer_training(recipe: Recipe) -> str:
    """Return the advice for training a finished run longer, without a jump of the learning rate."""
    last, steps = recipe.training.steps, 2 * recipe.training.steps
    segment = PhasePlan(recipe).at(last)
    rate, before = segment.rate_to_continue(last + 1), segment.schedule_first - 1
    if not rate:
        return (
            "to train longer, add a [[phase]] with its own schedule; the current schedule has "
            "decayed to a learning rate of 0"
        )
    stretched = rate  # a schedule that counts sequences has its own length
    if segment.recipe.optimizer.schedule.counts == "steps":
        stretched = learning_rate(last + 1 - before, segment.recipe.optimizer, steps - before)
    if stretched <= MAX_RATE_CHANGE * rate:
        return f"to train longer, raise training.steps above {last}"
    if not before and segment.outlasts_warmup:
        return (
            f"to train longer at the learning rate of {rate:.2e}, use --set training.steps={steps} "
            f"--set optimizer.schedule.steps={last}; training.steps alone would raise it to "
            f"{stretched:.2e}"
        )
    return (
        f"to train longer, add a [[phase]] with its own schedule; training.steps alone would raise "
        f"the learning rate from {rate:.2e} to {stretched:.2e}"
    )


def longer_training_than_requested(start: "ResumePoint", recipe: Recipe) -> str:
    """Return the advice for continuing a run whose checkpoint is beyond the requested last step.

    The requested schedule ends before the checkpoint, so the advice follows the recipe of the
    checkpoint. It mentions no learning rate if the command has another schedule.
    """
    earlier, step = start.earlier_recipe, start.progress.step
    if earlier and earlier.training.steps > step:
        return f"to continue the run, use training.steps = {earlier.training.steps} as before"
    if earlier and earlier.training.steps == step and _same_learning_rates(earlier, recipe):
        if (end := earlier.optimizer.schedule.steps) and not earlier.phase:
            return (
                f"to train longer with the same schedule, use --set training.steps={2 * step} "
                f"--set optimizer.schedule.steps={end}"
            )
        return longer_training(earlier)
    return f"to train longer, set training.steps above {step}"


def _same_learning_rates(one: Recipe, other: Recipe) -> bool:
    """Return True if two recipes have the same learning rates, apart from the number of steps."""

    def rates(recipe: Recipe) -> tuple[Any, ...]:
        schedule = recipe.optimizer.schedule.model_copy(update={"steps": None})
        return recipe.optimizer.learning_rate, schedule, recipe.phase

    return rates(one) == rates(other)


def goodput_line(events: Sequence[dict[str, Any]], metrics: Iterable[dict[str, Any]]) -> str:
    """Return a line about the wall time of a run until its last end.

    It is empty if the run has not ended, or has started only once.
    """
    ends = [
        index
        for index, event in enumerate(events)
        if event["event"] == "end" and number(event.get("time")) is not None
    ]
    if not ends:
        return ""
    # Later starts, such as those of a branch that was given up, are not part of the finished run.
    last = events[ends[-1]]
    kept = [line for line in metrics if line["step"] <= last["step"]]
    wall_time = WallTime(events[: ends[-1] + 1], kept)
    if wall_time.starts < 2:
        return ""
    end = last["time"]
    shares = wall_time.shares(end)
    paused = f"; not counted: {_time_text(wall_time.paused)} in which the run was stopped"
    return (
        f"  goodput     {shares['kept']:.1%} of {_time_text(3600 * wall_time.hours(end))} in "
        f"kept steps, after {wall_time.starts} starts; lost: {shares_text(shares)}"
        f"{paused if wall_time.paused >= MIN_SECONDS_SHOWN else ''}"
    )


def _time_text(seconds: float) -> str:
    """Return a time in hours; in seconds if it is short."""
    hours = seconds / 3600
    return f"{hours:.2f} h" if hours >= MIN_HOURS_IN_GOODPUT else f"{seconds:.0f} s"
