"""Small stand-ins for what vLLM hands to a spec: configurations and KV caches."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import torch
from kvoffload_rs.vllm import KvOffloadSpec
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload import config as vllm_config

_ENGINES = itertools.count()

MEMORY = 1 << 20

PAGE = 96
LAYERS = 3
BYTES_PER_BLOCK = PAGE * LAYERS
BLOCKS = 8


def build(kind: type, **values: Any) -> Any:
    """Makes a dataclass of vLLM's from the values that this version has; 0 for all others."""
    names = {field.name for field in dataclasses.fields(kind)}
    missing = {
        field.name: 0
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.name not in values
    }
    return kind(**missing, **{key: value for key, value in values.items() if key in names})


def offloading_config(
    extra: dict[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    pp_size: int = 1,
    engine_id: str | None = None,
    blocks_per_chunk: int = 1,
    bytes_per_block: int = BYTES_PER_BLOCK,
    events: bool = False,
) -> Any:
    """An `OffloadingConfig` of an engine with one KV group."""
    return build(
        vllm_config.OffloadingConfig,
        groups=(
            build(
                vllm_config.OffloadingGroupConfig,
                tokens_per_block=16,
                layer_names=tuple(f"layer{i}" for i in range(LAYERS)),
                group_id=0,
            ),
        ),
        worker_kv_bytes_per_block=bytes_per_block,
        enable_kv_cache_events=events,
        extra_config=extra,
        engine_id=engine_id or f"engine{next(_ENGINES)}",
        model=build(vllm_config.OffloadingModelConfig, name="model", dtype="float16"),
        cache=build(
            vllm_config.OffloadingCacheConfig,
            tokens_per_hash=16,
            blocks_per_chunk=blocks_per_chunk,
        ),
        parallel=build(
            vllm_config.OffloadingParallelConfig,
            rank=rank,
            world_size=world_size,
            tp_size=world_size,
            pp_size=pp_size,
        ),
    )


def make_spec(extra: dict[str, Any] | None = None, **config: Any) -> KvOffloadSpec:
    """A spec with 1 MiB of memory; `config` goes to `offloading_config`."""
    return KvOffloadSpec(offloading_config({"cpu_bytes_to_use": MEMORY, **(extra or {})}, **config))


def kv_caches(layers: int = LAYERS) -> Any:
    """KV caches of one group, one tensor per layer, on the CPU, every byte different from 0."""
    tensors = [
        base.CanonicalKVCacheTensor(
            torch.randint(1, 127, (BLOCKS, PAGE), dtype=torch.int8), page_size_bytes=PAGE
        )
        for _ in range(layers)
    ]
    refs = [
        base.CanonicalKVCacheRef(tensor_idx=i, page_size_bytes=PAGE) for i in range(len(tensors))
    ]
    return base.CanonicalKVCaches(tensors=tensors, group_data_refs=[refs])


def gpu_blocks(*blocks: int, first: int = 0) -> Any:
    """GPU blocks of one group; `first` is the logical index of the first one."""
    return base.GPULoadStoreSpec(list(blocks), group_sizes=[len(blocks)], block_indices=[first])
