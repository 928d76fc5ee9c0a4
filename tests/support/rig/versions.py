"""Everything that differs between vLLM releases for someone who builds a scheduler by hand."""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from .fake_model import Group

VERSION = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
_STRIDED_TENSORS = "layers" in {f.name for f in dataclasses.fields(KVCacheTensor)}  # 0.30 on
CAN_RESET_CONNECTOR = VERSION >= (0, 24)
# 0.24 forgets a live request's jobs in a reset, but not that the request waits for them: it hangs.
CAN_RESET_LIVE_REQUESTS = VERSION >= (0, 25)
# 0.26 stores an aborted request's whole prompt, computed or not: an assertion fails, or wrong bytes
# are stored under a good key (vLLM issue 49118).
CAN_ABORT = not (0, 25) <= VERSION < (0, 28)
KEEPS_STEPPING = VERSION >= (0, 24)  # the connector can ask for steps while copies are on their way
# 0.21 asserts that what a sliding window has freed is still counted as computed.
CAN_CHURN_HYBRID = VERSION >= (0, 24)
CAN_RECOMPUTE_HYBRID = VERSION >= (0, 30)  # workers name the requests whose loads failed
# 0.26 continues from states that it does not have (`compat.CONTINUES_WITHOUT_STATE`).
CAN_KEEP_STATES = VERSION >= (0, 28)
VERSION_TEXT = vllm.__version__
MAX_MODEL_LEN = 1024
OUR_CONNECTOR = "KvOffloadConnector"
OUR_MODULE = "kvoffload_rs.vllm"

_MODEL = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    vocab_size=1000,
    max_position_embeddings=4096,
    torch_dtype="float16",
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=2,
)


def make_vllm_config(
    extra: dict[str, Any],
    *,
    block_size: int,
    num_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    ranks: int,
    rank: int,
    async_scheduling: bool,
    engine_id: str,
    connector: str = "OffloadingConnector",
) -> VllmConfig:
    """The engine's configuration as one process (the scheduler's, or rank ``rank``'s) sees it."""
    model_dir = Path(tempfile.gettempdir()) / "kvoffload-rig-model"
    model_dir.mkdir(exist_ok=True)
    # Several processes may do this at once.
    written = model_dir / f"config-{os.getpid()}.json"
    written.write_text(json.dumps(_MODEL))
    written.replace(model_dir / "config.json")
    cache = CacheConfig(block_size=block_size, enable_prefix_caching=True)
    # For models without states it means nothing.
    cache.mamba_cache_mode, cache.mamba_block_size = "align", block_size
    if hasattr(cache, "kv_cache_layout"):
        cache.kv_cache_layout = "LBHNC"
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(model_dir),
            skip_tokenizer_init=True,
            dtype="float16",
            seed=0,
            max_model_len=MAX_MODEL_LEN,
        ),
        cache_config=cache,
        device_config=DeviceConfig("cpu"),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=MAX_MODEL_LEN,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=OUR_MODULE if connector == OUR_CONNECTOR else None,
            kv_role="kv_both",
            engine_id=engine_id,
            kv_connector_extra_config=extra,
            kv_load_failure_policy="recompute",
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
    )
    config.scheduler_config.async_scheduling = async_scheduling
    config.cache_config.num_gpu_blocks = num_blocks
    # Set afterwards: asking for two ranks makes some releases look for two devices.
    config.parallel_config.tensor_parallel_size = ranks
    config.parallel_config.world_size = ranks
    config.parallel_config.distributed_executor_backend = "mp" if ranks > 1 else "uni"
    config.parallel_config.rank = rank
    return config


def make_kv_cache_config(
    groups: list[Group], *, block_size: int, num_blocks: int, head_size: int
) -> KVCacheConfig:
    """KV cache groups that overlay each other: layer i of every group lives in the same memory."""

    def spec_of(group: Group) -> Any:
        size = group.block_size or block_size
        # Blocks of all groups have as many bytes: where they hold more tokens, heads are smaller.
        common = dict(
            block_size=size,
            num_kv_heads=2,
            head_size=head_size * block_size // size,
            dtype=torch.float16,
        )
        if group.window is not None:
            return SlidingWindowSpec(**common, sliding_window=group.window)
        if group.latent:
            latent = dict(num_kv_heads=1, head_size=4 * head_size)  # one vector for K and V
            return MLAAttentionSpec(**(common | latent))
        if group.state:
            page = FullAttentionSpec(**common).page_size_bytes
            shapes, dtypes = ((page // 2,),), (torch.float16,)
            mode = dict(mamba_cache_mode="align")
            return MambaSpec(block_size=size, shapes=shapes, dtypes=dtypes, **mode)
        if group.local is not None:
            return ChunkedLocalAttentionSpec(**common, attention_chunk_size=group.local)
        return FullAttentionSpec(**common)

    specs = [spec_of(group) for group in groups]
    page = specs[0].page_size_bytes
    depth = len(groups[0].layers)
    if _STRIDED_TENSORS:
        tensors = [
            KVCacheTensor(
                size=page * num_blocks * depth,
                layers=group.layers,
                layer_stride=page * num_blocks,
                block_stride=page,
            )
            for group in groups
        ]
    else:
        tensors = [
            KVCacheTensor(size=page * num_blocks, shared_by=[g.layers[i] for g in groups])
            for i in range(depth)
        ]
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=tensors,
        kv_cache_groups=[
            KVCacheGroupSpec(group.layers, spec) for group, spec in zip(groups, specs, strict=True)
        ],
    )


def make_device_memory(
    groups: list[Group], kv_cache_config: KVCacheConfig, block_size: int
) -> tuple[dict[str, torch.Tensor], list[np.ndarray]]:
    """One rank's KV memory: the tensor of each layer, and page arrays onto the same bytes."""
    page = kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    num_blocks, depth = kv_cache_config.num_blocks, len(groups[0].layers)
    if _STRIDED_TENSORS:  # one allocation, layers at an offset into it
        backing = torch.zeros(depth, num_blocks, page, dtype=torch.int8)
        storages = list(backing.unbind(0))
    else:  # one allocation per layer
        storages = [torch.zeros(num_blocks, page, dtype=torch.int8) for _ in range(depth)]

    def as_vllm(group: Group, storage: torch.Tensor) -> Any:
        if group.state:
            state = storage.view(torch.float16)
            if VERSION < (0, 28):
                return [state]
            return storage if VERSION < (0, 30) else state
        return storage.view(torch.float16).view(num_blocks, 2, group.block_size or block_size, -1)

    layers = {
        layer: as_vllm(group, storage)
        for group in groups
        for layer, storage in zip(group.layers, storages, strict=True)
    }
    return layers, [storage.numpy() for storage in storages]


class _FakeBackend:
    """Says that the block number is the outermost dimension; 0.21 asks each layer's backend."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, **_: Any
    ) -> tuple[int, ...]:
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)


class _FakeLayer(AttentionLayerBase):
    def get_attn_backend(self) -> Any:
        return _FakeBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> Any:
        raise NotImplementedError


def register_layers(config: VllmConfig, groups: list[Group]) -> None:
    """Make the layers known where 0.21 looks them up when KV caches are registered."""
    for group in groups:
        for layer in group.layers:
            config.compilation_config.static_forward_context[layer] = _FakeLayer()
