"""The datasheet that `sweep.py --links NAME` writes: check of the name, content, writing."""

import itertools
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from models.errors import UserError
from threefold.gpus.datasheet import MEASURED_MARK, Gpu, datasheet_text, file_of, read_gpu, rounded
from threefold.run_folder.json_lines import write_whole
from threefold.sweep.links.measurements import Measurements

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,59}")
NODE_LINK_KEYS = ("node_link_efficiency", "node_link_latency_seconds")
NETWORK_KEYS = ("network_efficiency", "network_latency_seconds")


def own_file(folder: Path, name: str) -> Path:
    """Return the path of a datasheet that --links may write.

    Args:
        folder: folder of the datasheets
        name: name of the datasheet

    Raises:
        UserError: the name is not valid, the file belongs to another datasheet, or the folder
            cannot be written.
    """
    if not NAME.fullmatch(name):
        raise UserError(
            f"invalid --links {name}: expected a letter and then at most 59 letters, digits, - or "
            f"_, for example my-cluster"
        )
    file = file_of(folder, name)
    if not is_own(file, name) or name.lower() in names_of_others(folder, file):
        raise UserError(
            f"--links {name}: {file.name} is a datasheet that --links {name} did not write; use "
            f"another name, for example --links {free_name(folder, name)}"
        )
    if not os.access(folder, os.W_OK):
        raise UserError(
            f"{folder} cannot be written, and --links writes {file.name} there; make it writable, "
            f"for example with chmod u+w"
        )
    return file


def is_own(file: Path, name: str) -> bool:
    """Return True if a file does not exist, or if --links has written it and git ignores it."""
    if not os.path.lexists(file):
        return True
    first_line = (
        file.read_text(encoding="utf-8", errors="replace").partition("\n")[0]
        if file.is_file()
        else ""
    )
    return first_line == f"# {mark(name)}" and not is_tracked(file)


def mark(name: str) -> str:
    """Return the first line of a datasheet that --links has written."""
    return f"{MEASURED_MARK} {name}`"


def is_tracked(file: Path) -> bool:
    """Return True if git tracks a file; False outside a git repository."""
    command = ["git", "-C", str(file.parent), "ls-files", "--error-unmatch", file.name]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:  # git is not installed
        return False


def names_of_others(folder: Path, file: Path) -> set[str]:
    """Return the names that --links must not use, in lower case.

    They are the names of the datasheets in all files but one, and the beginnings of these names,
    such as "a100", by which published tables name a GPU.
    """
    names = {read_gpu(path).name.lower() for path in folder.glob("*.toml") if path != file}
    return names | {name.split("-")[0] for name in names}


def free_name(folder: Path, name: str) -> str:
    """Return a name like the given one that no datasheet has."""
    names = itertools.chain([f"{name}-links"], (f"{name}-links-{n}" for n in itertools.count(2)))
    files = ((each, file_of(folder, each)) for each in names)
    return next(
        each
        for each, file in files
        if not os.path.lexists(file) and each.lower() not in names_of_others(folder, file)
    )


def content(
    fitted: Gpu, measured: Measurements, *, name: str, source: Gpu, nodes: int, today: date
) -> str:
    """Return the text of the datasheet.

    Args:
        fitted: the values
        measured: the measurements that the values were fitted to
        name: name of the datasheet
        source: the GPU whose other values were kept
        nodes: number of measured nodes
        today: date of the measurement
    """
    gpu = replace(
        fitted,
        name=name,
        device_names=device_names(source, measured.device),
        node_link_gigabytes_per_second=rounded(fitted.node_link_gigabytes_per_second),
        network_gigabytes_per_second=rounded(fitted.network_gigabytes_per_second),
    )
    ranks = len(measured.rates)
    comment = [
        mark(name),
        f"on {today}, by {ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}: "
        f"{measured.device}, torch {measured.torch}.",
        f"Rates and latencies were fitted to {measured_text(measured)}.",
        *(() if measured.inside_nodes else ("Links within a node were not measured.",)),
        *(() if measured.across_nodes else ("The network between nodes was not measured.",)),
        f"Values that were not measured are those of {source.name}.",
    ]
    return datasheet_text(gpu, comment=comment, measured=measured_keys(measured))


def measured_keys(measured: Measurements) -> Sequence[str]:
    """Return the keys of [efficiency] that the measurements decide."""
    return (
        "matmul_efficiency",
        *(NODE_LINK_KEYS if measured.inside_nodes else ()),
        *(NETWORK_KEYS if measured.across_nodes else ()),
    )


def measured_text(measured: Measurements) -> str:
    """Describe the measurements that a datasheet was fitted to."""
    size = measured.matmul_size
    text = f"matmuls of {size} x {size} x {size} in {measured.precision}"
    if not measured.links:
        return text
    return f"{text}, transfers and all-reduces"


def device_names(source: Gpu, device: str) -> list[str]:
    """Return the driver's names of the measured device; empty for a CPU."""
    if not source.device_names or any(name in device for name in source.device_names):
        return source.device_names
    return [device]


def write(file: Path, text: str) -> None:
    """Write a datasheet completely or not at all.

    Raises:
        OSError: the file cannot be written; an earlier file is unchanged.
    """
    fresh = file.with_name(f"{file.name}.{os.getpid()}.incomplete")
    try:
        write_whole(file, text, fresh=fresh)
    finally:  # also if a signal has ended the command
        fresh.unlink(missing_ok=True)
