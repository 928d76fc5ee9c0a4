"""The real engine on a GPU: equal tokens, and a start with CUDA graphs.

Short forms of `python benches/gpu_engine tokens` and `... starts`, which say more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benches"))

from gpu_engine import starts, tokens

pytestmark = pytest.mark.gpu


def vllm_unavailable() -> str | None:
    """Why vLLM's engine cannot run on a GPU here; None if it can."""
    try:
        import vllm
        from vllm.platforms import current_platform
    except ImportError as error:
        return f"vLLM cannot be imported: {error}"
    version = tuple(int(part) for part in vllm.__version__.split(".")[:2] if part.isdigit())
    if version < (0, 26):
        return f"vLLM {vllm.__version__} is older than 0.26"
    if not current_platform.is_cuda():
        return f"vLLM {vllm.__version__} here is not for CUDA"
    return None


@pytest.fixture(autouse=True)
def engine(gpu: None) -> Iterator[None]:
    """Skip where vLLM has no GPU, or too little of one; `gpu` has skipped where there is none."""
    import torch

    reason = vllm_unavailable()
    if reason is not None:
        pytest.skip(reason)
    free, _ = torch.cuda.mem_get_info()
    if free < 40 << 30:
        pytest.skip(f"the GPU has {free >> 30} GiB free; two engines need 40")
    yield


def run(measurement: Any, folder: Path, *options: str) -> dict[str, Any]:
    """Run a measurement with some of its options."""
    parser = argparse.ArgumentParser()
    measurement.arguments(parser)
    answer: dict[str, Any] = measurement.parent(parser.parse_args(options), folder)
    print(measurement.show(answer))
    return answer


@pytest.mark.parametrize("runner", ["1", "2"])
def test_tokens_from_host_memory_are_those_from_the_gpu(runner: str, tmp_path: Path) -> None:
    options = ["--heads", "8", "--runner", runner, "--graphs", "full", "--requests", "6"]
    kinds = ["--kinds", "reference", "ours", "control"]
    answer = run(tokens, tmp_path, *options, *kinds)
    verdict = answer["runs"][0]["verdict"]
    assert verdict["problems"] == []
    assert verdict["from_host"] == 0
    assert verdict["control"] > 0


def test_tokens_of_a_crowd_with_too_few_blocks(tmp_path: Path) -> None:
    options = ["--heads", "8", "--runner", "2", "--graphs", "full"]
    answer = run(tokens, tmp_path, *options, "--kinds", "crowd-reference", "crowd")
    verdict = answer["runs"][0]["verdict"]
    assert verdict["problems"] == []
    assert verdict["crowd_load_jobs"] > 0


def test_graphs_are_captured_while_the_region_registers(tmp_path: Path) -> None:
    options = ["--starts", "1", "--controls", "0", "--no-full-gpu", "--gib", "16", "--runner", "2"]
    answer = run(starts, tmp_path, *options)
    (start,) = answer["starts"]
    assert start["right"], start.get("error", start)
    assert start["captured_while_registering"], "the region was registered before the capture"
