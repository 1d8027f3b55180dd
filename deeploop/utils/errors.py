"""Exceptions that the command line reports in one sentence, without a traceback."""


class InputError(ValueError):
    """Bad input, in one sentence: the field, its value and the allowed values.

    The command line prints the sentence and exits with code 2. Any other exception
    that escapes is a bug and keeps its traceback.
    """


class Diverged(RuntimeError):
    """A loss, a gradient or a model's output is not finite; nothing was made of it.

    The command line prints the sentence and exits with code 1.
    """
