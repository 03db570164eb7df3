"""Translate the configuration of another program into a recipe, with a line for every key.

`foreign_programs.py`, `foreign_neox.py` and `foreign_megatron.py` have a table of keys and a
function for each program. The translation applies them, and reports each key as taken, derived,
without effect here, not supported or unknown. What changes the loss and cannot be expressed is
reported first, and in the recipe's header.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any

import tomli_w

from models.errors import UserError, toml_value
from threefold.config.deepspeed_json import shipped_json
from threefold.config.deepspeed_schema import SETTINGS, Review, review_settings
from threefold.config.loading import REPOSITORY, apply_overrides, parse_recipe
from threefold.config.recipe import Recipe
from threefold.convert.foreign_files import Foreign

DIVISORS = {  # keys of all programs by which sizes are divided
    "micro-batch-size", "make-vocab-size-divisible-by", "tensor-model-parallel-size",
    "pipeline-model-parallel-size", "num-attention-heads", "seq-length", "hidden_size",
    "num_attention_heads", "make_vocab_size_divisible_by", "model_parallel_size",
    "train_micro_batch_size_per_gpu", "training.local_batch_size", "training.seq_len",
    "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree",
    "parallelism.context_parallel_degree", "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.tp", "parallelism.pp",
}  # fmt: skip
# The kinds of lines of a report, in their order.
NOT_SUPPORTED, UNKNOWN, ASSUMED = "not supported", "unknown", "assumed"
DERIVED, TAKEN, DEFAULT, FREE = "derived", "taken", "default", "no effect"
ORDER = (NOT_SUPPORTED, UNKNOWN, ASSUMED, DERIVED, TAKEN, DEFAULT, FREE)
DEEPSPEED_DEFAULTS = {
    "fp16.loss_scale": 0, "fp16.initial_scale_power": 16, "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2, "fp16.min_loss_scale": 1, "fp16.consecutive_hysteresis": False,
    "prescale_gradients": False, "gradient_predivide_factor": 1.0,
}  # fmt: skip
MAX_CHARACTERS = 60  # of a value in a report

# Reasons and facts that the tables of several programs name.

LOGGING = "metrics go to metrics.jsonl and Weights & Biases; see docs/run-folder-and-metrics.md"
KERNELS = "kernels are chosen here; the result is the same"
COMMUNICATION = "communication is organised here; the result is the same"
FILES = "the run folder holds checkpoints and logs"
START = "hosts come from Slurm or a hostfile; see docs/multi-node-and-slurm.md"
READING = "corpora are read by memory map in one process; see docs/data.md"
SUPERVISION = "launch.py and [supervision] do this; see docs/fault-tolerance.md"
SUMS = "gradients are accumulated and summed in fp32"
ONE_LATER = (
    "the program uses the learning rate of n completed steps in step n + 1, so its first step has "
    "the rate 0; here step n has the rate of n"
)
SHIFT_OF_NEOX = ONE_LATER.replace("rate 0;", "rate of the first step twice;")
ALL_DECAY = "the program's weight decay includes norms and biases; here they have none"
GPT2_TOKENS, LLAMA2_TOKENS, NEOX_TOKENS = 50257, 32000, 50277  # of the tokenizers of these names


@dataclass(frozen=True)
class Line:
    """The report about one key.

    Attributes:
        key: in the source; "" for what a program does without a key
        status: one of ORDER
        text: our keys, and the reason
        changes_loss: the recipe trains something else than the source because of this key
    """

    key: str
    value: Any
    status: str
    text: str
    changes_loss: bool = False

    def __str__(self) -> str:
        value = " ".join(map(str, self.value)) if isinstance(self.value, list) else self.value
        shown = "" if value is None else f" = {value}"
        if len(shown) > MAX_CHARACTERS:
            shown = f"{shown[:MAX_CHARACTERS]}..."
        arrow = " -> " if self.key and self.text else ""
        return f"{self.status}: {self.key}{shown}{arrow}{self.text}"


@dataclass(frozen=True)
class Rule:
    """The translation of a key whose meaning does not depend on other keys.

    Attributes:
        target: our key, which takes the value; "" for none
        reason: the reason why it has no effect, or is not supported
        harmless: values with which a key that is not supported has no effect; None if it has none
            with any value
    """

    target: str = ""
    reason: str = ""
    harmless: tuple[Any, ...] | None = None


def takes(target: str) -> Rule:
    """Return the rule of a key whose value our key takes."""
    return Rule(target=target)


def free(reason: str, keys: str) -> dict[str, Rule]:
    """Return the rule of keys, separated by spaces, that have no effect on what is trained."""
    return dict.fromkeys(keys.split(), Rule(reason=reason))


def _shown(value: Any) -> Any:
    """Return a value as the source has it."""
    return " ".join(map(str, value)) if isinstance(value, list) else value


def unfit(key: str, value: Any, expected: str) -> UserError:
    """Return the error of a key of the source with an invalid value."""
    return UserError(f"{key} = {_shown(value)}: expected {expected}; correct the file")


def breaks(reason: str, *harmless: Any) -> Rule:
    """Return the rule of a key that changes the loss and is not supported.

    harmless: values with which it changes nothing, in addition to False and None
    """
    return Rule(reason=reason, harmless=(False, None, *harmless))


@dataclass(frozen=True)
class Program:
    """The configuration language of another program.

    Attributes:
        name: of the program
        table: key -> rule; "section.*" is the rule of all other keys of a section, without effect
        defaults: values of keys that a file leaves out, where they matter
        derive: sets the keys that follow from several keys, which it reads with `get`
        required: keys without which there is nothing to translate
        numbers: keys that `derive` computes with, separated by spaces
        differences: what the program always computes differently
    """

    name: str
    table: Mapping[str, Rule]
    defaults: Mapping[str, Any]
    derive: Callable[["Translation"], None]
    required: Sequence[str] = ()
    numbers: str = ""
    differences: Sequence[str] = ()


@dataclass
class Translation:
    """A recipe in the making.

    Attributes:
        ranks: number of GPUs; None if neither the files nor the user say
        recipe: table of the recipe
        deepspeed: settings of DeepSpeed, "block.key" -> value; "zero_optimization.stage" decides
            the JSON with `precision`
    """

    foreign: Foreign
    program: Program
    name: str
    ranks: int | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    precision: str = "bf16"

    def has(self, *keys: str) -> bool:
        """Return whether the files set one of the keys."""
        return any(self.foreign.values.get(key) not in (None, False) for key in keys)

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Return the value of a key, or the program's default."""
        value = self.foreign.values.get(key)
        return self.program.defaults.get(key, otherwise) if value is None else value

    def ours(self, target: str, otherwise: Any = None) -> Any:
        """Return the value of our key so far."""
        section: Any = self.recipe
        for part in target.split("."):
            section = section.get(part) if isinstance(section, dict) else None
        return otherwise if section is None else section

    def put(self, target: str, value: Any) -> None:
        """Set our key; None removes it."""
        *sections, key = target.split(".")
        table = self.recipe
        for part in sections:
            table = table.setdefault(part, {})
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value

    def derive(self, keys: str, settings: Mapping[str, Any], text: str = "") -> None:
        """Set our keys, and report the source's keys, separated by spaces, as derived."""
        for target, value in settings.items():
            self.put(target, value)
        shown = [f"{target} = {toml_value(v)}" for target, v in settings.items() if v is not None]
        about = ", ".join(shown)
        about += f" ({text})" if text and about else text
        names = keys.split()
        present = [key for key in names if key in self.foreign.values]
        for key in present:
            self.say(key, DERIVED, about)
        if not present and about:
            default = self.program.defaults.get(names[0])
            self.lines.append(Line(names[0], default, DEFAULT, about))

    def say(self, key: str, status: str, text: str, *, changes_loss: bool = False) -> None:
        """Report a key of the files; what changes the loss replaces earlier lines about it."""
        if key not in self.foreign.values and not changes_loss:
            return
        line = Line(key, self.foreign.values.get(key), status, text, changes_loss)
        if all(other.key != key or other.changes_loss for other in self.lines) or changes_loss:
            self.lines = [n for n in self.lines if not (key and n.key == key and changes_loss)]
            self.lines.append(line)

    def differs(self, key: str, text: str) -> None:
        """Report a key that changes the loss and is not supported."""
        self.say(key, NOT_SUPPORTED, text, changes_loss=True)

    def assume(self, target: str, value: Any, text: str) -> None:
        """Set our key to a value that the source does not have, unless it is set."""
        if self.ours(target) is None:
            self.put(target, value)
            self.note(ASSUMED, f"{target} = {toml_value(value)}: {text}")

    def note(self, status: str, text: str) -> None:
        """Report something that belongs to no key."""
        self.lines.append(Line("", None, status, text))

    # The steps of a translation, in their order.

    def apply_table(self) -> None:
        """Apply the rules of single keys, also to the program's defaults."""
        for key, rule in self.program.table.items():
            value, given = self.get(key), key in self.foreign.values
            if given and self.foreign.values[key] is None:
                self.say(key, FREE, "the default")
            elif rule.target and value is not None:
                self.put(rule.target, value)
                status = TAKEN if given else DEFAULT
                self.lines.append(Line(key, value, status, f"{rule.target} = {toml_value(value)}"))
            elif given and rule.harmless is not None:
                if any(value is one or value == one for one in rule.harmless):
                    self.say(key, FREE, "switched off")
                else:
                    self.differs(key, rule.reason)
            elif given and rule.reason:
                self.say(key, FREE, rule.reason)

    def report_the_rest(self) -> None:
        """Report the keys that no rule knows, and what the program always does differently."""
        known = {line.key for line in self.lines}
        for key, value in self.foreign.values.items():
            section, dot, _ = key.partition(".")
            if key in known:
                continue
            if value is None or value == []:
                self.say(key, FREE, "the default")
            elif dot and (rule := self.program.table.get(f"{section}.*")):
                self.say(key, FREE, rule.reason)
            else:
                text = "this key is not known here; it may change the loss"
                self.say(key, UNKNOWN, text, changes_loss=True)
        for text in self.program.differences:
            self.lines.append(Line("", None, NOT_SUPPORTED, text, changes_loss=True))
        for line in self.foreign.lost:
            self.lines.append(Line("", None, UNKNOWN, line, changes_loss=True))
        for note in self.foreign.notes:
            self.lines.append(Line("", None, UNKNOWN, note, changes_loss=False))

    def choose_deepspeed(self, folder: Path | None) -> dict[str, Any] | None:
        """Set the recipe's JSON: a shipped one, or one with settings of its own.

        Args:
            folder: the folder of the recipe; None if it is not written

        Returns:
            The content of a JSON to write next to the recipe; None if a shipped one has the
            settings.
        """
        stage, own = self.deepspeed.pop("zero_optimization.stage", 1) or 1, dict[str, Any]()
        for path, value in self.deepspeed.items():
            block, _, key = path.rpartition(".")
            review = Review()
            table: Any = SETTINGS.get(block, {}) if block else SETTINGS
            prefix = f"{block}." if block else ""
            accepted = review_settings({key: value}, review, table, prefix)
            names = (path, f"deepspeed_extra_args.{path}")
            source = next((n for n in names if n in self.foreign.values), f"deepspeed.{path}")
            if block == "zero_optimization" and accepted:
                self._about(source, value, FREE, "buckets and overlap are chosen here")
            elif block in ("fp16", "bf16") and (key == "enabled" or self.precision != block):
                self._about(source, value, DERIVED, f"precision {self.precision}")
            elif accepted and accepted[key] == DEEPSPEED_DEFAULTS.get(path):
                self._about(source, value, TAKEN, "DeepSpeed's default")
            elif accepted:
                own.setdefault(block, {})[key] = accepted[key]
                self._about(source, value, TAKEN, f"DeepSpeed's {path}")
            elif review.findings:
                self._about(source, value, NOT_SUPPORTED, review.findings[0])
            else:
                reason = next(iter(review.without_effect), "switched off")
                self._about(source, value, FREE, reason)
        stage = 2 if stage > 2 and self._divides_layers() else stage
        shipped = shipped_json(stage, self.precision)
        content = json.loads((REPOSITORY / shipped).read_text(encoding="utf-8"))
        merged = {**content, **own.pop("", {})}
        merged |= {block: {**content.get(block, {}), **inner} for block, inner in own.items()}
        self.put("deepspeed", shipped)
        if merged == content:
            return None
        if folder is not None:
            file = folder.resolve() / f"{self.name}.json"
            inside = file.is_relative_to(REPOSITORY)
            self.put("deepspeed", str(file.relative_to(REPOSITORY) if inside else file))
        return merged

    def _divides_layers(self) -> bool:
        """Return whether the layout needs ZeRO-2 or less."""
        keys = ("layout.pipeline", "layout.expert", "layout.dp_shard")
        return any(self.ours(key, 0) > (key != "layout.dp_shard") for key in keys)

    def _about(self, key: str, value: Any, status: str, text: str) -> None:
        if all(line.key != key for line in self.lines):
            self.lines.append(Line(key, value, status, text))

    def complete(self) -> None:
        """Add what every recipe needs and the source does not have."""
        about = "the source does not say; choose it"
        for target, value in (
            ("training.steps", 1000),
            ("batch.global_sequences", self.ours("batch.micro_sequences", 1)),
            ("batch.micro_sequences", 1), ("optimizer.learning_rate", 3e-4),
            ("optimizer.schedule", {"warmup_steps": 0, "decay": "constant"}), ("seed", 1234),
            ("training.evaluate_every", 0), ("checkpoint.every", 1000),
        ):  # fmt: skip
            self.assume(target, value, about)
        folder = f"data/{self.name}"
        paths: dict[str, Any] = {
            "data.train": [{"path": f"{folder}/train"}],
            "data.tokenizer": f"{folder}/tokenizer",
        }
        if self.ours("training.evaluate_every"):
            paths["data.validation"] = f"{folder}/validation"
        for target, value in paths.items():
            self.assume(target, value, "as prepare_data.py writes it")
        self.put("name", self.name)
        self.recipe.setdefault("layout", {})


# Steps that several programs share.


def spread(t: Translation, keys: str, micro: int, accumulation: int | None, shards: int) -> None:
    """Set the batch of a program that counts micro-batches per data rank.

    Args:
        accumulation: micro-batches per step and data rank
        shards: ranks that share a data rank
    """
    ranks = t.ranks
    if ranks is None:
        ranks = shards
        t.note(ASSUMED, f"the global batch is that of {ranks} GPUs, the fewest; use --ranks N")
    batches = accumulation or 1
    sequences = micro * batches * (ranks // shards)
    text = f"{micro} x {batches} micro-batches x {ranks // shards} data ranks of {ranks} GPUs"
    t.derive(keys, {"batch.global_sequences": sequences, "batch.micro_sequences": micro}, text)


def vocabulary(t: Translation, keys: str, tokens: int, multiple: int, text: str) -> None:
    """Set the vocabulary with the rows of padding, which take part in the source's softmax."""
    size = -(-tokens // multiple) * multiple
    about = f"{text}{tokens:,} tokens, in multiples of {multiple}" if size != tokens else text
    t.derive(keys, {"model.vocab_size": size}, about)


def schedule(
    t: Translation,
    keys: str,
    shape: str,
    *,
    warmup: float,
    start: float,
    end: float,
    minimum: float,
    counts: str = "steps",
    text: str = "",
) -> None:
    """Set the schedule: warm-up, constant until `start`, then down to the minimum at `end`.

    Args:
        shape: "cosine", "linear", "sqrt" or "constant"
        warmup, start, end: steps or sequences, as `counts` says; they are rounded
    """
    warmup, start, end = (round(steps) for steps in (warmup, start, end))
    values: dict[str, Any] = {"warmup_steps": warmup, "decay": shape}
    if shape != "constant":
        values |= {"steps": end, "minimum_learning_rate": minimum}
        if start > warmup or shape == "sqrt":
            values |= {"decay": "wsd", "decay_steps": end - start, "decay_shape": shape}
    if counts != "steps":
        values["counts"] = counts
    t.derive(keys, {"optimizer.schedule": values}, text)


def corpora(t: Translation, keys: str, paths: Sequence[tuple[float, str]]) -> None:
    """Set the corpora, whose files prepare_data.py has to write anew."""
    names = corpus_names([path for _, path in paths])
    train = [
        {"path": f"data/{t.name}/{name}", "weight": float(weight)}
        for name, (weight, _) in zip(names, paths, strict=True)
    ]
    t.derive(keys, {"data.train": train}, "prepare the text with prepare_data.py")


def corpus_names(paths: Sequence[str]) -> list[str]:
    """Return a name for each corpus: that of its file, with a number if several have it."""
    names = [PurePath(path).name.strip("<>") or f"corpus-{n}" for n, path in enumerate(paths)]
    return [name if names.count(name) == 1 else f"{name}-{n}" for n, name in enumerate(names)]


def table_of_positions(t: Translation, key: str, length: str, rotary: bool) -> None:
    """Report the number of positions, which is the size of a table if they are learned."""
    if not rotary and t.get(key) not in (None, t.get(length)):
        t.differs(key, f"the table of positions has {t.get(length)} rows, as {length}")
    t.say(key, FREE, "rotary positions have no table" if rotary else "model.sequence_length")


# The result.


@dataclass(frozen=True)
class Translated:
    """A finished translation.

    Attributes:
        table: of the recipe
        deepspeed: content of a JSON to write next to it; None if a shipped one is used
        lines: the report, in the order of ORDER
    """

    recipe: Recipe
    table: dict[str, Any]
    deepspeed: dict[str, Any] | None
    lines: tuple[Line, ...]

    @property
    def warnings(self) -> list[Line]:
        """The lines about what changes the loss and is not in the recipe."""
        return [line for line in self.lines if line.changes_loss]

    def text(self, sources: Sequence[Path]) -> str:
        """Return the recipe as TOML, with what changes the loss in its header."""
        names = ", ".join(path.name for path in sources)
        lines = [f"Translated from {names} by convert.py recipe."]
        if self.warnings:
            lines.append("The source trains something else in these respects:")
            lines += [f"- {line}" for line in self.warnings]
        lines += [f"Check: {line}" for line in self.lines if line.status == ASSUMED]
        header = "\n".join(f"# {' '.join(line.split())}" for line in lines)
        order = [name for name in Recipe.model_fields if name in self.table]
        return f"{header}\n\n{tomli_w.dumps({name: self.table[name] for name in order})}"

    def write(self, path: Path, sources: Sequence[Path]) -> list[Path]:
        """Write the recipe, and its DeepSpeed JSON if it has one of its own.

        Returns:
            the files

        Raises:
            UserError: a file exists or cannot be written.
        """
        files = {path: self.text(sources)}
        if self.deepspeed is not None:
            text = json.dumps(self.deepspeed, indent=2) + "\n"
            files[path.parent / f"{self.table['name']}.json"] = text
        for file, content in files.items():
            try:
                with file.open("x", encoding="utf-8") as opened:
                    opened.write(content)
            except FileExistsError:
                raise UserError(f"--output {file}: the file exists; use another name") from None
            except OSError as error:
                raise UserError(
                    f"--output {file} cannot be written ({error.strerror}); use another folder"
                ) from None
        return list(files)


def translate(
    foreign: Foreign,
    program: Program,
    *,
    name: str,
    ranks: int | None = None,
    overrides: Sequence[str] = (),
    folder: Path | None = None,
) -> Translated:
    """Translate the content of configuration files.

    Args:
        name: of the recipe
        ranks: number of GPUs, which decides the global batch of sources that do not have it
        overrides: `section.key=value`, applied last
        folder: the folder that the recipe is written to; None if it is only printed

    Raises:
        UserError: the result is not a valid recipe; the message names our key.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._") or "translated"
    work = Translation(foreign, program, name, ranks=ranks or foreign.ranks)
    if missing := [key for key in program.required if work.get(key) is None]:
        raise UserError(
            f"the files do not set {', '.join(missing)}, which a configuration of {program.name} "
            f"needs; name all files of the run"
        )
    for key in (*program.required, *program.numbers.split()):
        value = work.get(key)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not is_number and key != "model_type":
            raise UserError(
                f"{key} = {_shown(value)} is not a number; write the number into the file, for "
                f"example in place of a variable that the file does not set"
            )
    for key in DIVISORS:
        if work.get(key) == 0:
            raise unfit(key, 0, "1 or more")
    work.apply_table()
    program.derive(work)
    deepspeed = work.choose_deepspeed(folder)
    work.report_the_rest()
    work.complete()
    apply_overrides(work.recipe, overrides)
    shipped = {**work.recipe, "deepspeed": shipped_json(1, work.precision)}
    recipe = parse_recipe(work.recipe if deepspeed is None else shipped, f"recipe of {name}")
    lines = sorted(work.lines, key=lambda line: (not line.changes_loss, ORDER.index(line.status)))
    return Translated(recipe, work.recipe, deepspeed, tuple(lines))


def without_defaults(section: Any) -> dict[str, Any]:
    """Return a dataclass as a table of TOML, without keys at their defaults."""
    table = {}
    for key in fields(section):
        value = getattr(section, key.name)
        if value is not None and value != key.default:
            plain = list(value) if isinstance(value, tuple) else value
            table[key.name] = without_defaults(value) if is_dataclass(value) else plain
    return table
