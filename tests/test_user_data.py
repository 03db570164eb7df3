"""Files, options and variables that cannot be parsed are UserErrors that name them."""

import ast
import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast, dynamic_module_utils

from models.errors import UserError
from tests.report.synthetic import write_run
from threefold.checkpoint.compatibility import check_initial_weights
from threefold.checkpoint.format import REMEDY, Manifest
from threefold.commands.prepare_data import check_same_options, parse_command_line
from threefold.config.deepspeed_json import read_deepspeed_json
from threefold.config.loading import DEFAULT_RECIPE, REPOSITORY, load_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.convert.from_hugging_face import TheirFiles, read_config
from threefold.data.token_file import TokenFile, write_token_file
from threefold.gpus.datasheet import FOLDER, read_gpu
from threefold.launch.hosts import read_hostfile
from threefold.plan.calibration.runs_table import read_table
from threefold.prepare_data import formats
from threefold.prepare_data.corpus import Origins, find_damages
from threefold.prepare_data.formats import JsonLines, TextLines
from threefold.prepare_data.tables import from_library
from threefold.prepare_data.tokenization import Tokenization, read_report, texts_of
from threefold.prepare_data.tokenizer import load_tokenizer
from threefold.report.page import render
from threefold.report.run_record import read_run
from threefold.run_folder.folder import RunFolder
from threefold.run_folder.history import Progress
from threefold.run_folder.lock import is_held
from threefold.runtime.environment import check_accelerator
from threefold.runtime.processes import check_port
from threefold.tracking.wandb_connection import (
    check_variables,
    read_run_id,
    read_wandb_key,
)

DIGITS = "1" * 5000  # more than Python converts: a plain ValueError of json and tomllib
NO_TABLES = (b"{", b"[" * 10**5, b"\xff", DIGITS.encode(), b"5", b"[]", b"null", b'"text"')
H100 = (FOLDER / "h100.toml").read_text()


def rejection(call: Callable[..., Any], *arguments: Any) -> str:
    """Return the message of a call that must raise a UserError."""
    with pytest.raises(UserError) as raised:
        call(*arguments)
    return str(raised.value)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": "abc"}, 'RANK = "abc" is not a whole number'),
        ({"RANK": ""}, 'RANK = ""'),
        ({"RANK": "-1"}, 'RANK = "-1"'),
        ({"RANK": "8"}, "RANK = 8 and LOCAL_RANK = 0 are not both below WORLD_SIZE = 8"),
        ({"WORLD_SIZE": "many"}, 'WORLD_SIZE = "many"'),
        ({"WORLD_SIZE": "0"}, "RANK = 0 and LOCAL_RANK = 0 are not both below WORLD_SIZE = 0"),
        ({"LOCAL_RANK": "1.5"}, 'LOCAL_RANK = "1.5"'),
        ({"LOCAL_SIZE": "x"}, 'LOCAL_SIZE = "x"'),
        ({"LOCAL_SIZE": "0"}, "LOCAL_SIZE = 0"),
        ({"WORLD_SIZE": DIGITS}, "WORLD_SIZE = "),
    ],
)
def test_a_variable_of_the_launcher(variables: dict[str, str], named: str) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0"} | variables
    assert rejection(LaunchEnvironment.from_environment, environment).startswith(named)


def test_the_tasks_per_node_of_slurm() -> None:
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "20", "SLURM_LOCALID": "3"}
    for text, size in (("8(x2),4", 8), ("4,2", 4), ("20", 20)):
        world = LaunchEnvironment.from_environment(slurm | {"SLURM_TASKS_PER_NODE": text})
        assert world.local_size == size
    assert "8x" in rejection(
        LaunchEnvironment.from_environment, slurm | {"SLURM_TASKS_PER_NODE": "8x"}
    )


@pytest.mark.parametrize("port", ["abc", "", "-1", "70000", "29500 "])
def test_a_port(port: str) -> None:
    assert f'MASTER_PORT = "{port}"' in rejection(check_port, port)
    for works in (None, "0", "29500", "65535"):
        check_port(works)


def test_a_device() -> None:
    assert "use cuda or cpu" in rejection(check_accelerator, {"DS_ACCELERATOR": "gpu"})
    for works in ({}, {"DS_ACCELERATOR": "cpu"}, {"DS_ACCELERATOR": "cuda"}):
        check_accelerator(works)


@pytest.mark.parametrize("text", [f"seed = {DIGITS}", "seed = " + "[" * 10**5, "seed = \udcff"])
def test_a_recipe(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(text, errors="surrogateescape")
    assert rejection(load_recipe, file).startswith(f"{file}: this is not valid TOML")
    key, _, value = text.partition(" = ")
    assert "seed" in rejection(load_recipe, DEFAULT_RECIPE, [f"{key}={value}"])


def test_a_name_that_is_not_text() -> None:
    assert "name" in rejection(load_recipe, DEFAULT_RECIPE, ["name=\udcff"])


def test_an_override_in_bytes_that_the_locale_lacks() -> None:
    """Python passes such bytes of an argument as halves of surrogate pairs."""
    recipe = load_recipe(DEFAULT_RECIPE, ['tracking.tags=["\udcc3\udca9", "a"]'])
    assert recipe.tracking.tags == ("\u00e9", "a")
    for override in ('tracking.tags=["\udce9"]', "tracking.tags=\ud800", "model.\udcff=1"):
        message = rejection(load_recipe, DEFAULT_RECIPE, [override])
        assert message.startswith(f"--set {override}: this is not UTF-8 text; "), ascii(message)
    assert load_recipe(DEFAULT_RECIPE, ['tracking.tags=["\\u00e9"]']).tracking.tags == ("\u00e9",)


def test_a_section_that_is_set_to_a_value() -> None:
    overrides = ["layout.schedule=zb-v", "layout=5"]
    assert "layout = 5" in rejection(load_recipe, DEFAULT_RECIPE, overrides)


@pytest.mark.parametrize("content", NO_TABLES)
def test_a_deepspeed_json(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    assert f'deepspeed = "{tmp_path / "x.json"}"' in rejection(
        read_deepspeed_json, str(tmp_path / "x.json")
    )


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("memory_gib = 79.1", "memory_gib = ", "this is not valid TOML"),
        ("memory_gib = 79.1", f"memory_gib = {DIGITS}", "this is not valid TOML"),
        ("memory_gib = 79.1", 'memory_gib = "80"', 'memory_gib = "80" has the wrong type'),
        ("memory_gib = 79.1", "memory_gib = true", "memory_gib = true has the wrong type"),
        ('["H100"]', '"H100"', 'device_names = "H100" has the wrong type'),
        ('["H100"]', "[100]", "device_names = [100] has the wrong type"),
        ("fp16 = 989.4, fp32 = 66.9, fp8 = 1978.9 }", 'fp8 = "x" }', "peak_tflops = "),
        ("multiprocessors = 132", "multiprocessors = 132.5", "multiprocessors = 132.5"),
        ("[efficiency]", 'efficiency = "X"\n[other]', "there is no x.toml"),
        ("[efficiency]", "efficiency = 5\n[other]", "efficiency is not a table"),
        ("[efficiency]", 'efficiency = "A100-80GB"\n[other]', "missing or unknown: other"),
    ],
)
def test_a_hardware_file(before: str, after: str, named: str, tmp_path: Path) -> None:
    assert before in H100
    (tmp_path / "mine.toml").write_text(H100.replace(before, after))
    message = rejection(read_gpu, tmp_path / "mine.toml")
    assert message.startswith("mine.toml: ") and named in message


def test_a_table_with_bytes_that_are_not_utf_8(tmp_path: Path) -> None:
    published = REPOSITORY / "benchmarks/planner_accuracy" / "narayanan2021.csv"
    (tmp_path / "x.csv").write_bytes(published.read_bytes() + b"\xff\n")
    assert "x.csv: this is not valid CSV" in rejection(read_table, tmp_path / "x.csv")


@pytest.mark.parametrize("content", NO_TABLES)
def test_the_files_of_a_corpus(content: bytes, tmp_path: Path) -> None:
    for name in ("manifest.json", "pieces.jsonl", "report.json"):
        (tmp_path / name).write_bytes(content)
    options = parse_command_line(["--output", str(tmp_path)])
    begins = (f"{tmp_path}/manifest.json is damaged (", f"{tmp_path}/manifest.json is not a man")
    rejected = rejection(check_same_options, options, tmp_path)
    assert rejected.startswith(begins) and f"or delete {tmp_path} to prep" in rejected
    rejected = rejection(lambda: list(find_damages(tmp_path, 1)))
    assert rejected.startswith(begins)
    assert rejected.endswith("; delete the folder and prepare the corpus again")
    assert f"{tmp_path}/pieces.jsonl, line 1, is damaged" in rejection(Origins, tmp_path / "train")
    assert f"delete {tmp_path}" in rejection(read_report, tmp_path / "report.json")


@pytest.mark.parametrize("content", [*NO_TABLES, b"{}", b'{"format": 1, "more": 2}'])
def test_the_manifest_of_a_checkpoint(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    assert f"{tmp_path}/manifest.json" in rejection(Manifest.read, tmp_path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"step": "4"}, "step = '4': Input should be a valid integer"),
        ({"step": -4}, "step = -4"),
        ({"samples": True}, "samples = True"),
        ({"tensors": []}, "tensors = []"),
        ({"tensors": {"exp_avg/x": "../x.safetensors"}}, "tensors.exp_avg/x = '../x.safetensors'"),
        ({"files": {"../../secret": {"bytes": 1, "sha256": ""}}}, "files.../../secret"),
        ({"files": {"x" * 256: {"bytes": 1, "sha256": ""}}}, f"files.{'x' * 256}"),
        ({"files": {"x.safetensors": {"bytes": "1", "sha256": ""}}}, "files.x.safetensors.bytes"),
        ({"files": {"x.safetensors": 5}}, "files.x.safetensors = 5"),
        ({"recipe": {}}, "model = {}"),
        ({"recipe": {"model": {"layers": 2}}}, "model.hidden_size"),
        ({"data": {"parts": [{"phase": "a"}]}}, "parts.0.first_step"),
        ({"read_parts": [["a"]]}, "read_parts.0.0 = 'a'"),
    ],
)
def test_a_value_in_the_manifest_of_a_checkpoint(
    change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    model = load_recipe(DEFAULT_RECIPE).model_dump(mode="json")["model"]
    empty: dict[str, Any] = {"layout": {}, "data": {}, "versions": {}, "tensors": {}, "files": {}}
    manifest = Manifest(step=4, samples=1, tokens=1, updates=4, loss_scale=None,
                        recipe={"model": model}, **empty)  # fmt: skip
    file, content = tmp_path / "manifest.json", json.loads(manifest.text())
    assert Manifest.parse(json.dumps(content).encode(), file) == manifest
    message = rejection(Manifest.parse, json.dumps(content | change).encode(), file)
    assert message.startswith(f"{file} is damaged (") and named in message
    assert "\n" not in message and message.endswith(REMEDY)


def test_initial_weights_whose_manifest_has_changed(tmp_path: Path) -> None:
    recipe = load_recipe(DEFAULT_RECIPE, [f'training.initial_weights="{tmp_path}"'])
    empty: dict[str, Any] = {"layout": {}, "data": {}, "versions": {}, "tensors": {}, "files": {}}
    table = {"model": recipe.model_dump(mode="json")["model"]}
    Manifest(step=0, samples=0, tokens=0, updates=0, loss_scale=None, recipe=table,
             **empty).write(tmp_path)  # fmt: skip
    check_initial_weights(recipe)
    file = tmp_path / "manifest.json"
    file.write_text(file.read_text().replace('"samples": 0', '"samples": 9'))
    assert f"{file} has changed since the save (SHA-256)" in rejection(
        check_initial_weights, recipe
    )
    (tmp_path / "manifest.sha256").unlink()
    rejected = rejection(check_initial_weights, recipe)
    assert "manifest.sha256 is missing; use another checkpoint, or write it again" in rejected


@pytest.mark.parametrize("value", ["Infinity", "1e999", '"250"', "NaN", "null", "2.5", "[]"])
def test_the_vocabulary_in_the_manifest_of_a_corpus(value: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(f'{{"vocab_size": {value}}}')
    message = rejection(lambda: list(find_damages(tmp_path, 1)))
    assert "vocab_size = " in message and "is not a whole number" in message


def test_the_options_in_the_manifest_of_a_corpus(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"options": ["--vocab-size"]}')
    for call in (
        lambda: check_same_options(parse_command_line([]), tmp_path),
        lambda: list(find_damages(tmp_path, 1)),
    ):
        assert "options = ['--vocab-size'] is not a table of options" in rejection(call)


@pytest.mark.parametrize("field", [{"files": []}, {"stop": "9"}, {"train": 5}, {"start": None}])
def test_a_value_in_pieces(field: dict[str, Any], tmp_path: Path) -> None:
    part = {"documents": 1, "tokens": 9}
    piece = {"files": ["a.txt"], "start": 0, "stop": None, "train": part, "validation": part}
    (tmp_path / "pieces.jsonl").write_text(json.dumps(piece) + "\n")
    assert Origins(tmp_path / "train")[0] == "a.txt"
    (tmp_path / "pieces.jsonl").write_text(json.dumps(piece | field) + "\n")
    assert "pieces.jsonl, line 1, is damaged" in rejection(Origins, tmp_path / "train")


def test_phases_in_single_brackets(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(DEFAULT_RECIPE.read_text() + '\n[phase]\nname = "x"\nstart_step = 9\n')
    assert "phase = " in rejection(load_recipe, file)
    message = rejection(load_recipe, file, ["phase.x.start_step=8"])
    assert "--set phase.x.start_step=8" in message and "[[phase]] in double brackets" in message
    assert "it has none" in rejection(load_recipe, DEFAULT_RECIPE, ["phase.x.start_step=8"])


def test_the_former_name_of_a_table_is_rejected_with_its_new_name(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    text = DEFAULT_RECIPE.read_text()
    file.write_text(f'{text}\n[[stage]]\nname = "x"\nstart_step = 9\n')
    line = text.count("\n") + 2
    assert f"line {line}: [[stage]] is now [[phase]]; write [[phase]]" in rejection(
        load_recipe, file
    )
    message = rejection(load_recipe, DEFAULT_RECIPE, ["stage.x.start_step=8"])
    assert message.endswith("stage is now phase; write --set phase.x.start_step=8")


def test_dotted_keys_of_a_recipe_that_are_nested_deeply(tmp_path: Path) -> None:
    deep = ".".join(["a"] * 2000)
    message = rejection(load_recipe, DEFAULT_RECIPE, [f"{deep}=1"])
    assert "nested more than 20 levels deep" in message
    file = tmp_path / "recipe.toml"
    file.write_text(f"{deep} = 1\n")
    assert rejection(load_recipe, file).startswith(f"{file}: tables and arrays are nested")
    run = read_run(tmp_path, "run")
    assert any("nested more than 20 levels deep" in problem for problem in run.problems)
    assert "recipe" in render([run])


def test_an_empty_snapshot_folder() -> None:
    message = rejection(load_recipe, DEFAULT_RECIPE, ['checkpoint.snapshot_folder=""'])
    assert 'checkpoint.snapshot_folder = ""' in message and "/dev/shm" in message


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "-", "a\0b"])
def test_a_host_that_would_be_an_option(name: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(f"node1 slots=8\n{name} slots=8\n")
    assert "hosts, line 2: " in rejection(lambda: read_hostfile(tmp_path / "hosts", processes=8))


def test_deep_nesting_in_the_files_of_a_run(tmp_path: Path) -> None:
    deep = b"[" * 200_000 + b"\n"
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 2.0}\n' + deep)
    (tmp_path / "events.jsonl").write_bytes(deep + b'{"event": "start", "step": 0}\n')
    (tmp_path / "lock").write_bytes(deep)
    folder = RunFolder(tmp_path)
    assert folder.read_metrics() == [{"step": 1, "loss": 2.0}]
    assert folder.read_events() == [{"event": "start", "step": 0}]
    assert not is_held(tmp_path)
    problems = read_run(tmp_path, "run").problems
    assert sum("1 of 2 lines are damaged" in problem for problem in problems) == 2


NESTED = json.loads("[" * 900 + "]" * 900)


@pytest.mark.parametrize(
    "lines",
    [
        [
            {"event": "start", "time": 10**400},
            {"event": "repeat", "seconds": 10**400},
            {"event": "branch", "checkpoint": "x\0", "stamp": "y"},
        ],
        [
            {"event": "end", "time": 10**30},
            {"event": "first_step", "seconds": {"imports": 10**400, "data": float("inf")}},
            {"event": "branch", "checkpoint": "x", "stamp": "y", "once": [], "resume": {}},
        ],
        [
            {"event": "stop", "reason": NESTED},
            {"event": "rollback", "to": 3, "samples": 10**30},
            {"event": "resume", "samples": 0, "read_parts": float("inf")},
        ],
        [
            {"event": "slow", "ranks": NESTED, "ratio": 10**400},
            {"event": "rollback", "to": -1, "samples": float("inf"), "read_parts": [[1, "a"]]},
            {"step": 10**30, "event": "resume"},
        ],
    ],
)
def test_events_with_values_that_no_run_writes(lines: list[dict[str, Any]], tmp_path: Path) -> None:
    events = [{"step": 4, "time": 1.8e9 + 9} | line for line in lines]
    write_run(tmp_path, range(1, 9), events=events)
    run = read_run(tmp_path, "run")
    assert "finished" in (page := render([run])) or "interrupted" in page or "stopped" in page
    assert RunFolder(tmp_path).history().progress_at(4, 8).step == 4


@pytest.mark.parametrize("value", [10**400, float("inf"), "x", None, [], -1])
def test_a_metric_with_a_value_that_no_run_writes(value: Any, tmp_path: Path) -> None:
    def change(line: dict[str, Any]) -> None:
        line.update(dict.fromkeys(line.keys() - {"step"}, value) | {"slowest_rank": value})

    write_run(tmp_path, range(1, 9), change=change)
    run = read_run(tmp_path, "run")
    assert "of 200" in render([run])
    folder = RunFolder(tmp_path)
    folder.prepare(load_recipe(DEFAULT_RECIPE), Progress(step=3, samples=96))
    assert [line["step"] for line in folder.read_metrics()][:3] == [1, 2, 3]


def test_a_line_that_does_not_fit_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.jsonl.gz"
    with gzip.open(file, "wb") as stream:
        stream.write(b'{"text": "a"}\n{"text": "' + b"a" * 10_000 + b'"}\n')
    reader = JsonLines(file, "text")
    (piece,) = reader.pieces(10**6)
    assert len(list(reader.rows(piece))) == 2
    monkeypatch.setattr(formats, "MAX_LINE_BYTES", 1000)
    message = rejection(lambda: list(reader.rows(piece)))
    assert message.startswith(f"{file}, line 2 is longer than 1000 bytes; split it into several")
    monkeypatch.undo()

    def exhaust(self: object, line: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(JsonLines, "content", exhaust)
    assert f"{file}, line 1 does not fit into memory" in rejection(lambda: list(reader.rows(piece)))


def texts_without_encoding(tree: ast.Module) -> list[str]:
    """Return the calls that read or write text in the encoding of the locale."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        keywords = {keyword.arg for keyword in node.keywords}
        modes = [a.value for a in node.args if isinstance(a, ast.Constant) and a.value is not None]
        mode = next((m for m in modes if re.fullmatch(r"[rwax]\+?[bt]?\+?", str(m))), "r")
        opens_text = (
            name in ("open", "fdopen")
            and "b" not in mode
            and (not node.args or mode in modes or isinstance(node.func, ast.Name))
        )
        if opens_text or name in ("read_text", "write_text"):
            if name == "write_text" and isinstance(node.func, ast.Name):
                continue  # a function of convert.py
            if "encoding" not in keywords:
                found.append(ast.unparse(node))
        elif {"text", "universal_newlines"} & keywords and name in ("run", "Popen"):
            found.append(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    "line",
    ["path.read_text()", "path.write_text(x)", "path.open()", "path.open('w')", "open(path)",
     "path.open('a+', newline='')", "os.fdopen(d, 'w')", "subprocess.run(c, text=True)"],
)  # fmt: skip
def test_a_text_in_the_encoding_of_the_locale_is_seen(line: str) -> None:
    assert texts_without_encoding(ast.parse(line)) == [line]


def test_texts_are_utf_8_whatever_the_locale() -> None:
    found = {
        str(path.relative_to(REPOSITORY)): calls
        for folder in ("models", "recipes", "threefold", "slurm")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        if (calls := texts_without_encoding(ast.parse(path.read_text())))
    }
    assert found == {}


def test_a_locale_without_utf_8(tmp_path: Path) -> None:
    """A run with a tag that the locale lacks, in a folder whose name is not UTF-8.

    The same character is in the path of the run's validation file.
    """
    folder = Path(os.fsdecode(bytes(tmp_path) + b"/run\xff"))
    folder.mkdir()
    (tmp_path / "\u00e9").write_text("in a path")
    settings = ['tracking.tags=["\u00e9"]', f"data.validation={tmp_path}/\u00e9"]
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from threefold.commands import report\n"
        "from threefold.config.loading import DEFAULT_RECIPE, load_recipe\n"
        "from threefold.config.sections import repository_path\n"
        "from threefold.run_folder.json_lines import write_whole\n"
        "recipe = load_recipe(DEFAULT_RECIPE, [sys.argv.pop(), sys.argv.pop()])\n"
        "write_whole(Path(sys.argv[1]) / 'recipe.toml', recipe.toml())\n"
        "print(repository_path(recipe.data.validation).read_text(encoding='utf-8'))\n"
        "report.main()\n"
    )
    output = folder / "report.html"
    done = subprocess.run(
        [sys.executable, "-c", script, folder, "--output", output, *settings],
        env=os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        capture_output=True,
        cwd=REPOSITORY,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"in a path\n")
    assert b"wrote " in done.stdout and rb"run\udcff" in done.stdout
    assert 'tags = [\n    "\u00e9",\n]' in (folder / "recipe.toml").read_text(encoding="utf-8")
    assert "\u00e9" in output.read_text(encoding="utf-8")


def test_an_index_that_becomes_shorter(tmp_path: Path) -> None:
    write_token_file(tmp_path / "x", [np.arange(100)], vocab_size=100)
    file = TokenFile(tmp_path / "x")
    os.truncate(tmp_path / "x.idx", 40)
    assert "x.idx has become shorter: 40 bytes of 62" in rejection(file.starts, 0, 1)
    assert "x.idx has become shorter: 40 bytes of 62" in rejection(file.range_of, 0)


def test_a_tokenizer_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    message = rejection(load_tokenizer, tmp_path, 'data.tokenizer = "x"')
    assert message.startswith('data.tokenizer = "x" cannot be loaded: ') and "\n" not in message


def test_a_tokenizer_without_a_token_for_a_word(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tmp_path)
    plan = Tokenization(
        formats=[],
        tokenizer=tmp_path / "tokenizer.json",
        tokenizer_sha256="",
        vocab_size=2,
        start=(),
        end=1,
        split_special_tokens=False,
        validation_fraction=0.1,
        skip=frozenset(),
        folder=tmp_path,
    )
    message = rejection(plan._write, ["unknown"], {}, 0)
    assert "begins with 'unknown'" in message and "UNK" in message
    with pytest.raises(TypeError):  # a defect: the argument is not a text
        plan._write(["a", 5], {}, 0)


def test_only_a_library_is_blamed_for_data_that_cannot_be_read() -> None:
    def rows() -> Any:
        yield 1
        raise ValueError("the shard is damaged")

    seen = []
    assert rejection(lambda: seen.extend(from_library(rows(), "books"))) == (
        "books cannot be read: the shard is damaged"
    )
    with pytest.raises(ZeroDivisionError):
        for row in from_library(rows(), "books"):
            seen.append(row / 0)


def test_a_defect_while_a_row_is_read_is_not_a_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.txt").write_text("some text\n")
    reader = TextLines(tmp_path / "x.txt")
    (piece,) = reader.pieces(10**6)
    monkeypatch.setattr(TextLines, "content", lambda self, line: np.zeros(2).reshape(3))
    with pytest.raises(ValueError, match="cannot reshape") as raised:
        list(texts_of(reader, piece, frozenset()))
    assert raised.type is ValueError


def test_the_files_of_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run_id").write_bytes(b"\x00\xff")
    assert f"{tmp_path / 'run_id'} holds " in rejection(read_run_id, tmp_path / "run_id")
    (tmp_path / "run_id").write_text("")
    assert "holds '' instead" in rejection(read_run_id, tmp_path / "run_id")
    (tmp_path / "run_id").write_text("0a1b2c3d\n")
    assert read_run_id(tmp_path / "run_id") == "0a1b2c3d"
    key = tmp_path / "key"
    monkeypatch.setenv("WANDB_API_KEY_FILE", str(key))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for content in (b"\xff", b"a\x00b", b"", b"two words"):
        key.write_bytes(content)
        key.chmod(0o600)
        assert "does not hold a key" in rejection(read_wandb_key)
    key.write_text("0a1b2c3d")
    key.chmod(0o640)
    assert "can be read by others; use chmod 600" in rejection(read_wandb_key)
    monkeypatch.setenv("WANDB_BASE_URL", "http://[::1")
    assert "WANDB_BASE_URL = http://[::1: " in rejection(check_variables)


@pytest.mark.parametrize("content", NO_TABLES)
def test_a_folder_of_transformers(content: bytes, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes(content)
    assert rejection(read_config, tmp_path).startswith(f"{tmp_path}/config.json: ")
    assert "is not an index of tensors" in rejection(TheirFiles, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "model.safetensors cannot be read" in rejection(TheirFiles, tmp_path)


@pytest.mark.parametrize("answer", ["y", "n"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_in_a_folder_of_transformers_never_runs(
    file: str, answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a folder must neither ask whether to run its code nor run it."""
    folder, ran, questions = tmp_path / "folder", tmp_path / "ran", []
    folder.mkdir()
    (folder / f"payload_{tmp_path.name}.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        f"from transformers import PretrainedConfig, PreTrainedTokenizerFast\n"
        f"class Config(PretrainedConfig):\n    model_type = 'payload'\n"
        f"class Tokens(PreTrainedTokenizerFast):\n    pass\n"
    )
    auto_map = {
        "AutoConfig": f"payload_{tmp_path.name}.Config",
        "AutoTokenizer": [None, f"payload_{tmp_path.name}.Tokens"],
    }
    settings = {"model_type": "payload", "tokenizer_class": "Tokens", "auto_map": auto_map}
    (folder / file).write_text(json.dumps(settings))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda text="": questions.append(text) or answer)
    if file == "config.json":
        message = rejection(read_config, folder)
    else:
        message = rejection(load_tokenizer, folder, f"--tokenizer {folder}")
    assert not ran.exists() and questions == []
    assert re.search("without (code of its own|custom code)", message) and "\n" not in message


def test_no_call_lets_transformers_ask_whether_to_run_code() -> None:
    calls = [
        (path, call[0])
        for folder in ("models", "recipes", "threefold", "benchmarks", "slurm")
        for path in sorted((REPOSITORY / folder).rglob("*.py"))
        for call in re.finditer(
            r"Auto\w+\.from_pretrained\([^()]*(\([^()]*\)[^()]*)*\)", path.read_text()
        )
        if call[0].partition("(")[2] != '".")'  # in the model card of an export
    ]
    assert len(calls) >= 4
    assert [call for call in calls if "trust_remote_code=False" not in call[1]] == []


@pytest.mark.parametrize(
    ("key", "value"), [("num_attention_heads", 0), ("hidden_size", "big"), ("vocab_size", -1)]
)
def test_a_config_of_transformers(key: str, value: Any, tmp_path: Path) -> None:
    AutoConfig.for_model("llama").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    message = rejection(read_config, tmp_path)
    assert message.startswith(f"{file}: ") and re.search(f"{key}|vocab_size|heads|zero", message)
