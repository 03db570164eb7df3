"""The planner's pictures show the plan. The tests read the figure's axes, not its pixels."""

import errno
import os
import resource
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from models.errors import UserError
from threefold.commands import plan
from threefold.config.loading import REPOSITORY, load_recipe
from threefold.config.recipe import Recipe
from threefold.pipeline.picture import MAX_STAGE_ROWS, save_figure
from threefold.plan import catalogue as catalogue_module
from threefold.plan import pictures
from threefold.plan.job import Job, Machine, job_of
from threefold.plan.memory.peak import GIB, stage_memory
from threefold.plan.pictures import timeline
from threefold.plan.search import search

RECIPES = REPOSITORY / "recipes"


def load(name: str, *overrides: str) -> tuple[Recipe, Job]:
    recipe = load_recipe(RECIPES / name, overrides)
    return recipe, job_of(recipe, Machine.of_cluster(recipe.cluster))


def boxes(axes: Axes) -> int:
    return sum(
        len(each.get_paths()) for each in axes.collections if isinstance(each, PolyCollection)
    )


def rectangles(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def test_a_timeline_has_every_stage_and_every_pass() -> None:
    _, job = load("llama/70b.toml")
    passes, bars = timeline(job, "mine").axes
    assert [label.get_text() for label in passes.get_yticklabels()] == list("0123")
    assert boxes(passes) == 4 * 32 * 2
    assert "mine: 1F1B, 4 stages, 32 micro-batches" in passes.figure.get_suptitle()
    heights = {}
    for bar in rectangles(bars):
        stage = round(bar.get_x() + bar.get_width() / 2)
        heights[stage] = heights.get(stage, 0.0) + bar.get_height()
    assert heights == pytest.approx(
        {number: stage.total / GIB for number, stage in enumerate(stage_memory(job))}
    )
    assert [line.get_ydata()[0] for line in bars.lines] == [job.machine.gpu.memory_gib]


def test_a_deep_pipeline_shows_some_stages_and_both_ends() -> None:
    _, job = load("megatron/530b.toml")
    first, last, bars = timeline(job, "deep").axes
    labels = [label.get_text() for label in first.get_yticklabels()]
    assert len(labels) == MAX_STAGE_ROWS and labels[0] == "0" and labels[-1] == "34"
    assert "16 of 35" in first.get_ylabel()
    assert first.get_xlim()[1] < last.get_xlim()[0]
    assert len({round(bar.get_x(), 3) for bar in rectangles(bars)}) == 35


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "kinds"),
    [
        ("1f1b", 1, 2),
        ("interleaved", 2, 2),
        ("interleaved", 5, 2),
        ("zb-h1", 1, 3),
        ("zb-v", 2, 3),
        ("dualpipev", 2, 2),
    ],
)
def test_chunks_and_kinds_have_colours_of_their_own(
    schedule: str, virtual_stages: int, kinds: int
) -> None:
    _, job = load("qwen3/32b.toml", "layout.tensor=4", "layout.pipeline=2")
    job = replace(job, layout=replace(job.layout, schedule=schedule, virtual_stages=virtual_stages))
    passes, _ = timeline(job, "virtual_stages").axes
    assert (
        len({tuple(each.get_facecolor()[0]) for each in passes.collections})
        == kinds * virtual_stages
    )
    assert boxes(passes) == 2 * 8 * virtual_stages * kinds
    labels = [text.get_text() for text in passes.get_legend().get_texts()]
    assert len(labels) == kinds * min(virtual_stages, 3 if virtual_stages <= 3 else 2)
    assert ("weights" in labels) == (schedule == "zb-h1")


def test_without_a_pipeline_there_is_one_stage() -> None:
    _, job = load("llama/8b.toml")
    passes, bars = timeline(job, "one").axes
    assert [label.get_text() for label in passes.get_yticklabels()] == ["0"]
    assert "1 stage, 1 micro-batch\n" in passes.figure.get_suptitle()
    assert len({bar.get_x() for bar in rectangles(bars)}) == 1


def test_numbers_are_inside_their_boxes() -> None:
    figure = timeline(load("llama/70b.toml")[1], "numbers")
    figure.draw_without_rendering()
    passes = figure.axes[0]
    extents = [text.get_window_extent() for text in passes.texts]
    widths = [
        path.get_extents(passes.transData).width
        for each in passes.collections
        for path in each.get_paths()
    ]
    assert len(extents) == 4 * 32 * 2
    assert max(extent.width for extent in extents) < max(widths)
    for row in range(4):
        level = passes.transData.transform((0, row))[1]
        of_row = sorted(
            (extent.x0, extent.x1) for extent in extents if extent.y0 < level < extent.y1
        )
        assert len(of_row) == 64
        assert all(a[1] <= b[0] for a, b in pairwise(of_row))


def test_a_heat_map_has_the_family_by_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MIN_LAST_NODES", 2)
    assert pictures.node_counts(1) == [1, 2]
    relatives = [RECIPES / "llama" / f"{size}.toml" for size in ("1b", "405b")]
    monkeypatch.setattr(catalogue_module, "recipes_in_repository", lambda: relatives)
    size = ("cluster.nodes=2", "cluster.gpus_per_node=4", "batch.global_sequences=8")
    recipe, job = load("llama/7b.toml", *size)
    axes, bar = pictures.heatmap(recipe, job).axes
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "2"]
    names = [label.get_text().partition("\n")[0] for label in axes.get_yticklabels()]
    assert names == [f"llama-{size}b" for size in (1, 7, 405)]
    cells = {
        (round(text.get_position()[1]), round(text.get_position()[0])): text.get_text()
        for text in axes.texts
    }
    assert len(cells) == 3 * 2
    own = search(job, 1).plans[0]
    assert cells[1, 1] == pictures.memory_text(own)
    assert f"{pictures.mfu(own):.0%}" in cells[1, 1]
    assert cells[2, 0] == "-"  # 405B on one node
    (frame,) = rectangles(axes)
    assert frame.get_xy() == (0.5, 0.5)
    assert bar.get_ylabel() == "predicted MFU"


def test_a_heat_map_uses_the_imbalance_of_experts() -> None:
    small = ("layout={}", "model.layers=4", "cluster.nodes=1", "batch.global_sequences=8")
    recipe, job = load("mixtral/8x7b.toml", *small)
    even, busy = (
        pictures.plan_on_nodes(recipe, replace(job, expert_imbalance=ratio), 1)
        for ratio in (1.0, 3.0)
    )
    assert even and busy and busy.job.expert_imbalance == 3.0
    assert busy.time.total > 1.1 * even.time.total


def test_a_users_recipe_is_in_its_family() -> None:
    recipe, _ = load("llama/7b.toml", "name=llama-mine", "model.layers=40")
    names = [each.name for each in pictures.family(recipe)]
    assert names.index("llama-mine") == names.index("llama-8b") + 1
    other, _ = load("llama/7b.toml", "name=mine")
    assert pictures.family(other) == [other]


def test_columns_are_powers_of_two_and_the_users_nodes() -> None:
    powers = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    assert pictures.node_counts(4) == powers
    assert pictures.node_counts(384) == [*powers[:-1], 384, 512]
    assert pictures.node_counts(1024) == [*powers, 1024]


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_pictures_are_written(tmp_path: Path, suffix: str) -> None:
    _, job = load("llama/8b.toml")
    file = tmp_path / f"plan{suffix}"
    save_figure(pictures.timeline(job, "written"), file)
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    assert file.read_bytes().startswith(start) and file.stat().st_size > 5000


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    _, job = load("llama/8b.toml")
    with pytest.raises(UserError, match=r"gone/x\.png cannot be written \(No such file .*; use a"):
        save_figure(pictures.timeline(job, "x"), tmp_path / "gone" / "x.png")


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_a_full_disk_leaves_the_earlier_picture(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, figure = tmp_path / f"plan{suffix}", Figure()
    figure.subplots()
    file.write_text("the earlier picture")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot be written \(File too large\); use a file in"):
            save_figure(figure, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=full))
    with pytest.raises(UserError, match=r"\(No space left on device\); free disk space, or use a"):
        save_figure(figure, file)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["the earlier picture"]


@pytest.mark.parametrize("option", ["--timeline", "--heatmap", "table x.csv --scatter"])
@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ("plan.gif", "plan.gif is not a .png, .svg or .pdf; use picture.png"),
        ("gone/plan.png", "gone/plan.png: folder "),
        (".png", ".png is not a .png, .svg or .pdf; use picture.png"),
    ],
)
def test_a_bad_name_is_rejected_before_planning(
    option: str,
    file: str,
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr("sys.argv", ["plan.py", *option.split(), file])
    with pytest.raises(SystemExit) as rejected:
        plan.main()
    assert rejected.value.code == 2
    assert f"argument {option.split()[-1]}: {problem}" in capsys.readouterr().err


def test_the_command_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MIN_LAST_NODES", 1)
    files = {"--timeline": tmp_path / "timeline.png", "--heatmap": tmp_path / "heatmap.svg"}
    options = [str(word) for pair in files.items() for word in pair]
    monkeypatch.setattr("sys.argv", ["plan.py", "--top", "0", *options])
    with pytest.raises(SystemExit) as done:
        plan.main()
    assert done.value.code == 0
    assert all(file.stat().st_size > 5000 for file in files.values())
