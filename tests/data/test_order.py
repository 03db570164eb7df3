"""The order of windows over phases: no token is read twice in an epoch; nothing is stored."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from threefold.config.loading import parse_recipe
from threefold.config.parallel_dims import ParallelDims
from threefold.data import sample_order
from threefold.data.dataset import TrainingData
from threefold.data.sample_order import CorpusOrder, Mixture, permuted, place_of
from threefold.data.token_file import TokenFile
from threefold.run_folder.history import Progress

ALONE = ParallelDims(pipeline=1, data=1, tensor=1)


def test_place_of_inverts_the_permutation() -> None:
    for size in (1, 2, 5, 64, 1000):
        everything = np.arange(size)
        assert (place_of(permuted(everything, size, "key"), size, "key") == everything).all()


def ranges(corpus: CorpusOrder, count: int) -> list[range]:
    """Read `count` windows, and return their tokens."""
    windows = corpus.windows(np.arange(count))
    corpus.advance(count)
    return [range(w * corpus.length, (w + 1) * corpus.length) for w in windows.tolist()]


def tokens(*parts: list[range]) -> list[int]:
    return [token for part in parts for each in part for token in each]


def test_one_length_reads_the_permutation_of_each_epoch() -> None:
    corpus = CorpusOrder(101, "7/0")
    corpus.set_sequence_length(10)
    found = corpus.windows(np.arange(25)).tolist()
    assert found[:10] == permuted(np.arange(10), 10, "7/0/0").tolist()
    assert found[10:20] == permuted(np.arange(10), 10, "7/0/1").tolist()
    corpus.advance(13)
    corpus.set_sequence_length(10)  # no change
    assert corpus.windows(np.arange(7)).tolist() == found[13:20]


def test_samples_ahead_are_those_of_the_permutation() -> None:
    corpus = CorpusOrder(101, "7/0")
    corpus.set_sequence_length(10)
    mixture = Mixture((0,), (1.0,), {0: corpus}, 0, np.zeros(1, np.int64))
    last = 3 * sample_order.SAMPLES_AHEAD
    expected = mixture.places(np.arange(last))
    for first in (0, 3, 6, 2, 120, 127, 128, 250, 5):  # forwards, backwards, across the last one
        assert mixture.places_of(range(first, first + 4)) == expected[first : first + 4]
    assert mixture.places_of(range(1, last)) == expected[1:]  # more than are computed ahead


@pytest.mark.parametrize("lengths", [(10, 20), (20, 10), (10, 30, 15), (8, 12, 8), (10, 20, 40)])
@pytest.mark.parametrize("block", [4, 2**14])
def test_no_token_is_read_twice_in_an_epoch(
    lengths: tuple[int, ...], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_order, "CANDIDATES_PER_BLOCK", block)
    corpus = CorpusOrder(2411, "7/0")
    read: list[list[range]] = []
    for length in lengths:
        corpus.set_sequence_length(length)
        read.append(ranges(corpus, 15))
    assert len(set(tokens(*read))) == len(tokens(*read)) == 15 * sum(lengths)


def test_the_rest_of_an_epoch_is_read_before_the_next() -> None:
    """After 11 of 24 windows, all longer windows without them come first, and then all."""
    corpus = CorpusOrder(241, "7/0")
    corpus.set_sequence_length(10)
    before = set(tokens(ranges(corpus, 11)))
    corpus.set_sequence_length(20)
    everything = [range(20 * n, 20 * n + 20) for n in range(12)]
    free = [each for each in everything if not before.intersection(each)]
    assert free  # otherwise the test would show nothing
    after = ranges(corpus, len(free) + 12)
    assert sorted(after[: len(free)], key=lambda each: each.start) == free
    assert sorted(after[len(free) :], key=lambda each: each.start) == everything
    # The new epoch began there: a third length may read everything that it has not read.
    corpus.set_sequence_length(40)
    assert corpus.epoch == 2
    assert corpus.earlier == ()


def test_a_corpus_without_unread_windows_begins_its_next_epoch() -> None:
    corpus = CorpusOrder(101, "7/0")
    corpus.set_sequence_length(10)
    ranges(corpus, 9)
    corpus.set_sequence_length(100)
    assert corpus.windows(np.arange(2)).tolist() == [0, 0]
    corpus.advance(2)
    corpus.set_sequence_length(50)
    assert len(set(tokens(ranges(corpus, 2)))) == 100


PHASES = [
    {
        "name": "long",
        "start_step": 5,
        "model": {"sequence_length": 64},
        "batch": {"global_sequences": 4},
    },
    {"name": "mixture", "start_step": 9, "data": {"train": []}},  # filled in by the fixture
    {"name": "back", "start_step": 13, "model": {"sequence_length": 32}},
]


@pytest.fixture
def table(small: dict[str, Any], corpus: Path) -> dict[str, Any]:
    paths = [str(corpus / "train"), str(corpus / "validation")]
    small["data"]["train"] = [{"path": paths[0]}]
    small["data"]["validation"] = str(corpus / "other")
    for suffix in (".bin", ".idx"):
        source, other = corpus / f"train{suffix}", corpus / f"other{suffix}"
        if not other.exists():
            other.write_bytes(source.read_bytes())
    small["training"] |= {"steps": 16, "evaluate_every": 0}
    mixture = [{"path": paths[1], "weight": 3.0}, {"path": paths[0], "weight": 1.0}]
    phases = [PHASES[0], {**PHASES[1], "data": {"train": mixture}}, PHASES[2]]
    return small | {"phase": phases}


def build(table: dict[str, Any], progress: Progress = Progress()) -> TrainingData:  # noqa: B008
    data = TrainingData(parse_recipe(table, "test"), ALONE, 0)
    data.resume(progress)
    return data


def ranges_of(data: TrainingData, steps: range) -> Iterator[tuple[int, range]]:
    """Yield (number of the corpus, tokens) of the samples of some steps."""
    for step in steps:
        length = data.phase_plan.at(step).recipe.model.sequence_length
        for source, window in data.places(np.array(data.samples(step)), step):
            yield source, range(window * length, (window + 1) * length)


def test_phases_do_not_repeat_tokens(table: dict[str, Any]) -> None:
    data = build(table)
    read: dict[int, list[range]] = {}
    for source, each in ranges_of(data, range(1, 17)):
        read.setdefault(source, []).append(each)
    assert read.keys() == {0, 1}  # the first corpus keeps its number in the second mixture
    sizes = {number: each.file.count for number, each in data.sources(9).items()}
    for source, each in read.items():
        found = tokens(each)
        assert len(found) < sizes[source]
        assert len(set(found)) == len(found)


def test_the_mixture_of_a_phase_has_its_own_shares(table: dict[str, Any]) -> None:
    data = build(table)
    sources = [source for source, _ in ranges_of(data, range(9, 17))]
    for count in range(1, len(sources) + 1):
        assert abs(sources[:count].count(1) - 0.75 * count) < 1


@pytest.mark.parametrize("micro_sequences", [1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_each_data_rank_reads_every_corpus(
    table: dict[str, Any], ranks: int, micro_sequences: int
) -> None:
    """With weights of 3 and 1, every fourth sample is of the second corpus."""
    table["training"]["steps"] = 100
    table["phase"] = [table["phase"][1] | {"start_step": 2}]
    batch = {"global_sequences": 16, "micro_sequences": micro_sequences}
    recipe = parse_recipe(table | {"batch": table["batch"] | batch}, "small")
    dims = ParallelDims(pipeline=1, data=ranks, tensor=1)
    read: list[list[int]] = [[] for _ in range(100)]
    for rank in range(ranks):
        data = TrainingData(recipe, dims, rank)
        corpora: Counter[int] = Counter()
        for step in range(2, 100):
            samples = data.samples(step)
            for share in data._shares(
                recipe, samples.start, len(samples), data._groups_per_turn(step)
            ):
                read[step] += share
                corpora.update(corpus for corpus, _ in data._mixture(step).places_of(share))
        most, least = corpora.most_common()
        assert most[1] == pytest.approx(3 * least[1], rel=0.2)
    assert all(sorted(read[step]) == list(data.samples(step)) for step in range(2, 100))


def test_epochs_are_counted_over_phases(table: dict[str, Any], corpus: Path) -> None:
    data, count = build(table), {"train": {}, "validation": {}}  # type: ignore[var-annotated]
    for name, of_length in count.items():
        tokens_of_corpus = TokenFile(corpus / name).count
        of_length |= {length: (tokens_of_corpus - 1) // length for length in (32, 64)}
    train, other = count["train"], count["validation"]
    expected = {
        str(corpus / "train"): 32 / train[32] + 16 / train[64] + 4 / train[64] + 4 / train[32],
        str(corpus / "validation"): 12 / other[64] + 12 / other[32],
    }
    assert data.epochs(16) == pytest.approx(expected)
    assert data.epochs(0) == {}


def test_data_is_a_pure_function_of_recipe_and_step(table: dict[str, Any]) -> None:
    """A run that resumes after any step reads the same windows, dropout masks and samples."""
    whole = build(table)
    expected = {step: list(ranges_of(whole, range(step, step + 1))) for step in range(1, 17)}
    numbers = {step: whole.samples(step) for step in range(1, 17)}
    for after in range(16):
        resumed = build(table, whole.progress_after(after))
        for step in range(after + 1, 17):
            assert resumed.samples(step) == numbers[step]
            assert list(ranges_of(resumed, range(step, step + 1))) == expected[step]
    last = whole.progress_after(16)
    assert last == Progress(16, 4 * 8 + 12 * 4, ((0, 32), (1, 48), (2, 64)))
    assert last.tokens(whole.phase_plan) == whole.phase_plan.total_tokens


def test_micro_batches_have_the_length_of_their_phase(table: dict[str, Any]) -> None:
    data = build(table)
    shapes = {
        step: [tuple(each.tokens.shape) for each in data.micro_batches(step)] for step in (4, 5, 13)
    }
    assert shapes == {4: [(2, 32)] * 4, 5: [(2, 64)] * 2, 13: [(2, 32)] * 2}


def test_a_rollback_to_an_earlier_phase_reads_on(table: dict[str, Any]) -> None:
    """After a bad step 6, the run repeats steps 4 .. 6 with tokens that it has not read."""
    data = build(table)
    before = list(ranges_of(data, range(1, 7)))
    target = data.progress_after(6).moved_to(3, data.phase_plan)
    data.resume(target)
    after = list(ranges_of(data, range(4, 9)))
    found = [(source, token) for source, each in [*before, *after] for token in each]
    assert len(set(found)) == len(found)
    assert data.progress_after(6).samples == target.samples + 8 + 2 * 4
    assert data.samples(4).start == target.samples
    again = build(table, data.progress_after(5))
    assert list(ranges_of(again, range(6, 9))) == after[8 + 4 :]


def test_a_position_that_is_not_carried_over_is_found(
    table: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant: a corpus that begins again with every length."""

    def forget(self: CorpusOrder) -> None:
        self.earlier, self.epoch = (), 0

    monkeypatch.setattr(CorpusOrder, "_finish_passes", forget)
    found = [(s, token) for s, each in ranges_of(build(table), range(1, 17)) for token in each]
    assert len(set(found)) < len(found)
