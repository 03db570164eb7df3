"""Kill prepare_data.py at random times, and check that the corpus equals the undisturbed one.

Two processes prepare a small corpus of many pieces. One of them, the command itself or all are
killed repeatedly, and the same command is started again. Finished pieces must remain, no process
may continue without the command, and in the end every file must equal, byte for byte, that of an
undisturbed preparation. The exit code is 1 if a check fails.

    make soak
    python tests/fault_injection/soak_data.py --kills 50 --seed 7
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # the repository, not tests/, is where imports start
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import json
import random
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil

from threefold.config.loading import REPOSITORY

PIECE_BYTES = 2**16
PREPARATION_SECONDS = 120  # a preparation that takes longer hangs
SECONDS_TO_FOLLOW = 10  # until the processes of a killed command have ended
VICTIMS = ("the command", "a process", "all of them")
COMMAND = (
    "from threefold.commands import prepare_data\nfrom threefold.prepare_data import formats\n"
    f"formats.MIN_PIECE_BYTES = {PIECE_BYTES}\nprepare_data.main()"
)


@dataclass
class Report:
    """The results of a soak.

    kills: number of kills, by victim and by the pieces that were finished
    """

    kills: Counter = field(default_factory=Counter)
    corpora: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.kills.total()} kills:",
                *(f"  {count:4} {kind}" for kind, count in sorted(self.kills.items())),
                f"{self.corpora} corpora compared",
                *(f"wrong: {text}" for text in self.wrong),
                "nothing was lost" if not self.wrong else f"{len(self.wrong)} things are wrong",
            ]
        )


def soak(folder: Path, *, kills: int, seed: int, megabytes: float = 12) -> Report:
    """Prepare corpora until the number of kills is reached."""
    source, expected = folder / "source.jsonl", folder / "undisturbed"
    write_source(source, int(megabytes * 1e6))
    started = time.monotonic()
    undisturbed = start(source, expected)
    words = undisturbed.communicate(timeout=PREPARATION_SECONDS)[0]
    if undisturbed.returncode:
        raise RuntimeError(f"an undisturbed preparation failed: {words}")
    seconds = time.monotonic() - started
    report, chance = Report(), random.Random(seed)
    while report.kills.total() < kills and not report.wrong:
        output = folder / "disturbed"
        shutil.rmtree(output, ignore_errors=True)
        prepare_under_fire(report, chance, kills, source=source, output=output, seconds=seconds)
        if not report.wrong:
            report.wrong += compare(expected, output)
            report.corpora += 1
    return report


def prepare_under_fire(
    report: Report, chance: random.Random, kills: int, *, source: Path, output: Path, seconds: float
) -> None:
    """Prepare one corpus, with kills until the corpus is finished or no kills are left.

    seconds: duration of an undisturbed preparation
    """
    pieces: set[str] = set()
    while True:
        process = start(source, output)
        armed = report.kills.total() < kills
        if chance.random() < 0.7:  # wait until the next piece is finished
            while process.poll() is None and finished(output) <= pieces:
                time.sleep(0.005)
        instant = time.monotonic() + chance.uniform(0, seconds / 3)
        while process.poll() is None and (not armed or time.monotonic() < instant):
            time.sleep(0.005)
            if time.monotonic() > instant + PREPARATION_SECONDS:
                report.wrong.append("the preparation hangs")
                process.kill()
                return
        if process.returncode is not None:
            if process.returncode:
                report.wrong.append(f"the preparation failed: {process.communicate()[0]}")
            return
        victim = kill(process, chance)
        now = finished(output)
        pieces_done = "no piece" if not now else "all" if output.is_dir() else "some pieces"
        report.kills[f"{victim}, {pieces_done} finished"] += 1
        if not pieces <= now and not (output / "manifest.json").is_file():
            report.wrong.append(f"{len(pieces - now)} finished pieces are gone")
        pieces = now


def kill(process: subprocess.Popen, chance: random.Random) -> str:
    """Kill a random victim, wait until all processes have ended, and return the victim.

    Raises:
        TimeoutError: a process is still running.
    """
    command = psutil.Process(process.pid)
    family = command.children(recursive=True)
    workers = [child for child in family if is_worker(child)]
    victim = chance.choice(VICTIMS) if workers else "the command"
    chosen = {
        "the command": [command],
        "a process": [chance.choice(workers)] if workers else [],
        "all of them": [command, *family],
    }[victim]
    for one in chosen:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs([command, *family], timeout=SECONDS_TO_FOLLOW)
    words = process.communicate()[0]
    if alive:
        raise TimeoutError(f"{victim} killed, {len(alive)} processes stay: {words}")
    return victim


def is_worker(process: psutil.Process) -> bool:
    """Return True for a process that tokenizes."""
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def start(source: Path, output: Path) -> subprocess.Popen:
    """Start the command, with its output in a pipe that is read at its end."""
    options = ["--source", source, "--output", output, "--vocab-size", 400, "--processes", 2]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *map(str, options)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(output: Path) -> set[str]:
    """Return the names of the finished pieces."""
    folder = output.with_name(output.name + ".incomplete") / "pieces"
    return {path.name for path in folder.glob("*") if not path.suffix}


def compare(expected: Path, found: Path) -> list[str]:
    """Return the files that differ between two corpora, apart from the corpora's own paths."""
    trees = [
        {str(file.relative_to(root)): file for file in root.rglob("*") if file.is_file()}
        for root in (expected, found)
    ]
    if trees[0].keys() != trees[1].keys():
        return [f"other files: {sorted(trees[0].keys() ^ trees[1].keys())}"]
    contents = [
        {name: file.read_bytes().replace(str(root).encode(), b"") for name, file in tree.items()}
        for root, tree in zip((expected, found), trees, strict=True)
    ]
    return [
        f"{name} is different" for name in contents[0] if contents[0][name] != contents[1][name]
    ]


def write_source(path: Path, size: int) -> None:
    """Write parts of Python's standard library as documents, `size` bytes in all."""
    with path.open("w") as stream:
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text = file.read_text(errors="ignore")
            for first in range(0, len(text), 5000):
                if size > 0:
                    size -= stream.write(json.dumps({"text": text[first : first + 5000]}) + "\n")


def main() -> None:
    """Run the soak, and print its report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = soak(Path(folder), kills=options.kills, seed=options.seed)
    print(report)
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
