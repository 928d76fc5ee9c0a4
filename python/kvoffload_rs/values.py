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
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = match.group(2).lower() if match else ""
    if match is None or (unit != "%" and unit not in _UNITS):
        raise ConfigError(
            f"{field} is {value!r}, which is no number of bytes",
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


def parse_int(field: str, value: object, least: int) -> int:
    """Reads a whole number of at least `least`, also from a string.

    Raises:
        ConfigError: it is none, or less.
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
    if number is None or number < least:
        raise ConfigError(
            f"{field} is {value!r}",
            field=field,
            value=value,
            hint=f"It must be a whole number of at least {least}.",
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
        except ValueError:
            seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError(
            f"{field} is {value!r}",
            field=field,
            value=value,
            hint="It must be a number of seconds above 0.",
        )
    return seconds
