"""Runs scenarios in this process and prints one line ``RESULT {...}``.

Started as ``python -m support.rig.drive`` with one vLLM release first on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
import traceback

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

#: A scenario takes a second or two; one that waits for ever must not take the others with it.
LIMIT_S = 60


class Overdue(BaseException):
    """A scenario takes too long. No handler of ordinary errors should stop it."""


def give_up(_signal: int, _frame: object) -> None:
    """Ends the scenario that runs."""
    raise Overdue(f"not ended within {LIMIT_S} s")


def main() -> None:
    """Parse the command line, run, report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scenarios", nargs="*")
    parser.add_argument("--blocks-per-chunk", type=int, default=1)
    parser.add_argument("--spec-name", default="KvOffloadSpec")
    parser.add_argument("--spec-module", default="kvoffload_rs.vllm")
    parser.add_argument("--connector", default="OffloadingConnector")
    arguments = parser.parse_args()

    from support.rig import versions  # first: it makes old releases importable
    from support.rig.connector_scenarios import OURS
    from support.rig.kit import Settings, Skipped
    from support.rig.scenarios import SCENARIOS

    settings = Settings(
        arguments.blocks_per_chunk,
        arguments.spec_name,
        arguments.spec_module,
        arguments.connector,
    )
    signal.signal(signal.SIGALRM, give_up)
    known = SCENARIOS | OURS if settings.ours else SCENARIOS
    results: dict[str, object] = {}
    for name in arguments.scenarios or known:
        start = time.monotonic()
        signal.alarm(LIMIT_S)
        try:
            results[name] = {"figures": known[name](settings)}
        except Skipped as reason:
            results[name] = {"skipped": str(reason)}
        except (Exception, Overdue):
            results[name] = {"error": traceback.format_exc()}
        finally:
            signal.alarm(0)
        results[name]["seconds"] = round(time.monotonic() - start, 2)
    print("RESULT " + json.dumps({"version": versions.vllm.__version__, "scenarios": results}))


if __name__ == "__main__":
    main()
