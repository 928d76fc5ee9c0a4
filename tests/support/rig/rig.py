"""An engine without a model: the real scheduler, a worker connector per rank, the fake model."""

from __future__ import annotations

import itertools
import pickle
import time
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.forward_context import set_forward_context
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

from . import versions
from .fake_model import FakeModel, Group
from .watch import Watch

_ENGINE_IDS = itertools.count()


@dataclass
class Totals:
    """What the workers were asked to do."""

    steps: int = 0
    loads: int = 0
    stores: int = 0
    loaded_blocks: int = 0
    stored_blocks: int = 0
    flushes: int = 0
    preemptions: int = 0
    waiting_steps: int = 0


class OurPool:
    """What tests ask a manager, answered by our connector."""

    def __init__(self, core: Any) -> None:
        self.core = core

    def stats(self) -> dict[str, int]:
        """Sizes and counts of the pool."""
        stats: dict[str, int] = self.core.pool_stats()
        return stats


class Rig:
    """One engine. ``extra`` is what the user would put into ``kv_connector_extra_config``.

    ``rank_faults`` are faults of single ranks instead of those in ``extra``.
    """

    def __init__(
        self,
        extra: dict[str, Any],
        *,
        groups: list[Group] | None = None,
        block_size: int = 16,
        num_blocks: int = 40,
        head_size: int = 8,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 256,
        ranks: int = 1,
        async_scheduling: bool = False,
        connector: str = "OffloadingConnector",
        rank_faults: dict[int, dict[str, Any]] | None = None,
    ) -> None:
        self.ours = connector == versions.OUR_CONNECTOR
        self.repeat_reports = False
        self.groups = groups or [Group(["full.0", "full.1"])]
        one_region = ranks > 1 and all(group.latent for group in self.groups)
        self.watch = Watch(ranks, one_region=one_region) if self.ours else None
        self._sizes = [group.block_size or block_size for group in self.groups]
        self.totals = Totals()
        self.finished: dict[str, list[int]] = {}
        self._async = async_scheduling
        self._pending: list[tuple[Any, ModelRunnerOutput]] = []
        kv_cache_config = versions.make_kv_cache_config(
            self.groups, block_size=block_size, num_blocks=num_blocks, head_size=head_size
        )
        engine_id = f"rig-{next(_ENGINE_IDS)}"
        configs = [
            versions.make_vllm_config(
                extra | _faults_of(rank_faults, rank),
                block_size=block_size,
                num_blocks=num_blocks,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                ranks=ranks,
                rank=rank,
                async_scheduling=async_scheduling,
                engine_id=engine_id,
                connector=connector,
            )
            for rank in [0, *range(ranks)]
        ]
        self._prompts: dict[str, list[int]] = {}
        self._scheduler_config, self._rank_configs = configs[0], configs[1:]
        scheduler_block, hash_block = resolve_kv_cache_block_sizes(kv_cache_config, configs[0])
        self.scheduler = (AsyncScheduler if async_scheduling else Scheduler)(
            vllm_config=configs[0],
            kv_cache_config=kv_cache_config,
            structured_output_manager=StructuredOutputManager(configs[0]),
            block_size=scheduler_block,
            hash_block_size=hash_block,
            log_stats=True,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_block, sha256)
        if self.watch is not None:
            self._watch_resets()
        self.workers: list[Any] = []
        pages = []
        for config in self._rank_configs:
            versions.register_layers(config, self.groups)
            tensors, rank_pages = versions.make_device_memory(
                self.groups, kv_cache_config, block_size
            )
            pages.append(rank_pages)
            with set_current_vllm_config(config):
                worker = KVConnectorFactory.create_connector(
                    config, KVConnectorRole.WORKER, kv_cache_config
                )
                worker.register_kv_caches(tensors)
            self.workers.append(worker)
        self.model = FakeModel(self.groups, block_size, pages)
        self._aggregator = KVOutputAggregator.from_connector(self.workers[0], ranks)

    def _watch_resets(self) -> None:
        side, watch = self.scheduler.connector.scheduler_side, self.watch
        reset = side.reset

        def watched() -> bool:
            assert watch is not None
            counts = side.core.stats()
            watch.reset(counts["loads_begun"] + counts["stores_begun"])
            return bool(reset())

        side.reset = watched

    # --- requests -----------------------------------------------------------------------------

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 3) -> None:
        """Queue a request."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, 2)
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=params,
            pooling_params=None,
            block_hasher=self._hasher,
        )
        self.model.add(request_id, prompt)
        self._prompts[request_id] = list(prompt)
        self.scheduler.add_request(request)

    def run(self, request_id: str, prompt: list[int], max_tokens: int = 3) -> list[int]:
        """Serve one request alone and return its tokens, the prompt's first."""
        self.add(request_id, prompt, max_tokens)
        self.drain()
        return self.finished[request_id]

    def abort(self, request_id: str) -> None:
        """Drop a request, whatever state it is in."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def stop(self, request_id: str) -> None:
        """End a request because of what it said, as the front end does."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_STOPPED)

    def forget_gpu(self) -> None:
        """Lose the device's copy of everything (the engine must be idle)."""
        if not self.scheduler.reset_prefix_cache():
            raise AssertionError("blocks are still in use on an idle engine")
        self.model.forget_kv()

    # --- steps --------------------------------------------------------------------------------

    def step(self) -> None:
        """One engine step, in the order in which vLLM's own runner makes its calls."""
        scheduled = self.scheduler.schedule()
        self.totals.steps += 1
        self._count(scheduled.kv_connector_metadata)
        blocks = {
            request_id: self.scheduler.kv_cache_manager.get_block_ids(request_id)
            for request_id in scheduled.num_scheduled_tokens
        }
        if self.watch is not None:
            self.watch.step(scheduled, blocks, self._sizes)
        wire = pickle.dumps(scheduled)
        outputs: list[ModelRunnerOutput] = []
        sampled: list[list[int]] = []
        for rank, (config, worker) in enumerate(zip(self._rank_configs, self.workers, strict=True)):
            received = pickle.loads(wire)
            kv_transfer_state._KV_CONNECTOR_AGENT = worker
            worker.handle_preemptions(received.kv_connector_metadata)
            if not received.total_num_scheduled_tokens:
                output = KVConnectorModelRunnerMixin.kv_connector_no_forward(received, config)
            else:
                with (
                    set_forward_context(None, config),
                    KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(received) as kv,
                ):
                    ends = self._forward(rank, received, blocks)
                ids = list(ends)
                if rank == 0:
                    sampled = [self.model.sample(*end) for end in ends.items()]
                output = ModelRunnerOutput(
                    req_ids=ids,
                    req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
                    sampled_token_ids=sampled,
                    logprobs=None,
                    prompt_logprobs_dict={},
                    pooler_output=[],
                    kv_connector_output=kv,
                )
            output = pickle.loads(pickle.dumps(output))
            self._look_at_reports(output)
            outputs.append(output)
        combined = self._aggregator.aggregate(outputs) if len(outputs) > 1 else outputs[0]
        self._pending.append((scheduled, combined))
        if not self._async or len(self._pending) > 1:
            self._apply()
        if not scheduled.total_num_scheduled_tokens:
            self.totals.waiting_steps += 1
            time.sleep(0.0005)  # nothing to compute: copies are on their way

    def _look_at_reports(self, output: ModelRunnerOutput) -> None:
        """Every job once from every rank; a second time if a worker is told to repeat itself."""
        if self.watch is None or output.kv_connector_output is None:
            return
        reports = output.kv_connector_output.kv_connector_worker_meta
        if reports is None:
            return
        self.watch.reported(reports.ends)
        if self.repeat_reports:
            reports.ends += list(reports.ends)

    def _forward(self, rank: int, scheduled: Any, blocks: dict[str, Any]) -> dict[str, int]:
        """Compute on one rank; the position that each request has reached."""
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        if rank == 0:
            for request_id in cached.resumed_req_ids:
                self.model.truncate(request_id, self.scheduler.requests[request_id].num_tokens)
        ends = {}
        for request_id, count in scheduled.num_scheduled_tokens.items():
            self.model.compute(rank, request_id, blocks[request_id], computed[request_id], count)
            ends[request_id] = computed[request_id] + count
        return ends

    def _apply(self) -> None:
        scheduled, output = self._pending.pop(0)
        live = dict(self.scheduler.requests)
        self.scheduler.update_from_output(scheduled, output)
        for request_id, request in live.items():
            if request.is_finished() and request_id not in self.finished:
                tokens = self.finished[request_id] = list(request.all_token_ids)
                if not self.model.weights:
                    expected = self.model.expected(self._prompts[request_id], len(tokens))
                    assert tokens == expected, f"{request_id} has other tokens than it should"
                self.totals.preemptions += request.num_preemptions

    def _count(self, metadata: Any) -> None:
        if self.ours:
            self.totals.loads += len(metadata.loads)
            self.totals.stores += len(metadata.stores)
            self.totals.loaded_blocks += sum(len(one.blocks) // 4 for one in metadata.loads)
            self.totals.stored_blocks += sum(len(one.blocks) // 4 for one in metadata.stores)
            self.totals.flushes += len(metadata.flush)
            return
        for jobs, name in ((metadata.load_jobs, "load"), (metadata.store_jobs, "store")):
            for job in jobs.values():
                sides = getattr(job, "transfer_spec", None) or (job.src_spec, job.dst_spec)
                device = next(side for side in sides if hasattr(side, "group_sizes"))
                field = "loaded_blocks" if name == "load" else "stored_blocks"
                count = getattr(self.totals, field) + len(device.block_ids)
                setattr(self.totals, field, count)
        self.totals.loads += len(metadata.load_jobs)
        self.totals.stores += len(metadata.store_jobs)
        self.totals.flushes += len(metadata.jobs_to_flush or ())

    def drain(self, seconds: float = 20.0) -> None:
        """Step until every request is done and no copy is left."""
        deadline = time.monotonic() + seconds
        while self._busy():
            if time.monotonic() > deadline:
                left = {
                    request_id: f"{request.status.name} {request.num_computed_tokens}"
                    for request_id, request in self.scheduler.requests.items()
                }
                raise AssertionError(f"not idle after {seconds} s: {left}, {self.totals}")
            self.step()
        while self._pending:
            self._apply()

    def _busy(self) -> bool:
        if self.scheduler.has_requests() or len(self._pending) > int(self._async):
            return True
        if self._pending and self._pending[-1][0].total_num_scheduled_tokens:
            return True
        # Before 0.24 an idle engine leaves its last stores unsubmitted.
        return not versions.KEEPS_STEPPING and bool(self.tracked())

    def tracked(self) -> list[str]:
        """The requests that the connector has not forgotten yet."""
        if self.ours:
            core = self.core
            core.validate()
            return [f"{core.num_requests} requests"] if core.num_requests else []
        return list(self.scheduler.connector.connector_scheduler._req_status)

    # --- reset, end ---------------------------------------------------------------------------

    def reset_everything(self) -> bool:
        """What a weight update does: drop running requests' KV and both caches, mid-flight."""
        if getattr(self.scheduler, "defer_block_free", False):
            while self._pending:  # blocks of a step that runs ahead cannot be dropped
                self._apply()
        done = self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        self.model.change_weights()
        return bool(done)

    def shutdown(self) -> None:
        """Stop the workers, then the scheduler's side."""
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.connector.shutdown()
        kv_transfer_state._KV_CONNECTOR_AGENT = None

    @property
    def core(self) -> Any:
        """The Rust state of our connector's scheduler side."""
        return self.scheduler.connector.scheduler_side.core

    @property
    def manager(self) -> Any:
        """The spec's manager, as the scheduler's connector holds it; our connector's pool."""
        if self.ours:
            return OurPool(self.core)
        return self.scheduler.connector.connector_scheduler.manager


def _faults_of(rank_faults: dict[int, dict[str, Any]] | None, rank: int) -> dict[str, Any]:
    faults = (rank_faults or {}).get(rank)
    return {} if faults is None else {"fault_injection": faults}
