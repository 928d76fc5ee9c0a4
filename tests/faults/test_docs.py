"""The page about fault scenarios names tests that exist, and tests that it names."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "faults.md"


def test_page_and_tests_agree() -> None:
    """Each name in `docs/faults.md` is a test here, and each scenario's test is on the page."""
    named = re.findall(r"`(test_\w+\*?)`", PAGE.read_text())
    tests = {
        name
        for file in HERE.glob("test_*.py")
        for name in re.findall(r"^def (test_(?:[A-Z]\d+|top\d+)_\w+)", file.read_text(), re.M)
    }
    assert [name for name in named if not fnmatch.filter(tests, name)] == []
    assert [test for test in tests if not any(fnmatch.fnmatch(test, n) for n in named)] == []
