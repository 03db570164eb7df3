"""What `--source` names: files, the standard library, or a dataset, as formats that read them."""

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from datasets import Dataset, DatasetDict, disable_progress_bars, load_dataset, load_from_disk

from models.errors import UserError
from recipes.preparing.formats import (
    COMPRESSED,
    Format,
    JsonArray,
    JsonLines,
    Parquet,
    Rows,
    Stream,
    TextLines,
    Texts,
    first_line,
    open_bytes,
)

STANDARD_LIBRARY = "stdlib"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".txt", ".arrow", ".csv")
COMPRESSIBLE = (".jsonl", ".ndjson", ".json", ".txt")


def open_source(
    names: Sequence[str],
    *,
    column: str,
    config: str | None,
    split: str,
    streaming: bool,
    text_is: str,
) -> list[Format]:
    """What to read, in order.

    names: files, patterns of files, folders, "stdlib" or datasets of the hub
    config, split, streaming: of a dataset
    text_is: "line" or "file", the document in a .txt file

    Raises:
        UserError: there is no such thing, or no way to read it.
    """
    formats: list[Format] = []
    seen: set[Path] = set()
    for name in names:
        if name == STANDARD_LIBRARY:
            formats.append(Texts(standard_library(), lenient=True))
        elif files := find_files(name):
            twice = seen.intersection(file.resolve() for file in files)
            if twice:
                raise UserError(f"--source {name}: {min(twice)} is named twice; name it once")
            seen |= {file.resolve() for file in files}
            formats += [open_file(file, column) for file in files if not is_whole(file, text_is)]
            whole = [file for file in files if is_whole(file, text_is)]
            formats += [Texts(whole)] if whole else []
        else:
            formats.append(open_dataset(name, column, config, split, streaming))
    return formats


def find_files(name: str) -> list[Path]:
    """The files that a name means: itself, those of a folder or of a pattern, sorted; or none.

    Links are followed, and a file that is found twice counts once.

    Raises:
        UserError: there is no such file, or its format is unknown.
    """
    path = Path(name)
    if not name.strip():
        raise UserError("--source is empty; use a file, a folder, a pattern or a dataset")
    if path.is_file():
        if not is_readable(path):
            raise UserError(f"--source {name}: no reader for it; use one of {', '.join(SUFFIXES)}")
        return [path]
    if path.is_dir():
        if is_saved_dataset(path):
            return []
        found = walk(path)
    elif glob.has_magic(name):
        found = [Path(each) for each in glob.glob(name, recursive=True)]
    elif format_of(path) in SUFFIXES or path.is_absolute():
        raise UserError(f"--source {name}: no such file")
    else:
        return []
    once = {file.resolve(): file for file in sorted(found, reverse=True) if file.is_file()}
    files = sorted(file for file in once.values() if not is_ours(file))
    readable = [file for file in files if is_readable(file)]
    if not readable:
        raise UserError(f"--source {name}: no file there is one of {', '.join(SUFFIXES)}")
    if len(readable) < len(files):
        others = [file for file in files if not is_readable(file)]
        print(f"left out, no reader for them: {len(others)} files, such as {others[0]}")
    return readable


def walk(folder: Path) -> Iterator[Path]:
    """All files below a folder, links followed, each folder once."""
    seen = set()
    for path, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(path)
        if real in seen or is_saved_dataset(Path(path)):
            folders.clear()
            continue
        seen.add(real)
        yield from (Path(path, file) for file in files)


def is_saved_dataset(folder: Path) -> bool:
    """Whether datasets' save_to_disk has written a folder."""
    return any((folder / name).is_file() for name in ("dataset_info.json", "dataset_dict.json"))


def is_readable(file: Path) -> bool:
    """Whether a file's name says a format that is known here."""
    suffix = format_of(file)
    return suffix in SUFFIXES and (suffix == file.suffix.lower() or suffix in COMPRESSIBLE)


def is_ours(file: Path) -> bool:
    """Whether a file is part of a corpus, finished or not, that this command has made."""
    return any(
        folder.suffix == ".incomplete" or (folder / "pieces.jsonl").is_file()
        for folder in file.parents
    )


def is_whole(file: Path, text_is: str) -> bool:
    """Whether a file is one document."""
    return text_is == "file" and format_of(file) == ".txt"


def format_of(file: Path) -> str:
    """A file's suffix, before that of its compression."""
    suffix = file.suffix.lower()
    return Path(file.stem).suffix.lower() if suffix in COMPRESSED else suffix


def open_file(file: Path, column: str) -> Format:
    """A file, read by the format that its name says."""
    suffix = format_of(file)
    if suffix == ".txt":
        return TextLines(file)
    if suffix == ".json" and is_array(file):
        return JsonArray(file, column)
    if suffix in (".jsonl", ".ndjson", ".json"):
        return JsonLines(file, column)
    if suffix == ".parquet":
        return Parquet(file, column)
    disable_progress_bars()
    try:
        if suffix == ".arrow":
            dataset = Dataset.from_file(str(file))
        else:  # texts as they are: 001 is no number, NA not missing
            texts = {"keep_default_na": False, "converters": {column: str}}
            dataset = load_dataset("csv", data_files=str(file), split="train", **texts)
    except Exception as error:  # whatever pyarrow and datasets raise
        reason = first_line(error.__cause__ or error)
        raise UserError(f"--source {file} cannot be read: {reason}") from None
    return Rows(str(file), dataset, column)


def is_array(file: Path) -> bool:
    """Whether a JSON file is one array, and not an object per line."""
    with open_bytes(file) as stream:
        return stream.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def open_dataset(name: str, column: str, config: str | None, split: str, streaming: bool) -> Format:
    """A dataset of the hub, or one that `save_to_disk` has written."""
    disable_progress_bars()
    try:
        if Path(name).is_dir():
            dataset = load_from_disk(name)
        else:
            dataset = load_dataset(name, config, split=split, streaming=streaming)
    except Exception as error:  # whatever the hub's client raises
        raise UserError(
            f"--source {name} is no file here, and as a dataset it cannot be loaded: "
            f"{first_line(error)}"
        ) from None
    if isinstance(dataset, DatasetDict):
        if split not in dataset:
            raise UserError(f"--split {split}: {name} has the splits {', '.join(dataset)}")
        dataset = dataset[split]
    if isinstance(dataset, Dataset):
        return Rows(name, dataset, column)
    version = dataset.info.version if dataset.info else None
    return Stream(name, dataset, column, f"{config}/{split}/{version}")


def standard_library() -> list[Path]:
    """The interpreter's own Python sources, tests and installed packages left out."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(root.rglob("*.py"))
    return [file for file in files if not left_out & set(file.relative_to(root).parts)]
