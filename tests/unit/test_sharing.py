"""Ranks that hold the same KV: one stores, all load from its region."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
import time
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from kvoffload_rs.errors import CapacityError, ConfigError, InvalidJobError
from kvoffload_rs.vllm import KvOffloadSpec, compat
from kvoffload_rs.vllm.manager import HostSlotsSpec
from kvoffload_rs.vllm.sharing import Offer, Sharing
from shapes import MEMORY, gpu_blocks, kv_caches, make_spec, offloading_config

_NAMES = itertools.count()


def name() -> str:
    return f"sharing-{os.getpid()}-{next(_NAMES)}"


def specs(ranks: int = 3, **extra: Any) -> list[KvOffloadSpec]:
    engine = name()
    return [
        KvOffloadSpec(
            offloading_config(
                {"cpu_bytes_to_use": MEMORY, **extra},
                rank=rank,
                world_size=ranks,
                engine_id=engine,
            ),
            replicated=True,
        )
        for rank in range(ranks)
    ]


def shut_down(made: list[KvOffloadSpec]) -> None:
    for spec in made:
        if spec.transfers is not None:
            spec.transfers.shutdown()


def finish(transfers: Any, job: int) -> Any:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for ended in transfers.outcomes():
            if ended[0] == job:
                return ended
    raise AssertionError("not over")


def test_one_rank_stores_and_all_load() -> None:
    made = specs()
    caches = [kv_caches() for _ in made]
    for spec, cache in zip(made, caches, strict=True):
        spec.get_worker(cache)
    first, *others = [spec.transfers for spec in made]
    assert first is not None and all(others)
    wanted = [tensor.tensor[5].clone() for tensor in caches[0].tensors]
    for transfers in (first, *others):
        transfers.submit_store(1, gpu_blocks(5), HostSlotsSpec([7]))
    assert finish(first, 1)[2:3] == (3 * 96,)
    for transfers in others:
        assert finish(transfers, 1) == (1, True, 0, 0.0, None)  # another rank's business
        assert transfers.stats()["stores"] == 0
    for rank, (transfers, cache) in enumerate(zip((first, *others), caches, strict=True)):
        transfers.submit_load(2, HostSlotsSpec([7]), gpu_blocks(rank))
        assert finish(transfers, 2)[4] is None
        for tensor, bytes_ in zip(cache.tensors, wanted, strict=True):
            assert torch.equal(tensor.tensor[rank], bytes_)
    shut_down(made)


def test_the_memory_pays_for_one_region() -> None:
    one, _, _ = specs()
    alone, _, _ = specs(share_replicated_kv=False)
    assert specs(pinning="allocate")[0].num_slots == alone.num_slots  # memory of the driver's
    assert one.num_slots == MEMORY // 320 and alone.num_slots == MEMORY // (320 * 3)
    assert make_spec(world_size=3).num_slots == alone.num_slots


def test_without_sharing_every_rank_stores() -> None:
    made = specs(2, share_replicated_kv=False)
    for spec in made:
        spec.get_worker(kv_caches())
        transfers = spec.transfers
        assert transfers is not None
        transfers.submit_store(1, gpu_blocks(5), HostSlotsSpec([7]))
        assert finish(transfers, 1)[2] == 3 * 96
    shut_down(made)


def test_vllms_worker_hears_of_stores_that_others_make() -> None:
    made = specs(2)
    sides = [spec.get_worker(kv_caches()) for spec in made]
    assert sides[1].submit_store(4, gpu_blocks(1), HostSlotsSpec([0])) is True
    sides[1].wait({4})
    (result,) = sides[1].get_finished()
    assert (result.job_id, result.success) == (4, True)
    assert sides[1].get_finished() == []
    shut_down(made)


def test_who_only_reads_cannot_store() -> None:
    made = specs(2)
    for spec in made:
        spec.get_worker(kv_caches())
    core = made[1].transfers._core  # type: ignore[union-attr]
    with pytest.raises(InvalidJobError, match="only reads the region"):
        core.submit_store(1, gpu_blocks(1), HostSlotsSpec([0]))
    assert core.take_region_fd() is None
    shut_down(made)


def test_other_kv_caches_are_found_out() -> None:
    made = specs(2)
    made[0].get_worker(kv_caches())
    with pytest.raises(CapacityError, match="region of rank 0 has") as caught:
        made[1].get_worker(kv_caches(layers=2))
    assert caught.value.field == "share_replicated_kv"
    shut_down(made)


def test_a_first_rank_that_never_comes() -> None:
    begin = time.monotonic()
    with pytest.raises(ConfigError, match="rank 1 did not get the region") as caught:
        Sharing(name(), 1, 2).join("shape", deadline_s=0.2)
    assert time.monotonic() - begin < 5
    assert "share_replicated_kv to false" in str(caught.value.hint)


def test_two_engines_of_one_name() -> None:
    sharing = Sharing(name(), 0, 2)
    offer = Offer(sharing, os.open("/dev/null", os.O_RDONLY), "shape")
    second = os.open("/dev/null", os.O_RDONLY)
    with pytest.raises(ConfigError, match="cannot be offered") as caught:
        Offer(sharing, second, "shape")
    assert caught.value.field == "engine_id"
    with pytest.raises(OSError):
        os.fstat(second)
    offer.close()
    again = Offer(sharing, os.open("/dev/null", os.O_RDONLY), "shape")
    again.close()


def test_nothing_is_left_open() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(5):
        made = specs()
        for spec in made:
            spec.get_worker(kv_caches())
        shut_down(made)
        assert descriptors() == before


def _other_process(engine: str, results: Any) -> None:
    descriptor = Sharing(engine, 1, 2, parent=0).join("shape", deadline_s=20)
    results.put(os.pread(descriptor, 5, 0))


def test_between_processes_in_any_order() -> None:
    engine, context = name(), multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_other_process, args=(engine, results))
    process.start()
    time.sleep(0.3)  # it waits meanwhile, or is not there yet
    memory = os.memfd_create("test")
    os.pwrite(memory, b"hello", 0)
    offer = Offer(Sharing(engine, 0, 2, parent=0), memory, "shape")
    assert results.get(timeout=60) == b"hello"
    process.join()
    offer.close()


def test_two_engines_of_one_name_that_start_together_do_not_meet() -> None:
    """Each has been started by a process of its own."""
    engine = name()
    for parent in (1, 2):
        memory = os.memfd_create("test")
        os.pwrite(memory, b"%d" % parent, 0)
        offer = Offer(Sharing(engine, 0, 2, parent), memory, "shape")
        other = Sharing(engine, 1, 2, 3 - parent)
        with pytest.raises(ConfigError):
            other.join("shape", deadline_s=0.1)
        descriptor = Sharing(engine, 1, 2, parent).join("shape", deadline_s=20)
        assert os.pread(descriptor, 1, 0) == b"%d" % parent
        os.close(descriptor)
        offer.close()


def test_who_is_no_rank_takes_nobodys_turn() -> None:
    sharing = Sharing("x" * 200 + name(), 0, 3)  # whatever the length of the name
    offer = Offer(sharing, os.open("/dev/null", os.O_RDONLY), "shape")
    for said in (b"", b"\0\0\0\0", b"\x07\0\0\0", b"ab", b"\1\0\0\0"):  # the last does not answer
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(sharing.address)
            stranger.sendall(said)
    for rank in (2, 1):
        os.close(Sharing(sharing.engine_id, rank, 3).join("shape", deadline_s=20))
    offer.close()
    with pytest.raises(ConfigError):
        Sharing(sharing.engine_id, 1, 3).join("shape", deadline_s=0.1)


def test_long_shapes() -> None:
    sharing = Sharing(name(), 0, 3)
    shape = "p" * 10_000
    offer = Offer(sharing, os.open("/dev/null", os.O_RDONLY), shape)
    os.close(Sharing(sharing.engine_id, 1, 3).join(shape, deadline_s=20))
    with pytest.raises(CapacityError):
        Sharing(sharing.engine_id, 2, 3).join(shape + "q", deadline_s=20)
    offer.close()


# --- when ranks share -----------------------------------------------------------------------------


def layout(parallel: dict[str, Any], *specs: Any) -> bool:
    from types import SimpleNamespace as Plain

    values = {
        "tensor_parallel_size": 2,
        "world_size": 2,
        "distributed_executor_backend": "mp",
        "decode_context_parallel_size": 1,
    }
    config = Plain(parallel_config=Plain(**(values | parallel)))
    groups = [Plain(kv_cache_spec=spec) for spec in specs]
    return compat.is_replicated(config, Plain(kv_cache_groups=groups))


def test_a_draft_model_with_heads_is_not_shared() -> None:
    from types import SimpleNamespace as Plain

    for use_mla in (True, False):
        config = Plain(
            parallel_config=Plain(
                tensor_parallel_size=2, world_size=2, distributed_executor_backend="mp"
            ),
            speculative_config=Plain(draft_model_config=Plain(use_mla=use_mla)),
        )
        caches = Plain(kv_cache_groups=[Plain(kv_cache_spec=latent())])
        assert compat.is_replicated(config, caches) is use_mla


def latent() -> Any:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float16)


def heads() -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float16)


def test_ranks_hold_the_same_only_with_latents_and_nothing_but_tensor_parallelism() -> None:
    assert layout({}, latent())
    assert layout({}, latent(), latent())
    assert not layout({})
    assert not layout({}, latent(), heads())
    assert not layout({"tensor_parallel_size": 1, "world_size": 1}, latent())
    assert not layout({"world_size": 4}, latent())
    assert not layout({"decode_context_parallel_size": 2}, latent())
    assert not layout({"prefill_context_parallel_size": 2}, latent())
    assert not layout({"nnodes_within_dp": 2}, latent())
    assert not layout({"distributed_executor_backend": "ray"}, latent())
