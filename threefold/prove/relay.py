"""The work of a rank in a relay: every layout resumes from the checkpoint of the previous layout.

The folder of a relay holds the checkpoints of a run and a file `handed`, with the tensors that the
previous layout had in memory when it saved, and the losses of its later steps.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.checkpoint import resume
from threefold.checkpoint.state import KINDS
from threefold.checkpoint.writer import CheckpointWriter
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.data.dataset import TrainingData
from threefold.engine.engine import Engine
from threefold.prove.compare import ResumeResult, relative
from threefold.prove.layouts import ProofCase
from threefold.prove.training import (
    gather,
    held_state,
    held_weights,
    many_cases,
    start,
    train_step,
)
from threefold.run_folder.folder import RunFolder

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
