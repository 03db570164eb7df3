"""Open the sources that `--source` names, but not files that prepare_data.py has written."""

import argparse
import glob
import os
import re
import shlex
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from datasets import (
    Dataset,
    DatasetDict,
    disable_progress_bars,
    load_dataset,
    load_dataset_builder,
    load_from_disk,
)

from models.errors import UserError, a_few, counted, reason_of, why_no_folder
from threefold.prepare_data.formats import (
    MAX_PIECE_BYTES,
    Format,
    JsonArray,
    JsonLines,
    TextLines,
    Texts,
    is_compressed,
    open_bytes,
)
from threefold.prepare_data.tables import Parquet, Rows, Stream
from threefold.prepare_data.workspace import OwnFiles

STANDARD_LIBRARY = "stdlib"
SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".txt", ".arrow", ".csv")
UNKNOWN_SPLIT = re.compile("Unknown split|Bad split")  # errors of load_dataset
VALIDATION_SPLITS = ("valid", "dev", "val", "test")  # beginnings of names, the best first
HELD_OUT_WORDS = ("validation", "valid", "val", "dev", "test")  # in names of files, the best first
MAX_FILES_IN_COMMAND = 8
PLAIN_TEXT = (".tokens", ".raw")  # as the files of WikiText are named
FORMATS = ", ".join((*SUFFIXES, *PLAIN_TEXT))
DELIMITERS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}  # other than a comma
COMPRESSIBLE = (".jsonl", ".ndjson", ".json", ".txt")


@dataclass(frozen=True)
class SourceOptions:
    """The options that say how the documents of a source are read.

    column: column that holds the text
    config: configuration of a hub dataset
    split: split of a dataset
    streaming: stream hub datasets instead of storing them
    text_is: unit that is a document in a .txt file, "line" or "file"
    option: the option that names the sources, for messages
    only_splits: reject sources that have no splits
    suggests_split: print a split of a dataset that could be the validation part
    """

    column: str = "text"
    config: str | None = None
    split: str = "train"
    streaming: bool = False
    text_is: str = "line"
    option: str = "--source"
    only_splits: bool = False
    suggests_split: bool = False


def open_source(names: Sequence[str], reading: SourceOptions) -> list[Format]:
    """Return the formats that read the sources, in order.

    names: files, patterns of files, folders, "stdlib" or datasets of the hub

    Raises:
        UserError: A source does not exist or cannot be read.
    """
    formats: list[Format] = []
    seen, all_files = set[Path](), list[Path]()
    for name in names:
        files = [] if name == STANDARD_LIBRARY else find_files(name, reading.option)
        content = {file.resolve() for file in files or saved_tables(name)} or {Path(name)}
        if twice := seen & content:
            raise UserError(f"{reading.option} {name}: {min(twice)} is named twice; name it once")
        seen |= content
        if reading.only_splits and (files or name == STANDARD_LIBRARY):
            raise without_splits(name, reading)
        if reading.split != "train" and (files or name == STANDARD_LIBRARY):
            raise UserError(
                f"--split {reading.split}: {name} is not a dataset with splits; omit --split"
            )
        if name == STANDARD_LIBRARY:
            formats.append(Texts(standard_library(), lenient=True))
        elif files:
            check_no_configuration(name, reading)
            all_files += files
            whole = [file for file in files if is_whole(file, reading.text_is)]
            parts = (file for file in files if not is_whole(file, reading.text_is))
            formats += [open_file(file, reading) for file in parts]
            formats += [Texts(whole)] if whole else []
        else:
            formats.append(open_dataset(name, reading))
    warn_of_copies(all_files)
    if reading.suggests_split:
        suggest_files(all_files)
    return formats


def check_unused_options(formats: Sequence[Format], reading: SourceOptions) -> None:
    """Raise a UserError if an option is given that affects none of the sources."""
    for option, is_given, has_effect, reason in (
        (
            f"--text-is {reading.text_is}",
            reading.text_is != "line",
            any(isinstance(reader, Texts) and not reader.lenient for reader in formats),
            "no source is a text file",
        ),
        (
            f"--column {reading.column}",
            reading.column != "text",
            any(reader.column for reader in formats),
            "no source has columns",
        ),
        (
            "--streaming",
            reading.streaming,
            any(isinstance(reader, Stream) for reader in formats),
            "no source is a dataset on the hub",
        ),
    ):
        if is_given and not has_effect:
            raise UserError(f"{option} has no effect, because {reason}; omit it")


def check_no_configuration(name: str, reading: SourceOptions) -> None:
    """Raise a UserError if --config is given for a source on this machine."""
    if reading.config:
        raise UserError(
            f"--config {reading.config}: {reading.option} {name} has no configurations, only "
            f"datasets of the hub have them; omit --config"
        )


def open_validation(
    options: argparse.Namespace, reading: SourceOptions, training: Sequence[Format]
) -> list[Format]:
    """Return the formats that read the validation part; none if it is a share of the documents.

    Args:
        reading: how the training part is read
        training: the formats that read the training part

    Raises:
        UserError: A source does not exist, cannot be read, or is also in the training part.
    """
    sources, split = options.validation_source, options.validation_split
    if not sources and not split:
        return []
    formats = open_source(
        sources or options.source,
        replace(
            reading,
            option="--validation-source" if sources else reading.option,
            split=split or reading.split,
            only_splits=bool(split),
        ),
    )
    both = files_of(formats) & files_of(training)
    if both:
        raise UserError(
            f"--validation-source: {min(both)} is also in --source; name the files of the training "
            f"part alone there"
        )
    in_training = datasets_of(training)
    same = [name for key, name in datasets_of(formats).items() if key in in_training]
    if same:
        option = "--validation-source" if sources else f"--validation-split {split}"
        raise UserError(
            f"{option}: {same[0]} has the same documents as the training part; use another "
            f"dataset, or another split with --validation-split"
        )
    return formats


def files_of(formats: Sequence[Format]) -> set[Path]:
    """Return the files that formats read, with links resolved."""
    pieces = (piece for reader in formats for piece in reader.pieces(MAX_PIECE_BYTES))
    paths = (Path(name) for piece in pieces for name in piece.files)
    return {path.resolve() for path in paths if path.is_file()}


def datasets_of(formats: Sequence[Format]) -> dict[str, str]:
    """Return the names of the datasets that formats read, by the identity of their documents."""
    names = {}
    for reader in formats:
        if isinstance(reader, Rows):
            names[reader.fingerprint] = reader.name
        elif isinstance(reader, Stream):
            names[f"{reader.name} {reader.identity}"] = reader.name
    return names


def without_splits(name: str, reading: SourceOptions) -> UserError:
    """Return the error of --validation-split with a source that has no splits."""
    advice = "name the files of the validation part with --validation-source"
    if reading.option == "--validation-source":
        advice = "omit --validation-split"
    return UserError(
        f"--validation-split {reading.split}: {name} is not a dataset with splits; {advice}"
    )


def find_files(name: str, option: str = "--source") -> list[Path]:
    """Return the files that a name stands for: the file, the folder's files or the matches, sorted.

    Links are followed, and a file found twice counts once. Skipped files are printed with the
    reason.

    option: the option that names the source, for messages

    Returns:
        No files if the name is neither a file nor a folder of files nor a pattern.

    Raises:
        UserError: The file does not exist, or its format is not supported.
    """
    path = Path(name)
    if not name.strip():
        raise UserError(f"{option} is empty; use a file, a folder, a pattern or a dataset")
    if path.is_file():
        if not is_readable(path):
            raise UserError(f"{option} {name}: unsupported format; use one of {FORMATS}")
        return [path]
    if path.is_dir():
        if is_saved_dataset(path):
            return []
        found = list(walk(path))
    elif glob.has_magic(name):
        found = list(match(name))
    elif format_of(path) in SUFFIXES or path.is_absolute() or path.is_symlink():
        problem = why_no_folder(path) if path.is_symlink() else "no such file"
        raise UserError(f"{option} {name}: {problem}")
    else:
        return []
    once = {file.resolve(): file for file in sorted(found, reverse=True)}
    files, left_out = sort_out(sorted(once.values()))
    if others := sorted(set(found) - set(once.values())):
        left_out["another name of a file that is already read"] = others
    for reason, others in left_out.items():
        print(f"skipped {count_of(others)} ({reason}), such as {others[0]}")
    if not found:
        folder = path.parent
        while glob.has_magic(str(folder)):
            folder = folder.parent
        problem = "" if folder.is_dir() else f", because the folder {folder} does not exist"
        empty = "the folder is empty" if path.is_dir() else f"no file matches{problem}"
        raise UserError(f"{option} {name}: {empty}; use a folder or a pattern such as 'text/*.txt'")
    if not files:
        why = "".join(
            f"; skipped {count_of(others)} ({reason})" for reason, others in left_out.items()
        )
        raise UserError(f"{option} {name}: no file is one of {FORMATS}{why}")
    return files


def warn_of_copies(files: Sequence[Path]) -> None:
    """Print a warning about files that are read next to their compressed copies."""
    paths = set(files)
    copies = [file for file in files if is_compressed(file) and file.with_suffix("") in paths]
    if copies:
        first, *others = copies
        more = f" (and {counted(len(others), 'more pair')})" if others else ""
        print(
            f"warning: {first.with_suffix('')} and its compressed copy {first.name} are both "
            f"read{more}; if they have the same documents, delete one of them, or use a pattern "
            f"that only one matches"
        )


def match(pattern: str) -> list[Path]:
    """Return the matches of a pattern, without the folders that contain another match."""
    paths = [Path(path) for path in glob.glob(pattern, recursive=True)]
    entered = {parent for path in paths for parent in path.parents}
    return [path for path in paths if path not in entered]


def sort_out(paths: Sequence[Path]) -> tuple[list[Path], dict[str, list[Path]]]:
    """Divide paths into the files to read, and the skipped paths by reason."""
    own, files, left_out = OwnFiles(), [], defaultdict(list)
    for path in paths:
        if path.is_dir() and not is_saved_dataset(path):
            left_out["folder; pass it to --source by itself"].append(path)
        elif path.is_dir():
            left_out["saved with save_to_disk; pass each one to --source by itself"].append(path)
        elif not path.is_file():
            left_out["broken link or not a regular file"].append(path)
        elif path in own:
            left_out["written by prepare_data.py"].append(path)
        elif not is_readable(path):
            left_out["unsupported format"].append(path)
        else:
            files.append(path)
    return files, left_out


def count_of(paths: Sequence[Path]) -> str:
    """Return the number of paths with their noun, for example "3 files"."""
    return counted(len(paths), "folder" if paths[0].is_dir() else "file")


def walk(folder: Path) -> Iterator[Path]:
    """Yield all files below a folder, following links and visiting each folder once.

    For a dataset written by save_to_disk, only its folder is yielded.

    Raises:
        OSError: A folder cannot be read.
    """

    def reject(error: OSError) -> None:
        raise error

    seen = set()
    for path, folders, files in os.walk(folder, followlinks=True, onerror=reject):
        real = os.path.realpath(path)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        if is_saved_dataset(Path(path)):
            folders.clear()
            yield Path(path)
            continue
        yield from (Path(path, file) for file in files)


def is_saved_dataset(folder: Path) -> bool:
    """Return whether a folder was written by save_to_disk of `datasets`."""
    if (folder / "dataset_dict.json").is_file():
        return True
    return all((folder / name).is_file() for name in ("dataset_info.json", "state.json"))


def saved_tables(name: str) -> list[Path]:
    """Return the files of a dataset that save_to_disk has written; none of any other source."""
    return list(Path(name).glob("**/*.arrow")) if is_saved_dataset(Path(name)) else []


def is_readable(file: Path) -> bool:
    """Return whether the suffix of a file is that of a supported format."""
    suffix = format_of(file)
    return suffix in SUFFIXES and (suffix == file.suffix.lower() or suffix in COMPRESSIBLE)


def is_whole(file: Path, text_is: str) -> bool:
    """Return whether a file is one document."""
    return text_is == "file" and format_of(file) == ".txt"


def format_of(file: Path) -> str:
    """Return the suffix of a file without that of its compression; ".txt" for any plain text."""
    suffix = Path(file.stem).suffix if is_compressed(file) else file.suffix
    suffix = suffix.lower()
    return ".txt" if suffix in PLAIN_TEXT else suffix


def open_file(file: Path, reading: SourceOptions) -> Format:
    """Open a file with the format that its suffix names."""
    suffix, column = format_of(file), reading.column
    if suffix == ".txt":
        return TextLines(file)
    if suffix == ".json" and is_array(file):
        return JsonArray(file, column)
    if suffix in (".jsonl", ".ndjson", ".json"):
        return JsonLines(file, column)
    if suffix == ".parquet":
        return Parquet(file, column)
    if suffix == ".csv":
        check_delimiter(file, column)
    disable_progress_bars()
    try:
        if suffix == ".arrow":
            dataset = Dataset.from_file(str(file))
        else:  # keep all texts: 001 is not a number, and NA is not a missing value
            texts = {"keep_default_na": False, "converters": {column: str}}
            dataset = load_dataset("csv", data_files=str(file), split="train", **texts)
    except Exception as error:  # pyarrow and datasets raise many classes
        reason = reason_of(error.__cause__ if isinstance(error.__cause__, Exception) else error)
        raise UserError(f"{reading.option} {file} cannot be read: {reason}") from None
    return Rows(str(file), dataset, column)


def check_delimiter(file: Path, column: str) -> None:
    """Raise a UserError if the header of a .csv has a delimiter other than a comma."""
    with open_bytes(file) as stream:
        header = stream.readline(4096).decode("utf-8-sig", errors="replace").rstrip("\r\n")
    if "," in header or header.strip('"') == column:
        return
    for mark, name in DELIMITERS.items():
        if mark in header:
            raise UserError(
                f"{file}: the columns are separated by {name}; separate them with commas, or write "
                f"the table as .jsonl or .parquet"
            )


def is_array(file: Path) -> bool:
    """Return whether a JSON file is one array instead of an object per line."""
    with open_bytes(file) as stream:
        return stream.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def open_dataset(name: str, reading: SourceOptions) -> Format:
    """Open a dataset of the hub, or a folder written by `save_to_disk`."""
    column, split, revision = reading.column, reading.split, ""
    split_option = "--validation-split" if reading.only_splits else "--split"
    disable_progress_bars()
    if Path(name).is_dir():
        check_no_configuration(name, reading)
    try:
        if Path(name).is_dir():
            dataset = load_from_disk(name)
        elif reading.streaming:
            builder = load_dataset_builder(name, reading.config)
            dataset, revision = builder.as_streaming_dataset(split=split), builder.hash
        else:
            dataset = load_dataset(name, reading.config, split=split)
    except Exception as error:  # the hub's client raises many classes
        if UNKNOWN_SPLIT.match(str(error)):
            raise UserError(f"{split_option} {split}: {name}: {reason_of(error)}") from None
        raise UserError(
            f"{reading.option} {name} is not a file, and cannot be loaded as a dataset: "
            f"{reason_of(error)}"
        ) from None
    splits: list[str] = []
    if isinstance(dataset, DatasetDict):
        if split not in dataset:
            raise UserError(f"{split_option} {split}: {name} has the splits {', '.join(dataset)}")
        splits, dataset = list(dataset), dataset[split]
    elif not Path(name).is_dir():
        splits = list(dataset.info.splits or ()) if dataset.info else []
    elif reading.only_splits:
        raise without_splits(name, reading)
    if reading.suggests_split and split == "train":
        suggest_split(name, splits)
    if isinstance(dataset, Dataset):
        return Rows(name, dataset, column, split=split if splits else "")
    identity = f"{reading.config}/{split}/{revision}"
    return Stream(name, dataset, column, split=split, identity=identity)


def suggest_split(name: str, splits: Sequence[str]) -> None:
    """Print which split of a dataset could be the validation part, if its name says so."""
    for start in VALIDATION_SPLITS:
        if official := [split for split in splits if split.startswith(start)]:
            print(
                f"{name} has the splits {', '.join(splits)}, of which only train is read; with "
                f"--validation-split {official[0]}, that split becomes the validation part"
            )
            return


def suggest_files(files: Sequence[Path]) -> None:
    """Print which files could be the validation part, if their names and those of others say so."""
    words = {file: set(re.split("[._-]", file.name.lower())) for file in files}
    held_out = list(dict.fromkeys(f for word in HELD_OUT_WORDS for f in files if word in words[f]))
    others = sorted(set(files) - set(held_out), key=lambda file: "train" not in words[file])
    if held_out and others:
        kind = "another split" if len(held_out) == 1 else "other splits"
        validation = shlex.quote(str(held_out[0]))
        if len(others) <= MAX_FILES_IN_COMMAND:
            source = shlex.join(map(str, others))
            how = f"name the files: --source {source} --validation-source {validation}"
        else:
            how = (
                f"pass only the other {len(others)} files to --source, and {validation} to "
                f"--validation-source"
            )
        if len(held_out) > 1:
            how += f" ({a_few([file.name for file in held_out[1:]])} would then not be read)"
        print(
            f"all files are read as one corpus, although {a_few([f.name for f in held_out])} "
            f"may be {kind}; to keep them apart, {how}"
        )


def standard_library() -> list[Path]:
    """Return the interpreter's own Python sources, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = sorted(root.rglob("*.py"))
    return [file for file in files if not left_out & set(file.relative_to(root).parts)]
