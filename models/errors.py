"""The exception class of mistakes that a user can correct."""


class UserError(ValueError):
    """An invalid recipe, option, file or environment, with a message that says how to correct it.

    Every command catches UserError once and prints its message without a traceback. Any other
    exception, a plain ValueError of a library included, is a defect and keeps its traceback.
    """
