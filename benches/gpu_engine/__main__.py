"""python benches/gpu_engine {ttft,throughput,tokens,starts,mla} [options]"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

MEASUREMENTS = ("ttft", "throughput", "tokens", "starts", "mla")


def measurement(name: str) -> Any:
    """The module of a measurement."""
    return importlib.import_module(f"gpu_engine.{name}")


def run_child(kind: str, job: str) -> None:
    """Serves as a child. Its last row says that it is complete."""
    from gpu_engine import processes

    measurement(kind).child(json.loads(job))
    processes.say({"row": "end"})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing is left to do that may fail or hang


def main() -> int:
    """Run one measurement: a table on standard error, one JSON document on standard output."""
    if sys.argv[1:2] == ["child"]:
        run_child(sys.argv[2], sys.argv[3])
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="measurement", required=True)
    for name in MEASUREMENTS:
        module = measurement(name)
        command = commands.add_parser(name, description=module.__doc__)
        module.arguments(command)
        command.add_argument("--json", type=Path, help="file for the JSON instead of stdout")
        command.add_argument("--logs", type=Path, help="folder for the children's logs")
    options = parser.parse_args()
    logs = options.logs or Path(tempfile.mkdtemp(prefix="gpu-engine-"))
    logs.mkdir(parents=True, exist_ok=True)
    module = measurement(options.measurement)
    begin = time.monotonic()
    answer = module.parent(options, logs)
    answer = {
        "measurement": options.measurement,
        "seconds": round(time.monotonic() - begin, 1),
        **answer,
    }
    print(module.show(answer), file=sys.stderr)
    print(f"{answer['seconds']} s; logs in {logs}", file=sys.stderr, flush=True)
    if options.json:
        options.json.write_text(json.dumps(answer, indent=1) + "\n")
    else:
        print(json.dumps(answer))
    return 0 if answer["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
