"""The type stub says what the compiled module really has."""

from __future__ import annotations

import subprocess
import sys

from support.process import ROOT


def test_stub_matches_the_module() -> None:
    """mypy's stubtest imports both and compares names, signatures and defaults."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "--concise", "kvoffload_rs._core"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
