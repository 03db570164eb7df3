import itertools
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from models.errors import UserError
from models.parallel.micro_batch_info import MaskKey
from tests.conftest import VOCAB_SIZE, changed
from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import ParallelDims
from threefold.config.recipe import Recipe
from threefold.config.sections import PERIOD, check_weights, whole_shares
from threefold.data.corpus import document_starts, fingerprint
from threefold.data.dataset import MicroBatch, SequenceView, TrainingData
from threefold.data.manifest import tokenizer_hash
from threefold.data.sample_order import choose_sources, permuted
from threefold.data.token_file import HEADER, TokenFile, write_token_file
from threefold.prepare_data.workspace import OwnFiles
from threefold.run_folder.history import Progress
from threefold.tracking.messages import announce


def build(table: dict[str, Any], data_size: int = 1, data_rank: int = 0) -> TrainingData:
    recipe: Recipe = parse_recipe(table, "test.toml")
    return TrainingData(recipe, ParallelDims(pipeline=1, data=data_size, tensor=1), data_rank)


def window(data: TrainingData, sample: int) -> np.ndarray:
    """Return the [s + 1] tokens of a sample."""
    ((source, index),) = data.places(np.array([sample]))
    return data.sources()[source].read(index)


def rows(micro_batches: Iterable[MicroBatch]) -> list[tuple[int, ...]]:
    """Return each sequence of the micro-batches: its inputs and its last label."""
    return [
        (*tokens.tolist(), label.tolist()[-1])
        for each in micro_batches
        for tokens, label in zip(each.tokens, each.labels, strict=True)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000])
def test_a_permutation_visits_every_window_once(size: int) -> None:
    assert sorted(permuted(np.arange(size), size, "key")) == list(range(size))
    assert [int(permuted(np.array([i]), size, "key")[0]) for i in range(size)] == list(
        permuted(np.arange(size), size, "key")
    )


def test_permutations_depend_on_the_key_and_mix() -> None:
    orders = [permuted(np.arange(1000), 1000, key) for key in ("1/0/0", "1/0/1", "2")]
    assert len({tuple(order) for order in orders}) == 3
    for order in orders:
        assert abs(np.corrcoef(np.arange(1000), order)[0, 1]) < 0.1
        assert np.sum(np.diff(order) == 1) < 10
        quarter = np.sort(order[:250])  # any part of an epoch is spread over the whole corpus
        assert np.abs(quarter / 1000 - np.arange(250) / 250).max() < 0.1


@pytest.mark.parametrize(
    "weights",
    [
        [1.0], [0.7, 0.3], [5.0, 3.0, 2.0], [0.01, 0.99], [10.0, 10.0, 10.0, 70.0], [1.0] * 50,
        [0.5, *(0.5 / 20 for _ in range(20))], [round(0.1 * 1.3**n, 3) for n in range(20)],
    ],
)  # fmt: skip
def test_sources_are_mixed_by_weight_at_every_prefix(weights: list[float]) -> None:
    given: Counter[int] = Counter()
    for source, index in zip(*choose_sources(np.arange(2000), weights), strict=True):
        sample = given.total()
        assert index == given[source]  # each window of the source in turn
        given[source] += 1
        for index, weight in enumerate(weights):
            share = (sample + 1) * weight / sum(weights)
            assert abs(given[index] - share) < 1


def test_the_sample_order_of_rounded_weights_is_fixed() -> None:
    """Checkpoints do not record the order, so resumed runs would read other samples."""
    for weights, expected in {
        (0.7, 0.3): (7, 3),
        (1.0, 1.0, 1.0): (1, 1, 1),
        (0.9999, 0.0001): (9999, 1),
        (1 / 3, 2 / 3): (1, 2),
        (0.1234567, 0.3, 0.0007654): (19072, 46346, 118),
    }.items():
        assert whole_shares(weights) == expected


@pytest.mark.parametrize("rest", [[1.0], [0.5, 0.2, 0.3], [100.0]])
def test_a_weight_too_small_for_the_period_is_rejected(rest: list[float]) -> None:
    weights = [1e-6 * sum(rest), *rest]
    with pytest.raises(UserError, match=r"data.train.0.weight = .* would become 1.53e-05") as said:
        check_weights(weights)
    least = float(re.search(r"use weight = (\S+) or more", str(said.value))[1])
    assert least < 2e-4 * sum(rest)
    check_weights([least, *rest])
    sources, _ = choose_sources(np.arange(2**16), [least, *rest])
    found = np.count_nonzero(sources == 0) / 2**16
    assert found == pytest.approx(least / (least + sum(rest)), rel=0.1)
    with pytest.raises(UserError):
        check_weights([least * 0.15, *rest])


@pytest.mark.parametrize("weights", [[0.9999, 0.0001], [1.0] * 200, [65535.0, 1.0]])
def test_small_weights_that_are_exact_are_accepted(weights: list[float]) -> None:
    check_weights(weights)
    given = Counter(choose_sources(np.arange(sum(whole_shares(weights))), weights)[0].tolist())
    shares = [given[source] / given.total() for source in range(len(weights))]
    assert shares == pytest.approx([weight / sum(weights) for weight in weights], rel=1e-9)


def test_the_global_batch_is_the_same_for_every_layout(small: dict[str, Any]) -> None:
    whole = rows(build(small).micro_batches(3))
    for micro_sequences, data_size in ((1, 2), (2, 2), (2, 4), (4, 1)):
        table = changed(small, batch__micro_sequences=micro_sequences)
        shares = [rows(build(table, data_size, rank).micro_batches(3)) for rank in range(data_size)]
        assert sorted(itertools.chain(*shares)) == sorted(whole)
        assert {len(share) for share in shares} == {8 // data_size}


def test_an_epoch_reads_every_window_once_and_the_next_epoch_in_another_order(
    small: dict[str, Any],
) -> None:
    data = build(small)
    count = data.sources()[0].count
    windows = [tuple(window(data, sample)) for sample in range(2 * count)]
    expected = {tuple(data.sources()[0].read(index)) for index in range(count)}
    assert set(windows[:count]) == set(windows[count:]) == expected
    assert windows[:count] != windows[count:]


def test_epochs_are_counted_in_the_rounded_shares_of_the_order(
    small: dict[str, Any], corpus: Path
) -> None:
    paths = [str(corpus / "train"), str(corpus / "validation")]
    mixture = [{"path": paths[0], "weight": 99_989.0}, {"path": paths[1], "weight": 11.0}]
    data = build(
        changed(small, data__train=mixture, data__validation=None, training__evaluate_every=0)
    )
    data.resume(Progress(0, 1000 * PERIOD))
    windows = data.epochs(0)[paths[1]] * data.sources()[1].count
    assert windows == pytest.approx(1000 * 7)  # and not 7.209


def test_the_step_in_which_a_corpus_begins_to_repeat_is_known(
    small: dict[str, Any], corpus: Path
) -> None:
    paths = [str(corpus / "train"), str(corpus / "validation")]
    mixture = [{"path": paths[0], "weight": 1.0}, {"path": paths[1], "weight": 3.0}]
    table = changed(
        small, data__train=mixture, data__validation=None, training__evaluate_every=0,
        training__steps=60,
    )  # fmt: skip
    data, read, repeated = build(table), ([], []), {}  # type: ignore[var-annotated]
    for step in range(1, 61):
        for source, index in data.places(np.array(data.samples(step)), step):
            read[source].append(index)
        for source, path in enumerate(paths):
            epochs = len(read[source]) / data.sources()[source].count
            assert data.epochs(step)[path] == pytest.approx(epochs)
            if len(set(read[source])) < len(read[source]):
                repeated.setdefault(path, step)
        assert data.repeated(step) == [path for path in repeated if repeated[path] == step]
    assert repeated.keys() == {paths[1]}


def test_an_epoch_is_exact_while_the_layout_changes(small: dict[str, Any], corpus: Path) -> None:
    """Each window is read once on 1, 2, 4 and 8 data ranks in turn, with changing batch sizes."""
    small["data"] |= {
        "train": [{"path": str(corpus / "validation")}],
        "validation": str(corpus / "train"),
    }
    data, progress = build(small), Progress()
    count = data.sources()[0].count
    seen: Counter[int] = Counter()
    for step in itertools.count(1):
        size = (1, 2, 4, 8)[step % 4]
        sequences = (8, 16)[step % 3 == 0]
        settings = {"batch__global_sequences": sequences, "batch__micro_sequences": 1 + (size < 8)}
        table = changed(small, **settings, training__evaluate_every=0)
        parts = [build(table, size, rank) for rank in range(size)]
        for part in parts:
            part.resume(progress)
            for each in part.micro_batches(step):
                seen.update(sample for sample in each.info.dropout.samples if sample < count)
        progress = parts[0].progress_after(step)
        if progress.samples >= count:
            break
    assert sorted(seen) == list(range(count)) and set(seen.values()) == {1}
    places = data.places(np.arange(count))
    assert sorted(index for _, index in places) == list(range(count))


def test_labels_are_the_tokens_shifted_by_one(small: dict[str, Any]) -> None:
    micro_batch = next(build(small).micro_batches(1))
    tokens, labels = micro_batch.tokens, micro_batch.labels
    assert tokens.dtype == labels.dtype == torch.int64
    assert torch.equal(tokens[:, 1:], labels[:, :-1])


def test_validation_is_spread_over_its_own_file(small: dict[str, Any]) -> None:
    data = build(small)
    corpus = data.validation[""]
    assert corpus.count == 124
    expected = [tuple(corpus.read(index * 124 // 16)) for index in range(16)]
    assert rows(data.evaluation()) == expected
    training = {tuple(window(data, sample)) for sample in range(data.sources()[0].count)}
    assert not training & set(expected)


def test_a_short_validation_set_is_read_as_a_whole(
    small: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    sets = {"long": str(corpus / "validation"), "short": str(tmp_path / "short")}
    first = TokenFile(corpus / "validation").read(0, 11 * 32 + 1)
    write_token_file(tmp_path / "short", [first], vocab_size=VOCAB_SIZE)
    table = changed(small, data__validation=sets)
    data, two_ranks = build(table), [build(table, 2, rank) for rank in (0, 1)]
    windows = [tuple(data.validation["short"].read(index)) for index in range(11)]
    # 11 windows are two global batches of 8, filled with the first window.
    assert rows(data.evaluation("short")) == windows + 5 * windows[:1]
    assert len(rows(data.evaluation("long"))) == 16
    numbers = [n for each in two_ranks for n in itertools.chain(*each.evaluation_samples(11))]
    assert sorted(numbers) == list(range(16))


STAGES_WITH_TOKENS = {  # schedule -> the stages that read tokens (inputs or labels)
    "1f1b": {0, 2},
    "interleaved": {0, 2},
    "zb-h1": {0, 2},
    "zb-v": {0},
    "dualpipev": {0},
    "gpipe": {0, 2},
}


@pytest.mark.parametrize("schedule", STAGES_WITH_TOKENS)
def test_all_stages_know_the_documents_and_only_the_end_stages_read_tokens(
    schedule: str, small: dict[str, Any]
) -> None:
    table = changed(
        small,
        model__layers=6,
        layout={"pipeline": 3, "tensor": 2, "schedule": schedule},
        batch__global_sequences=24,
        data__separate_documents=True,
    )
    recipe, dims = parse_recipe(table, "test.toml"), ParallelDims(pipeline=3, data=2, tensor=2)
    found = set()
    for rank in range(12):
        data = TrainingData(recipe, dims, rank)
        coordinates = dims.coordinates(rank)
        data.resume(Progress(5, 77))
        for each, first in zip(
            data.micro_batches(6), range(77 + 2 * coordinates.data, 77 + 24, 4), strict=True
        ):
            assert each.info.dropout == MaskKey(recipe.seed, range(first, first + 2))
            places = data.places(np.array([first, first + 1]))
            found.add(check_documents(each, [(data.sources()[s], index) for s, index in places]))
            assert (each.tokens is not None) == (
                coordinates.pipeline in STAGES_WITH_TOKENS[schedule]
            )
        corpus = data.validation[""]
        windows = [(corpus, n * corpus.count // 48) for n in range(48)]
        for each, first in zip(data.evaluation(), range(2 * coordinates.data, 48, 4), strict=True):
            assert each.info.dropout is None
            found.add(check_documents(each, windows[first : first + 2]))
            assert (each.tokens is not None) == (
                coordinates.pipeline in STAGES_WITH_TOKENS[schedule]
            )
    assert None in found and any(len(lengths[0]) > 2 for lengths in filter(None, found))


def check_documents(
    micro_batch: MicroBatch, windows: list[tuple[SequenceView, int]]
) -> tuple[tuple[int, ...], ...] | None:
    """Compare a micro-batch with its windows; return the documents, or None if none ends."""
    lengths = tuple(
        tuple(
            end - begin for _, begin, end in corpus.file.documents_of(32 * index, 32 * index + 32)
        )
        for corpus, index in windows
    )
    expected = lengths if max(map(len, lengths)) > 1 else None
    documents = micro_batch.info.documents
    assert (documents and documents.lengths) == expected
    return expected


def test_documents_are_not_separate_by_default(small: dict[str, Any]) -> None:
    data = build(small)
    assert {each.info.documents for each in (*data.micro_batches(1), *data.evaluation())} == {None}


def test_another_seed_reads_in_another_order(small: dict[str, Any]) -> None:
    assert rows(build(small).micro_batches(1)) != rows(
        build(changed(small, seed=5)).micro_batches(1)
    )


def test_token_files_are_read_as_written(tmp_path) -> None:
    documents = [np.array([1, 2, 3]), np.array([], dtype=int), np.array([70000])]
    for vocab_size, kept in ((70001, documents), (2**16, documents[:2])):
        assert write_token_file(tmp_path / "x", kept, vocab_size=vocab_size) == sum(map(len, kept))
        file = TokenFile(tmp_path / "x")
        assert file.read(0, file.count).tolist() == np.concatenate(kept).tolist()
    with pytest.raises(UserError, match="document 2: token id outside"):
        write_token_file(tmp_path / "x", documents, vocab_size=70000)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_truncated_token_file_is_rejected(tmp_path, suffix: str) -> None:
    write_token_file(tmp_path / "x", [np.arange(50)], vocab_size=50)
    file = tmp_path / f"x.{suffix}"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(UserError, match=rf"x\.{suffix} has \d+ bytes instead of"):
        TokenFile(tmp_path / "x")


@pytest.fixture
def own_corpus(small: dict[str, Any], corpus: Path, tmp_path: Path) -> dict[str, Any]:
    """Return the small recipe on a copy of the corpus in tmp_path, with a manifest."""
    folder = shutil.copytree(corpus, tmp_path / "data")
    table = changed(
        small,
        data__train=[{"path": str(folder / "train")}],
        data__validation=str(folder / "validation"),
        data__tokenizer=str(folder / "tokenizer"),
    )
    write_manifest(folder)
    return table


def write_manifest(folder: Path, **changes: Any) -> None:
    manifest = {
        "vocab_size": 250,
        "tokenizer": "that one",
        "tokenizer_sha256": tokenizer_hash(folder / "tokenizer"),
        "files": {name: {"tokens": TokenFile(folder / name).count} for name in PARTS},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest | changes))


def write_tokenizer(folder: Path) -> None:
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")


def shorten(folder: Path, name: str) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:-2])


def put_token(folder: Path, place: int, token: int) -> None:
    with (folder / "train.bin").open("r+b") as stream:
        stream.seek(2 * place)
        stream.write(token.to_bytes(2, "little"))


def write_documents(file: Path, first: int | None) -> None:
    """Write random documents, each beginning with the token `first` unless it is None."""
    random, start = np.random.default_rng(0), [] if first is None else [first]
    lengths = [*random.integers(1, 40, 300), 0, 0]  # empty ones at the end
    documents = [[*start, *random.integers(2, 250, n)] if n else [] for n in lengths]
    write_token_file(file, map(np.array, documents), vocab_size=250)


def test_the_start_of_documents_is_recorded_or_found(
    own_corpus: dict[str, Any], tmp_path: Path
) -> None:
    recipe, folder = parse_recipe(own_corpus, "test"), tmp_path / "data"
    assert document_starts(recipe) == [[]]
    write_manifest(folder, document_start=[7])
    assert document_starts(recipe) == [[7]] == fingerprint(recipe)["document_starts"]
    (folder / "manifest.json").unlink()  # as a corpus of Megatron's tools
    for first in (1, None):
        write_documents(folder / "train", first)
        assert document_starts(recipe) == [[1] if first else []]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "damaged"),
        ("[" * 10**5, "damaged"),
        ("[]", "not a manifest of prepare_data.py"),
        ('"text"', "not a manifest of prepare_data.py"),
    ],
)
def test_a_manifest_that_is_not_an_object_is_an_error_of_the_user(
    content: str, problem: str, own_corpus: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "data" / "manifest.json"
    file.write_text(content)
    named = re.escape(f"{file} is {problem} (") + ".*delete the folder and prepare the corpus again"
    with pytest.raises(UserError, match=named):
        document_starts(parse_recipe(own_corpus, "test"))
    with pytest.raises(UserError, match=named):
        build(own_corpus)
    assert tmp_path / "data" / "train.bin" not in OwnFiles()


def test_corpora_that_begin_documents_differently_are_rejected(
    own_corpus: dict[str, Any], tmp_path: Path
) -> None:
    other = shutil.copytree(tmp_path / "data", tmp_path / "other")
    table = changed(own_corpus, data__validation=str(other / "validation"))
    for start, other_start in (([1], [1]), (None, [1]), ([1], None)):
        for folder, value in ((tmp_path / "data", start), (other, other_start)):
            write_manifest(folder, **({} if value is None else {"document_start": value}))
        build(table)
    write_manifest(tmp_path / "data", document_start=[])
    write_manifest(other, document_start=[1])
    with pytest.raises(UserError, match=r"train begin with the tokens \[\] and .* with \[1\]"):
        build(table)


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(content)


PARTS = ("train", "validation")
REJECTED: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "a truncated .bin": (
        lambda folder: shorten(folder, "train.bin"), {}, r"train\.bin has \d+ bytes instead of"),
    "a truncated .idx": (
        lambda folder: shorten(folder, "validation.idx"), {}, r"validation\.idx has \d+ bytes"),
    "a missing file": (
        lambda folder: (folder / "train.idx").unlink(), {}, r"train\.idx is missing"),
    "no token index": (
        lambda folder: (folder / "train.idx").write_bytes(b"x" * 99), {}, "is not a token index"),
    "a damaged index": (
        lambda folder: flip(folder / "train.idx", HEADER.size), {}, r"train\.idx is damaged"),
    "another size than the manifest's": (
        lambda folder: write_manifest(folder, files={"train": {"tokens": 7}}), {},
        r"train has \d+ tokens and .*manifest\.json says 7"),
    "a broken manifest": (
        lambda folder: (folder / "manifest.json").write_text("{"), {}, r"json is damaged \("),
    "a manifest without what it is for": (
        lambda folder: (folder / "manifest.json").write_text("{}"), {}, r"json is not a manifest"),
    "a vocabulary that is too small": (
        write_manifest, {"model__vocab_size": 249}, "use model.vocab_size = 250"),
    "an id beyond the vocabulary at the beginning": (
        lambda folder: put_token(folder, 0, 250), {}, "token 0 has the id 250"),
    "an id beyond the vocabulary in the middle": (
        lambda folder: put_token(folder, 10_000, 999), {}, "token 10000 has the id 999"),
    "another tokenizer": (
        lambda folder: (folder / "tokenizer" / "tokenizer.json").write_text("{}"), {},
        "is not the tokenizer .*use the tokenizer whose tokenizer.json has the SHA-256 .{64}$"),
    "another tokenizer, and that of the corpus": (
        lambda folder: write_tokenizer(folder.parent / "other"),
        {"data__tokenizer": "{folder}/other"},
        "is not the tokenizer that made .*in a new run, use .*/data/tokenizer$"),
    "a corpus instead of its tokenizer": (
        write_manifest, {"data__tokenizer": "{folder}/data"},
        r"has no tokenizer\.json; use the corpus's own tokenizer, .*/data/tokenizer$"),
    "a file instead of a tokenizer": (
        write_manifest, {"data__tokenizer": "{folder}/data/tokenizer/tokenizer.json"},
        r"is a file, not a folder; use the corpus's own tokenizer, .*/data/tokenizer$"),
    "no tokenizer": (
        lambda folder: (folder / "tokenizer" / "tokenizer.json").unlink(), {},
        r"has no tokenizer\.json"),
    "less than one window": (
        write_manifest, {"model__sequence_length": 100_000},
        "has 20,000 tokens, and a window of .* needs 100001; use .* = 19999 or less"),
    "a weight of zero": (
        write_manifest, {"data__train": [{"path": "data/x", "weight": 0.0}]}, "weight = 0.0"),
    "a weight that is too small": (
        write_manifest,
        {"data__train": [{"path": "data/x"}, {"path": "data/y", "weight": 1e-6}]},
        r"data\.train\.1\.weight = 1e-06 is 1e-06 of all .* use weight = 0\.00016 or more"),
    "a negative weight": (
        write_manifest, {"data__train": [{"path": "data/x", "weight": -1.0}]}, "weight = -1.0"),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_bad_data_are_rejected_before_the_first_step(
    name: str, own_corpus: dict[str, Any], tmp_path: Path
) -> None:
    build(own_corpus)
    spoil, changes, message = REJECTED[name]
    spoil(tmp_path / "data")
    changes = {
        key: value.format(folder=tmp_path) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    with pytest.raises(UserError, match=message):
        build(changed(own_corpus, **changes))


@pytest.mark.parametrize("context", [2, 4])
def test_context_ranks_divide_the_sequences_of_a_data_rank(
    context: int, small: dict[str, Any]
) -> None:
    changes = {
        "data__separate_documents": True,
        "model__sequence_length": 128,
        "model__prediction": {"depth": 2},
    }
    recipe = parse_recipe(changed(small, **changes), "test.toml")
    length = recipe.model.sequence_length
    for data_rank in range(2):
        dims = ParallelDims(pipeline=1, data=2, tensor=1)
        whole = TrainingData(recipe, dims, data_rank)
        divided = ParallelDims(pipeline=1, data=2, tensor=1, context=context)
        parts = [
            TrainingData(recipe, divided, data_rank * context + rank) for rank in range(context)
        ]
        assert all(part.fingerprint == whole.fingerprint for part in parts)
        for expected, *found in zip(
            whole.micro_batches(3), *(part.micro_batches(3) for part in parts), strict=True
        ):
            assert expected.tokens is not None and expected.info.slices is None
            together = torch.full_like(expected.tokens, -1)
            labels = torch.full_like(expected.labels, -2)
            for each in found:
                assert each.info.dropout == expected.info.dropout
                assert each.info.documents == expected.info.documents is not None
                positions = [p for one in each.info.slices for p in one]
                assert len(positions) == length // context
                together[:, positions], labels[:, positions] = each.tokens, each.labels
            assert torch.equal(together, expected.tokens)
            assert torch.equal(labels, expected.labels)


def test_the_imbalance_of_context_ranks_is_the_busiest_ranks_share(small: dict[str, Any]) -> None:
    changes = {"data__separate_documents": True, "model__sequence_length": 128}
    recipe = parse_recipe(changed(small, **changes), "test.toml")
    dims = ParallelDims(pipeline=1, data=2, tensor=1, context=2)
    most = total = 0
    for each in TrainingData(recipe, dims, 0).micro_batches(1):
        assert each.info.documents is not None and each.info.division is not None
        lengths = each.info.documents.lengths
        tokens = [[n + 1 for document in one for n in range(document)] for one in lengths]
        work = []
        for rank in range(2):
            slices = each.info.division.slices_of(rank)
            work.append(sum(row[p] for row in tokens for part in slices for p in part))
        most, total = most + max(work), total + sum(work)
    imbalance = TrainingData(recipe, dims, 0).context_imbalance()
    assert imbalance == pytest.approx(2 * most / total) and imbalance > 1
    whole = recipe.model_copy(update={"data": recipe.data.model_copy(
        update={"separate_documents": False}
    )})  # fmt: skip
    assert TrainingData(whole, dims, 0).context_imbalance() == 1
    alone = ParallelDims(pipeline=1, data=2, tensor=1)
    assert TrainingData(recipe, alone, 0).context_imbalance() == 1


def test_a_run_prints_the_imbalance_of_context_ranks(
    small: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = parse_recipe(changed(small, layout__context=2), "test.toml")
    dims = ParallelDims(pipeline=1, data=1, tensor=1, context=2)
    found = mock.Mock(progress=Progress(), weights_only=False)
    for imbalance, said in ((1.34, True), (1.05, False)):
        announce(recipe, dims, ["a", "a"], mock.Mock(path=tmp_path), found, imbalance)
        assert ("context 2: " in capsys.readouterr().out.replace("x context 2", "")) == said


@pytest.mark.parametrize("separate", [False, True])
def test_labels_of_further_tokens_are_those_of_the_same_document(
    separate: bool, small: dict[str, Any]
) -> None:
    changes = {
        "data__separate_documents": separate,
        "model__sequence_length": 128,
        "model__prediction": {"depth": 2},
    }
    recipe = parse_recipe(changed(small, **changes), "test.toml")
    data = TrainingData(recipe, ParallelDims(pipeline=1, data=1, tensor=1), 0)
    file = next(iter(data.sources().values())).file
    crossing, sample = 0, 0
    for micro_batch in data.micro_batches(1):
        assert micro_batch.tokens is not None and micro_batch.labels is not None
        for row, labels in zip(micro_batch.tokens, micro_batch.labels, strict=True):
            ((_, index),) = data.places(np.array([sample]))
            sample += 1
            tokens = file.read(index * 128, index * 128 + 131).astype(np.int64)
            lengths = file.document_lengths(index * 128, index * 128 + 131)
            document = np.repeat(np.arange(len(lengths)), lengths)
            assert row.tolist() == tokens[:128].tolist()
            for depth in range(3):
                expected = tokens[depth + 1 : depth + 129].copy()
                if separate:  # the input of module k is the token k positions later
                    other = document[depth : depth + 128] != document[:128]
                    expected[other] = -1
                    crossing += int(other.sum())
                assert labels[:, depth].tolist() == expected.tolist(), depth
    assert (crossing > 0) == separate
    of_evaluation = next(data.evaluation()).labels
    assert of_evaluation is not None and of_evaluation.dim() == 2


def test_labels_beyond_the_end_of_the_corpus_do_not_count(small: dict[str, Any]) -> None:
    recipe = parse_recipe(changed(small, model__prediction={"depth": 3}), "test.toml")
    data = TrainingData(recipe, ParallelDims(pipeline=1, data=1, tensor=1), 0)
    view = next(iter(data.sources().values()))
    length, count = view.sequence_length, view.file.count
    with mock.patch.object(view.file, "count", length + 2):  # one label beyond the first window
        tokens, labels = data._read([(view, 0)], None, 3)
        assert not view.same_document(0, 3)[-1, 2]
    assert count > length + 2 and tokens.shape == (1, length)
    assert (labels[0] < 0).sum(0).tolist() == [0, 0, 1, 2]
    assert (labels[0, -2:, 3] < 0).all()


def test_overwritten_training_data_are_noticed(own_corpus: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint would otherwise record data that the run has not read."""
    data = TrainingData(parse_recipe(own_corpus, "test"), ParallelDims(), 0)
    file = tmp_path / "data" / "train.bin"
    assert data.fingerprint
    data.check_unchanged()
    os.utime(file, (0, 0))  # as programs do that keep a scratch disk from deleting it
    data.check_unchanged()
    with file.open("r+b") as stream:
        stream.write(bytes(64))
    with pytest.raises(UserError, match=r"/data/train: the tokens have been overwritten since"):
        data.check_unchanged()


def test_a_ramp_does_not_change_the_windows_of_validations(small: dict[str, Any]) -> None:
    """Even if the run ends within the ramp, so that no step has the full batch."""
    ramp = {"start_sequences": 2, "increment": 2, "samples": 1000}
    ramped = build(changed(small, batch__ramp=ramp))
    assert ramped.validation_windows("") == build(small).validation_windows("")
