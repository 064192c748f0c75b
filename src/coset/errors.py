"""The one exception that `coset` raises for bad input."""


class CosetError(ValueError):
    """Something the caller can mend: a bad file, flag, tensor or pair of models.

    The message names what is wrong (file, tensor or flag), what was expected, what came, and what to try. The command
    line prints it without a traceback; further lines hold one difference each.
    """
