"""Runs of recipes/pretrain.py on a synthetic corpus, each in separate processes."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from tests.gpu.setting import Setting
from threefold.config.loading import REPOSITORY
from threefold.prove.shrink import write_corpus
from threefold.runtime.launchers import free_port
from threefold.runtime.ranks import killed_with_parent, rank_variables

Item = TypeVar("Item")
VOCAB_SIZE, SMALL_VOCAB_SIZE = 2048, 250
VALIDATION_TOKENS, SMALL_VALIDATION_TOKENS = 40_000, 4_000  # five times as many to train on
SMALL = (  # on top of recipes/tiny.toml
    "model.layers=2", "model.hidden_size=64", "model.heads=4", "model.kv_heads=2",
    "model.ffn_hidden_size=96", f"model.vocab_size={SMALL_VOCAB_SIZE}", "model.sequence_length=32",
    "batch.micro_sequences=1", "training.compile=false",
)  # fmt: skip
LAST_CHARACTERS = 3000  # of a log, in an error
POLL_SECONDS = 0.02
LAUNCHER_VARIABLES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK",
    "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR",
    "MASTER_PORT",
}  # fmt: skip
THREADS = 4  # of a run on the CPU, at most
SECONDS_FOR_OTHER_RANKS = 5.0  # to end by themselves, once a rank has failed
# Without progress; then the run ends with a hang report. Compiling its kernels takes up to 20, and
# several times as long next to other runs.
HANG_SECONDS = 90


class Failure(Exception):
    """An error for a run that has not ended as expected."""


def corpus(setting: Setting) -> Path:
    """Write the corpus unless another part has written it; return its folder."""
    folder = setting.output / ("corpus-small" if setting.small else "corpus")
    if not folder.exists():
        tokens = SMALL_VALIDATION_TOKENS if setting.small else VALIDATION_TOKENS
        new = folder.with_name(f"{folder.name}.new")  # whole or not at all
        shutil.rmtree(new, ignore_errors=True)
        write_corpus(new, vocab_size(setting), validation_tokens=tokens)
        new.rename(folder)
    return folder


def vocab_size(setting: Setting) -> int:
    """Return the vocabulary of the corpus and the model."""
    return SMALL_VOCAB_SIZE if setting.small else VOCAB_SIZE


def overrides(setting: Setting, **changes: Any) -> list[str]:
    """Return the changes of recipes/tiny.toml: one stage, the corpus, and `section__key=value`."""
    data = corpus(setting)
    found = {
        "layout.pipeline": 1,
        "batch.global_sequences": 8,  # few, so that the CPU can keep up
        "training.steps": 20,
        "training.evaluate_every": 0,
        "optimizer.schedule.warmup_steps": 10,
        "checkpoint.every": 1000,
        "supervision.hang_seconds": HANG_SECONDS,
        "data.train": f'[{{path = "{data}/train"}}]',
        "data.validation": f"{data}/validation",
        "data.tokenizer": f"{data}/tokenizer",
        "tracking.mode": "disabled",
    } | {name.replace("__", "."): value for name, value in changes.items()}
    usual = list(SMALL) if setting.small else []
    return usual + [f"{key}={_toml(value)}" for key, value in found.items()]


def _toml(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) else str(value)


@dataclass
class Run:
    """A run that has been started.

    folder: the run folder
    """

    name: str
    folder: Path
    processes: list[subprocess.Popen]
    logs: list[Path]

    def finish(self, seconds: float | None = None) -> list[dict[str, Any]]:
        """Wait for the run; return its metrics, a line per step.

        Args:
            seconds: after which all ranks are killed; None: wait for as long as it takes

        Raises:
            Failure: a rank has failed, with the end of its log, or the time is over.
        """
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        while None in (codes := [process.poll() for process in self.processes]) and not any(codes):
            if time.monotonic() > deadline:
                self.kill()
                raise Failure(f"{self.name}: killed after {seconds:g} seconds:\n{self.log_ends()}")
            time.sleep(POLL_SECONDS)
        if not any(codes):
            return self.metrics()
        rank = next(rank for rank, code in enumerate(codes) if code)  # the others follow
        ended = time.monotonic() + SECONDS_FOR_OTHER_RANKS
        while None in [process.poll() for process in self.processes] and time.monotonic() < ended:
            time.sleep(POLL_SECONDS)
        self.kill()
        raise Failure(
            f"{self.name}: rank {rank} ended with exit code {codes[rank]}:\n{self.log_ends(rank)}"
        )

    def log_ends(self, *ranks: int) -> str:
        """Return the ends of the logs of some ranks, or of all."""
        logs = [self.logs[rank] for rank in ranks] or self.logs
        return "\n".join(log.read_text(errors="replace")[-LAST_CHARACTERS:] for log in logs)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of metrics that have been written so far."""
        file = self.folder / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def kill_after(self, steps: int) -> int:
        """Kill all ranks with SIGKILL after some steps; return the number of steps done.

        Raises:
            Failure: the run has ended before.
        """
        while (done := len(self.metrics())) < steps:
            if self.processes[0].poll() is not None:
                self.finish()
                raise Failure(f"{self.name} ended before it could be killed")
            time.sleep(POLL_SECONDS)
        self.kill()
        return done

    def kill(self) -> None:
        """Kill all ranks with SIGKILL."""
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()


def start(
    setting: Setting,
    name: str,
    settings: Sequence[str],
    *,
    ranks: int = 1,
    device: str = "",
    share_gpu: bool = False,
    recipe: str = "recipes/tiny.toml",
) -> Run:
    """Start a run of a recipe, with ranks started as torchrun starts them.

    Args:
        setting: the machine and the sizes
        name: name of the run folder; a run with the same name is resumed
        settings: changes of the recipe, as `overrides` returns them
        ranks: number of ranks, one per GPU
        device: "cpu" to run on the CPU although there is a GPU
        share_gpu: True to run all ranks on the first GPU
    """
    folder = setting.runs / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "recipes/pretrain.py", recipe, "--run-dir", str(folder)]
    command += [word for each in settings for word in ("--set", each)]
    port = free_port()
    logs = [folder.parent / f"{name}-rank{rank}.log" for rank in range(ranks)]
    here = replace(setting, device=device or setting.device)
    processes = [
        subprocess.Popen(
            killed_with_parent(command),
            cwd=REPOSITORY,
            env=rank_environment(here, rank, ranks, port, share_gpu=share_gpu),
            stdout=log.open("ab"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    return Run(name, folder, processes, logs)


def rank_environment(
    setting: Setting, rank: int, ranks: int, port: int, *, share_gpu: bool = False
) -> dict[str, str]:
    """Return the environment of a rank.

    share_gpu: True to use the first GPU in every rank. NCCL rejects two ranks of one host on the
        same GPU, so each rank reports a host of its own, and NCCL uses sockets.
    """
    environment = device_environment(setting.device, small=setting.small)
    environment |= rank_variables(rank, ranks, port)
    if share_gpu and setting.device == "cuda":
        environment |= {"LOCAL_RANK": "0", "NCCL_HOSTID": f"rank{rank}",
                        "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket",
                        "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    return environment


def device_environment(device: str, *, small: bool = False) -> dict[str, str]:
    """Return this process's environment: a device, fp32 products in full fp32, no network.

    A launcher's variables are left out: inside a job of Slurm or under torchrun a part would wait
    for ranks that do not exist.
    """
    environment = {name: text for name, text in os.environ.items() if not of_launcher(name)}
    environment |= {"NVIDIA_TF32_OVERRIDE": "0", "HF_HUB_OFFLINE": "1"}
    if device == "cpu":
        # Other runs use the machine at the same time.
        threads = "1" if small else str(max(1, min(THREADS, cores() // 2)))
        return environment | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": threads}
    environment.pop("DS_ACCELERATOR", None)
    return environment


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield lists of `size` successive items, as itertools does since Python 3.12."""
    iterator = iter(items)
    while group := list(islice(iterator, size)):
        yield group


def of_launcher(name: str) -> bool:
    """Return True for an environment variable that tells a process of other ranks."""
    return name in LAUNCHER_VARIABLES or name.startswith(("SLURM_", "TORCHELASTIC_"))


def losses(metrics: Sequence[dict[str, Any]]) -> list[float]:
    """Return the losses of a run's metrics."""
    return [line["loss"] for line in metrics]


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest relative difference of two runs' losses; NaN if one of them is NaN.

    Raises:
        Failure: the runs have different numbers of steps.
    """
    if len(one) != len(other):
        raise Failure(f"{len(one)} steps cannot be compared with {len(other)}")
    differences = [abs(a / b - 1) for a, b in zip(one, other, strict=True)]
    return max(differences, key=lambda each: (math.isnan(each), each))
