"""Read configurations of other programs: YAML, TOML, JSON, argument lists and shell scripts.

A shell script is interpreted, never executed: variables, arrays, arithmetic, simple conditions and
here-documents are evaluated, commands are not. The result of every reader is a flat table from key
to value, such as "optimizer.params.lr" or "num-layers".
"""

import ast
import json
import operator
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from models.errors import UserError, reason_of
from threefold.config.json_repair import repair_json

MAX_BYTES = 2**20  # of one file; the longest published script has 30 KB
MARKER = "--num-layers"  # the option that every Megatron command has


def scalar(value: Any) -> Any:
    """Return the number, flag or None that a text holds; any other value as it is.

    YAML 1.1 reads 6e-5 as a text, and every value of a script is one.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if (word := text.lower()) in ("true", "false", "none", "null", ""):
        return {"true": True, "false": False}.get(word)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return value


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("section.key", value) for everything in nested tables; lists stay whole."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", scalar(value)


@dataclass
class Foreign:
    """The content of one or several files of one program.

    Attributes:
        program: "neox", "megatron", "nanotron", "torchtitan" or "transformers"
        values: key -> value; of Megatron without the hyphens in front
        deepspeed: content of the DeepSpeed JSON that a script writes, flat
        ranks: number of processes that the launcher starts, if the files say so
        notes: lines of a script that were not evaluated
        lost: parts of the training command that are not known, with options that may be in them
    """

    program: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    ranks: int | None = None
    notes: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def read_foreign(paths: list[Path]) -> Foreign:
    """Return the content of the files, of which later ones override earlier ones.

    Raises:
        UserError: a file cannot be read, belongs to no known program, or the files belong to
            several programs.
    """
    foreign, shell, has_script = Foreign(), Shell(), False
    for path in paths:
        text = _text(path)
        program, values = _parse(path, text, foreign.notes)
        if foreign.program not in ("", program):
            raise UserError(
                f"{path} is a configuration of {program} and {paths[0]} one of {foreign.program}; "
                f"translate them one after the other"
            )
        foreign.program = program
        if values is None:
            has_script = True
            shell.run(text)
        else:
            foreign.values |= values
    if has_script:
        _read_command(shell, foreign, paths)
    return foreign


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise UserError(f"{path} has more than {MAX_BYTES:,} bytes; name a configuration")
        return path.read_text(encoding="utf-8-sig")
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; name the files in it") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; name a configuration") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {reason_of(error)}; name a text file") from None


def _parse(path: Path, text: str, notes: list[str]) -> tuple[str, dict[str, Any] | None]:
    """Return the program of a file and its values; None for a script, which is run later.

    notes: receives the keys that a file has twice
    """
    if path.suffix == ".py":
        raise UserError(
            f"{path}: configurations in Python are not translated, because they would have to be "
            f"executed; use one of torchtitan's TOML files (before 2026-04), or write the values "
            f"into one"
        )
    try:
        if path.suffix == ".toml":
            values = dict(flat(tomllib.loads(text)))
            if not {"model.name", "model.flavor"} & values.keys():
                raise UserError(
                    f"{path} has neither model.name nor model.flavor, so it is not a "
                    f"configuration of torchtitan; use a file such as its llama3_8b.toml"
                )
            return "torchtitan", values
        if path.suffix == ".json":
            return "transformers", _table(path, json.loads(text))
        if path.suffix in (".yml", ".yaml"):
            notes += _given_twice(yaml.compose(text, yaml.SafeLoader))
            return _of_yaml(_table(path, yaml.safe_load(text)))
    except UserError:
        raise
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path} is not valid: {reason_of(error)}; correct the file") from None
    return "megatron", None


def _given_twice(node: yaml.Node | None) -> Iterator[str]:
    """Yield a note about each key that a mapping has twice, of which the last one counts."""
    for child in node.value if isinstance(node, yaml.CollectionNode) else []:
        for inner in child if isinstance(child, tuple) else (child,):
            yield from _given_twice(inner)
    if isinstance(node, yaml.MappingNode):
        keys = [str(key.value) for key, _ in node.value]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        yield from (f"{key} is given twice; the last one counts" for key in twice)


def _table(path: Path, content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise UserError(f"{path} has no keys at its top level; name a configuration")
    return {str(key): value for key, value in content.items()}


def _of_yaml(table: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Tell nanotron's files, Megatron's test configurations and GPT-NeoX's files apart."""
    if isinstance(arguments := table.get("MODEL_ARGS"), dict):
        values = {option(key): scalar(value) for key, value in arguments.items()}
        return "megatron", {key: value for key, value in values.items() if value is not False}
    if isinstance(model := table.get("model"), dict) and "model_config" in model:
        return "nanotron", dict(flat(table))
    values = {key.replace("-", "_"): value for key, value in table.items()}
    return "neox", dict(flat(values))


def option(name: str) -> str:
    """Return the key of a command line's option: --adam_beta1 is "adam-beta1"."""
    return name.lstrip("-").replace("_", "-")


# The part of a shell's language that training scripts use.

NAME = r"[A-Za-z_]\w*"
ASSIGNMENT = re.compile(
    rf"(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)*)?({NAME})(\+?)=(.*)", re.S
)
HERE_DOCUMENT = re.compile(rf"<<-?\s*(['\"]?)({NAME})\1(?:\s*>+\s*(\S+))?")
EXPANSION = re.compile(
    rf"(?<!\\)(?:\$\(\((?P<sum>.*?)\)\)|\$\((?P<command>[^()]*(?:\([^()]*\)[^()]*)*)\)"
    rf"|`(?P<old>[^`]*)`|\$\{{(?P<name>{NAME}|\d)(?:\[[@*]\])?(?::?[-=](?P<default>[^}}]*))?\}}"
    rf"|\$(?P<plain>{NAME}|\d))",
    re.S,
)
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq, "==": operator.eq, "!=": operator.ne, "-eq": operator.eq,
    "-ne": operator.ne, "-gt": operator.gt, "-ge": operator.ge, "-lt": operator.lt,
    "-le": operator.le,
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip


class Shell:
    """The variables, commands and here-documents of scripts.

    Attributes:
        variables: name -> text; the elements of an array are separated by spaces
        statements: commands with their variables expanded
        documents: file -> text of a here-document
        notes: conditions that were not evaluated, whose branches are left out
    """

    def __init__(self) -> None:
        self.variables: dict[str, str] = {}
        self.statements: list[str] = []
        self.documents: dict[str, str] = {}
        self.notes: list[str] = []

    def run(self, text: str) -> None:
        """Interpret a script."""
        if nodes := re.search(r"^#SBATCH\s+(?:--nodes|-N)[= ](\d+)", text, re.M):
            self.variables |= dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), nodes[1])
        branches: list[tuple[bool, bool]] = []  # of each open `if`: (a branch was taken, is taken)
        loops = 0
        for statement in _statements(self._without_documents(text)):
            word, _, rest = statement.partition(" ")
            if word in ("for", "while", "until", "case", "select"):
                loops += 1
                self.notes.append(f"not evaluated: {statement.splitlines()[0]}")
            elif word in ("done", "esac"):
                loops -= 1
            elif loops > 0:
                continue
            elif word == "if":
                holds = self._holds(rest) if all(taken for _, taken in branches) else False
                branches.append((holds, holds))
            elif word == "elif" and branches:
                holds = not branches[-1][0] and self._holds(rest)
                branches[-1] = (branches[-1][0] or holds, holds)
            elif word == "else" and branches:
                branches[-1] = (True, not branches[-1][0])
                if rest:
                    self._execute(rest, branches)
            elif word == "fi" and branches:
                branches.pop()
            elif word == "then":
                self._execute(rest, branches)
            else:
                self._execute(statement, branches)

    def _without_documents(self, text: str) -> str:
        """Return the script without its here-documents, which are kept for `documents`."""
        lines, kept = iter(text.splitlines()), []
        for line in lines:
            kept.append(line)
            if (start := HERE_DOCUMENT.search(line)) and not line.lstrip().startswith("#"):
                body = []
                for inner in lines:
                    if inner.strip() == start[2]:
                        break
                    body.append(inner)
                target = (
                    start[3] or (re.search(r">+\s*(\S+)", line[: start.start()]) or ["", ""])[1]
                )
                kept[-1] = f"HERE_DOCUMENT {len(self.documents)} {target}"
                self.documents[str(len(self.documents))] = "\n".join(body)
        return "\n".join(kept)

    def _execute(self, statement: str, branches: list[tuple[bool, bool]]) -> None:
        if not statement.strip() or not all(taken for _, taken in branches):
            return
        if statement.startswith("HERE_DOCUMENT "):
            _, number, target = f"{statement} ".split(" ", 2)
            name = self.expand(target).strip("\"' ")
            self.documents[name] = self.expand(self.documents[number])
        elif match := ASSIGNMENT.fullmatch(statement.strip()):
            name, plus, value = match[1], match[2], match[3].strip()
            if value.startswith("("):
                value = self.expand(value[1:].removesuffix(")"))
            elif value.startswith("'") and value.endswith("'"):
                value = value[1:-1]
            else:
                value = self.expand(re.sub(r'(?<!\\)"', "", value)).replace('\\"', '"')
            separator = " " if match[3].startswith("(") else ""
            former = self.variables.get(name, "") + separator if plus else ""
            self.variables[name] = former + value
        else:
            expanded = self.expand(statement)
            if statement.split()[0] in ("source", ".", "eval") and MARKER not in expanded:
                self.notes.append(f"not evaluated: {statement.splitlines()[0]}")
            self.statements.append(expanded)

    def expand(self, text: str, *, unset: str = "<{}>") -> str:
        """Replace variables, sums and commands; what is not known becomes `unset`."""

        def value(match: re.Match[str]) -> str:
            if match["sum"] is not None:
                return str(self._sum(match["sum"]) or unset.format("sum"))
            if (command := match["command"] or match["old"]) is not None:
                return unset.format(command.split()[0] if command.split() else "command")
            name = match["name"] or match["plain"]
            known = self.variables.get(name)
            if match["default"] is not None and not known:
                return self.expand(match["default"].strip("\"'"), unset=unset)
            return unset.format(name) if known is None else known

        return EXPANSION.sub(value, text).replace("\\$", "$")

    def _sum(self, text: str) -> int | None:
        """Return the value of an arithmetic expression of whole numbers."""
        names = {**self.variables}
        text = EXPANSION.sub(lambda match: names.get(match["name"] or match["plain"], "x"), text)
        text = re.sub(NAME, lambda match: names.get(match[0], match[0]), text)

        def evaluate(node: ast.expr) -> int:
            if isinstance(node, ast.Constant) and isinstance(node.value, int):
                return node.value
            if isinstance(node, ast.BinOp) and (kind := ARITHMETIC.get(type(node.op))):
                return kind(evaluate(node.left), evaluate(node.right))
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
                return -evaluate(node.operand)
            raise ValueError

        try:
            return evaluate(ast.parse(text.strip().replace("/", "//"), mode="eval").body)
        except (ValueError, SyntaxError, ZeroDivisionError):
            return None

    def _holds(self, condition: str) -> bool:
        """Return whether a condition holds; one that cannot be evaluated does not."""
        text = condition.removesuffix("then").strip().rstrip(";").strip()
        for separator, combine in (("||", any), ("&&", all)):
            if separator in text:
                return combine([self._holds(part) for part in text.split(separator)])
        try:
            words = shlex.split(self.expand(text, unset=""))
        except ValueError:
            words = []
        if len(words) < 3 or words[0] not in ("[", "[["):
            self.notes.append(f"not evaluated, taken as false: if {text}")
            return False
        words = words[1:-1]
        if negated := words[0] == "!":
            words = words[1:]
        match words:
            case ["-n", value]:
                holds = bool(value)
            case ["-z", *value]:
                holds = not any(value)
            case ["-n"] | [("-f" | "-d" | "-e" | "-s"), _]:
                holds = False
            case [left, compare, right] if compare in COMPARISONS:
                first, second = left, right
                if compare.startswith("-"):
                    first, second = scalar(left), scalar(right)
                try:
                    holds = COMPARISONS[compare](first, second)
                except TypeError:
                    holds = False
            case [compare, _] if compare in COMPARISONS:  # the left side is empty
                holds = compare == "!="
            case _:
                self.notes.append(f"not evaluated, taken as false: if {text}")
                return False
        return holds is not negated


def _statements(text: str) -> Iterator[str]:
    """Yield the statements of a script, without comments; a quoted text or array is one piece."""
    statement, quote, depth, position = "", "", 0, 0
    while position < len(text):
        character = text[position]
        if character == "\\" and quote != "'":
            continuation = re.compile(r"\\[ \t]*\n").match(text, position)
            statement += " " if continuation else text[position : position + 2]
            position = continuation.end() if continuation else position + 2
            continue
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'`":
            quote = character
        elif character == "#" and (not statement or statement[-1].isspace()):
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
            continue
        elif character in "(":
            depth += 1
        elif character == ")":
            depth = max(0, depth - 1)
        elif character in "\n;" and depth == 0:
            if statement.strip():
                yield statement.strip()
            statement = ""
            position += 1
            continue
        statement += character
        position += 1
    if statement.strip():
        yield statement.strip()


# The arguments of a Megatron command.

END_OF_COMMAND = re.compile(r"\||\d*&?>{1,2}&?\d?|&>{1,2}.*|2>&1|&|&&")
HIDDEN = re.compile(r"(<\w+>)+")  # variables and commands that are not known
FLAG = re.compile(  # options without a value, after which a hidden word holds further options
    r"(no|use|disable|enable|overlap|untie|log|moe-use)-.*|bf16|fp16|swiglu|squared-relu|qk-layernorm"
    r"|sequence-parallel|deepspeed|finetune|(group-query|flash)-attention|add-qkv-bias"
)
LISTS = {"data-path", "train-data-path", "valid-data-path", "test-data-path"}  # weights and paths
PROCESSES = ("nproc-per-node", "nnodes")


def _words(text: str) -> list[str]:
    """Return the words of a command; an argument that holds several options is split again."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = text.split()
    return [
        part
        for word in words
        for part in (_words(word) if " " in word and re.search(r"(^|\s)--\w", word) else [word])
    ]


def _read_command(shell: Shell, foreign: Foreign, paths: list[Path]) -> None:
    """Add the arguments of the training command in a script."""
    commands = [text for text in shell.statements if MARKER in text]
    # A file that only assigns the options, which another script sources.
    texts = commands or [text for text in shell.variables.values() if MARKER in text]
    if not texts:
        raise UserError(
            f"{', '.join(map(str, paths))}: no command or variable has {MARKER}; name a script or "
            f"an argument list of Megatron-LM or Megatron-DeepSpeed"
        )
    words = _words(texts[-1] if commands else max(texts, key=len))
    start = max((n + 1 for n, word in enumerate(words) if word.endswith(".py")), default=0)
    arguments = []
    for word in words[start:]:
        if END_OF_COMMAND.fullmatch(word):
            break
        arguments.append(word)
    arguments, lost = _known(arguments)
    foreign.lost += lost
    if len(commands) > 1:
        foreign.notes.append(f"{len(commands)} training commands; the last one counts")
    launcher = _options(_known(words[:start])[0]) if start else {}
    counts = [scalar(launcher.get(key)) for key in PROCESSES]
    if all(isinstance(count, int) for count in counts):
        foreign.ranks = counts[0] * counts[1]
    foreign.values |= _options(arguments)
    if start:
        foreign.values["script"] = words[start - 1].rpartition("/")[2]
    foreign.notes += shell.notes
    config = str(foreign.values.get("deepspeed-config", ""))
    if config and config in shell.documents:
        foreign.deepspeed = dict(flat(json.loads(repair_json(shell.documents[config])[1])))


def _known(words: list[str]) -> tuple[list[str], list[str]]:
    """Divide a command into the known words, and a line about each word that may hold options."""
    known: list[str] = []
    lost: list[str] = []
    name, values = "", 0
    for word in words:
        follows_weight = name in LISTS and known and isinstance(scalar(known[-1]), int | float)
        follows_value = not name or FLAG.fullmatch(name) or (values and not follows_weight)
        if word.startswith("$") or (HIDDEN.fullmatch(word) and follows_value):
            lost.append(f"not evaluated: {word} in the training command, which may hold options")
            continue
        key, equals, _ = word.partition("=")
        if word.startswith("--"):
            name, values = option(key), int(bool(equals))
        else:
            values += 1
        known.append(word)
    return known, lost


def _options(words: list[str]) -> dict[str, Any]:
    """Return the options of a command: a flag is True, several values are a list of texts."""
    options: dict[str, Any] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            values = [value] if equals else []
            options[option(name)] = values
        else:
            values.append(word)
    return {
        key: True if not given else scalar(given[0]) if len(given) == 1 else given
        for key, given in options.items()
    }
