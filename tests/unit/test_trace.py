"""The trace reader: formats, limits, and what it says about files that are no traces."""

from __future__ import annotations

import gzip
import json
import lzma
import os
from pathlib import Path
from typing import Any

import pytest
from kvoffload_rs.cli.trace import TraceRequest, read_trace
from kvoffload_rs.errors import ConfigError

TRACES = Path(
    os.environ.get("KVOFFLOAD_TRACES", Path(__file__).resolve().parents[3] / "shared" / "traces")
)
GOOD: dict[str, Any] = {"timestamp": 12, "input_length": 1000, "hash_ids": [0, 7]}


def line(**changes: Any) -> str:
    return json.dumps({**GOOD, **changes})


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.xz", "t.jsonl.gz", "renamed.txt"])
def test_reads_plain_xz_and_gzip_whatever_the_name(tmp_path: Path, name: str) -> None:
    text = f"{line()}\n\n{line(timestamp=13.5, hash_ids=[0, 8, -3], output_length=4)}\n".encode()
    pack = {"xz": lzma.compress, "gz": gzip.compress, "txt": lzma.compress}
    path = tmp_path / name
    path.write_bytes(pack.get(path.suffix[1:], bytes)(text))
    assert read_trace(path, 10) == [
        TraceRequest(12, 1000, (0, 7)),
        TraceRequest(13.5, 1000, (0, 8, -3)),
    ]


def test_a_last_line_without_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{line()}\n{line()}")
    assert len(read_trace(path, 10)) == 2


def test_stops_at_the_limit_before_it_sees_what_follows(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{line()}\n{line()}\nbroken\n")
    assert len(read_trace(path, 2)) == 2
    with pytest.raises(ConfigError, match="line 3 is not JSON"):
        read_trace(path, 3)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2]", "line 2 is not a JSON object"),
        ('{"timestamp": 1', "line 2 is not JSON"),
        ("\ufffe\x00", "line 2 is not JSON"),
        ('{"timestamp": 1}', "line 2 has no input_length, hash_ids"),
        (line(timestamp="soon"), "line 2 has a timestamp that is no number: 'soon'"),
        (line(timestamp=True), "line 2 has a timestamp"),
        (line(input_length=0), "line 2 has an input_length that is no count: 0"),
        (line(input_length=2.5), "line 2 has an input_length"),
        (line(hash_ids=[]), "line 2 has hash_ids that are not a list of one or more integers"),
        (line(hash_ids=[1, "2"]), "line 2 has hash_ids"),
        (line(hash_ids=[1, None]), "line 2 has hash_ids"),
        (line(hash_ids={"1": 1}), "line 2 has hash_ids"),
        ("[" * 100_000, "line 2 is not JSON"),
        ('{"timestamp": ' + "9" * 5000 + "}", "line 2 is not JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f"{line()}\n{text}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_trace(path, 10)
    assert says in str(caught.value)
    assert "Mooncake format" in str(caught.value)
    assert caught.value.field == "trace"
    assert caught.value.value == str(path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"\x7fELF\x02\xf0\xf1\xf2")
    with pytest.raises(ConfigError, match="line 1 is not UTF-8 text"):
        read_trace(path, 10)


def test_a_line_without_end_is_not_read_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvoffload_rs.cli.trace._LONGEST_LINE", 1 << 20)
    path = tmp_path / "t"
    path.write_bytes(b" " * (3 << 20))
    with pytest.raises(ConfigError, match="line 1 is longer than 1 MiB"):
        read_trace(path, 10)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file"):
        read_trace(tmp_path / "missing", 1)
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory"):
        read_trace(tmp_path, 1)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_requests(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="has no request"):
        read_trace(path, 1)


@pytest.mark.parametrize("pack", [lzma.compress, gzip.compress])
def test_damaged_files(tmp_path: Path, pack: Any) -> None:
    packed = pack((line() + "\n").encode() * 1000)
    path = tmp_path / "t"
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ConfigError, match="is damaged or cut short"):
        read_trace(path, 10_000)
    path.write_bytes(packed[:20] + bytes(40) + packed[60:])
    with pytest.raises(ConfigError, match="is damaged or cut short"):
        read_trace(path, 10_000)


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"no traces in {TRACES}: set KVOFFLOAD_TRACES")
def test_public_traces() -> None:
    paths = sorted(TRACES.glob("*.jsonl.xz"))
    assert paths
    for path in paths:
        requests = read_trace(path, 300)
        assert len(requests) == 300
        times = [request.timestamp for request in requests]
        assert times == sorted(times)
