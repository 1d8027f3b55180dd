"""The one exception that means "the input was refused"."""


class InputError(ValueError):
    """Bad input, in one sentence: the field, its value and what is allowed.

    The command line prints the sentence and exits with code 2; anything else
    that escapes is a bug and keeps its traceback.
    """


class Diverged(RuntimeError):
    """Training met a loss or gradient that is not finite, and stopped before using it."""
