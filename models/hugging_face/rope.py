"""Conversion between our scaling of rotary positions and transformers' `rope_parameters`."""

import math
from collections.abc import Mapping
from typing import Any

from models.config import ModelConfig
from models.errors import UserError
from models.rope_scaling import SCALING_KEYS, RopeScaling

THEIR_ROPE_KEYS = {  # our key -> that of transformers, where they differ
    "original_sequence_length": "original_max_position_embeddings",
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
}


def rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """Return transformers' `rope_parameters`."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope_theta}
    values = {
        THEIR_ROPE_KEYS.get(key, key): getattr(scaling, key) for key in SCALING_KEYS[scaling.type]
    }
    given = {key: value for key, value in values.items() if value is not None}
    return {
        "rope_type": scaling.type,
        "rope_theta": config.rope_theta,
        "factor": scaling.factor,
        **given,
    }


def rope_scaling_in(theirs: Mapping[str, Any], positions: int) -> RopeScaling | None:
    """Return the scaling in transformers' `rope_parameters`; None if there is none.

    positions: number of positions of the model, from which transformers derives a missing factor of
        YaRN

    Raises:
        UserError: a value is missing or not valid.
    """
    kind = theirs.get("rope_type")
    if kind not in SCALING_KEYS:
        return None
    factor, original = theirs.get("factor"), theirs.get("original_max_position_embeddings")
    if factor is None and kind == "yarn" and original:
        factor = positions / original
    if not isinstance(factor, (int, float)) or factor < 1:
        raise UserError(
            f"rope_parameters: factor = {factor!r} is not a number of at least 1; use the length "
            f'of the new sequences divided by the original one, such as "factor": 8.0'
        )
    values = {key: theirs.get(THEIR_ROPE_KEYS.get(key, key)) for key in SCALING_KEYS[kind]}
    if kind == "yarn" and values["attention_factor"] is None:
        values["attention_factor"] = _attention_factor(theirs, factor)
    given = {key: value for key, value in values.items() if value is not None}
    return RopeScaling(type=kind, factor=float(factor), **given)


def _attention_factor(theirs: Mapping[str, Any], factor: float) -> float | None:
    """Return the attention factor that `mscale` and `mscale_all_dim` define (DeepSeek-V3).

    Returns:
        None unless both are set
    """
    over, under = theirs.get("mscale"), theirs.get("mscale_all_dim")
    if not (over and under):
        return None
    logarithm = 0.1 * math.log(factor)
    return (over * logarithm + 1.0) / (under * logarithm + 1.0)
