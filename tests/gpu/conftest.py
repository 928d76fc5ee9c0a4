"""Tests on an NVIDIA GPU: each is skipped, with the reason, where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import gpu_kit
import pytest


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    """Skip without a GPU; leave it idle and empty afterwards."""
    reason = gpu_kit.unavailable()
    if reason is not None:
        pytest.skip(reason)
    yield
    gpu_kit.synchronize()
    gpu_kit.torch.cuda.empty_cache()


@pytest.fixture(params=gpu_kit.PATHS)
def path(request: pytest.FixtureRequest) -> str:
    """Every copy path."""
    name: str = request.param
    return name
