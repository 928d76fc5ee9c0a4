"""What several of the unit tests use."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.LogCaptureFixture]:
    """The log of the vLLM side; vLLM's logger does not pass it on by itself."""
    from kvoffload_rs.vllm import compat, spec

    monkeypatch.setattr(compat.logger, "propagate", False)
    monkeypatch.setattr(spec, "_warned", set())
    compat.logger.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, logger=compat.logger.name)
    yield caplog
    compat.logger.removeHandler(caplog.handler)
