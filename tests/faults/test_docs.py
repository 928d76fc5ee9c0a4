"""The page about fault scenarios names tests that exist, and tests that it names."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "faults.md"
RIG = HERE.parent / "versions" / "test_real_scheduler.py"


def scenario_tests(pattern: str) -> set[str]:
    """Names of the scenarios' tests."""
    found: set[str] = set()
    for file in HERE.glob(pattern):
        found.update(re.findall(r"^def (test_(?:[A-Z]\d+|top\d+)_\w+)", file.read_text(), re.M))
    return found


def named(text: str) -> list[str]:
    """Names of tests, or patterns of names, in some text."""
    return re.findall(r"`(test_\w+\*?)`", text)


def columns() -> tuple[str, str]:
    """What the page says of the shared parts, and of the connector."""
    shared, connector = [], []
    for line in PAGE.read_text().splitlines():
        cells = line.split("|")
        if len(cells) == 6:
            shared.append(cells[3])
            connector.append(cells[4])
        else:
            shared.append(line)
    return "\n".join(shared), "\n".join(connector)


def test_page_and_tests_agree() -> None:
    """Each name in `docs/faults.md` is a test here, and each scenario's test is on the page."""
    of_connector = scenario_tests("test_connector_*.py")
    of_others = scenario_tests("test_[!c]*.py")
    assert of_connector
    assert of_others
    for text, tests in zip(columns(), (of_others, of_connector), strict=True):
        names = named(text)
        assert [name for name in names if not fnmatch.filter(tests, name)] == []
        assert [test for test in tests if not any(fnmatch.fnmatch(test, n) for n in names)] == []


def test_page_names_scenarios_of_the_rig() -> None:
    """What is said to be played by the real schedulers is played by them."""
    scenarios = re.findall(r"rig: `(\w+)`", PAGE.read_text())
    played = re.findall(r'^    "(\w+)",$', RIG.read_text(), re.M)
    assert scenarios
    assert [name for name in scenarios if name not in played] == []
