"""A stage of a run: the step at which it begins, and the keys of the recipe that it changes."""

from typing import Annotated, Any

from pydantic import Field, model_validator

from models.errors import UserError
from threefold.config.section import Count, Section

# Section -> the keys that a stage may change; None: any key.
CHANGEABLE: dict[str, tuple[str, ...] | None] = {
    "model": ("sequence_length", "rope_theta", "rope_scaling"),
    "batch": ("global_sequences", "micro_sequences"),
    "data": ("train", "validation", "separate_documents"),
    "optimizer": ("learning_rate", "weight_decay", "schedule"),
    "layout": None,
}
Changes = dict[str, Any]
FIRST_STAGE = "first"  # the name of the steps before the first [[stage]]


class Stage(Section):
    """A later stage of the run. Its changes also apply to the following stages."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=64)]
    """Name of the stage in messages, events and `--set stage.NAME.section.key=value`. The steps
    before the first `[[stage]]` are the stage "first"."""

    start_step: Annotated[int, Field(ge=2)] | None = None
    """First step of the stage."""

    start_tokens: Count | None = None
    """Alternative to `start_step`: number of tokens. The stage begins with the first step before
    which the run has read at least that many."""

    model: Changes = Field(default_factory=dict)
    """Changes of `[model]`: `sequence_length`, `rope_theta` and `rope_scaling`."""

    batch: Changes = Field(default_factory=dict)
    """Changes of `[batch]`: `global_sequences` and `micro_sequences`."""

    data: Changes = Field(default_factory=dict)
    """Changes of `[data]`: `train` (a whole list, with weights), `validation` and
    `separate_documents`."""

    optimizer: Changes = Field(default_factory=dict)
    """Changes of `[optimizer]`: `learning_rate`, `weight_decay` and `schedule` (a whole table). A
    stage that sets `learning_rate` or `schedule` begins a schedule of its own, which ends before
    the next stage that does so, or with the run, or after its `schedule.steps`. Otherwise the
    earlier schedule continues."""

    layout: Changes = Field(default_factory=dict)
    """Changes of `[layout]`: any key."""

    @property
    def key(self) -> str:
        """The name of the stage in the option --set."""
        return f"stage.{self.name}"

    @property
    def begins_schedule(self) -> bool:
        """True if a new schedule of the learning rate begins with the stage."""
        return bool({"learning_rate", "schedule"} & self.optimizer.keys())

    @model_validator(mode="after")
    def _check(self) -> "Stage":
        if (self.start_step is None) == (self.start_tokens is None):
            given = "neither" if self.start_step is None else "both"
            raise UserError(
                f"{self.key} has {given} of start_step and start_tokens; use one of them, for "
                f"example start_step = 1000"
            )
        for section, keys in CHANGEABLE.items():
            for key in getattr(self, section):
                if keys is not None and key not in keys:
                    raise UserError(
                        f"{self.key}.{section}.{key} cannot change during a run; the keys of "
                        f"[stage.{section}] are {', '.join(keys)}"
                    )
        if not any(getattr(self, section) for section in CHANGEABLE):
            raise UserError(
                f"{self.key} changes nothing; use one of the sections "
                f"{', '.join(f'[stage.{section}]' for section in CHANGEABLE)}, or leave it out"
            )
        return self
