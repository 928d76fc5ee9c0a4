"""What scenarios are made of: settings, engines, prompts, and what must hold in the end."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from typing import Any

from .fake_model import FIRST_TOKEN, LAST_TOKEN, Group
from .rig import Rig
from .versions import (
    OUR_CONNECTOR,
)

BLOCK = 16
LAYERS = 2
PAGE_BYTES = BLOCK * 2 * 2 * 8 * 2  # tokens x (K and V) x heads x head size x bytes of a float16
SLOW_COPIES = {"seed": 1, "max_delay_us": 3000}
FULL = Group(["full.0", "full.1"])
HYBRID = [FULL, Group(["slide.0", "slide.1"], window=3 * BLOCK)]
LOCAL = [FULL, Group(["local.0", "local.1"], local=4 * BLOCK)]
LATENT = [Group(["latent.0", "latent.1"], latent=True)]
MAMBA = [FULL, Group(["state.0", "state.1"], state=True)]
UNEVEN = [FULL, Group(["slide.0", "slide.1"], window=4 * BLOCK, block_size=2 * BLOCK)]


@dataclass
class Settings:
    """What one process is asked for."""

    blocks_per_chunk: int
    spec_name: str
    spec_module: str
    connector: str = "OffloadingConnector"

    @property
    def ours(self) -> bool:
        """Our connector, not vLLM's with a spec."""
        return self.connector == OUR_CONNECTOR


class Skipped(Exception):
    """This release cannot do what the scenario needs."""


class Pool:
    """Counts what the manager answers, whoever's manager it is."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self.refused = self.evicted = self.stored = 0
        if rig.ours:
            return
        prepare_store = rig.manager.prepare_store

        def counted(*arguments: Any) -> Any:
            answer = prepare_store(*arguments)
            if answer is None:
                self.refused += 1
            else:
                self.evicted += len(answer.evicted_keys)
                self.stored += len(answer.keys_to_store)
            return answer

        rig.manager.prepare_store = counted

    def look(self) -> Pool:
        """Brings the counts up to date."""
        if self._rig.ours:
            stats = self._rig.manager.stats()
            self.refused, self.evicted, self.stored = (
                stats["refused"] + stats["left_out"],
                stats["evicted"],
                stats["stored"],
            )
        return self


def make_rig(
    settings: Settings, slots: int, *, ranks: int = 1, slow: bool = False, **more: Any
) -> Rig:
    """An engine whose host pool holds ``slots`` chunks. ``more`` goes to ``Rig``."""
    chunk_bytes = LAYERS * PAGE_BYTES * settings.blocks_per_chunk
    regions = 1 if more.get("groups") is LATENT else ranks
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": slots * chunk_bytes * regions,
        "block_size": BLOCK * settings.blocks_per_chunk,
        "offload_prompt_only": more.pop("prompt_only", True),
    }
    if not settings.ours:
        extra |= {"spec_name": settings.spec_name, "spec_module_path": settings.spec_module}
    if settings.ours or settings.spec_name == "KvOffloadSpec":
        extra["verify"] = more.pop("verify", "all")
        extra["eviction_policy"] = more.pop("policy", "lru")
        extra |= more.pop("extra", {})
        faults = (SLOW_COPIES if slow else {}) | more.pop("faults", {})
        if faults:
            extra["fault_injection"] = faults
    return Rig(extra, ranks=ranks, connector=settings.connector, **more)


def prompt(seed: str, blocks: int, tail: int = 5) -> list[int]:
    """``blocks`` full blocks and ``tail`` tokens; another seed shares no prefix."""
    rng = random.Random(seed)
    return [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(blocks * BLOCK + tail)]


def check_it_still_works(rig: Rig) -> None:
    """After all that, a prompt is stored and comes back."""
    rig.drain()
    text = prompt("still works", 4)
    rig.run("store", text)
    rig.forget_gpu()
    before = rig.totals.loads
    rig.run("load", text)
    assert rig.totals.loads > before, "what was stored did not come back"


def end(rig: Rig, pool: Pool | None = None) -> dict[str, Any]:
    """Check that nothing is left over, stop the engine, and say what happened."""
    rig.drain()
    assert not rig.tracked(), f"the connector still tracks {rig.tracked()}"
    stats = getattr(rig.manager, "stats", None)
    if stats is not None:
        now = stats()
        assert now["pinned"] == 0, now
        assert now["writing"] == 0, now
        assert now["free"] + now["ready"] == now["slots"], now
    if rig.ours:
        assert not rig.core.has_work()
        assert rig.core.num_jobs == 0
        assert rig.watch is not None and not rig.watch.live, rig.watch
        counts = rig.core.stats()
        for kind in ("loads", "stores"):
            ends = [counts[f"{kind}_{end}"] for end in ("done", "failed", "voided")]
            assert counts[f"{kind}_begun"] == sum(ends), counts
    rig.shutdown()
    figures = asdict(rig.totals) | {"rows_checked": rig.model.rows_checked}
    return figures | ({"refused": pool.look().refused, "evicted": pool.evicted} if pool else {})
