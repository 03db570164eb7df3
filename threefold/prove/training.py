"""The work of a rank in a proof: train the cases of its world size, or resume along a relay.

In a relay, every layout resumes from the checkpoint of the previous layout. The folder of a relay
holds the checkpoints of a run and a file `handed`, with the tensors that the previous layout had in
memory when it saved, and the losses of its later steps.
"""

import contextlib
import gc
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor

from models.errors import UserError
from models.layer_specs import logical_shapes
from models.sharding import Sharding, sharding_of
from threefold.checkpoint import resume
from threefold.checkpoint.state import AVERAGE, KINDS, WEIGHTS
from threefold.checkpoint.writer import CheckpointWriter
from threefold.config.deepspeed_json import build_deepspeed_config
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.data.dataset import TrainingData
from threefold.data.tasks import ScoringRequest, Tasks
from threefold.engine.build import build_from_recipe
from threefold.engine.engine import Engine, StepResult, is_partitioned
from threefold.engine.experts import smallest_margin
from threefold.pipeline.stage import replaced
from threefold.pretrain.evaluation import Evaluator
from threefold.prove.compare import ResumeResult, TrainingResult, relative
from threefold.prove.layouts import ProofCase
from threefold.prove.recording import (
    BACKWARD,
    UPDATE,
    Recorder,
    Recording,
    Value,
    perturbed,
)
from threefold.run_folder.folder import RunFolder
from threefold.runtime.processes import start_processes

TASK_REQUESTS = 8  # of the task of a proof


def train_cases(cases: Iterable[ProofCase]) -> Iterator[TrainingResult | Recording | None]:
    """Train or record the cases of this world; yield outcomes on rank 0, None on the others."""
    cases = list(cases)
    deterministic = cases[0].recipe.training.deterministic
    with many_cases(deterministic=deterministic) as begin_case:
        for case in cases:
            begin_case()
            world = LaunchEnvironment.from_environment(os.environ)
            yield record(case, world) if case.recorded else train(case, world)


@contextlib.contextmanager
def many_cases(*, deterministic: bool = False) -> Iterator[Callable[[], None]]:
    """Join the process group and train several cases in it, one after the other.

    Args:
        deterministic: `training.deterministic` of all cases

    Yields:
        The function to call before each case.
    """
    torch.set_num_threads(1)
    start_processes(LaunchEnvironment.from_environment(os.environ), deterministic=deterministic)
    with shared_groups() as forget_asked:

        def begin() -> None:
            forget_asked()
            gc.collect()  # an engine has reference cycles
            # Later collections skip what is left now: imports, and models that DeepSpeed's ZeRO-3
            # keeps. Otherwise they would take longer with each case.
            gc.freeze()

        yield begin


def train(case: ProofCase, world: LaunchEnvironment) -> TrainingResult | None:
    """Run all steps of a case and return its outcome on rank 0."""
    engine, data = start(case.recipe, world)
    evaluator = Evaluator(engine, data)
    data.tasks = proof_task(data)
    results, validation, evaluations = [], [], []
    margin = math.inf
    steps = case.recipe.training.steps
    with perturbed_if_asked(engine, case):
        for step in range(1, steps + 1):
            if step == steps:  # between two steps, as in a run
                metrics = evaluator.validate()
                validation.append(metrics["validation_loss"])
                evaluations += metrics.get("validation_position_losses", [])
                if engine.average is not None:
                    evaluations.append(metrics["averaged_validation_loss"])
                evaluations += evaluator.score_requests()[0].tolist()
                margin = min(margin, margin_of(engine))
            results.append(train_step(engine, data, step))
            margin = min(margin, margin_of(engine))
    further = [loss for result in results for loss in result.prediction_losses or ()]
    state = logical_state(engine)
    diverged = engine.diverged_replicas()
    if world.rank != 0:
        return None
    averages = {f"average of {name}": mean for name, mean in state.get(AVERAGE, {}).items()}
    return TrainingResult(
        losses=[result.loss for result in results] + validation,
        grad_norms=[result.grad_norm for result in results],
        weights=state[WEIGHTS] | averages,
        moments=first_moments(state),
        diverged=diverged,
        expert_counts=[result.experts.counts for result in results if result.experts],
        margin=margin,
        evaluations=evaluations,
        prediction_losses=further,
    )


def record(case: ProofCase, world: LaunchEnvironment) -> Recording | None:
    """Run one step without clipping, and return its logical tensors on rank 0.

    The gradient of a weight is recorded as the optimizer's moment, which is a multiple of it after
    the first step.
    """
    optimizer = case.recipe.optimizer.model_copy(update={"gradient_clipping": 0.0})
    engine, data = start(case.recipe.model_copy(update={"optimizer": optimizer}), world)
    recorder = Recorder(engine)
    with recorder.recording(), perturbed_if_asked(engine, case):
        result = train_step(engine, data, 1)
    recording = recorder.gather()
    state = logical_state(engine)
    if recording is None:
        return None
    weights, moments = state[WEIGHTS], first_moments(state)
    backwards = [name for name in reversed(logical_shapes(case.recipe.model)) if name in weights]
    for name in backwards:
        if name in moments:
            gradient = Value(module_of(name), BACKWARD, f"gradient of {name}")
            recording.values[gradient] = [moments[name]]
    norm = Value("gradient norm", UPDATE, "norm of all gradients")
    recording.values[norm] = [torch.tensor(result.grad_norm)]
    for name in backwards:
        recording.values[Value(module_of(name), UPDATE, f"updated {name}")] = [weights[name]]
    return recording


def module_of(parameter: str) -> str:
    """Return the module of a parameter: "blocks.0.mlp.experts" of "blocks.0.mlp.experts.up_5"."""
    return parameter.rpartition(".")[0]


def perturbed_if_asked(engine: Engine, case: ProofCase) -> contextlib.AbstractContextManager[None]:
    """Perturb the passes of a perturbed run of the reference."""
    if case.perturbation is None:
        return contextlib.nullcontext()
    return perturbed(engine, case.perturbation)


def first_moments(state: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return AdamW's first moments and Muon's momenta out of `logical_state`.

    They are running means or sums of the gradients. Unlike the updates, they show an error in the
    scale of a gradient.
    """
    return state.get("exp_avg", {}) | state.get("momentum_buffer", {})


def logical_state(engine: Engine) -> dict[str, dict[str, Tensor]]:
    """Return all logical fp32 weights, moments and averages on rank 0; collective.

    Each rank sends the parts that it holds in one message. DeepSpeed's functions (`held_state`)
    would sum each tensor over the data ranks, which is slower.

    Returns:
        kind (one of `KINDS`) -> logical name -> tensor; empty on other ranks
    """
    parameters, tensor = dict(engine.parameters()), engine.axes.tensor
    flats = engine.state.tensors()
    pieces = []
    for fragment in engine.state.fragments:
        values = {
            kind: tensors.narrow(0, fragment.offset, len(fragment.elements)).cpu().numpy()
            for kind, tensors in flats[fragment.flat].items()
        }
        sharding = sharding_of(parameters[fragment.name])
        pieces.append((fragment, tensor.rank, sharding, sharding.local_shape(tensor), values))
    shards: dict[tuple[str, str], tuple[Sharding, dict[int, Tensor]]] = {}
    # Where ranks hold copies, those of the lowest rank remain.
    for fragment, tensor_rank, sharding, shape, values in reversed(sent_to_first_rank(pieces)):
        held = slice(fragment.elements.start, fragment.elements.stop)
        for kind, elements in values.items():
            _, parts = shards.setdefault((kind, fragment.name), (sharding, {}))
            if tensor_rank not in parts:
                parts[tensor_rank] = torch.full(shape, math.nan)
            parts[tensor_rank].view(-1)[held] = torch.from_numpy(elements)
    state: dict[str, dict[str, Tensor]] = {}
    for (kind, name), shard in shards.items():
        state.setdefault(kind, {})[name] = joined(*shard)
    return state


def joined(sharding: Sharding, parts: dict[int, Tensor]) -> Tensor:
    """Join the parts of a logical tensor, by tensor rank."""
    return sharding.logical_tensor([parts[rank] for rank in sorted(parts)])


def sent_to_first_rank(items: list[Any]) -> list[Any]:
    """Return the items of all ranks on rank 0, an empty list on other ranks; collective."""
    of_ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(items, of_ranks)
    return list(itertools.chain.from_iterable(of_ranks or []))


def proof_task(data: TrainingData) -> Tasks:
    """Return a task of continuations in the validation file, from two tokens to whole windows."""
    length, requests = data.sequence_length, []
    for number in range(TASK_REQUESTS):
        tokens = data.validation[""].read(number)  # [s + 1]
        kept = 2 + number * (length - 1) // (TASK_REQUESTS - 1)
        requests.append(ScoringRequest(tokens[:kept].astype(np.int32), 1 + number % (kept - 1)))
    return Tasks([], requests, length)


def margin_of(engine: Engine) -> float:
    """Return the smallest margin of a choice of experts; infinite for a dense model; collective."""
    if engine.recipe.model.experts is None:
        return math.inf
    return smallest_margin(engine.expert_layers, engine.device)


def start(recipe: Recipe, world: LaunchEnvironment) -> tuple[Engine, TrainingData]:
    """Build the recipe's engine and open this rank's data; collective."""
    dims = recipe.parallel_dims(world)
    engine = build_from_recipe(recipe, dims, build_deepspeed_config(recipe, dims))
    return engine, TrainingData(recipe, dims, world.rank)


def train_step(engine: Engine, data: TrainingData, step: int) -> StepResult:
    """Run a step, counted from 1, at the recipe's learning rate.

    Raises:
        UserError: the loss is not finite. DeepSpeed skips such a step, so that there would be no
            states of the optimizer to compare.
    """
    result = engine.train_step(
        data.micro_batches(step), data.phase_plan.at(step).learning_rate(step)
    )
    if not math.isfinite(result.loss):
        raise UserError(
            f"the loss of step {step} is {result.loss}, so there is nothing to compare; find the "
            f"key of [model] or [optimizer] that causes it, such as optimizer.learning_rate"
        )
    return result


def held_weights(engine: Engine) -> dict[str, Tensor]:
    """Return this tensor rank's part of every weight of its stage; collective under ZeRO-3."""
    held = dict(engine.parameters())
    partitioned = [parameter for parameter in held.values() if is_partitioned(parameter)]
    with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
        return {name: parameter.detach().cpu().clone() for name, parameter in held.items()}


def held_state(engine: Engine, kind: str) -> dict[str, Tensor]:
    """Return this tensor rank's part of an optimizer state of all weights that have it; collective.

    Args:
        kind: "fp32" for the fp32 weights, or one of KINDS in `checkpoint/state.py`
    """
    optimizer = engine.wrapped.optimizer
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):  # not ZeRO-3
        # DeepSpeed links the states of all parameter groups after the first group's step.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    return {
        name: (
            safe_get_full_fp32_param(parameter)
            if kind == "fp32"
            else safe_get_full_optimizer_state(parameter, kind)
        ).cpu()
        for name, parameter in engine.parameters()
        if kind == "fp32" or kind in engine.state.kinds(name)
    }


def gather(engine: Engine, held: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the logical tensors on rank 0, an empty dict on other ranks; collective."""
    shardings = {name: sharding_of(parameter) for name, parameter in engine.parameters()}
    parts = [  # as arrays, which are pickled far faster than tensors
        (name, engine.axes.tensor.rank, shardings[name], part.float().numpy(), part.dtype)
        for name, part in held.items()
    ]
    shards: dict[str, tuple[Sharding, dict[int, Tensor]]] = {}
    for name, tensor_rank, sharding, array, dtype in sent_to_first_rank(parts):
        tensors = shards.setdefault(name, (sharding, {}))[1]
        tensors.setdefault(tensor_rank, torch.from_numpy(array).to(dtype))
    return {name: joined(*shard) for name, shard in shards.items()}


@contextlib.contextmanager
def shared_groups() -> Iterator[Callable[[], None]]:
    """Create each process group once, and share it between the cases of a world.

    The n-th request for a group of the same ranks and backend gets the group that the n-th request
    of an earlier case created. Every engine requests dozens of groups, each of which opens
    connections that are never closed.

    If each rank requests its own group (`use_local_synchronization`), some ranks may have theirs
    while others must create it. The former then create a group of one rank, because torch names a
    group after the number of groups that its members have, and members with different numbers would
    wait for each other.

    Yields:
        The function to call before each case.
    """
    made: dict[tuple, list[dist.ProcessGroup]] = {}
    asked: dict[tuple, int] = {}
    new_group = dist.new_group

    def reuse(ranks: Iterable[int] | None = None, *arguments: Any, **settings: Any) -> Any:
        members = tuple(ranks) if ranks is not None else tuple(range(dist.get_world_size()))
        key = members, settings.get("backend")
        turn = asked[key] = asked.get(key, -1) + 1
        groups = made.setdefault(key, [])
        is_missing = turn == len(groups)
        is_rank_s_own = settings.get("use_local_synchronization", False)
        others_create = is_rank_s_own and is_true_anywhere(is_missing)
        if is_missing:
            groups.append(new_group(list(members), *arguments, **settings))
        elif others_create:
            new_group([dist.get_rank()], *arguments, **settings)
        return groups[turn]

    with replaced(dist, "new_group", reuse):
        yield asked.clear


def is_true_anywhere(flag: bool) -> bool:
    """Return True if the flag is true on any rank of the world; collective."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    flags = torch.tensor(int(flag), device=device)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return bool(flags)


SHARED_STEPS = 10  # steps after a checkpoint that two layouts both run


def run_relay(cases: Iterable[ProofCase], folder: Path) -> Iterator[ResumeResult | None]:
    """Run cases of this world's size in turn; yield their results on rank 0, None on the others."""
    cases = list(cases)
    deterministic = cases[0].recipe.training.deterministic
    with many_cases(deterministic=deterministic) as begin_case:
        for case in cases:
            begin_case()
            yield resume_in_layout(
                case, LaunchEnvironment.from_environment(os.environ), RunFolder(folder)
            )


def resume_in_layout(
    case: ProofCase, world: LaunchEnvironment, folder: RunFolder
) -> ResumeResult | None:
    """Load and compare, run a step, save, and run the steps that the next layout repeats."""
    engine, data = start(case.recipe, world)
    done = load_newest(engine, data, folder)
    got = everything(engine) if done else {}
    step = done + 1
    losses = [train_step(engine, data, step).loss]
    save(engine, data, folder, step=step)
    saved = everything(engine)
    losses += [train_step(engine, data, step + later).loss for later in range(1, SHARED_STEPS + 1)]
    dist.barrier()
    if world.rank != 0:
        return None
    file = folder.path / "handed"
    handed = torch.load(file) if file.exists() else None
    torch.save({"tensors": saved, "losses": losses[1:]}, file)
    return compare_resumed(got, losses, handed)


def load_newest(engine: Engine, data: TrainingData, folder: RunFolder) -> int:
    """Load the newest checkpoint, if there is one, and return its step; collective."""
    newest = resume.find(folder.checkpoints, "auto", engine.recipe, data.fingerprint)
    if newest.path:
        engine.load(newest.reader())
    data.resume(newest.progress)
    return newest.progress.step


def save(engine: Engine, data: TrainingData, folder: RunFolder, *, step: int) -> None:
    """Save after a step and wait until the checkpoint is written; collective."""
    dims = engine.recipe.parallel_dims(LaunchEnvironment.from_environment(os.environ))
    folder.path.mkdir(parents=True, exist_ok=True)
    writer = CheckpointWriter(
        engine.state,
        folder,
        recipe=engine.recipe,
        dims=dims,
        data=data.fingerprint,
    )
    problem = writer.save(data.progress_after(step)) or writer.wait()
    assert problem is None, problem


def everything(engine: Engine) -> dict[str, Tensor]:
    """Return all logical weights, fp32 weights and optimizer states on rank 0.

    They are read with DeepSpeed's functions, independently of our checkpoint code.
    """
    tensors = {f"weight {n}": t for n, t in gather(engine, held_weights(engine)).items()}
    for kind in ("fp32", *KINDS[1:]):
        held = gather(engine, held_state(engine, kind))
        tensors |= {f"{kind} {name}": tensor for name, tensor in held.items()}
    return tensors


def compare_resumed(
    got: dict[str, Tensor], losses: list[float], handed: dict[str, Any] | None
) -> ResumeResult:
    """Compare a layout with the previous one; the first layout of a relay has none."""
    if handed is None:
        return ResumeResult(first=True, changed=[], loss=0.0)
    expected = handed["tensors"]
    assert got.keys() == expected.keys()
    changed = [name for name, tensor in expected.items() if not torch.equal(got[name], tensor)]
    pairs = zip(losses[:SHARED_STEPS], handed["losses"], strict=True)
    return ResumeResult(first=False, changed=changed, loss=max(relative(a, b) for a, b in pairs))
