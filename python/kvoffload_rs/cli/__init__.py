"""The ``kvoffload`` command."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from kvoffload_rs.cli.bench import options as bench_options
from kvoffload_rs.cli.bench.device import CudaUnavailable
from kvoffload_rs.cli.demo import DemoOptions, run_demo
from kvoffload_rs.config import POLICIES
from kvoffload_rs.errors import ConfigError, KvOffloadError

THROUGH = ("connector", "spec")

EXIT_FAILED = 1
"""A verdict failed or an engine died."""

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    arguments = _parser().parse_args(argv)
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        status: int = arguments.run(arguments)
        return status
    except (ConfigError, CudaUnavailable) as error:
        return _complain(error, EXIT_BAD_INPUT)
    except KvOffloadError as error:
        return _complain(error, EXIT_FAILED)
    except KeyboardInterrupt:
        print("kvoffload: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def _demo(arguments: argparse.Namespace) -> int:
    options = DemoOptions(
        trace=arguments.trace,
        requests=arguments.requests,
        users=arguments.users,
        turns=arguments.turns,
        policy=arguments.policy,
        through=arguments.through,
        blocks_per_chunk=arguments.blocks_per_chunk,
        pool=arguments.pool,
        max_tokens=arguments.max_tokens,
        seed=arguments.seed,
        keep_logs=arguments.keep_logs,
    )
    report = run_demo(options, Console(stderr=True))
    if arguments.json:
        print(json.dumps(report.as_json()))
    else:
        report.print(Console())
    return 0 if report.passed else EXIT_FAILED


def _bench_transfer(arguments: argparse.Namespace) -> int:
    options = bench_options.from_arguments(arguments)
    from kvoffload_rs.cli.bench.report import print_rows
    from kvoffload_rs.cli.bench.transfer import run_transfer

    rows = run_transfer(options, Console(stderr=True))
    if arguments.json:
        print(json.dumps([row.as_json() for row in rows]))
    else:
        print_rows(rows, Console())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvoffload", description="KV-cache offloading for vLLM with a Rust core."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="serve a workload with and without offloading and compare every token",
        description="Serves a workload whose KV does not fit the engine's own cache on the real "
        "vLLM CPU engine, three times: without offloading, with kvoffload-rs, and with a control "
        "whose loads copy nothing. Exit status 0 if every token equals the run without offloading "
        "and the control differs; 1 if not, or if an engine dies; 2 for bad input.",
    )
    add = demo.add_argument
    add("--json", action="store_true", help="print one JSON object instead of the table")
    add("--trace", type=Path, metavar="FILE", help="serve a trace (Mooncake format, .xz or .gz)")
    add(
        "--requests",
        type=_whole_number(1),
        metavar="N",
        help="serve the first N requests (trace: 300; chat: all)",
    )
    add("--users", type=_whole_number(1), metavar="N", help="users of the chat (12)")
    add("--turns", type=_whole_number(1), metavar="N", help="messages of each user (8)")
    add(
        "--through",
        choices=THROUGH,
        default="connector",
        help="our connector, or vLLM's with our spec (connector)",
    )
    add("--policy", choices=POLICIES, default="lru", help="eviction policy (lru)")
    add(
        "--blocks-per-chunk",
        type=_whole_number(1),
        default=1,
        metavar="N",
        help="engine blocks in an offloaded chunk (1)",
    )
    add(
        "--pool",
        default="256MiB",
        metavar="BYTES",
        help="bytes of the host pool, also 64MiB (256MiB)",
    )
    add(
        "--max-tokens",
        type=_whole_number(1),
        default=16,
        metavar="N",
        help="tokens of each answer (16)",
    )
    add("--seed", type=_whole_number(0), default=0, metavar="N", help="seed of it all (0)")
    add("--keep-logs", action="store_true", help="keep the engines' logs and say where they are")
    demo.set_defaults(run=_demo)
    _add_bench(commands)
    return parser


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser("bench", help="measure this machine")
    measures = bench.add_subparsers(dest="measure", required=True, metavar="WHAT")
    transfer = measures.add_parser(
        "transfer",
        help="copies between GPU and host memory, on every path",
        description="Times stores (d2h), loads (h2d) and both at once on every copy path and for "
        "every fragment size, next to one big DMA and to the installed vLLM's own copies, and "
        "compares the bytes. Exit status 0 if all bytes were right; 1 if a copy failed; 2 for bad "
        "input or where there is no GPU.",
    )
    bench_options.add_arguments(transfer)
    transfer.set_defaults(run=_bench_transfer)


def _whole_number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return number

    return parse


def _complain(error: KvOffloadError, status: int) -> int:
    print(f"kvoffload: {error}", file=sys.stderr)
    return status


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    # Unwinds the stack, which ends the engine and removes its files.
    raise SystemExit(128 + number)
