"""The stage that needs most memory is found by looking at a few."""

from dataclasses import replace

from recipes.planning.hardware import load_gpu
from recipes.planning.job import Machine, job_of
from recipes.planning.memory import fullest_stage, stage_memory
from recipes.training.recipe import REPOSITORY, load_recipe


def test_the_fullest_stage_is_found_without_looking_at_all() -> None:
    recipe = load_recipe(REPOSITORY / "recipes" / "gpt" / "175b.toml")
    job = job_of(recipe, Machine.of(load_gpu("A100-80GB"), gpus=1024))
    for pipeline, chunks, schedule in ((8, 1, "1f1b"), (12, 2, "1f1b"), (20, 2, "dualpipev")):
        for micro_batches in (1, 3, 40):
            for recompute in ("none", "full"):
                spread = replace(
                    job.spread, pipeline=pipeline, chunks=chunks, schedule=schedule, data=1,
                    recompute=recompute,
                )  # fmt: skip
                other = replace(job, spread=spread, global_sequences=micro_batches)
                fullest = max(stage.total for stage in stage_memory(other))
                assert fullest_stage(other).total == fullest
