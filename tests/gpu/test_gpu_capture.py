"""CUDA graphs can be captured while a worker registers memory and moves jobs.

vLLM captures in global mode, where many driver calls of any other thread break the capture.
"""

from __future__ import annotations

import time

import gpu_kit
import pytest
from gpu_kit import Rig, run_script, torch

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def capture_and_replay() -> None:
    """Capture a graph, slowly, so that others' calls fall into it; its result must be right."""
    values = torch.zeros(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        for _ in range(20):
            values += 1
            time.sleep(0.003)
    graph.replay()
    gpu_kit.synchronize()
    assert bool((values == 20).all())


def busy_worker(gib: int, fault: str | None = None) -> Rig:
    """A worker whose large region is being registered."""
    faults: dict[str, object] | None = {fault: 1} if fault else None
    return Rig(
        [[MIB, MIB]],
        blocks=256,
        slots=gib << 9,
        model=False,
        register=False,
        faults=faults,
    )


def keep_busy(rig: Rig, turn: int) -> list[int]:
    """About 100 ms of jobs in both directions, in slots all over the region."""
    jobs: list[int] = []
    for number in range(40):
        first = (turn * 40 + number) * 64 % (rig.slots - 64)
        jobs.append(rig.store(range(64), range(first, first + 64)))
        jobs.append(rig.load(range(first, first + 64), range(128, 192)))
    return jobs


def test_graphs_are_captured_while_the_worker_works() -> None:
    torch.zeros(1, device="cuda")
    with busy_worker(16) as rig:
        stats = rig.core.stats()
        assert stats["registered_bytes"] < stats["region_bytes"], "the region was ready at once"
        jobs: list[int] = []
        for turn in range(10):
            jobs += keep_busy(rig, turn)
            capture_and_replay()
        rig.done(*jobs)
        assert rig.same(range(64), range(128, 192))


def test_control_with_threads_in_the_mode_they_are_born_in() -> None:
    """In a process of its own, because a broken capture leaves torch in no good state."""
    answer = run_script(CONTROL)
    assert answer["broken"] >= 1, "no capture broke, so the test above proves nothing"


CONTROL = """
import json, os, sys
import gpu_kit, test_gpu_capture as tests
from gpu_kit import torch
torch.zeros(1, device="cuda")
rig = tests.busy_worker(16, "keep_capture_mode")
broken = captures = 0
for turn in range(10):
    try:
        tests.keep_busy(rig, turn)
    except Exception as error:
        print("submit:", error, file=sys.stderr)
    captures += 1
    try:
        tests.capture_and_replay()
    except Exception as error:
        print("capture:", error, file=sys.stderr)
        broken += 1
        break
print(json.dumps({"broken": broken, "captures": captures}), flush=True)
os._exit(0)
"""
