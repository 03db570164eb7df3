"""The stage that needs the most memory is found among a few candidates."""

from dataclasses import replace

import pytest

from threefold.config.loading import REPOSITORY, load_recipe
from threefold.gpus.datasheet import load_gpu
from threefold.pipeline.schedules import SCHEDULES
from threefold.plan.job import Machine, job_of
from threefold.plan.memory.peak import fullest_stage, stage_memory


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_fullest_stage_is_found_among_a_few_candidates(schedule: str) -> None:
    recipe = load_recipe(REPOSITORY / "recipes" / "gpt" / "175b.toml")
    job = job_of(recipe, Machine.of(load_gpu("A100-80GB"), gpus=1024))
    virtual_stages = SCHEDULES[schedule].virtual_stages or 3
    for pipeline, vocab_size in ((8, 50257), (12, 400_000), (20, 50257), (7, 200_000)):
        model = replace(job.model, vocab_size=vocab_size)
        for micro_batches in (1, 3, pipeline, 40):
            for recompute in ("none", "full"):
                layout = replace(
                    job.layout, pipeline=pipeline, virtual_stages=virtual_stages,
                    schedule=schedule, data=2, recompute=recompute,
                )  # fmt: skip
                other = replace(job, model=model, layout=layout, global_sequences=2 * micro_batches)
                fullest = max(stage.total for stage in stage_memory(other))
                assert fullest_stage(other).total == fullest
