"""The corpora and their tokenizer."""

from typing import Annotated

from pydantic import Field, model_validator

from models.errors import UserError
from recipes.training.recipe.blend_weights import check_weights
from recipes.training.recipe.repository import repository_path
from recipes.training.recipe.sections.section import Section


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

    validation: str
    """Path of the validation file, without .bin or .idx. It must not be a training corpus."""

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
        if repository_path(self.validation) in paths:
            raise UserError(
                f'data.validation = "{self.validation}" is also a training corpus (data.train); '
                f"use a file of its own, as prepare_data.py writes it"
            )
        check_weights([source.weight for source in self.train])
        return self
