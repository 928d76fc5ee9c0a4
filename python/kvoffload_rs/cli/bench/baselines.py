"""What copies are compared with: one big DMA."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

from kvoffload_rs.cli.bench.device import Device

DMA_BYTES = 512 << 20


class OneDma:
    """torch's copy of one contiguous GPU tensor to or from one pinned host tensor."""

    def __init__(self, device: Device, size: int = DMA_BYTES) -> None:
        torch = device.torch
        self._torch = torch
        self._size = size
        self._gpu = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._host = [torch.zeros(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._streams = [torch.cuda.Stream() for _ in range(2)]
        self._samples: defaultdict[str, list[float]] = defaultdict(list)
        self.sample(1)
        self._samples.clear()

    def sample(self, repeats: int = 3) -> None:
        """Time each direction, and both at once."""
        out = (0, self._host[0], self._gpu[0])
        back = (1, self._gpu[1], self._host[1])
        for _ in range(repeats):
            for direction, copies in (("d2h", [out]), ("h2d", [back]), ("both", [out, back])):
                seconds = self._time(copies)
                self._samples[direction].append(self._size * len(copies) / seconds / 1e9)

    def take_medians(self) -> dict[str, float]:
        """Median GB/s of each direction over the samples since the last call."""
        medians = {name: statistics.median(values) for name, values in self._samples.items()}
        self._samples.clear()
        return medians

    def _time(self, copies: list[tuple[int, Any, Any]]) -> float:
        self._torch.cuda.synchronize()
        begin = time.perf_counter()
        for stream, target, source in copies:
            with self._torch.cuda.stream(self._streams[stream]):
                target.copy_(source, non_blocking=True)
        for stream, _, _ in copies:
            self._streams[stream].synchronize()
        return time.perf_counter() - begin
