"""Kill prepare_data.py at random instants, and see that the corpus is the undisturbed one.

A small corpus of many pieces is prepared by two processes. Again and again one of them, the command
itself or all get SIGKILL; then the same command is started again. Finished pieces must stay, nobody
may go on without the command, and in the end every file must be, byte for byte, what an undisturbed
preparation writes. Exit code 1 if anything is not so.

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

from recipes.training.recipe.loading import REPOSITORY

PIECE_BYTES = 2**16
PREPARATION_SECONDS = 120  # one that takes longer hangs
SECONDS_TO_FOLLOW = 10  # for processes whose command is gone
VICTIMS = ("the command", "a process", "all of them")
COMMAND = f"import recipes.prepare_data as p; p.SMALLEST_PIECE = {PIECE_BYTES}; p.main()"


@dataclass
class Report:
    """What has been seen.

    kills: by victim and by what there was: no piece yet, pieces, all of them
    """

    kills: Counter = field(default_factory=Counter)
    corpora: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.kills.total()} kills:",
                *(f"  {count:4} {what}" for what, count in sorted(self.kills.items())),
                f"{self.corpora} corpora compared",
                *(f"wrong: {text}" for text in self.wrong),
                "nothing was lost" if not self.wrong else f"{len(self.wrong)} things are wrong",
            ]
        )


def soak(folder: Path, *, kills: int, seed: int, megabytes: float = 12) -> Report:
    """Kill so many times; corpus after corpus until that is done."""
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
    """Prepare one corpus, killing as long as kills are left and it is not there.

    seconds: that it takes undisturbed
    """
    pieces: set[str] = set()
    while True:
        process = start(source, output)
        armed = report.kills.total() < kills
        if chance.random() < 0.7:  # when it has come to the pieces that are left
            while process.poll() is None and finished(output) <= pieces:
                time.sleep(0.005)
        instant = time.monotonic() + chance.uniform(0, seconds / 3)
        while process.poll() is None and (not armed or time.monotonic() < instant):
            time.sleep(0.005)
            if time.monotonic() > instant + PREPARATION_SECONDS:
                report.wrong.append("it hangs")
                process.kill()
                return
        if process.returncode is not None:
            if process.returncode:
                report.wrong.append(f"it failed: {process.communicate()[0]}")
            return
        victim = kill(process, chance)
        now = finished(output)
        what = "no piece" if not now else "some pieces" if not output.is_dir() else "all there"
        report.kills[f"{victim}, {what} finished"] += 1
        if not pieces <= now and not (output / "manifest.json").is_file():
            report.wrong.append(f"{len(pieces - now)} finished pieces are gone")
        pieces = now


def kill(process: subprocess.Popen, chance: random.Random) -> str:
    """SIGKILL to a victim, which is returned, and wait until all are gone.

    Raises:
        TimeoutError: somebody stays.
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
    """Whether it is one of those that tokenize."""
    try:
        return "spawn_main" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def start(source: Path, output: Path) -> subprocess.Popen:
    """The command, into a pipe that is read at its end."""
    options = ["--source", source, "--output", output, "--vocab-size", 400, "--processes", 2]
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, *map(str, options)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(output: Path) -> set[str]:
    """The pieces that have their names."""
    folder = output.with_name(output.name + ".incomplete") / "pieces"
    return {path.name for path in folder.glob("*") if not path.suffix}


def compare(expected: Path, found: Path) -> list[str]:
    """What is different between two corpora, but for their own names in the manifest."""
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
    """Parts of Python's standard library as documents, so many bytes."""
    with path.open("w") as stream:
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text = file.read_text(errors="ignore")
            for first in range(0, len(text), 5000):
                if size > 0:
                    size -= stream.write(json.dumps({"text": text[first : first + 5000]}) + "\n")


def main() -> None:
    """Soak, report."""
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
