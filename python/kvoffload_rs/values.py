"""Single settings, read from what a user may have written: numbers, words, sizes."""

from __future__ import annotations

import math
import re

from kvoffload_rs.errors import ConfigError
from kvoffload_rs.memory import MemoryLimit, machine_memory

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0", ""})
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{p}{s}": 1000**i for i, p in enumerate("kmgt", 1) for s in ("", "b")},
    **{f"{p}{s}": 1024**i for i, p in enumerate("kmgt", 1) for s in ("i", "ib")},
}
_SIZE = re.compile(r"\s*([+-]?[0-9][0-9_]*(?:\.[0-9]+)?)\s*(%|[a-zA-Z]*)\s*")


def parse_bytes(field: str, value: object, memory: MemoryLimit | None = None) -> int:
    """Reads a number of bytes: a number, "8GiB", "8 GB" (decimal), or "50%" of the memory.

    Raises:
        ConfigError: it is none of these.
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        # vLLM's own --kv-offloading-size arrives as a float.
        return int(value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) and len(value) <= 64 else None
    unit = match.group(2).lower() if match else ""
    if match is None or (unit != "%" and unit not in _UNITS):
        raise ConfigError(
            f"{field} is {_short(value)}, which is no number of bytes",
            field=field,
            value=value,
            hint='Write bytes as a number, or "8GiB", "512MiB", "8 GB", or "50%" of the memory.',
        )
    digits = match.group(1).replace("_", "")
    if unit != "%":
        scale = _UNITS[unit]
        return int(float(digits) * scale) if "." in digits else int(digits) * scale
    percent = float(digits)
    if not 0 < percent <= 100:
        raise ConfigError(
            f"{field} is {value!r}, which is no share of the memory",
            field=field,
            value=value,
            hint="A percentage is above 0 and at most 100.",
        )
    if memory is None:
        memory = machine_memory()
    if memory is None:
        raise ConfigError(
            f"{field} is {value!r}, but the size of the memory cannot be read here",
            field=field,
            value=value,
            hint="Give it in bytes.",
        )
    return int(memory.bytes * percent / 100)


def parse_bool(field: str, value: object) -> bool:
    """Reads a truth value, also from a string: "false" is false, and never taken for true.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str):
        word = value.strip().lower()
        if word in _TRUE:
            return True
        if word in _FALSE:
            return False
    raise ConfigError(
        f"{field} is {value!r}, which is neither true nor false",
        field=field,
        value=value,
        hint="Write true or false.",
    )


#: The core counts in 32 bits.
MOST = 2**32 - 1

#: A hundred years: more than any wait, and less than any clock's range.
_MOST_SECONDS = 100 * 365 * 86400.0


def parse_int(field: str, value: object, least: int, most: int = MOST) -> int:
    """Reads a whole number from `least` to `most`, also from a string.

    Raises:
        ConfigError: it is none, less or more.
    """
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    elif isinstance(value, str):
        try:
            number = int(value)
        except ValueError:
            number = None
    if number is None or not least <= number <= most:
        raise ConfigError(
            f"{field} is {_short(value)}",
            field=field,
            value=value,
            hint=f"It must be a whole number from {least} to {most}.",
        )
    return number


def parse_choice(field: str, value: object, choices: tuple[str, ...]) -> str:
    """Reads one word of several.

    Raises:
        ConfigError: it is none of them.
    """
    if value is False and "off" in choices:
        return "off"  # what YAML makes of a bare off
    if isinstance(value, str) and value.strip().lower() in choices:
        return value.strip().lower()
    raise ConfigError(
        f"{field} is {value!r}",
        field=field,
        value=value,
        hint=f"It must be one of {', '.join(choices)}.",
    )


def parse_seconds(field: str, value: object) -> float:
    """Reads a time above 0, also from a string.

    Raises:
        ConfigError: it is none.
    """
    seconds = math.nan
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except (ValueError, OverflowError):
            seconds = math.nan
    if not 0 < seconds <= _MOST_SECONDS:
        raise ConfigError(
            f"{field} is {_short(value)}",
            field=field,
            value=value,
            hint="It must be a number of seconds above 0, and less than a century.",
        )
    return seconds


def _short(value: object) -> str:
    """A value as an error message shows it: whoever wrote a novel there knows how it goes on."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge number"
    return text if len(text) <= 80 else f"{text[:77]}..."
