"""One vLLM engine in this process, with what a measurement asks of it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_engine.models import write_model
from gpu_engine.watch import Watch

FIRST_TOKEN, LAST_TOKEN = 10, 31_000
BACKENDS = ("none", "native", "kvoffload", "connector")

VLLMS_CONNECTOR = {"kv_connector": "OffloadingConnector"}
OUR_CONNECTOR = {
    "kv_connector": "KvOffloadConnector",
    "kv_connector_module_path": "kvoffload_rs.vllm",
    "kv_load_failure_policy": "recompute",
}

#: Sizes of the captured graphs: some more than a small run needs, so that capturing takes a while.
CAPTURE_SIZES = [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]

#: `full` captures whole steps and needs no torch.compile; `default` is what vLLM does by itself.
GRAPHS = ("none", "full", "default")


@dataclass
class Setup:
    """An engine.

    Attributes:
        model: name of a shape.
        kv_heads: KV heads of the model.
        runner: 1 or 2, the version of vLLM's model runner. The parent process sets the variable.
        backend: `none`, vLLM's own (`native`), our spec (`kvoffload`), or our `connector`.
        host_bytes: host memory for KV.
        weights: real random weights instead of vLLM's dummy ones.
        graphs: one of `GRAPHS`.
        faults: `fault_injection`.
        extra: more of our settings.
        models: folder for models.
        llm: more arguments of vLLM's `LLM`.
    """

    model: str = "8b"
    kv_heads: int = 8
    runner: int = 2
    backend: str = "kvoffload"
    host_bytes: int = 4 << 30
    weights: bool = False
    graphs: str = "none"
    faults: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    models: str = "/tmp/kvoffload-models"
    llm: dict[str, Any] = field(default_factory=dict)


@dataclass
class Answer:
    """Tokens of one request, and how many tokens of its prompt were not computed."""

    tokens: list[int]
    cached: int


class Engine:
    """vLLM's engine after its start.

    Args:
        setup: what to start.
    """

    def __init__(self, setup: Setup) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        self.setup = setup
        self.watch = Watch()
        self.watch.install(setup.runner)
        model = write_model(setup.model, setup.kv_heads, Path(setup.models), weights=setup.weights)
        extra = extra_config(setup)
        transfer = None
        if extra is not None:
            transfer = KVTransferConfig(
                **(OUR_CONNECTOR if setup.backend == "connector" else VLLMS_CONNECTOR),
                kv_role="kv_both",
                kv_connector_extra_config=extra,
            )
        settings: dict[str, Any] = {
            "load_format": "auto" if setup.weights else "dummy",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "seed": 0,
            **graph_settings(setup.graphs),
            **setup.llm,
        }
        begin = time.perf_counter()
        self.llm: Any = LLM(model=str(model), kv_transfer_config=transfer, **settings)
        self.start_s = time.perf_counter() - begin

    def facts(self) -> dict[str, Any]:
        """What is worth knowing about the start. Times in seconds."""
        import torch
        import vllm

        config = self.llm.llm_engine.vllm_config
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
            "model": self.setup.model,
            "kv_heads": self.setup.kv_heads,
            "runner": 2 if getattr(config, "use_v2_model_runner", False) else 1,
            "backend": self.setup.backend,
            "host_bytes": self.setup.host_bytes if self.setup.backend != "none" else 0,
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "compilation_mode": str(config.compilation_config.mode),
            "gpu_blocks": config.cache_config.num_gpu_blocks,
            "start_s": round(self.start_s, 2),
            "worker_s": None if self.watch.worker_s is None else round(self.watch.worker_s, 3),
            "layout": self.watch.layout,
            "copies": self.watch.describe(),
            "captures": self.watch.captures,
        }

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int | Sequence[int] = 1,
        *,
        offload: bool = True,
    ) -> tuple[float, list[Answer]]:
        """Serves prompts at once, greedily.

        Args:
            prompts: token ids.
            tokens: tokens to generate, one number for all or one for each.
            offload: let vLLM's connector store these requests' KV.

        Returns:
            Seconds until the last answer, and the answers.
        """
        from vllm import SamplingParams

        counts = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
        args = None if offload else {"kv_transfer_params": {"max_offload_tokens": 0}}
        sampling = [
            SamplingParams(
                max_tokens=count,
                temperature=0.0,
                ignore_eos=True,
                detokenize=False,
                extra_args=args,
            )
            for count in counts
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        begin = time.perf_counter()
        outputs = self.llm.generate(requests, sampling, use_tqdm=False)
        seconds = time.perf_counter() - begin
        return seconds, [
            Answer(list(output.outputs[0].token_ids), int(output.num_cached_tokens or 0))
            for output in outputs
        ]

    def drain(self, limit_s: float = 60.0) -> float:
        """Steps the idle engine until its connector has no transfer left; returns the seconds.

        Raises:
            RuntimeError: some are left after `limit_s`.
        """
        client = self.llm.llm_engine.engine_core
        scheduler = client.engine_core.scheduler
        begin = time.perf_counter()
        while scheduler.has_requests():
            client.get_output()
            if time.perf_counter() - begin > limit_s:
                raise RuntimeError("transfers did not end")
        return time.perf_counter() - begin

    def drop(self, *, scrub: bool = False) -> None:
        """Forgets the GPU's prefix cache; what is in host memory stays.

        Args:
            scrub: overwrite the KV cache, too.

        Raises:
            RuntimeError: vLLM refused.
        """
        self.drain()
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("the GPU's prefix cache would not reset")
        if scrub:
            self.watch.scrub()

    def close(self) -> None:
        """Shuts the engine down."""
        self.llm.llm_engine.engine_core.shutdown()


def extra_config(setup: Setup) -> dict[str, Any] | None:
    """vLLM's `kv_connector_extra_config` for a backend; None for none."""
    if setup.backend == "none":
        return None
    extra: dict[str, Any] = {"cpu_bytes_to_use": setup.host_bytes}
    if setup.backend == "kvoffload":
        extra |= {"spec_name": "KvOffloadSpec", "spec_module_path": "kvoffload_rs.vllm"}
    if setup.backend != "native" and setup.faults:
        extra["fault_injection"] = setup.faults
    return extra | setup.extra


def graph_settings(graphs: str) -> dict[str, Any]:
    """Arguments of `LLM` for CUDA graphs."""
    if graphs == "none":
        return {"enforce_eager": True}
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": CAPTURE_SIZES}
    if graphs == "full":
        compilation |= {"mode": 0, "cudagraph_mode": "FULL"}
    return {"compilation_config": compilation}


def prompt(seed: object, length: int, last: int = LAST_TOKEN) -> list[int]:
    """Random tokens; another seed shares no prefix."""
    numbers = random.Random(str(seed))
    return [numbers.randrange(FIRST_TOKEN, last) for _ in range(length)]
