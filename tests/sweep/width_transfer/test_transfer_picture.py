"""The pictures of a transfer check. The tests read the figure's axes, not its pixels."""

from tests.sweep.width_transfer.test_coordinates import check, measured
from tests.sweep.width_transfer.test_learning_rates import RATES, outcome
from threefold.sweep.width_transfer import picture


def test_each_width_has_a_line_with_a_star_at_its_best_rate() -> None:
    outcomes = [outcome([3, 2, 3, None]), outcome([3, 2.5, 2.2, 4], width=128)]
    (axes,) = picture.learning_rates(outcomes, "title").axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["width 64", "width 128"]
    curves, stars = axes.lines[::3], axes.lines[1::3]
    assert [list(line.get_ydata()) for line in curves] == [[3, 2, 3], [3, 2.5, 2.2, 4]]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in stars] == [(2e-3, 2), (4e-3, 2.2)]
    assert list(axes.lines[2].get_xdata()) == RATES[3:]  # diverged


def test_families_are_compared_over_the_steps() -> None:
    outcomes = [outcome([3, 2, 3, 4], family="adamw"), outcome([3, 3, 1.5, 4], family="muon")]
    _, steps = picture.learning_rates(outcomes, "title").axes
    assert list(steps.lines[1].get_ydata()) == [3.0, 2.5, 2.0, 1.5]
    assert [text.get_text() for text in steps.texts] == ["step 15"]
    assert list(steps.lines[2].get_ydata()) == [2, 2]  # the final loss of the first


def test_runs_that_have_not_learned_do_not_hide_the_others() -> None:
    lowest, highest = picture.loss_limits([outcome([3, 2, 50, 1000])])
    assert 1 < lowest < 2 and 2 < highest < 4


def test_sizes_over_widths_have_a_part_for_each_moment() -> None:
    found = check({64: [measured(1, 2, 0.1)], 128: [measured(1, 3, 0.3)]})
    start, end, change = picture.coordinates([found], "title").axes
    assert [list(line.get_ydata()) for line in end.lines] == [[2, 3], [10, 15]]
    assert [line.get_linestyle() for line in start.lines] == ["-", ":"]
    assert [line.get_linestyle() for line in change.lines] == [":", ":", "-"]
    assert [text.get_text() for text in change.get_legend().get_texts()][-1] == "loss: 1.00"
