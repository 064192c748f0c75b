"""The one exception that `coset` raises for bad input, and the check that most of it shares."""


class CosetError(ValueError):
    """Something the caller can mend: a bad file, flag, tensor or pair of models.

    The message names what is wrong (file, tensor or flag), what was expected, what came, and what to try. The command
    line prints it without a traceback; further lines hold one difference each.
    """


def require_whole(name: str, value: object, *, least: int) -> None:
    """Raise unless `value` is an integer, no truth value, of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise CosetError(f"{name} must be an integer, got {value!r}")
    if value < least:
        raise CosetError(f"{name} must be at least {least}, got {value}")
