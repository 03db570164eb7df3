"""Whether a job that has failed should start again: not if the last one failed where it did.

    python slurm/attempts.py EXIT_CODE RECIPE [what else pretrain.py got]

Exit code 0: start again. Failures are noted in the run folder, in attempts.jsonl.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the repository, not slurm/, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import os

from models.errors import UserError
from recipes.training.recipe.loading import REPOSITORY, load_recipe
from recipes.training.run_folder.checkpoint_folders import published, step_of
from recipes.training.run_folder.folder import RunFolder
from recipes.training.run_folder.line_file import LineFile
from recipes.training.runtime.exits import REFUSED


def main() -> None:
    """Note the failure and decide."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("code", type=int, help="how pretrain.py ended")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--run-dir", type=Path)
    for name in ("--resume", "--resume-once", "--wait-for-folder"):
        parser.add_argument(name, help="for pretrain.py")
    options = parser.parse_args()
    if options.code == REFUSED:
        sys.exit("the recipe was refused; the job does not start again")
    try:
        name = load_recipe(options.recipe, options.set).name
    except UserError as problem:
        sys.exit(f"{problem}; the job does not start again")
    folder = RunFolder(options.run_dir or REPOSITORY / "runs" / name)
    step = max(map(step_of, published(folder.checkpoints)), default=0)
    try:
        repeated = note_failure(folder.path / "attempts.jsonl", step, options.code)
    except OSError as problem:
        sys.exit(
            f"{problem.filename or folder.path} cannot be read or written ({problem.strerror}), so "
            f"failures cannot be counted; make room, and submit the job again"
        )
    if repeated:
        sys.exit(
            f"failed twice without a checkpoint after step {step} (exit code {options.code}); the "
            f"job does not start again"
        )
    print(f"failed with exit code {options.code}; starts again after step {step}")


def note_failure(attempts: Path, step: int, code: int) -> bool:
    """Note a failure; return True if the job has already failed after that checkpoint.

    Raises:
        OSError: the failure cannot be noted.
    """
    attempts.parent.mkdir(parents=True, exist_ok=True)
    job = os.environ.get("SLURM_JOB_ID", "")
    lines = LineFile(attempts, key="job")
    earlier = lines.read()
    lines.append_durably({"job": job, "step": step, "exit_code": code})
    return any(attempt["job"] == job and attempt.get("step") == step for attempt in earlier)


if __name__ == "__main__":
    main()
