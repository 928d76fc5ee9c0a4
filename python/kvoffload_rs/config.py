"""Settings of the vLLM spec, read from vLLM's `kv_connector_extra_config`.

Nothing here needs vLLM: the keys that belong to vLLM itself are passed in.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvoffload_rs.errors import CapacityError, ConfigError
from kvoffload_rs.memory import MemoryLimit
from kvoffload_rs.values import (
    MOST,
    parse_bool,
    parse_bytes,
    parse_choice,
    parse_int,
    parse_seconds,
)

POLICIES = ("lru", "arc")
VERIFY_MODES = ("off", "sample", "all")
LOAD_FAULTS = ("copy", "nothing", "neighbour")
COPY_PATHS = ("auto", "direct", "staged")
PINNING_MODES = ("register", "allocate", "none")

#: Faults that the host backend can inject, and those that the CUDA backend can.
HOST_FAULT_KEYS = frozenset(
    {
        "seed",
        "max_delay_us",
        "loads",
        "fail_every_store",
        "fail_every_load",
        "stall_job",
        "corrupt_every_store",
    }
)
CUDA_FAULT_KEYS = frozenset(
    {
        "loads",
        "fail_every_store",
        "fail_every_load",
        "fail_path",
        "fail_piece",
        "skip_compute_wait",
        "skip_ring_wait",
        "skip_staging_wait",
        "skip_stream_wait",
        "keep_capture_mode",
    }
)
#: With `rank`, only that rank injects them.
FAULT_KEYS = HOST_FAULT_KEYS | CUDA_FAULT_KEYS | {"rank"}

#: Keys that `Settings.parse` reads. Some are vLLM's too, which reads them itself.
OUR_KEYS = frozenset(
    {
        "block_size",
        "blocks_per_chunk",
        "canonical_layout",
        "copy_path",
        "cpu_bytes_to_use",
        "defer_deadline_s",
        "eviction_policy",
        "fault_injection",
        "load_deadline_s",
        "max_tracker_size",
        "offload_prompt_only",
        "partial_admission",
        "pinning",
        "secondary_tiers",
        "self_describing_kv_events",
        "share_replicated_kv",
        "spec_module_path",
        "spec_name",
        "staging_bytes",
        "store_threshold",
        "verify",
        "verify_sample",
        "wait_timeout_s",
        "write_deadline_s",
    }
)

#: The most slots that the core manages.
_MAX_SLOTS = 2**30

#: The most keys whose offers the core counts; they take 72 bytes each.
_MAX_TRACKED = 2**24
_SLOT_ALIGNMENT = 64
_PAGE_ALIGNMENT = 4096
_LARGE_SLOT = 256 << 10


@dataclass(frozen=True)
class Settings:
    """The settings of one engine, checked.

    Attributes:
        cpu_bytes: host memory of the whole engine (all ranks), or None if it was not given.
        eviction_policy: `lru` or `arc`.
        block_size: tokens of one chunk, if the chunk size was given in tokens.
        blocks_per_chunk: GPU blocks of one chunk, if the chunk size was given in blocks.
        store_threshold: how often a chunk is offered before it is stored; 0 and 1 store at once.
        max_tracker_size: how many chunks that are not stored yet are counted.
        offload_prompt_only: store the prompt's chunks only, not the generated ones.
        self_describing_kv_events: KV events carry tokens, where vLLM supports it.
        partial_admission: store as many chunks as there is room for instead of all or none.
        verify: which loads are checked against a hash of the stored bytes.
        verify_sample: with `verify=sample`, one slot of so many is checked.
        wait_timeout_s: how long vLLM's wait for a transfer may take.
        write_deadline_s: after so long, a chunk whose store never completed counts as absent.
        defer_deadline_s: with the connector, how long a request waits for chunks that are being
            written or loaded before it makes do without.
        load_deadline_s: with the connector, after so long a load is given up and computed instead.
        copy_path: on a GPU, how copies are made: `auto`, `direct` or `staged`.
        staging_bytes: GPU memory that the staged path may use; 0 for none.
        pinning: on a GPU, how host memory is pinned: `register`, `allocate` or `none`.
        share_replicated_kv: where all ranks hold the same KV (MLA), keep it once for all of them.
        fault_injection: faults for tests, or None.
    """

    cpu_bytes: int | None = None
    eviction_policy: str = "lru"
    block_size: int | None = None
    blocks_per_chunk: int | None = None
    store_threshold: int = 0
    max_tracker_size: int = 64_000
    offload_prompt_only: bool = True
    self_describing_kv_events: bool = False
    partial_admission: bool = False
    verify: str = "off"
    verify_sample: int = 16
    wait_timeout_s: float = 60.0
    write_deadline_s: float = 600.0
    defer_deadline_s: float = 2.0
    load_deadline_s: float = 60.0
    copy_path: str = "auto"
    staging_bytes: int = 64 << 20
    pinning: str = "register"
    share_replicated_kv: bool = True
    fault_injection: Mapping[str, Any] | None = None

    def on_rank(self, rank: int) -> Settings:
        """The settings of one rank: they differ in the faults that it injects."""
        faults = dict(self.fault_injection or {})
        here = faults.pop("rank", rank) == rank
        return replace(self, fault_injection=faults if faults and here else None)

    @classmethod
    def parse(cls, extra: Mapping[str, Any], memory: MemoryLimit | None = None) -> Settings:
        """Reads the settings from `kv_connector_extra_config`; other keys are not looked at.

        Args:
            extra: the dictionary.
            memory: what the machine has; read from the system if it is not given and needed.

        Raises:
            ConfigError: a value is wrong, or asks for something this spec does not do.
        """
        _refuse_unsupported(extra)
        given = {key: value for key, value in extra.items() if value is not None}
        settings: dict[str, Any] = {}
        if "cpu_bytes_to_use" in given:
            settings["cpu_bytes"] = parse_bytes(
                "cpu_bytes_to_use", given["cpu_bytes_to_use"], memory
            )
        if "staging_bytes" in given:
            settings["staging_bytes"] = _parse_staging(given["staging_bytes"])
        for key, choices in (
            ("eviction_policy", POLICIES),
            ("verify", VERIFY_MODES),
            ("copy_path", COPY_PATHS),
            ("pinning", PINNING_MODES),
        ):
            if key in given:
                settings[key] = parse_choice(key, given[key], choices)
        for key, least, most in (
            ("block_size", 1, MOST),
            ("blocks_per_chunk", 1, MOST),
            ("store_threshold", 0, MOST),
            ("max_tracker_size", 1, _MAX_TRACKED),
            ("verify_sample", 1, MOST),
        ):
            if key in given:
                settings[key] = parse_int(key, given[key], least, most)
        for key in (
            "offload_prompt_only",
            "self_describing_kv_events",
            "partial_admission",
            "share_replicated_kv",
        ):
            if key in given:
                settings[key] = parse_bool(key, given[key])
        for key in ("wait_timeout_s", "write_deadline_s", "defer_deadline_s", "load_deadline_s"):
            if key in given:
                settings[key] = parse_seconds(key, given[key])
        if "fault_injection" in given:
            settings["fault_injection"] = _parse_faults(given["fault_injection"])
        if settings.get("copy_path") == "staged" and settings.get("staging_bytes") == 0:
            raise ConfigError(
                'copy_path is "staged" but staging_bytes is 0',
                field="staging_bytes",
                value=0,
                hint="Leave staging_bytes out, or use another copy_path.",
            )
        if "block_size" in settings and "blocks_per_chunk" in settings:
            raise ConfigError(
                "block_size and blocks_per_chunk are both given",
                field="blocks_per_chunk",
                value=given["blocks_per_chunk"],
                hint="Both are the size of a chunk: give one of them.",
            )
        return cls(**settings)


def check_keys(
    extra: Mapping[str, Any], vllm_keys: Collection[str], other_keys: Mapping[str, str]
) -> list[str]:
    """Looks for keys that nobody reads, and returns one warning for each.

    Args:
        extra: `kv_connector_extra_config`.
        vllm_keys: keys that the installed vLLM reads itself; they are left alone.
        other_keys: further keys that are known but have no effect here, with the reason.

    Raises:
        ConfigError: a key is probably misspelt: it is not known, but nearly a known one.
    """
    known = OUR_KEYS.union(vllm_keys, other_keys)
    warnings = []
    for key in map(str, extra):
        if key in other_keys:
            warnings.append(f"setting {key!r} has no effect: {other_keys[key]}")
        elif key not in known:
            near = near_miss(key, known)
            if near is not None:
                raise ConfigError(
                    f"unknown setting {key!r} in kv_connector_extra_config",
                    field=key,
                    value=extra.get(key),
                    hint=f"Did you mean {near!r}?",
                )
            warnings.append(f"setting {key!r} is unknown and has no effect")
    return warnings


@dataclass(frozen=True)
class Capacity:
    """How much the host pool of one engine holds: the same figures in every process of it.

    Attributes:
        num_slots: slots, each of which holds one chunk.
        slot_bytes: bytes of one slot in one region.
        regions: one for each rank, or one for all of them.
    """

    num_slots: int
    slot_bytes: int
    regions: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots in all regions."""
        return self.num_slots * self.slot_bytes * self.regions


def plan_capacity(
    cpu_bytes: int | None,
    *,
    bytes_per_block: int,
    blocks_per_chunk: int,
    regions: int,
    memory: MemoryLimit | None = None,
) -> Capacity:
    """Divides the host memory into slots, from figures that all processes of an engine share.

    Args:
        cpu_bytes: memory of the whole engine.
        bytes_per_block: KV bytes of one GPU block on one rank, all layers.
        blocks_per_chunk: GPU blocks in one chunk.
        regions: ranks, or 1 if they share one region.
        memory: what the machine has; None skips that check.

    Raises:
        CapacityError: there is nothing to store, no room for one slot, or more than the machine.
    """
    if bytes_per_block <= 0:
        raise CapacityError(
            "the engine has no KV cache to offload: one block has 0 bytes",
            field="cpu_bytes_to_use",
            value=cpu_bytes,
            hint="Remove the KV offloading settings for this model.",
        )
    chunk_bytes = bytes_per_block * blocks_per_chunk
    large = chunk_bytes >= _LARGE_SLOT
    slot_bytes = _round_up(chunk_bytes, _PAGE_ALIGNMENT if large else _SLOT_ALIGNMENT)
    need = slot_bytes * regions
    need_text = f"one slot needs {need} bytes ({slot_bytes} in each of {regions} region(s))"
    if cpu_bytes is None:
        raise CapacityError(
            f"cpu_bytes_to_use is missing; {need_text}",
            field="cpu_bytes_to_use",
            hint='Set it in kv_connector_extra_config, for example to "8GiB" or "50%".',
        )
    if cpu_bytes < need:
        raise CapacityError(
            f"cpu_bytes_to_use is {cpu_bytes} bytes, but {need_text}",
            field="cpu_bytes_to_use",
            value=cpu_bytes,
            hint="Give it many times that: every cached chunk takes one slot.",
        )
    if memory is not None and cpu_bytes > memory.bytes:
        raise CapacityError(
            f"cpu_bytes_to_use is {cpu_bytes} bytes, but only {memory.bytes} are there "
            f"({memory.source})",
            field="cpu_bytes_to_use",
            value=cpu_bytes,
            hint='Give less, for example "50%", or raise the limit of the machine or container.',
        )
    num_slots = cpu_bytes // need
    if num_slots > _MAX_SLOTS:
        raise CapacityError(
            f"cpu_bytes_to_use makes {num_slots} slots, but at most {_MAX_SLOTS} are possible",
            field="cpu_bytes_to_use",
            value=cpu_bytes,
            hint="Give less memory, or put more blocks in a chunk with blocks_per_chunk.",
        )
    return Capacity(num_slots, slot_bytes, regions)


def near_miss(key: str, known: Collection[str]) -> str | None:
    """The known key that is at most two edits from `key`; the nearest, and the first of those."""
    spelling = key.lower().replace("-", "_")
    near = [(edit_distance(spelling, other, 2), other) for other in sorted(known)]
    distance, other = min(near, default=(3, ""))
    return other if distance <= 2 else None


def edit_distance(a: str, b: str, limit: int) -> int:
    """Insertions, deletions, changes and swaps of neighbours between two words.

    Answers `limit + 1` for anything above `limit`.
    """
    if abs(len(a) - len(b)) > limit:
        return limit + 1
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, above, row = row, before, [i]
        for j, y in enumerate(b, 1):
            best = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                best = min(best, above[j - 2] + 1)
            row.append(best)
    return min(row[-1], limit + 1)


def _refuse_unsupported(extra: Mapping[str, Any]) -> None:
    tiers = extra.get("secondary_tiers")
    if tiers:
        raise ConfigError(
            "secondary_tiers is not supported by KvOffloadSpec",
            field="secondary_tiers",
            value=tiers,
            hint="Remove it, or use vLLM's TieringOffloadingSpec.",
        )
    canonical = extra.get("canonical_layout")
    if canonical is not None and parse_bool("canonical_layout", canonical):
        raise ConfigError(
            "canonical_layout is not supported by KvOffloadSpec",
            field="canonical_layout",
            value=canonical,
            hint="Remove it: chunks are kept in the layout of this engine.",
        )


def _parse_staging(value: object) -> int:
    """0, or enough for a ring of useful chunks in both directions."""
    field = "staging_bytes"
    staging = 0 if value in (0, "0") else parse_bytes(field, value, None)
    if staging and not 2 << 20 <= staging <= 8 << 30:
        raise ConfigError(
            f"{field} is {staging}",
            field=field,
            value=value,
            hint="Give 2 MiB to 8 GiB, or 0 for no staging.",
        )
    return staging


def _parse_faults(value: object) -> Mapping[str, Any] | None:
    field = "fault_injection"
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except ValueError:
            value = None
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{field} is no dictionary", field=field, value=value, hint="It is for tests only."
        )
    faults: dict[str, Any] = {}
    for key, setting in value.items():
        if key not in FAULT_KEYS:
            raise ConfigError(
                f"unknown key {key!r} in {field}",
                field=field,
                value=dict(value),
                hint=f"It may hold {', '.join(sorted(FAULT_KEYS))}.",
            )
        if key == "loads":
            faults[key] = parse_choice(f"{field}.loads", setting, LOAD_FAULTS)
        elif key == "fail_path":
            faults[key] = parse_choice(f"{field}.fail_path", setting, COPY_PATHS[1:])
        else:
            faults[key] = parse_int(f"{field}.{key}", setting, 0)
    return faults or None


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
