"""Reads request traces in the Mooncake format, plain or compressed with xz or gzip.

One JSON object a line: ``timestamp`` (ms), ``input_length`` (tokens) and ``hash_ids`` (ids of the
prompt's blocks in order; equal ids mean equal block and equal everything before it).
Files are read line by line, and only as far as asked.
"""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import BinaryIO

from kvoffload_rs.errors import ConfigError

_XZ_MAGIC = b"\xfd7zXZ\x00"
_GZIP_MAGIC = b"\x1f\x8b"
_LONGEST_LINE = 64 << 20
_FORMAT = (
    "A trace has one JSON object a line with timestamp, input_length and hash_ids "
    "(Mooncake format; plain, .xz or .gz)."
)


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace."""

    timestamp: float
    """Arrival in milliseconds."""
    input_length: int
    """Prompt tokens."""
    hash_ids: tuple[int, ...]
    """Ids of the prompt's blocks, first block first; never empty."""


def read_trace(path: Path, limit: int) -> list[TraceRequest]:
    """The first ``limit`` requests of the trace at ``path``.

    Raises ConfigError if the file cannot be read, is not a trace or has no request; the message
    names the line.
    """
    requests: list[TraceRequest] = []
    try:
        with path.open("rb") as raw:
            for number, line in enumerate(_lines(path, raw), start=1):
                if line.strip():
                    requests.append(_parse(path, number, line))
                    if len(requests) == limit:
                        break
    except (lzma.LZMAError, zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise _bad_file(path, f"is damaged or cut short: {error}") from error
    except OSError as error:
        raise _bad_file(path, f"cannot be read: {error.strerror or error}") from error
    if not requests:
        raise _bad_file(path, "has no request")
    return requests


def _lines(path: Path, raw: BinaryIO) -> Iterator[bytes]:
    """Lines of the file, decompressed if its first bytes say so."""
    magic = raw.read(len(_XZ_MAGIC))
    raw.seek(0)
    stream: BinaryIO | BufferedIOBase = raw
    if magic == _XZ_MAGIC:
        stream = lzma.LZMAFile(raw)  # noqa: SIM115 (closing raw is enough)
    elif magic.startswith(_GZIP_MAGIC):
        stream = gzip.GzipFile(fileobj=raw)
    number = 0
    while line := stream.readline(_LONGEST_LINE):
        number += 1
        if len(line) == _LONGEST_LINE:
            raise _bad_line(path, number, f"is longer than {_LONGEST_LINE >> 20} MiB")
        yield line


def _parse(path: Path, number: int, line: bytes) -> TraceRequest:
    try:
        entry = json.loads(line)
    except UnicodeDecodeError as error:
        raise _bad_line(path, number, "is not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise _bad_line(path, number, f"is not JSON ({why})") from error
    if not isinstance(entry, dict):
        raise _bad_line(path, number, "is not a JSON object")
    missing = [name for name in ("timestamp", "input_length", "hash_ids") if name not in entry]
    if missing:
        raise _bad_line(path, number, f"has no {', '.join(missing)}")
    timestamp, length, ids = entry["timestamp"], entry["input_length"], entry["hash_ids"]
    if not (_is_int(timestamp) or isinstance(timestamp, float)):
        raise _bad_line(path, number, f"has a timestamp that is no number: {timestamp!r:.40}")
    if not _is_int(length) or length < 1:
        raise _bad_line(path, number, f"has an input_length that is no count: {length!r:.40}")
    if not isinstance(ids, list) or not ids or not all(map(_is_int, ids)):
        raise _bad_line(path, number, "has hash_ids that are not a list of one or more integers")
    return TraceRequest(timestamp, length, tuple(ids))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bad_file(path: Path, why: str) -> ConfigError:
    return ConfigError(f"trace {path} {why}", field="trace", value=str(path), hint=_FORMAT)


def _bad_line(path: Path, number: int, why: str) -> ConfigError:
    return _bad_file(path, f"line {number} {why}")
