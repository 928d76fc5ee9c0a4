"""The kernels' PTX is what their source compiles to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_ptx.py"


def test_the_committed_text_is_what_the_source_compiles_to() -> None:
    """Skipped where NVRTC is not installed; it comes with the CUDA build of PyTorch."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=120
    )
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stdout + done.stderr
