"""A user's mistake is a UserError and ends with a message; a defect keeps class and traceback."""

import ast
import functools
import importlib
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tomli_w
from transformers import AutoConfig

from models.errors import UserError, reason_of
from recipes import pretrain
from tests.conftest import changed, small_recipe
from tests.ranks import start_ranks
from threefold.commands import launch, report
from threefold.config import optimization
from threefold.config.loading import REPOSITORY, parse_recipe
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.config.recipe import Recipe
from threefold.pretrain import experiment
from threefold.prove import layouts

COMMANDS = (
    *("pretrain", "plan", "prove", "prepare_data", "convert", "generate", "sweep", "launch"),
    "report",
)
BROAD = {"ValueError", "AssertionError", "Exception", "BaseException"}
# Classes of Python whose text is not meant for users.
PYTHONS = BROAD | {"OSError", "KeyError", "TypeError", "AttributeError", "IndexError",
                   "RecursionError", "UnicodeDecodeError"}  # fmt: skip
INVARIANTS = {  # function that raises a plain ValueError -> why no user can cause it
    "threefold/pipeline/simulation.py: simulate": "no order of passes is made by users",
    "threefold/convert/foreign_files.py: Shell._sum.evaluate": "the caller catches it",
    "threefold/prove/ranks.py: run_cases": "prove.py only makes layouts of at most --ranks",
}
FOREIGN = "the line calls a library, which raises many classes for data that it cannot read"
PARSING = "the block parses text of a file or an option, and nothing else"
CONTINUES = "what fails is reported, and the run continues without it"
RAISES = "the exception is raised again, or ends the process with its traceback"
CATCHES = {  # function that catches one of BROAD -> why no defect becomes a user's mistake there
    "models/experts/overlap.py: Turns._run_one": RAISES,
    "threefold/convert/from_hugging_face.py: special_tokens_in": PARSING,
    "threefold/convert/foreign_checkpoint.py: load": FOREIGN,
    "threefold/convert/foreign_checkpoint.py: read_distributed": PARSING,
    "threefold/convert/foreign_checkpoint.py: DistributedFiles._piece": FOREIGN,
    "threefold/convert/foreign_files.py: scalar": PARSING,
    "threefold/convert/foreign_files.py: _parse": PARSING,
    "threefold/convert/foreign_files.py: _words": PARSING,
    "threefold/convert/foreign_files.py: Shell._holds": PARSING,
    "threefold/convert/foreign_files.py: Shell._sum": PARSING,
    "threefold/convert/foreign_programs.py: _transformers": FOREIGN,
    "threefold/convert/from_hugging_face.py: TheirFiles._names": PARSING,
    "threefold/convert/from_hugging_face.py: read_config": FOREIGN,
    "threefold/convert/text_generation.py: _load": FOREIGN,
    "threefold/convert/to_hugging_face.py: their_config": FOREIGN,
    "threefold/gpus/datasheet.py: _read_toml": PARSING,
    "threefold/prepare_data/corpus.py: find_damages": PARSING,
    "threefold/prepare_data/tasks.py: items_of_samples": PARSING,
    "threefold/prepare_data/corpus.py: read_pieces": PARSING,
    "threefold/prepare_data/documents.py: json_document": PARSING,
    "threefold/prepare_data/formats.py: JsonArray.rows": PARSING,
    "threefold/prepare_data/tables.py: from_library": FOREIGN,
    "threefold/prepare_data/source.py: open_dataset": FOREIGN,
    "threefold/prepare_data/source.py: open_file": FOREIGN,
    "threefold/prepare_data/tokenization.py: Tokenization._write": FOREIGN,
    "threefold/prepare_data/tokenization.py: read_report": PARSING,
    "threefold/prepare_data/tokenizer.py: _train.train": RAISES,
    "threefold/prepare_data/tokenizer.py: load_tokenizer": FOREIGN,
    "threefold/prepare_data/tokenizer.py: save_tokenizer": RAISES,
    "threefold/prepare_data/workspace.py: lock_workspace": RAISES,
    "threefold/runtime/command_line.py: number": PARSING,
    "threefold/launch/connection.py: _parse": PARSING,
    "threefold/launch/gpu_watch.py: GpuWatch._end": PARSING,
    "threefold/launch/node_agent.py: NodeAgent.read_commands": PARSING,
    "threefold/pretrain/out_of_memory.py: report": "a lack of memory is reported anyway",
    "threefold/pretrain/out_of_memory.py: out_of_memory_explained": "raises others again",
    "recipes/pretrain.py: main": RAISES,
    "threefold/report/page.py: _time": PARSING,
    "threefold/report/run_record.py: _read_recipe": PARSING,
    "threefold/sweep/choice.py: values_of_setting": PARSING,
    "threefold/sweep/folder.py: read_json": PARSING,
    "threefold/sweep/report.py: publish": "the message shows the error, and no result is lost",
    "threefold/sweep/ranks/protocol.py: read_message": PARSING,
    "threefold/sweep/ranks/rank.py: run_rank": "a trial that fails is a result of the sweep",
    "threefold/sweep/ranks/controller.py: Workers.start": RAISES,
    "threefold/pretrain/setup.py: raise_on_all_ranks": RAISES,
    "threefold/prove/ranks.py: _run_cases": "a layout that fails is a finding of the proof",
    "threefold/runtime/ranks.py: ForkedRanks.__init__": RAISES,
    "threefold/checkpoint/writer.py: CheckpointWriter._begin.work": RAISES,
    "threefold/data/corpus.py: _check_manifest": PARSING,
    "threefold/data/tasks.py: TaskTokenizer.__init__": FOREIGN,
    "threefold/data/tasks.py: _item": PARSING,
    "threefold/data/corpus.py: token_bytes": PARSING,
    "threefold/config/deepspeed_json.py: _parse": PARSING,
    "threefold/data/tasks.py: _read_settings": PARSING,
    "threefold/checkpoint/snapshots/node_memory.py: Client.listing": PARSING,
    "threefold/checkpoint/snapshots/node_memory.py: NodeMemory.servers": PARSING,
    "threefold/supervision/supervisor.py: within.run": CONTINUES,
    "threefold/run_folder/lock.py: _parse": PARSING,
    "threefold/run_folder/json_lines.py: LineFile._parse": PARSING,
    "threefold/checkpoint/format.py: Manifest.parse": PARSING,
    "threefold/config/loading.py: _read_toml": PARSING,
    "threefold/convert/to_hugging_face.py: recorded_files": PARSING,
    "threefold/config/loading.py: apply_override": PARSING,
    "threefold/supervision/supervisor.py: Background._work": CONTINUES,
    "threefold/supervision/supervisor.py: Supervisor._end": CONTINUES,
    "threefold/supervision/supervisor.py: Supervisor._watch": CONTINUES,
    "threefold/data/manifest.py: read_manifest": PARSING,
    "threefold/tracking/weights_and_biases.py: WandbThread._work": CONTINUES,
    "threefold/tracking/wandb_connection.py: check_variables": PARSING,
    "threefold/tracking/wandb_connection.py: WandbStatus.read": PARSING,
    "threefold/tracking/tracker.py: open_tracker": RAISES,
    "threefold/sweep/report.py: publish_trial": CONTINUES,
}


@functools.cache
def sources() -> list[tuple[str, ast.Module]]:
    """Return the path and the syntax tree of every module that handles or raises errors."""
    folders = (REPOSITORY / folder for folder in ("models", "recipes", "threefold", "slurm"))
    paths = (path for folder in folders for path in sorted(folder.rglob("*.py")))
    texts = {str(path.relative_to(REPOSITORY)): path.read_text() for path in paths}
    return [
        (path, ast.parse(text))
        for path, text in texts.items()
        if "except" in text or "ValueError" in text
    ]


@functools.cache
def functions(tree: ast.Module) -> list[tuple[str, ast.AST]]:
    """Return every statement and handler with the qualified name of its innermost function."""
    waiting: list[tuple[str, ast.AST]] = [("", tree)]
    nodes = []
    while waiting:
        name, node = waiting.pop()
        nodes.append((name, node))
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
                continue  # most nodes are expressions
            is_scope = isinstance(child, ast.FunctionDef | ast.ClassDef)
            waiting.append((f"{name}.{child.name}".lstrip(".") if is_scope else name, child))
    return nodes


def caught(handler: ast.ExceptHandler, tree: ast.Module) -> set[str]:
    """Return the names of the classes that a handler catches, with module constants resolved."""
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if handler.type is None:
        return {"BaseException"}
    found = constants.get(handler.type.id) if isinstance(handler.type, ast.Name) else None
    return {
        node.id if isinstance(node, ast.Name) else node.attr
        for node in ast.walk(found or handler.type)
        if isinstance(node, ast.Name | ast.Attribute)
    }


def raising(tree: ast.Module) -> set[str]:
    """Return the functions that raise a plain ValueError."""
    return {
        name
        for name, node in functions(tree)
        if isinstance(node, ast.Raise) and node.exc is not None
        for raised in [node.exc.func if isinstance(node.exc, ast.Call) else node.exc]
        if isinstance(raised, ast.Name) and raised.id == "ValueError"
    }


def catching(tree: ast.Module) -> set[str]:
    """Return the functions that catch one of BROAD."""
    return {
        name
        for name, node in functions(tree)
        if isinstance(node, ast.ExceptHandler) and caught(node, tree) & BROAD
    }


def test_plain_value_errors_are_raised_for_invariants_only() -> None:
    found = {f"{path}: {name}" for path, tree in sources() for name in raising(tree)}
    assert found == set(INVARIANTS)


def test_broad_classes_are_caught_only_where_no_defect_becomes_a_users_mistake() -> None:
    found = {f"{path}: {name}" for path, tree in sources() for name in catching(tree)}
    assert found == set(CATCHES)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_catches_user_errors_in_its_main_function(command: str) -> None:
    folder = "recipes" if command == "pretrain" else "threefold/commands"
    tree = ast.parse((REPOSITORY / folder / f"{command}.py").read_text())
    found = [
        caught(node, tree)
        for name, node in functions(tree)
        if name == "main" and isinstance(node, ast.ExceptHandler)
    ]
    assert {"UserError"} in found


def parser_of(name: str) -> Callable[[], object]:
    """Return the function that parses the options of a command."""
    if name == "pretrain":
        return functools.partial(experiment.parse_command_line, None)
    return functools.partial(importlib.import_module(f"threefold.commands.{name}").main, "")


@pytest.mark.parametrize(
    "command",
    [
        *("pretrain --run-dir", "pretrain --resume", "launch --run-dir", "sweep --sweep-dir"),
        *("sweep lr --sweep-dir", "convert to-hf run", "convert average run --output"),
        *("prepare_data --tokenizer", "prepare_data --source", "prepare_data --validation-split"),
        *("prepare_data show --run-dir", "generate", "report", "plan --write"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *words = command.split()
    parse = parser_of(name)
    monkeypatch.setattr("sys.argv", [f"{name}.py", *words, ""])
    with pytest.raises(SystemExit, match="2"):
        parse()
    assert "the value is empty, perhaps because" in capsys.readouterr().err


def test_every_option_that_names_a_file_rejects_an_empty_text() -> None:
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "type":
                assert ast.unparse(node.value) != "Path", f"{path}: use type=file_path"


@pytest.mark.parametrize(
    "command",
    ["plan", "prove", "sweep", "launch", "prepare_data show", "convert reshape", "pretrain"],
)
def test_spaces_around_the_value_of_set_are_explained(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *words = command.split()
    parse = parser_of(name)
    said = "argument --set: {} has no value; write --set seed=VALUE without spaces, or quote"
    for override in (["seed", "=", "20"], ["seed=", "20"]):
        monkeypatch.setattr("sys.argv", [f"{name}.py", *words, "--set", *override])
        with pytest.raises(SystemExit, match="2"):
            parse()
        assert said.format(override[0]) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "option", "durations"),
    [
        (experiment, "--wait-for-folder", ("-1", "nan", "inf", "long")),
        (launch, "--wait-for-folder", ("-1", "nan", "inf", "long")),
        (report, "--every", ("0", "-1", "nan", "inf", "long")),
    ],
)
def test_a_duration_is_a_finite_time(
    module: ModuleType,
    option: str,
    durations: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for duration in durations:
        monkeypatch.setattr("sys.argv", ["command.py", "x", option, duration])
        with pytest.raises(SystemExit, match="2"):
            module.parse_command_line(None)
        said = f"argument {option}: invalid duration {duration}: expected"
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "handler",
    ["except ValueError:", "except (OSError, ValueError):", "except Exception as e:", "except:",
     "except KNOWN:", "except builtins.ValueError:"],
)  # fmt: skip
def test_a_broad_handler_is_seen(handler: str) -> None:
    body = f"try:\n        g()\n    {handler}\n        h()"
    source = f"KNOWN = (OSError, ValueError)\ndef f():\n    {body}"
    assert catching(ast.parse(source)) == {"f"}
    source = "class A:\n    def f(self):\n        raise ValueError('x')"
    assert raising(ast.parse(source)) == {"A.f"}


def test_broad_handlers_that_raise_user_errors_wrap_one_statement() -> None:
    for path, tree in sources():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Try | ast.TryStar):
                continue
            for handler in node.handlers:
                blames = any(isinstance(each, ast.Raise) and "UserError" in ast.dump(each)
                             for each in ast.walk(handler))  # fmt: skip
                if blames and caught(handler, tree) & {"Exception", "BaseException"}:
                    assert len(node.body) == 1, f"{path}, line {node.lineno}"


def test_messages_do_not_show_the_text_of_pythons_exceptions() -> None:
    """Such a text is for programmers, for example KeyError('files'); `reason_of` has words."""
    found = [
        f"{path}, line {shown.lineno}: {handler.name}"
        for path, tree in sources()
        for handler in ast.walk(tree)
        if isinstance(handler, ast.ExceptHandler) and caught(handler, tree) & PYTHONS
        for raised in ast.walk(handler)
        if isinstance(raised, ast.Raise) and "UserError" in ast.dump(raised)
        for shown in ast.walk(raised)
        if isinstance(shown, ast.FormattedValue)
        and isinstance(shown.value, ast.Name)
        and shown.value.id == handler.name
    ]
    assert found == []


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda: json.loads(""), "it is empty"),
        (lambda: json.loads('{"step": 4, "files'), "column 13: this string has no end"),
        (lambda: json.loads('{"step": 4'), "it ends too early"),
        (lambda: json.loads('{"a": 1}\n{"b": 2}'), "line 2, column 1: Extra data"),
        (lambda: json.loads("x"), "column 1: Expecting value"),
        (lambda: json.loads(b'{"a": "\xff"}'), "byte 7 is 0xff, not UTF-8"),
        (lambda: json.loads("[" * 100_000), "its values are nested too deeply"),
        (lambda: json.loads("1" * 4301), "a number has more than 4,300 digits"),
        (lambda: json.loads("{}")["files"], 'it has no "files"'),
        (lambda: {}["no key `a` in b"], "no key `a` in b"),
        (
            lambda: AutoConfig.for_model("llama", vocab_size=""),
            "Field 'vocab_size' expected int, got str (value: '')",
        ),
        (lambda: json.loads("5")["files"], "a value has another type than expected"),
        (lambda: json.loads("[]").get("files"), "a value has another type than expected"),
        (Path("/no/such").read_bytes, "No such file or directory: /no/such"),
    ],
)
def test_a_reason_is_in_words(read: Callable[[], object], words: str) -> None:
    with pytest.raises(Exception) as raised:
        read()
    assert reason_of(raised.value) == words


# A ValueError of a library, as a defect of ours makes numpy raise it.
DEFECT = "import numpy\ndef defect(*_, **__):\n    numpy.zeros(2).reshape(3)\n"
SCRIPTS = {  # command -> the defect's place, as a user's own line of Python would patch it
    "plan": "from threefold.commands import plan as command\ncommand.search = defect",
    "prove": "from threefold.commands import prove as command\n"
    "from threefold.prove import layouts\n"
    "layouts.build_deepspeed_config = defect",
    "prepare_data": "from threefold.commands import prepare_data as command\n"
    "from threefold.prepare_data import formats\nformats.document = defect",
    "convert": "from threefold.commands import convert as command\n"
    "from threefold.convert import from_hugging_face\n"
    "from_hugging_face.imported_model = defect",
    "pretrain": "from recipes import pretrain as command\n"
    "from threefold.data import dataset\ndataset.TrainingData._micro_batch = defect",
}


@pytest.fixture
def recipe_file(corpus: Path, tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(tomli_w.dumps(small_recipe(corpus)))
    return file


@pytest.mark.parametrize("place", SCRIPTS)
def test_a_defect_ends_a_command_with_a_traceback_and_exit_code_1(
    place: str, recipe_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("some text\nmore text\n")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    arguments = {
        "plan": [],
        "prove": ["--ranks", "1"],
        "prepare_data": ["--source", tmp_path / "text.txt", "--output", tmp_path / "out"],
        "convert": ["from-hf", tmp_path, tmp_path.with_name("converted")],
        "pretrain": [recipe_file, "--run-dir", tmp_path / "run"],
    }[place]
    script = f"{DEFECT}\n{SCRIPTS[place]}\ncommand.main()"
    codes, outputs = start_ranks(
        1, ["-c", script, *map(str, arguments)], folder=tmp_path, seconds=120
    )
    assert codes == [1], outputs[0]
    assert "Traceback" in outputs[0] and "in defect" in outputs[0]
    assert "ValueError: cannot reshape array of size 2 into shape (3,)" in outputs[0]


def defect(*_: object, **__: object) -> None:
    np.zeros(2).reshape(3)


def mistake(*_: object, **__: object) -> None:
    raise UserError("wandb/run_id is damaged")


def test_a_users_mistake_that_a_run_finds_late_is_a_message_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(pretrain, "exit_now", codes.append)
    monkeypatch.setattr(pretrain, "use_nonblocking_output", lambda: None)
    monkeypatch.setattr(pretrain, "pretrain", mistake)
    pretrain.main()
    assert capsys.readouterr().err == "pretrain.py: wandb/run_id is damaged\n"
    monkeypatch.setattr(pretrain, "pretrain", defect)
    pretrain.main()
    assert "Traceback" in capsys.readouterr().err and codes == [2, 1]


def test_a_defect_of_a_validator_is_not_a_rejected_recipe(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = changed(small_recipe(corpus), batch__micro_sequences=3)
    monkeypatch.setattr(optimization, "nearest_multiples", defect)
    with pytest.raises(ValueError, match="cannot reshape") as raised:
        parse_recipe(table, "small")
    assert raised.type is ValueError
    assert "defect" in [entry.name for entry in raised.traceback]


def failing_assertion(*_: object, **__: object) -> None:
    assert not _, "an invariant"


def test_a_failed_assertion_of_a_validator_is_not_a_rejected_recipe(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = changed(small_recipe(corpus), batch__micro_sequences=3)
    monkeypatch.setattr(optimization, "nearest_multiples", failing_assertion)
    with pytest.raises(AssertionError, match="an invariant"):
        parse_recipe(table, "small")


def test_a_defect_drops_no_layout_from_a_proof(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = parse_recipe(small_recipe(corpus), "small")
    every = layouts.valid_cases(recipe, ranks=2, micro_sequences=[1])
    healthy = layouts.build_deepspeed_config

    def refusing(variant: Recipe, dims: object, kind: type = UserError) -> object:
        if variant.layout.tensor == 2:
            raise kind("a layout of tensor = 2")
        return healthy(variant, dims)

    monkeypatch.setattr(layouts, "build_deepspeed_config", refusing)
    fewer = layouts.valid_cases(recipe, ranks=2, micro_sequences=[1])
    assert fewer == [each for each in every if each.dims.tensor == 1] != every
    monkeypatch.setattr(
        layouts, "build_deepspeed_config", lambda *pair: refusing(*pair, kind=ValueError)
    )
    with pytest.raises(ValueError, match="a layout of tensor = 2") as raised:
        layouts.valid_cases(recipe, ranks=2, micro_sequences=[1])
    assert raised.type is ValueError


@pytest.mark.parametrize(
    ("world", "who"),
    [
        (LaunchEnvironment(rank=1, size=2, local_size=1), f"rank 1 ({socket.gethostname()}): "),
        (LaunchEnvironment(rank=1, size=2, local_size=2), "rank 1: "),
        (LaunchEnvironment(rank=0, size=2, local_size=1), ""),
    ],
)
def test_a_rank_on_one_of_several_hosts_names_its_host(
    world: LaunchEnvironment,
    who: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(experiment, "exit_now", sys.exit)
    monkeypatch.setattr(experiment, "SECONDS_FOR_RANK_0_TO_SPEAK", 0)
    with pytest.raises(SystemExit), experiment.exit_on_user_error(world, "x.toml"):
        raise UserError("no such corpus")
    assert capsys.readouterr().err == f"pretrain.py: {who}x.toml: no such corpus\n"


TOGETHER = """
import os, sys
from models.errors import UserError
from recipes import pretrain
from threefold.pretrain import experiment
from threefold.pretrain.setup import raise_on_all_ranks
from threefold.runtime.processes import start_processes
from threefold.config.parallel_dims import LaunchEnvironment

def main(started):
    world = LaunchEnvironment.from_environment(os.environ)
    start_processes(world)
    for kinds in {kinds}:
        with experiment.exit_on_user_error(world), raise_on_all_ranks():
            if kinds[world.rank]:
                raise kinds[world.rank]("wrong on rank %d" % world.rank)

pretrain.pretrain = main
experiment.SECONDS_FOR_RANK_0_TO_SPEAK = 1
pretrain.main()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("kinds", "code", "said"),
    [
        ("[(None, None), (None, UserError)]", 2, ("wrong on rank 1", "")),
        ("[(UserError, ValueError)]", 1, ("because rank 1 failed", "in main")),
    ],
)
def test_all_ranks_end_in_the_same_way(
    kinds: str, code: int, said: tuple[str, str], tmp_path: Path
) -> None:
    script = TOGETHER.replace("{kinds}", kinds)
    codes, outputs = start_ranks(2, ["-c", script], folder=tmp_path, seconds=120)
    assert codes == [code, code], outputs
    for output, words in zip(outputs, said, strict=True):
        assert words in output
        assert ("Traceback" in output) == (words == "in main")
        assert words or "pretrain.py" not in output  # rank 0 prints the error of all ranks


EVERY_RANK = """
import os, sys
from models.errors import UserError
from threefold.config.parallel_dims import LaunchEnvironment
from threefold.pretrain import experiment

world = LaunchEnvironment.from_environment(os.environ)
with experiment.exit_on_user_error(world, "x.toml"):
    raise UserError(sys.argv[1 + world.rank])
"""


def test_a_rank_of_each_node_prints_an_error_of_several(tmp_path: Path) -> None:
    words = ["-c", EVERY_RANK, "no corpus", "no corpus", "no corpus", "no GPU"]
    codes, outputs = start_ranks(4, words, folder=tmp_path, seconds=120)
    assert codes == [2] * 4, outputs
    assert outputs[0].endswith("pretrain.py: x.toml: no corpus\n")
    assert sorted(bool(output) for output in outputs[1:3]) == [False, True], outputs
    assert outputs[3].endswith("pretrain.py: rank 3: x.toml: no GPU\n")
