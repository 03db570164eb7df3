"""Bad samples, deaths and defects that the soak of control puts into a run."""

import os
import signal
from typing import Any

from threefold.run_folder.folder import RunFolder
from threefold.run_folder.json_lines import LineFile

BATCH = 8  # samples of a step
BAD_SAMPLES = {  # first samples of bad steps, and their consequences
    40: "step 6 is left out",
    72: "and 80: steps 10 and 11, back to 8", 80: "",
    128: "and 136: steps 14 and 15, back to 12", 136: "",
    200: "step 20, back to 16",
    232: "step 20 again, left out",
}  # fmt: skip


def poison_and_record(rank: int, reads: LineFile) -> None:
    """Make some samples bad, and list those that each step has read."""
    from recipes import pretrain
    from threefold.engine.engine import Engine

    train_step, healthy, steps = pretrain.train_step, Engine.train_step, []

    def note(run: Any, step: int) -> Any:
        steps.append(step)
        return train_step(run, step)

    def poisoned(self: Any, micro_batches: Any, rate: float) -> Any:
        micro_batches = list(micro_batches)
        samples = [n for each in micro_batches for n in each.info.dropout.samples]
        reads.append({"step": steps[-1], "rank": rank, "samples": samples})
        bad = any(n - n % BATCH in BAD_SAMPLES for n in samples)
        if not bad or rank != 1 or self.recipe.optimizer.learning_rate == 0.0005:
            return healthy(self, micro_batches, rate)
        weight = next(weight for _, weight in self.parameters() if weight.requires_grad)
        hook = weight.register_hook(lambda gradient: gradient * float("nan"))
        result = healthy(self, micro_batches, rate)
        hook.remove()
        return result

    pretrain.train_step, Engine.train_step = note, poisoned


def die_at_operation(number: int) -> None:
    """SIGKILL to this process before, during or after an operation on the run folder."""
    left = [number]

    def dies() -> bool:
        left[0] -= 1
        return left[0] == 0

    def mortal(operation: Any) -> Any:
        def run(*arguments: Any) -> Any:
            if dies():
                os.kill(os.getpid(), signal.SIGKILL)
            result = operation(*arguments)
            if dies():
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return run

    write = LineFile._write

    def torn(lines: LineFile, content: bytes) -> None:
        if "step" in lines.keys and "reads" in lines.path.name:
            write(lines, content)
            return
        if dies():
            write(lines, content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(lines, content)

    os.rename, os.fsync, LineFile._write = mortal(os.rename), mortal(os.fsync), torn


def die_loading() -> None:
    """SIGKILL to this process when it has loaded a checkpoint, at the start or in a rollback."""
    from threefold.engine.engine import Engine

    def load(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Engine.load = load


def _count_stale_rollbacks() -> None:
    """Let rollbacks of other branches count, and those before a save of the same step."""
    from threefold.run_folder.history import History

    healthy = History.apply

    def apply(self: History, event: dict[str, Any]) -> None:
        if event["event"] == "save":
            self._targets.clear()
        else:
            healthy(self, event)

    History.apply = apply
    History._forget = lambda self, *, after: None


def _abandon_late() -> None:
    """Set later checkpoints aside when the chosen one has been loaded, and not before."""
    from threefold.checkpoint import resume
    from threefold.engine.engine import Engine

    load, begin_branch, begun = Engine.load, resume.begin_branch, []

    def late(self: Any, *arguments: Any, **options: Any) -> None:
        load(self, *arguments, **options)
        if begun:
            begin_branch(*begun.pop())

    def postpone(folder: RunFolder, start: Any) -> None:
        if start.request.resume == "never":
            begin_branch(folder, start)
        else:
            begun.append((folder, start))

    Engine.load, resume.begin_branch = late, postpone


def _count_for_ever() -> None:
    """Count every rollback of the run, as if no checkpoint had been saved since."""
    from threefold.run_folder.history import History

    History.rollbacks = lambda self, step: len(self.rolled_back)


FAULTS = {
    "stale rollbacks": _count_stale_rollbacks,
    "late abandonment": _abandon_late,
    "rollbacks for ever": _count_for_ever,
}
