"""What the user of ``kvoffload bench transfer`` may choose."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvoffload_rs.errors import ConfigError
from kvoffload_rs.values import parse_bytes

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

PATHS = ("auto", "direct", "staged")
DIRECTIONS = ("d2h", "h2d", "both")

_FRAGMENTS = tuple(size * KIB for size in (2, 4, 8, 16, 32, 64, 128, 256, 1024))
_GEMM_FRAGMENTS = (8 * KIB, 64 * KIB)
_QUICK: dict[str, Any] = {
    "fragments": tuple(size * KIB for size in (4, 8, 64, 256)),
    "case_bytes": 256 * MIB,
    "repeats": 3,
    "pool": 1 * GIB,
    "gemm_pairs": 10,
}


@dataclass(frozen=True)
class TransferOptions:
    """One run; the defaults take a few minutes, `quick` ones about one."""

    fragments: tuple[int, ...] = _FRAGMENTS
    """Bytes of one contiguous piece of one block in one GPU tensor."""
    case_bytes: int = 512 * MIB
    """Bytes that a job moves at most; see `cases.MOST_FRAGMENTS`."""
    paths: tuple[str, ...] = PATHS
    directions: tuple[str, ...] = DIRECTIONS
    repeats: int = 5
    pool: int = 4 * GIB
    """Bytes of the host pool."""
    adjacent: bool = False
    gemm: tuple[int, ...] = ()
    """Fragment sizes for which the slow-down of matrix products is measured."""
    gemm_pairs: int = 30
    vllm: bool = True
    chart: Path | None = None
    device: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for fragment in (*self.fragments, *self.gemm):
            if fragment < 2 or fragment % 2:
                raise _wrong("fragments", fragment, "A fragment has an even number of bytes.")
        if self.case_bytes < 1:
            raise _wrong("bytes", self.case_bytes, "It must be at least 1.")
        if self.pool < 4 * self.case_bytes:
            raise _wrong(
                "pool",
                self.pool,
                "Slots of two jobs with a gap after each must fit: use 4 times --bytes or more.",
            )
        if self.gemm and not self.gemm_directions:
            raise _wrong("gemm", self.directions, "Add d2h or h2d to --directions.")
        if self.chart is not None and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                "--chart needs matplotlib, which is not installed",
                field="chart",
                value=str(self.chart),
                hint="Install it with 'pip install matplotlib', or leave --chart out.",
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every fragment size that is measured, in ascending order."""
        return tuple(sorted({*self.fragments, *self.gemm}))

    @property
    def gemm_directions(self) -> tuple[str, ...]:
        """Directions whose effect on matrix products is measured."""
        return tuple(name for name in self.directions if name != "both")


def _wrong(field: str, value: object, hint: str) -> ConfigError:
    return ConfigError(f"--{field} is {value!r}", field=field, value=value, hint=hint)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to an argparse parser. What is not given stays None."""
    add = parser.add_argument
    sizes = _listed(_size)
    add(
        "--fragments",
        type=sizes,
        metavar="LIST",
        help="bytes of a fragment, one block of one layer (2KiB,4KiB,...,256KiB,1MiB)",
    )
    add(
        "--bytes",
        type=_size,
        dest="case_bytes",
        metavar="BYTES",
        help="bytes a job moves, less where that needs more than 131072 fragments (512MiB)",
    )
    add("--paths", type=_words("paths", PATHS), metavar="LIST", help="auto,direct,staged (all)")
    add(
        "--directions",
        type=_words("directions", DIRECTIONS),
        metavar="LIST",
        help="d2h (store), h2d (load), both at once (all three)",
    )
    add("--repeats", type=_at_least_one, metavar="N", help="timed repeats of each case (5)")
    add("--pool", type=_size, metavar="BYTES", help="bytes of the host pool (4GiB)")
    add("--adjacent", action="store_true", help="add rows whose slots and blocks are adjacent")
    add(
        "--gemm",
        type=sizes,
        nargs="?",
        const=_GEMM_FRAGMENTS,
        metavar="LIST",
        help="measure how much copies slow matrix products down, for these fragments (8KiB,64KiB)",
    )
    add("--no-vllm", action="store_true", help="leave the installed vLLM's own copies out")
    add("--quick", action="store_true", help="fewer sizes and repeats: about a minute")
    add("--chart", type=Path, metavar="FILE", help="write a chart (PNG; needs matplotlib)")
    add("--device", type=int, default=0, metavar="N", help="number of the GPU (0)")
    add("--seed", type=int, default=0, metavar="N", help="seed of ids and bytes (0)")
    add("--json", action="store_true", help="print one JSON list of rows instead of the table")


def from_arguments(arguments: argparse.Namespace) -> TransferOptions:
    """Options from parsed arguments.

    Raises:
        ConfigError: a value makes no sense, or --chart is asked for without matplotlib.
    """
    values: dict[str, Any] = dict(_QUICK) if arguments.quick else {}
    names = {field.name for field in dataclasses.fields(TransferOptions)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    values.update({name: value for name, value in given.items() if value is not None})
    return TransferOptions(**values, vllm=not arguments.no_vllm)


def _size(text: str) -> int:
    try:
        size = parse_bytes("size", text.strip())
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than one byte")
    return size


def _listed(parse: Callable[[str], int]) -> Callable[[str], tuple[int, ...]]:
    def parse_list(text: str) -> tuple[int, ...]:
        return tuple(parse(part) for part in text.split(","))

    return parse_list


def _words(name: str, allowed: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        words = [part.strip().lower() for part in text.split(",")]
        for word in words:
            if word not in allowed:
                raise argparse.ArgumentTypeError(
                    f"{word!r} is none of the {name}: {', '.join(allowed)}"
                )
        return tuple(dict.fromkeys(words))

    return parse


def _at_least_one(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return number
