"""The command recipes/prove.py: a recipe trained in many layouts, and their losses compared."""

import argparse
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from tqdm import tqdm

from models.errors import UserError, counted
from threefold.config.deepspeed_json import precision, read_deepspeed_json
from threefold.config.loading import DEFAULT_RECIPE, load_recipe
from threefold.config.phases import PhasePlan
from threefold.config.recipe import Recipe
from threefold.prove.compare import (
    PERTURBED_RUNS,
    Bands,
    ResumeResult,
    TrainingResult,
    compare,
    derive_bands,
)
from threefold.prove.layouts import (
    PRECISIONS,
    ProofCase,
    only,
    perturbed,
    reference,
    sample,
    valid_cases,
)
from threefold.prove.naming import Cause, find_cause
from threefold.prove.ranks import run_cases
from threefold.prove.report import CaseResult, as_json, as_text, describe, relay_as_text, summary
from threefold.prove.shrink import larger_micro_batch, shrink, write_corpus
from threefold.runtime.command_line import add_json, add_overrides, count, file_path, picture_file
from threefold.runtime.exits import exit_at_signals, ignore_ending_signals
from threefold.runtime.output import escape_output, report_unwritable, stdout_for_json

SECONDS_PER_LAYOUT = 300  # a layout that takes longer counts as hanging
RELAY_STEPS = 1000  # more than a relay runs, so that the learning rate stays above its minimum
SECONDS_BETWEEN_LINES = 30  # between progress lines if stderr is not a terminal
# Smallest difference by which experts are chosen; layouts round logits up to 3e-7 differently, and
# scores of a sigmoid, which is at most a quarter as steep, less.
MIN_MARGIN = {"softmax": 1e-5, "softmax-after-topk": 1e-5, "sigmoid": 2.5e-6}
MAX_SEEDS = 20
MAX_COUNT = 1024  # of ranks and of steps
MAX_SAMPLE = 1_000_000


def main(description: str | None = None) -> None:
    """Run the proof, print the report and exit with 0, 1 or 2."""
    exit_at_signals()  # after ending the ranks and deleting the folders
    escape_output()
    options = parse_command_line(description)
    try:
        code = run_proof(options)
    except UserError as problem:
        print(f"prove.py: {problem}", file=sys.stderr)
        code = 2
    finally:
        ignore_ending_signals()  # during the exit handlers, which end the fork server
    sys.exit(code)


def run_proof(options: argparse.Namespace) -> int:
    """Train the recipe in its layouts, print the report, and return the exit code.

    Raises:
        UserError: the recipe or an option is invalid.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            whole = PhasePlan(load_recipe(options.recipe, options.set))
            recipe = whole.recipe_of(options.phase or whole.names[0])
            small, cases = plan(recipe, options, Path(folder) / "corpus")
        except SystemExit:  # of the signal handler
            print("prove.py: interrupted; nothing has been started or written", file=sys.stderr)
            raise
        layouts = counted(len(cases), "layout")
        print(f"{recipe.name}: {layouts} of {model_text(small, cases)}", file=sys.stderr)
        proof = Proof(small, cases, ranks=options.ranks)
        coming = run_relay(cases, folder=Path(folder) / "run") if options.relay else proof.run()
        findings: list[CaseResult] = []
        code = 0
        try:
            with stdout_for_json(options.json), contextlib.closing(coming):  # ends the ranks
                for finding in with_progress(coming, len(cases)):
                    findings.append(finding)
                proof.find_cause(findings)
        except SystemExit as interruption:  # of the signal handler: report what is done
            code = int(interruption.code or 0)
    if code:
        print(
            f"interrupted after {len(findings)} of {counted(len(cases), 'layout')}", file=sys.stderr
        )
    if findings and not report(
        findings, options, proof=proof, title=recipe.name, complete=not code
    ):
        return code or 2
    return code or (0 if all(finding.passes for finding in findings) else 1)


def with_progress(coming: Iterator[CaseResult], total: int) -> Iterator[CaseResult]:
    """Yield findings, show the progress on stderr, and describe each layout that does not pass."""
    seconds = 0.1 if sys.stderr.isatty() else SECONDS_BETWEEN_LINES
    with tqdm(total=total, unit="layout", mininterval=seconds) as bar:
        for finding in coming:
            bar.update()
            if not finding.passes:
                bar.write(describe(finding), file=sys.stderr)
            yield finding


def report(
    findings: Sequence[CaseResult],
    options: argparse.Namespace,
    *,
    proof: "Proof",
    title: str,
    complete: bool,
) -> bool:
    """Print the report, and draw the pictures that are asked for.

    Args:
        proof: the proof that made the findings, unless they are of a relay
        title: name of the recipe
        complete: False if the proof was interrupted

    Returns:
        False if standard output or a picture cannot be written
    """
    is_written = True
    try:  # before the pictures, which may fail
        print(report_text(findings, options, proof=proof, complete=complete), flush=True)
    except OSError as problem:
        report_unwritable("prove.py", problem)
        is_written = False
    if not options.heatmap and not options.curves:
        return is_written
    from threefold.prove.picture import draw_curves, draw_heatmap  # matplotlib, which few need

    above = f"{title}: {summary(findings)}"
    pictures = ((draw_heatmap, above, options.heatmap), (draw_curves, title, options.curves))
    for draw, heading, file in pictures:
        try:
            if file:
                draw(findings, title=heading, file=file)
        except UserError as problem:
            print(f"prove.py: {problem}", file=sys.stderr)
            is_written = False
    return is_written


def report_text(
    findings: Sequence[CaseResult],
    options: argparse.Namespace,
    *,
    proof: "Proof",
    complete: bool,
) -> str:
    """Return the report as text, or as JSON; see `report`."""
    if options.json:
        table = as_json(
            findings, relay=options.relay, complete=complete, bands=proof.bands, cause=proof.cause
        )
        return json.dumps(table)
    if options.relay:
        return relay_as_text(findings, every_layout=options.layouts)
    return as_text(findings, every_layout=options.layouts, bands=proof.bands, cause=proof.cause)


def plan(
    recipe: Recipe, options: argparse.Namespace, corpus: Path
) -> tuple[Recipe, list[ProofCase]]:
    """Shrink the recipe, write its corpus, and return the small recipe and its valid cases."""
    steps = RELAY_STEPS if options.relay else options.steps
    weights = options.precision or default_precision(recipe)
    small = shrink(
        recipe, ranks=options.ranks, layers=options.layers, steps=steps, corpus=corpus,
        fp8=weights != "fp32",
    )  # fmt: skip
    needed = small.batch.global_sequences * small.model.sequence_length
    write_corpus(corpus, small.model.vocab_size, validation_tokens=2 * needed + 1000)
    own = {recipe.layout.recompute_interval} if recipe.layout.recompute == "full" else set()
    cases = valid_cases(
        small,
        precision=weights,
        ranks=options.ranks,
        micro_sequences=(1, larger_micro_batch(recipe)),
        recompute_intervals=sorted({min(n, small.model.layers) for n in {2} | own}),
    )
    chosen: dict[str, list[str]] = {}
    for name, values in options.only:
        chosen.setdefault(name, []).extend(values)
    cases = sample(only(cases, chosen), options.sample or MAX_SAMPLE)
    if options.relay and len(cases) < 2:
        raise UserError(
            "--relay passes a run from one layout to another; choose at least 2 layouts"
        )
    return small, cases


def default_precision(recipe: Recipe) -> str:
    """Return the precision in which a recipe is proven, unless --precision names one.

    This is the precision of its DeepSpeed JSON, with two exceptions. fp16 becomes fp32, because
    fp16 needs a GPU. Matmuls in FP8 are proven in bf16, because rounding to FP8 exceeds the limits
    of fp32.
    """
    if recipe.training.matmul_precision == "fp8":
        return "bf16"
    own = precision(read_deepspeed_json(recipe.deepspeed, recipe))
    return own if own in PRECISIONS else "fp32"


@dataclass
class Proof:
    """The training of a recipe in one process, and its comparison with layouts.

    Attributes:
        small: the recipe, made small
        cases: the layouts
        ranks: maximum number of processes at a time
        first, expected: the reference and its result, once it has run
        bands: the derived limits; None: those of fp32
        cause: the cause of the smallest failure
    """

    small: Recipe
    cases: list[ProofCase]
    ranks: int
    first: ProofCase | None = field(default=None, init=False)
    expected: TrainingResult | None = field(default=None, init=False)
    bands: Bands | None = field(default=None, init=False)
    cause: Cause | None = field(default=None, init=False)

    def run(self) -> Generator[CaseResult, None, None]:
        """Train the reference, then every case, and yield the differences as they complete."""
        if (failure := self._train_reference()) is not None:
            yield failure
            return
        assert self.first is not None and self.expected is not None
        seed, model = self.first.recipe.seed, self.small.model
        for case, outcome in run_cases(
            [
                replace(case, recipe=case.recipe.model_copy(update={"seed": seed}))
                for case in self.cases
            ],
            ranks=self.ranks,
            seconds=SECONDS_PER_LAYOUT,
        ):
            if isinstance(outcome, TrainingResult):
                difference = compare(outcome, self.expected, model, self.bands)
                yield CaseResult(case, difference, outcome.losses)
            else:
                assert isinstance(outcome, str)
                yield CaseResult(case, outcome)

    def _train_reference(self) -> CaseResult | None:
        """Train the reference and derive the bands; return its failure, if it fails.

        Two layouts round differently, and a token whose choice of experts is nearly a tie may get
        another expert. In fp32, the seed is therefore changed until the reference has no such
        token. In other precisions there always are such tokens, and the bands include them.
        """
        is_fp32 = self.cases[0].precision == "fp32"
        experts = self.small.model.experts
        least = MIN_MARGIN[experts.router if experts else "softmax"] if is_fp32 else -1.0
        for seed in range(self.small.seed, self.small.seed + MAX_SEEDS):
            small = self.small.model_copy(update={"seed": seed})
            self.first = reference(small, self.cases[0].precision)
            cases = [self.first, *([] if is_fp32 else perturbed(self.first, PERTURBED_RUNS))]
            results = dict(run_cases(cases, ranks=self.ranks, seconds=SECONDS_PER_LAYOUT))
            outcome = results.pop(self.first)
            if not isinstance(outcome, TrainingResult):
                return CaseResult(
                    self.first, f"the single process that layouts are compared with: {outcome}"
                )
            self.expected = outcome
            runs = [run for run in results.values() if isinstance(run, TrainingResult)]
            if runs:
                self.bands = derive_bands(runs, outcome, small.model)
            if outcome.margin >= least:
                return None
            print(
                f"seed {seed}: the last chosen and the first unchosen expert of a token differ by "
                f"only {outcome.margin:.1e}, which rounding may reverse; trying the next seed",
                file=sys.stderr,
            )
        print(f"no seed of {MAX_SEEDS} avoids this; layouts may differ", file=sys.stderr)
        return None

    def find_cause(self, findings: Sequence[CaseResult]) -> None:
        """Find the cause of the failure in the smallest of the layouts that fail, if any does."""
        failed = [one for one in findings if not one.passes and not isinstance(one.result, str)]
        if not failed or self.first is None or self.expected is None:
            return
        smallest = min(failed, key=lambda one: (one.case.world_size, one.case.method)).case
        print(
            f"looking for the module and the axis at fault in {smallest.axes}, {smallest.method}",
            file=sys.stderr,
        )
        self.cause = find_cause(
            smallest,
            self.first,
            self.expected,
            bands=self.bands,
            ranks=self.ranks,
            seconds=SECONDS_PER_LAYOUT,
        )


def run_relay(cases: list[ProofCase], *, folder: Path) -> Generator[CaseResult, None, None]:
    """Pass a run from case to case and yield each leg.

    Half of the cases lead from the largest world down to one process, the others up again.
    """
    shuffled = random.Random(0).sample(cases, len(cases))
    down, up = shuffled[::2], shuffled[1::2]
    for half, largest_first in ((down, True), (up, False)):
        for ranks in sorted({leg.world_size for leg in half}, reverse=largest_first):
            legs = [leg for leg in half if leg.world_size == ranks]
            for case, result in run_cases(
                legs, ranks=ranks, seconds=SECONDS_PER_LAYOUT, relay=folder
            ):
                assert isinstance(result, ResumeResult | str)  # a relay yields legs
                yield CaseResult(case, result)


def model_text(small: Recipe, cases: Sequence[ProofCase]) -> str:
    """Describe the small model and its precision in a few words."""
    model = small.model
    matmuls = " with matmuls in FP8" if small.training.matmul_precision == "fp8" else ""
    return (
        f"a model of the same structure ({model.layers} layers, hidden {model.hidden_size}, "
        f"{model.heads} heads on {model.kv_heads}, vocabulary {model.vocab_size}), "
        f"{small.training.steps} steps of {small.batch.global_sequences} sequences, "
        f"{cases[0].precision}{matmuls}"
    )


def setting(text: str) -> tuple[str, list[str]]:
    """Parse a setting of layouts and its values: "zero=1,2".

    Raises:
        ArgumentTypeError: the text has another form.
    """
    name, separator, values = text.partition("=")
    parts = [value.strip().lower() for value in values.split(",")]
    if not (separator and name.strip() and all(parts)):
        raise argparse.ArgumentTypeError(f"invalid {text}: expected a form like zero=1,2")
    return name.strip(), parts


def parse_command_line(description: str | None = None) -> argparse.Namespace:
    """Parse the options of the command."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        type=file_path,
        default=DEFAULT_RECIPE,
        help="default: recipes/tiny.toml",
    )
    parser.add_argument(
        "--phase", metavar="NAME", help="phase of the recipe to prove; default: the first one"
    )
    parser.add_argument(
        "--ranks",
        type=partial(count, most=MAX_COUNT),
        default=8,
        help="size of the largest world; default: 8",
    )
    parser.add_argument(
        "--steps",
        type=partial(count, most=MAX_COUNT),
        default=10,
        help="steps per layout; default: 10 (a relay has steps of its own)",
    )
    parser.add_argument(
        "--layers",
        type=partial(count, most=MAX_COUNT),
        default=4,
        help="maximum number of layers of the small model, and so of pipeline stages (one more if "
        "the recipe has an odd number); default: 4",
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="precision of weights and activations; default: that of the recipe, but fp32 for fp16 "
        "and bf16 for matmuls in FP8",
    )
    parser.add_argument(
        "--only",
        type=setting,
        action="append",
        default=[],
        metavar="SETTING=VALUE[,VALUE...]",
        help="only layouts in which SETTING has one of the values; repeat it for more settings, "
        'such as --only context=2,4 --only "schedule=zb-v,interleaved x 2"',
    )
    parser.add_argument(
        "--sample",
        type=partial(count, most=MAX_SAMPLE),
        metavar="N",
        help="only N of the layouts, chosen so that they have as many pairs of settings as "
        "possible; default: all layouts",
    )
    parser.add_argument(
        "--relay",
        action="store_true",
        help="pass one run from layout to layout through checkpoints",
    )
    parser.add_argument("--layouts", action="store_true", help="print a line per layout too")
    parser.add_argument(
        "--curves", type=picture_file, metavar="FILE", help="draw the loss curves: .png, .svg, .pdf"
    )
    parser.add_argument(
        "--heatmap", type=picture_file, metavar="FILE", help="draw a heat map: .png, .svg, .pdf"
    )
    add_json(parser)
    add_overrides(parser)
    options = parser.parse_args()
    for name in ("heatmap", "curves"):
        if options.relay and getattr(options, name):
            parser.error(f"--{name} compares whole trainings; omit it with --relay")
    return options
