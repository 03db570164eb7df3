"""Decide whether to requeue a failed job; a second failure at the same checkpoint is final.

    python slurm/attempts.py EXIT_CODE RECIPE [options of pretrain.py]

Exit code 0 means requeue. Failures are recorded in attempts.jsonl in the run folder.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from slurm/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import os

from models.errors import UserError
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import published, step_of
from threefold.run_folder.json_lines import LineFile
from threefold.runtime.command_line import file_path
from threefold.runtime.exits import REJECTED, UNFIT

EXCLUDE = """
The preflight has found a broken node; the log names it. Write #SBATCH --exclude=NODE at the top of
slurm/pretrain.slurm and submit the job again, or use slurm/submit.sh --elastic, which leaves broken
nodes out."""


def main() -> None:
    """Record the failure, and exit with 0 if the job should be requeued."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("code", type=int, help="exit code of pretrain.py")
    parser.add_argument("recipe", type=file_path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--run-dir", type=file_path)
    for name in ("--resume", "--resume-once", "--wait-for-folder"):
        parser.add_argument(name, help="ignored; for pretrain.py")
    parser.add_argument("--forget-failures", action="store_true", help="ignored; for launch.py")
    options = parser.parse_args()
    if options.code == REJECTED:
        sys.exit("the run was rejected (message above); the job is not requeued")
    try:
        name = load_recipe(options.recipe, options.set).name
    except UserError as problem:
        sys.exit(f"{problem}; the job is not requeued")
    folder = RunFolder(options.run_dir or REPOSITORY / "runs" / name)
    step = max(map(step_of, published(folder.checkpoints)), default=0)
    try:
        repeated = record_failure(folder.path / "attempts.jsonl", step, options.code)
    except OSError as problem:
        sys.exit(
            f"{problem.filename or folder.path} cannot be read or written ({problem.strerror}), so "
            f"failures cannot be counted; free disk space and submit the job again"
        )
    if repeated:
        sys.exit(
            f"failed twice without a checkpoint after step {step} (exit code {options.code}); the "
            f"job is not requeued{EXCLUDE if options.code == UNFIT else ''}"
        )
    rerun = "the requeued job" if os.environ.get("REQUEUE", "yes") == "yes" else "a rerun"
    print(f"failed with exit code {options.code}; {rerun} resumes after step {step}")


def record_failure(attempts: Path, step: int, code: int) -> bool:
    """Record a failure; return True if this job has failed before with the same newest checkpoint.

    Args:
        attempts: the file that records failures
        step: step of the newest checkpoint
        code: exit code of pretrain.py

    Raises:
        OSError: the failure cannot be recorded.
    """
    attempts.parent.mkdir(parents=True, exist_ok=True)
    job = os.environ.get("SLURM_JOB_ID", "")
    lines = LineFile(attempts, keys={"job": (str,)})
    earlier = lines.read()
    lines.append_durably({"job": job, "step": step, "exit_code": code})
    return any(attempt["job"] == job and attempt.get("step") == step for attempt in earlier)


if __name__ == "__main__":
    main()
