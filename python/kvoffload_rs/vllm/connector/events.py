"""vLLM's KV events for chunks on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvoffload_rs.vllm import compat

_GROUP_BYTES = 4


def _fields(kind: Any) -> set[str]:
    # msgspec structs say so; other releases might have dataclasses.
    names = getattr(kind, "__struct_fields__", None)
    return set(names if names is not None else (one.name for one in dataclasses.fields(kind)))


_STORED_FIELDS = _fields(BlockStored)
_REMOVED_FIELDS = _fields(BlockRemoved)


def to_vllm(changes: Iterable[tuple[Sequence[bytes], bool]]) -> list[Any]:
    """One event per stored chunk, one per group of evicted ones, without tokens: like those that
    vLLM's own connector sends unless it is told to describe them.

    Args:
        changes: (keys, whether they are gone).
    """
    events: list[Any] = []
    for keys, removed in changes:
        by_group: dict[int, list[Any]] = {}
        for key in keys:
            group = int.from_bytes(key[-_GROUP_BYTES:], "big")
            by_group.setdefault(group, []).append(maybe_convert_block_hash(key[:-_GROUP_BYTES]))
        for group, hashes in by_group.items():
            about = {"medium": compat.HOST_MEDIUM, "group_idx": group}
            if removed:
                events.append(_make(BlockRemoved, _REMOVED_FIELDS, block_hashes=hashes, **about))
                continue
            events.extend(
                _make(
                    BlockStored,
                    _STORED_FIELDS,
                    block_hashes=[one],
                    parent_block_hash=None,
                    token_ids=[],
                    block_size=0,
                    lora_id=None,
                    lora_name=None,
                    **about,
                )
                for one in hashes
            )
    return events


def _make(kind: Any, known: set[str], **values: Any) -> Any:
    return kind(**{name: value for name, value in values.items() if name in known})
