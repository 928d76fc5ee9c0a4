"""Fixtures of the fault scenarios."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["lru", "arc"])
def policy(request: pytest.FixtureRequest) -> str:
    """Both eviction policies."""
    name: str = request.param
    return name
