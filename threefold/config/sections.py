"""The corpora and their tokenizer."""

import re
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from models.errors import UserError, toml_line, toml_value
from threefold.config.blend_weights import check_weights
from threefold.config.repository import repository_path
from threefold.config.section import Section

SET_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"  # a part of the names of metrics


class Source(Section):
    """One corpus of the training data."""

    path: str
    """Path of the token file, without .bin or .idx, relative to the repository root."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Share of the samples, relative to the sum of all weights."""


class Data(Section):
    """Token files, and the tokenizer that made them."""

    train: Annotated[tuple[Source, ...], Field(min_length=1)]
    """Training corpora, each with a path and a weight. They are mixed evenly: at every step, each
    corpus is less than one sample from its share."""

    validation: str | dict[str, str] | None = None
    """Path of the validation file, without .bin or .idx, or a table with a name and a path for each
    of several sets: `{ code = "data/code/validation", web = "data/web/validation" }`. No validation
    file may be a training corpus. Leave it out to train without validation."""

    tokenizer: str
    """Folder of the tokenizer. Its hash must equal the one in the manifests of the corpora."""

    separate_documents: bool = False
    """Restrict attention to the tokens of the same document (arXiv 2402.13991). By default, a
    window of several documents is one sequence, and attention crosses their boundaries."""

    @model_validator(mode="after")
    def _check(self) -> "Data":
        paths = [repository_path(source.path) for source in self.train]
        if len(set(paths)) < len(paths):
            raise UserError(
                f"data.train = {[source.path for source in self.train]} names a corpus twice; use "
                f"each path once, with its weight"
            )
        sets = self.validation_sets
        for name, path in sets.items():
            if repository_path(path) in paths:
                raise UserError(
                    f'data.validation{f".{name}" if name else ""} = "{path}" is also a training '
                    f"corpus (data.train); use a file of its own, as prepare_data.py writes it"
                )
        if len({repository_path(path) for path in sets.values()}) < len(sets):
            raise UserError(
                f"data.validation = {toml_value(sets)} names a file twice; use each path once, "
                f"under one name"
            )
        check_weights([source.weight for source in self.train])
        return self

    @field_validator("validation", mode="before")
    @classmethod
    def _check_validation(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        example = '{ code = "data/code/validation", web = "data/web/validation" }'
        if not isinstance(value, dict) or not value:
            raise UserError(
                f"{toml_line('data.validation', value)} is neither a path nor a table of paths; "
                f"use a path, or for example {example}"
            )
        for name, path in value.items():
            if not isinstance(path, str):
                raise UserError(
                    f"data.validation.{name} = {toml_value(path)} is not a path; use for example "
                    f"{example}"
                )
            if not re.fullmatch(SET_NAME, name):
                raise UserError(
                    f"data.validation has a set with the name {toml_value(name)}; use only the "
                    f"letters A to Z and a to z, digits, dots, hyphens and underscores, for "
                    f"example {example}"
                )
        return value

    @property
    def validation_sets(self) -> dict[str, str]:
        """The path of each validation set by name; the name is "" if there is a single path."""
        if isinstance(self.validation, str):
            return {"": self.validation}
        return dict(self.validation or {})
