"""Give mutated files and options to everything that reads them, and report failures.

    python -m tests.fuzzing
    python -m tests.fuzzing --seconds 60 --only recipe
    python -m tests.fuzzing --seed 7 --only events --number 1234

An input is a file, or the options of a command, as bytes. It is derived from a valid one by random
changes of bytes and of values. Any exception other than UserError is a failure, and so are a hang
and memory that grows beyond a limit. Each failure is shown once, with the shortest input that was
found to cause it.
Input n of a kind depends only on the seed and on n. Exit code 0: no failure; 1: failures.
"""

import argparse
import contextlib
import datetime
import json
import math
import random
import resource
import signal
import sys
import tempfile
import time
import tomllib
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import tomli_w

from models.errors import UserError
from tests.conftest import VOCAB_SIZE, shipped_configs, shipped_recipes, small_recipe
from tests.report.synthetic import event, write_run
from threefold.checkpoint import format as format_module
from threefold.checkpoint.compatibility import check_initial_weights, check_same_run
from threefold.checkpoint.format import Manifest
from threefold.config.deepspeed_json import build_deepspeed_config
from threefold.config.loading import DEFAULT_RECIPE, REPOSITORY, load_recipe, parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.data.corpus import check_document_starts, document_starts, fingerprint, open_corpus
from threefold.data.manifest import folder_hash, tokenizer_hash
from threefold.data.token_file import TokenFile
from threefold.launch.connection import over_ssh
from threefold.launch.hosts import read_hostfile
from threefold.prepare_data.corpus import Origins, find_damages, sha256
from threefold.prepare_data.sample_lookup import samples_of
from threefold.prove.shrink import write_corpus
from threefold.report import page
from threefold.report.charts import axes_of, panels_of, step_positions
from threefold.report.page import _run_facts, render
from threefold.report.run_record import marks_of, read_run
from threefold.report.summaries import predict
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import Progress

SECONDS = 300.0  # of a whole run
CPU_SECONDS_PER_INPUT = 10.0  # after which an input counts as a hang
SECONDS_PER_INPUT = 120.0  # the same, on a busy machine or for a wait
BYTES_PER_INPUT = 2 * 2**30  # of address space, beyond what the process has at the start
SECONDS_TO_SHORTEN = 20.0  # for the input of a failure
INPUTS_PER_PAGE = 40  # one run folder in 40 is drawn as a page, which takes long
MAX_SHOWN = 2000  # characters of an input

DEEP = 100_000  # nested brackets
DIGITS = "1" * 5000  # more than Python converts
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, 2**64, 10**30, -(10**30)),
    *(0.0, -0.5, 0.5, 1e-300, 1e308, float("inf"), float("-inf"), float("nan")),
    *("", " ", "a", "auto", "../../x", "/", "\0", "é", "\n", "x" * 10_000, "1", "-1"),
    *("-oX", "\ud800"),
    *([], [[]], [None], [1], ["a", 1], [{}], {}, {"a": 1}, {"": {}}, datetime.date(2026, 1, 1)),
)  # fmt: skip
SNIPPETS = (
    *(b"\0", b"\xff", b"\xef\xbb\xbf", b"\r", b"\n", b"\t", b"#", b'"', b"'", b"\\", b"=", b"."),
    *(b"[", b"]", b"{", b"}", b",", b":", b"null", b"true", b"NaN", b"Infinity", b"-", b"1e999"),
    *(b"\\ud800", b"\\u0000", b"inf", b"1979-05-27", b"../", b"auto", b"[phase]", b" slots=8 "),
    *(b"[" * 200 + b"]" * 200, b"[" * 900 + b"]" * 900, b"1" + b"0" * 400, b"1e308"),
    *(b"[" * DEEP, b'{"a":' * DEEP, DIGITS.encode(), b"\xe2\x80\xa8", b"\x1b[31m"),
)


class Hang(BaseException):
    """An input takes too long; not an Exception, so that no handler swallows it."""


@dataclass(frozen=True)
class Kind:
    """A kind of input.

    Attributes:
        name: for `--only`
        seeds: valid inputs
        use: reads an input with the code of the repository; raises UserError to reject it
        decode: returns the value of an input whose values can be changed; None if it has none
        encode: the reverse
    """

    name: str
    seeds: Sequence[bytes]
    use: Callable[[bytes], object]
    decode: Callable[[bytes], Any] | None = None
    encode: Callable[[Any], bytes] | None = None

    def input(self, seed: int, number: int) -> bytes:
        """Return input `number` of a seed."""
        chance = random.Random(f"{seed} {self.name} {number}")
        content = chance.choice(self.seeds)
        if self.decode and self.encode and chance.random() < 0.6:
            value = self.decode(content)
            for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
                value = with_another_value(value, chance)
            with contextlib.suppress(TypeError, AttributeError, ValueError):  # not in this format
                content = self.encode(value)
            if chance.random() < 0.8:
                return content
        for _ in range(chance.choice((1, 1, 2, 4, 16))):
            content = with_other_bytes(content, chance, self.seeds)
        return content


@dataclass
class Failure:
    """A failure, by the line at which it was raised.

    Attributes:
        number: of the first input that caused it
        content: the shortest input known to cause it
        error: what was raised
        count: inputs that caused it
    """

    number: int
    content: bytes
    error: BaseException
    count: int = 1


@dataclass
class Result:
    """The outcome of the inputs of a kind."""

    accepted: int = 0
    rejected: int = 0
    failures: dict[str, Failure] = field(default_factory=dict)


def with_another_value(value: Any, chance: random.Random) -> Any:
    """Return a nested value in which a random entry was replaced, removed, renamed or doubled."""
    if isinstance(value, dict) and value:
        key = chance.choice(list(value))
        if isinstance(value[key], dict | list) and value[key] and chance.random() < 0.75:
            return value | {key: with_another_value(value[key], chance)}
        rest = {name: content for name, content in value.items() if name != key}
        action = chance.randrange(8)
        if action == 0:
            return rest
        if action == 1:
            return rest | {chance.choice(("", "x", key + "s", "a.b", "é", "\0")): value[key]}
        if action == 2:
            return value | {key: value[chance.choice(list(value))]}
        return value | {key: another(value[key], chance)}
    if isinstance(value, list) and value:
        index = chance.randrange(len(value))
        action = chance.randrange(6)
        if action == 0:
            return value[:index] + value[index + 1 :]
        if action == 1:
            return value + [value[index]] * chance.choice((1, 30))
        return [*value[:index], with_another_value(value[index], chance), *value[index + 1 :]]
    return another(value, chance)


def another(value: Any, chance: random.Random) -> Any:
    """Return a value in place of another one, often a similar one."""
    if isinstance(value, bool) or value is None or chance.random() < 0.5:
        return chance.choice(VALUES)
    if isinstance(value, int):
        return chance.choice((value + 1, value - 1, -value, 2 * value, 10 * value))
    if isinstance(value, float) and math.isfinite(value):
        return chance.choice((-value, value * 1e6, value / 1e6, int(value), value + 1))
    if isinstance(value, str):
        return chance.choice((value + "x", value[:-1], value.upper(), "../" + value, [value]))
    return chance.choice(VALUES)


def with_other_bytes(content: bytes, chance: random.Random, seeds: Sequence[bytes]) -> bytes:
    """Return bytes with one random change."""
    start = chance.randrange(len(content) + 1)
    stop = min(len(content), start + chance.choice((1, 1, 2, 4, 8, 30, 300)))
    action = chance.randrange(9)
    if action <= 2 and content:
        index = min(start, len(content) - 1)
        flipped = content[index] ^ 1 << chance.randrange(8)
        return content[:index] + bytes([flipped]) + content[index + 1 :]
    if action == 3:
        return content[:start] + content[stop:]
    if action == 4:
        return content[:stop] + content[start:stop] * chance.choice((1, 1, 50)) + content[stop:]
    if action == 5:
        return content[:start]
    if action == 6:
        other = chance.choice(seeds)
        return content[:start] + other[chance.randrange(len(other) + 1) :]
    if action == 7:
        return content[:start] + bytes(chance.randrange(256) for _ in range(4)) + content[stop:]
    return content[:start] + chance.choice(SNIPPETS) + content[chance.choice((start, stop)) :]


def kinds(folder: Path) -> list[Kind]:
    """Return all kinds of inputs.

    Args:
        folder: an empty folder, for the files that the code reads
    """
    corpus = folder / "corpus"
    small = small_corpus(corpus)
    recipes = [path for path in shipped_recipes() if path.parent == DEFAULT_RECIPE.parent]
    recipes += [REPOSITORY / "recipes/llama/8b-128k.toml", REPOSITORY / "recipes/mixtral/8x7b.toml"]
    toml = [path.read_bytes() for path in recipes]
    return [
        Kind("recipe", toml, _Recipes(folder), lambda text: tomllib.loads(text.decode()),
             lambda value: tomli_w.dumps(value).encode()),
        Kind("set", OVERRIDES, use_overrides),
        Kind("deepspeed", [path.read_bytes() for path in shipped_configs()],
             _DeepSpeed(folder), json.loads, to_json),
        Kind("manifest", [manifest_of(small).text().encode()], _Manifests(folder, small),
             json.loads, to_json),
        Kind("corpus", [(corpus / "manifest.json").read_bytes()], _Corpora(corpus, small),
             json.loads, to_json),
        Kind("pieces", [(corpus / "pieces.jsonl").read_bytes()], _Pieces(corpus),
             from_lines, to_lines),
        Kind("index", [(corpus / "train.idx").read_bytes(), b"MMIDIDX\0\0"], _Indices(corpus)),
        Kind("events", [EVENTS], _Lines(folder / "events", "events.jsonl"), from_lines, to_lines),
        Kind("metrics", [METRICS, DAMAGED_METRICS], _Lines(folder / "metrics", "metrics.jsonl"),
             from_lines, to_lines),
        Kind("lock", [LOCK], _Lines(folder / "lock", "lock"), json.loads, to_json),
        Kind("hosts", HOSTS, _Hosts(folder)),
    ]  # fmt: skip


def to_json(value: Any) -> bytes:
    """Return a value as JSON; half of a surrogate pair stays an escape."""
    return json.dumps(value).encode()


def from_lines(content: bytes) -> Any:
    """Return the values of lines of JSON."""
    return [json.loads(line) for line in content.splitlines()]


def to_lines(value: Any) -> bytes:
    """Return lines of JSON."""
    return b"".join(to_json(line) + b"\n" for line in value)


class _Recipes:
    """Recipes in TOML, and what `pretrain.py` derives from them before it starts anything."""

    def __init__(self, folder: Path):
        self.file = folder / "recipe.toml"

    def __call__(self, content: bytes) -> None:
        self.file.write_bytes(content)
        use_recipe(load_recipe(self.file))


def use_recipe(recipe: Recipe) -> None:
    """Derive from a recipe what a run needs."""
    tomllib.loads(recipe.toml())
    plan = PhasePlan(recipe)
    for segment in plan.segments[:3]:
        segment.learning_rate(segment.first)
        layout = segment.recipe.layout
        size = layout.tensor * layout.pipeline * layout.context * layout.expert
        if segment.recipe.cluster:
            size = segment.recipe.cluster.nodes * segment.recipe.cluster.gpus_per_node
        if size <= 2**20:
            local = segment.recipe.cluster.gpus_per_node if segment.recipe.cluster else size
            dims = segment.recipe.parallel_dims(LaunchEnvironment(size=size, local_size=local))
            build_deepspeed_config(segment.recipe, dims)
    Progress().after(min(plan.recipe.training.steps, 10**6), plan).tokens(plan)


OVERRIDES = [
    b"layout.tensor=2\nlayout.schedule=1f1b",
    b'data.train=[{path="data/stdlib/train",weight=0.75}]\ntracking.tags=["a","b"]',
    b"phase.long.batch.micro_sequences=1\nphase.long.start_step=99\nphase.decay.start_step=120",
    b"optimizer.schedule.warmup_steps=5\nname=x\nseed=7\noptimizer.learning_rate=1e-3",
    b'phase=[{name="a",start_step=3,batch={micro_sequences=1}}]\nphase.a.start_step=9',
    b"model.rope_scaling={type='linear',factor=8.0}\ncheckpoint.snapshot_folder=/dev/shm",
]


def use_overrides(content: bytes) -> None:
    """Load two recipes with options of --set, one a line."""
    overrides = content.decode(errors="surrogateescape").split("\n")
    problem: UserError | None = None
    for recipe in (DEFAULT_RECIPE, DEFAULT_RECIPE.with_name("tiny-phases.toml")):
        try:
            use_recipe(load_recipe(recipe, overrides))
            return
        except UserError as error:
            problem = error
    assert problem is not None
    raise problem


class _DeepSpeed:
    """DeepSpeed's JSON of a recipe."""

    def __init__(self, folder: Path):
        self.file = folder / "deepspeed.json"
        self.recipes = [
            load_recipe(DEFAULT_RECIPE, [f'deepspeed="{self.file}"', f"layout.pipeline={stages}"])
            for stages in (1, 2)
        ]

    def __call__(self, content: bytes) -> None:
        self.file.write_bytes(content)
        for recipe in self.recipes:
            stages = recipe.layout.pipeline
            build_deepspeed_config(
                recipe, recipe.parallel_dims(LaunchEnvironment(size=stages, local_size=stages))
            )


def small_corpus(folder: Path) -> Recipe:
    """Write a corpus as prepare_data.py does, and return a small recipe that trains on it."""
    write_corpus(folder, VOCAB_SIZE, validation_tokens=400)
    (folder / "pieces.jsonl").write_text("")
    recipe = small_recipe(folder)
    files = {name: TokenFile(folder / name) for name in ("train", "validation")}
    piece: dict[str, Any] = {"files": ["books.jsonl"], "start": 0, "stop": None}
    manifest: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE, "document_start": [], "files": {},
        "tokenizer": "books", "tokenizer_sha256": tokenizer_hash(folder / "tokenizer"),
        "tokenizer_folder_sha256": folder_hash(folder / "tokenizer"),
    }  # fmt: skip
    for name, file in files.items():
        counts = {"documents": file.sequences, "tokens": file.count}
        piece[name] = counts | {"sha256": sha256(folder / f"{name}.bin")}
        manifest["files"][name] = counts | {"idx_sha256": sha256(folder / f"{name}.idx")}
    (folder / "pieces.jsonl").write_text(json.dumps(piece) + "\n")
    manifest["pieces_sha256"] = sha256(folder / "pieces.jsonl")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert list(find_damages(folder, 1)) == []
    return parse_recipe(recipe, "small")


def manifest_of(recipe: Recipe) -> Manifest:
    """Return the manifest of a checkpoint of a run."""
    record: Any = {"bytes": 5, "sha256": "0" * 64}
    return Manifest(
        step=4, samples=32, tokens=1024, updates=4, loss_scale={"cur_scale": 65536.0},
        recipe=recipe.model_dump(mode="json"), layout={"tensor": 1, "deepspeed_json": {}},
        data=fingerprint(recipe), versions={"torch": "2"},
        files={"moments-00000.safetensors": record},
        tensors={"exp_avg/embedding.weight": "moments-00000.safetensors"},
        read_parts=[[0, 32]], parent={"run": "x", "step": 2},
    )  # fmt: skip


class _Manifests:
    """Manifests of checkpoints, with the matching hash and without."""

    def __init__(self, folder: Path, recipe: Recipe):
        self.checkpoint = folder / "step-0000004"
        self.checkpoint.mkdir(exist_ok=True)
        self.recipe, self.data = recipe, fingerprint(recipe)
        self.weights = recipe.model_copy(
            update={
                "training": recipe.training.model_copy(
                    update={"initial_weights": str(self.checkpoint)}
                )
            }
        )

    def __call__(self, content: bytes) -> None:
        (self.checkpoint / "manifest.json").write_bytes(content)
        digest = sha256(self.checkpoint / "manifest.json")
        (self.checkpoint / "manifest.sha256").write_text(digest + "\n")
        damages = list(format_module.find_damages(self.checkpoint))
        assert all(isinstance(damage, str) for damage in damages)
        manifest = Manifest.read(self.checkpoint)
        assert all("/" not in name for name in manifest.files), "a path outside the checkpoint"
        manifest.missing(self.checkpoint)
        assert manifest.progress.step >= 0
        Manifest.parse(manifest.text().encode(), self.checkpoint)
        check_initial_weights(self.weights)
        check_same_run(self.checkpoint, manifest, self.recipe, self.data)


class _Corpora:
    """Manifests of corpora, as a run and `prepare_data.py verify` read them."""

    def __init__(self, corpus: Path, recipe: Recipe):
        self.corpus, self.recipe = corpus, recipe
        self.sound = (corpus / "manifest.json").read_bytes()

    def __call__(self, content: bytes) -> None:
        try:
            (self.corpus / "manifest.json").write_bytes(content)
            assert all(isinstance(damage, str) for damage in find_damages(self.corpus, 1))
            open_corpus(str(self.corpus / "train"), self.recipe)
            check_document_starts(self.recipe)
            starts = document_starts(self.recipe)
            assert all(type(token) is int for start in starts for token in start)
        finally:
            (self.corpus / "manifest.json").write_bytes(self.sound)


class _Pieces:
    """Records of the origins of a corpus's documents."""

    def __init__(self, corpus: Path):
        self.corpus, self.sound = corpus, (corpus / "pieces.jsonl").read_bytes()

    def __call__(self, content: bytes) -> None:
        try:
            (self.corpus / "pieces.jsonl").write_bytes(content)
            origins = Origins(self.corpus / "train")
            for document in (0, 3, 10**6):
                assert isinstance(origins[document], str)
        finally:
            (self.corpus / "pieces.jsonl").write_bytes(self.sound)


class _Indices:
    """Indices of token files, and windows of their tokens."""

    def __init__(self, corpus: Path):
        self.index, self.sound = corpus / "train.idx", (corpus / "train.idx").read_bytes()

    def __call__(self, content: bytes) -> None:
        try:
            self.index.write_bytes(content)
            file = TokenFile(self.index.with_suffix(""))
            file.check_index(one_sequence_per_document=False)
            for start in range(0, max(0, file.count - 32), 97):
                lengths = file.document_lengths(start, start + 32)
                assert sum(lengths) == 32 and min(lengths) > 0
                documents = file.documents_of(start, start + 32)
                assert sum(stop - begin for _, begin, stop in documents) == 32
        finally:
            self.index.write_bytes(self.sound)


EVENTS = b"".join(
    json.dumps(line).encode() + b"\n"
    for line in (
        {"event": "start", "step": 0, "time": 1.8e9, "code_version": "1234-dirty", "samples": 0},
        event("attempt", 0, number=1, reason="", layout="pipeline 2", nodes=["a"]),
        event("first_step", 1, seconds={"imports": 1.5, "first step": 2.0}),
        event("resume", 40, changed={"layout.tensor": [1, 2]}, samples=320),
        event("skip", 50, reason="the loss is nan", samples=[1600, 1631]),
        event("rollback", 60, to=50, samples=480, reason="the loss is 9.1", read_parts=[[0, 400]]),
        event("slow", 80, ranks=[1], nodes=["b"], ratio=2.5),
        event("repeat", 80, steps=3, seconds=4.5),
        event("save", 90, checkpoint="/runs/x/checkpoints/step-0000090"),
        event("branch", 80, checkpoint="step-0000080", stamp="x", samples=640, once="a",
              resume="b", parent={"run": "y"}, data_parts=[{}], read_parts=[[0, 9]]),
        event("gpu_error", 95, reason="Xid 79", nodes=["c"]),
        event("replace", 96, nodes={"a": "b"}),
        event("stop", 100, reason="SIGTERM", exit_code=5),
    )
)  # fmt: skip
METRICS = b"".join(
    json.dumps(
        {
            "step": step, "loss": 3.0 / step, "grad_norm": 0.5, "learning_rate": 1e-3,
            "tokens": 8192 * step, "step_seconds": 0.5, "tokens_per_second": 16384.0,
            "tflops_per_gpu": 0.05, "mfu": None, "memory_gb": 0.6, "between_seconds": 0.01,
            "validation_loss": 3.1, "validation/code/loss": 2.0, "tasks/piqa": 0.6,
            "slowest_rank": 1, "slowest_ratio": 1.2, "task_seconds": 0.1,
        }
    ).encode() + b"\n"
    for step in (1, 2, 3, 4, 3, 4, 5)
)  # fmt: skip
DAMAGED_METRICS = METRICS.replace(b'"tokens": 8192', b'"tokens": NaN', 1)
LOCK = b'{"process": 1, "host": "a", "machine": "b 1", "started": 5, "token": "0a"}\n'


class _Lines:
    """A file of a run folder, as a resumed run and `report.py` read it."""

    def __init__(self, folder: Path, name: str):
        self.folder = write_run(folder, range(1, 4))
        self.file, self.recipe = folder / name, load_recipe(DEFAULT_RECIPE)

    def __call__(self, content: bytes) -> None:
        self.file.write_bytes(content)
        folder = RunFolder(self.folder)
        history = folder.history()
        history.first_samples()
        progress = history.progress_at(4, 32)
        assert progress.step == 4
        samples_of(self.recipe, folder, 4)
        run = read_run(self.folder, "run")
        plan = page.planned(run, predict, None)
        marks = marks_of(run.events)
        page.summary([run]), page.recipe_differences([run, run])
        _run_facts(run, 0, plan, marks)
        axes = axes_of([run])
        step_positions([mark.step for mark in marks], run, axes)
        panels_of([run], {0: plan[0]} if plan[0] else {})
        if zlib.crc32(content) % INPUTS_PER_PAGE == 0:
            render([run])


HOSTS = [
    b"node1 slots=8\nnode2 slots=8\n# comment\n\nnode3 slots=16\n",
    b"\xef\xbb\xbfnode1 slots=8 max_slots=8\r\nuser@node2 slots=8\r\n",
    b"10.0.0.1 slots=8\n[::1] slots=8\nhost-with.dots slots=8",
]


class _Hosts:
    """Hostfiles; a name becomes an argument of ssh."""

    def __init__(self, folder: Path):
        self.file = folder / "hostfile"

    def __call__(self, content: bytes) -> None:
        self.file.write_bytes(content)
        for host in read_hostfile(self.file, processes=8):
            command = over_ssh(host, ["true"])
            assert host in command and not host.startswith("-"), "an option of ssh"
            assert not any("\0" in word for word in command), "not an argument of a command"


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Limit the memory of this process, and let `Hang` be raised by an alarm."""

    def alarm(number: int, frame: FrameType | None) -> None:
        raise Hang

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    used = pages * resource.getpagesize()
    before = {number: signal.signal(number, alarm) for number in (signal.SIGALRM, signal.SIGPROF)}
    resource.setrlimit(resource.RLIMIT_AS, (used + BYTES_PER_INPUT, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for number, handler in before.items():
            signal.signal(number, handler)


def attempt(kind: Kind, content: bytes) -> BaseException | None:
    """Use an input, and return what it raises; None if it is accepted."""
    try:
        try:
            set_alarms(CPU_SECONDS_PER_INPUT, SECONDS_PER_INPUT)
            kind.use(content)
        finally:
            set_alarms(0, 0)
    except (Exception, Hang) as error:
        set_alarms(0, 0)  # again, because the first call may have been interrupted by an alarm
        return error
    return None


def set_alarms(cpu_seconds: float, seconds: float) -> None:
    """Let `Hang` be raised after a CPU time or a time has passed; 0 for never."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def error_site(error: BaseException) -> str:
    """Return the class of an error, and the line of the repository at which it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(REPOSITORY)
           and ".venv" not in frame.filename]  # fmt: skip
    if isinstance(error, Hang):  # the line depends on chance
        return f"Hang in {own[2].name}" if len(own) > 2 else "Hang"
    where = own[-1] if own else frames[-1]
    file = Path(where.filename)
    file = file.relative_to(REPOSITORY) if file.is_relative_to(REPOSITORY) else file
    return f"{type(error).__name__} at {file}:{where.lineno}"


def shortened(kind: Kind, content: bytes, site: str, *, seconds: float) -> bytes:
    """Return a shorter input with the same failure: remove halves, quarters and so on."""
    end, size = time.monotonic() + seconds, len(content) // 2
    while size and time.monotonic() < end:
        start, before = 0, len(content)
        while start < len(content) and time.monotonic() < end:
            candidate = content[:start] + content[start + size :]
            error = attempt(kind, candidate)
            is_failure = error is not None and not isinstance(error, UserError)
            if error is not None and is_failure and error_site(error) == site:
                content = candidate
            else:
                start += size
        size = size if len(content) < before and size > 1 else size // 2
    return content


def fuzz(
    kind: Kind, seed: int, numbers: Iterator[int], *, shorten: float = SECONDS_TO_SHORTEN
) -> Result:
    """Use inputs of a kind, and return the outcome.

    Args:
        kind: the kind
        seed: the seed
        numbers: numbers of the inputs
        shorten: seconds to shorten the input of a failure
    """
    result = Result()
    for number in numbers:
        content = kind.input(seed, number)
        error = attempt(kind, content)
        if error is None:
            result.accepted += 1
        elif isinstance(error, UserError):
            result.rejected += 1
        elif (site := error_site(error)) in result.failures:
            result.failures[site].count += 1
        else:
            if not isinstance(error, Hang):
                content = shortened(kind, content, site, seconds=shorten)
            result.failures[site] = Failure(number, content, error)
    return result


def until(seconds: float) -> Iterator[int]:
    """Yield 0, 1, ... for some seconds."""
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        yield number
        number += 1


def main() -> int:
    """Run the command; return 1 if there are failures."""
    options = parse_command_line()
    seed = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    failed = False
    with tempfile.TemporaryDirectory() as folder, limits():
        by_name = {kind.name: kind for kind in kinds(Path(folder))}
        if options.only not in (None, *by_name):
            sys.exit(f"--only {options.only} is not a kind of input; use {', '.join(by_name)}")
        chosen = [by_name[options.only]] if options.only else list(by_name.values())
        for kind in chosen:
            numbers = until(options.seconds / len(chosen))
            if options.number is not None:
                numbers = iter([options.number])
            result = fuzz(kind, seed, numbers)
            failed |= bool(result.failures)
            print(f"{kind.name:10} {result.accepted:6} accepted  {result.rejected:6} rejected  "
                  f"{sum(each.count for each in result.failures.values()):4} failures",
                  flush=True)  # fmt: skip
            for site, failure in result.failures.items():
                again = f"--seed {seed} --only {kind.name} --number {failure.number}"
                shown = repr(failure.content)
                if len(shown) > MAX_SHOWN:
                    shown = f"{shown[:MAX_SHOWN]}... ({len(failure.content)} bytes)"
                print(f"  {site}, {failure.count} times: {failure.error!s:.200}\n"
                      f"    python -m tests.fuzzing {again}\n    {shown}", flush=True)  # fmt: skip
                if options.number is not None:
                    traceback.print_exception(failure.error)
    return int(failed)


def parse_command_line() -> argparse.Namespace:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzzing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="of all kinds together; default: %(default)g"
    )
    parser.add_argument("--seed", type=int, help="default: a random one, which is printed")
    parser.add_argument("--only", metavar="KIND", help="use only this kind of input")
    parser.add_argument("--number", type=int, help="use only this input, and print the traceback")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
