"""Small checks that every data class shares: field values from a config, named by their full key."""

from collections.abc import Callable
from typing import Any

from jaxllm.errors import UserError

Log = Callable[[str], None] | None


def whole(key: str, value: Any, least: int, optional: bool = False) -> None:
    """Refuses anything but an int >= least (or None where optional). True is no number."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{key}={value!r}: must be a whole number >= {least}" + (" or null" if optional else ""))


def word(key: str, value: Any, optional: bool = False) -> None:
    """Refuses anything but a non-empty string (or None where optional)."""
    if optional and value is None:
        return
    if not isinstance(value, str) or not value:
        raise UserError(f"{key}={value!r}: must be a non-empty text" + (" or null" if optional else ""))


def flag(key: str, value: Any) -> None:
    """Refuses anything but true or false."""
    if not isinstance(value, bool):
        raise UserError(f"{key}={value!r}: must be true or false")


def say(log: Log, message: str) -> None:
    """One progress line, if somebody listens."""
    if log is not None:
        log(message)


def megabytes(count: float) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
