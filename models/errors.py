"""The exception class of mistakes that a user can correct."""


class UserError(ValueError):
    """An invalid recipe, option, file or environment, with a message that says how to correct it.

    Every command catches UserError once and prints its message without a traceback. Any other
    exception, a plain ValueError of a library included, is a defect and keeps its traceback.
    """


# How pydantic reads a recipe's [model] section and the sections in it: unknown keys and values of
# other types are errors, and the docstrings of the fields describe the keys.
STRICT_SECTION = {
    "extra": "forbid",
    "strict": True,
    "allow_inf_nan": False,
    "use_attribute_docstrings": True,
}
