"""The figures of the demo and its two verdicts, as a table or as JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from kvoffload_rs.cli.workload import Workload


@dataclass(frozen=True)
class RunFigures:
    """The figures of one engine run. Tokens are prompt tokens unless the name says otherwise."""

    requests: int
    prompt_tokens: int
    computed_tokens: int
    """Prompt tokens that the engine computed: new ones, and those it had to recompute."""
    gpu_hit_tokens: int
    """Prompt tokens found in the engine's own cache."""
    external_hit_tokens: int
    """Prompt tokens served from the host pool."""
    generated_tokens: int
    distinct_generated_tokens: int
    stored_bytes: int
    loaded_bytes: int
    preemptions: int
    ttft_median_ms: float
    ttft_p90_ms: float
    start_s: float
    serve_s: float
    different_answers: int
    """Requests whose tokens are not those of the run without offloading."""

    @classmethod
    def of(cls, result: dict[str, Any], reference: dict[str, Any]) -> RunFigures:
        """Figures of one engine's result, compared with the result without offloading."""
        counters = result["metrics"]
        generated = [token for answer in result["tokens"] for token in answer]
        times = result["first_token_s"]
        return cls(
            requests=len(result["tokens"]),
            prompt_tokens=sum(result["prompt_tokens"]),
            computed_tokens=int(counters["vllm:prompt_tokens_by_source{local_compute}"]),
            gpu_hit_tokens=int(counters["vllm:prefix_cache_hits"]),
            external_hit_tokens=int(counters["vllm:external_prefix_cache_hits"]),
            generated_tokens=len(generated),
            distinct_generated_tokens=len(set(generated)),
            stored_bytes=_moved(counters, "store"),
            loaded_bytes=_moved(counters, "load"),
            preemptions=int(counters["vllm:num_preemptions"]),
            ttft_median_ms=round(statistics.median(times) * 1e3, 2),
            ttft_p90_ms=round(percentile(times, 90) * 1e3, 2),
            start_s=round(result["start_s"], 2),
            serve_s=round(result["serve_s"], 2),
            different_answers=len(differences(result, reference)),
        )


def _moved(counters: dict[str, Any], direction: str) -> int:
    """Bytes of copies, as our connector or vLLM's counts them."""
    ours = counters.get(f"vllm:kvoffload_moved_{direction}_bytes", 0)
    return int(ours or counters.get(f"vllm:kv_offload_{direction}_bytes", 0))


@dataclass(frozen=True)
class Report:
    """Everything the demo found out."""

    without: RunFigures
    kvoffload: RunFigures
    control: RunFigures
    engine_version: str
    workload: dict[str, Any]
    settings: dict[str, Any]
    first_difference: str | None
    """Where the run with kvoffload-rs differs first; None if it does not."""

    @classmethod
    def of(
        cls,
        work: Workload,
        settings: dict[str, Any],
        without: dict[str, Any],
        kvoffload: dict[str, Any],
        control: dict[str, Any],
    ) -> Report:
        """Compare the results of the three runs."""
        return cls(
            without=RunFigures.of(without, without),
            kvoffload=RunFigures.of(kvoffload, without),
            control=RunFigures.of(control, without),
            engine_version=without["version"],
            workload={
                **work.facts,
                "max_model_len": work.max_model_len,
                "engine_blocks": work.engine_blocks,
            },
            settings=settings,
            first_difference=_first_difference(kvoffload, without),
        )

    @property
    def tokens_equal(self) -> bool:
        """Every token of every answer equals the run without offloading."""
        return self.kvoffload.different_answers == 0

    @property
    def control_differs(self) -> bool:
        """The control, whose loads copy nothing, answers at least one request differently."""
        return self.control.different_answers > 0

    @property
    def passed(self) -> bool:
        """Both verdicts hold."""
        return self.tokens_equal and self.control_differs

    def as_json(self) -> dict[str, Any]:
        """One object: verdicts and main figures at the top, every figure of each run below."""
        main = asdict(self.kvoffload)
        del main["different_answers"]
        return {
            "tokens_equal": self.tokens_equal,
            "control_differs": self.control_differs,
            **main,
            "engine": {"name": "vllm", "version": self.engine_version},
            "workload": self.workload,
            "settings": self.settings,
            "first_difference": self.first_difference,
            "runs": {
                "without": asdict(self.without),
                "kvoffload": asdict(self.kvoffload),
                "control": asdict(self.control),
            },
        }

    def verdicts(self) -> list[tuple[bool, str]]:
        """Both verdicts as sentences, with the reason where one fails."""
        control = self.control
        equal = "every token equals the run without offloading"
        if not self.tokens_equal:
            equal = (
                f"{self.kvoffload.different_answers} of {self.kvoffload.requests} answers differ "
                f"from the run without offloading; first: {self.first_difference}"
            )
        differs = f"the control differs ({control.different_answers} of {control.requests} answers)"
        if not self.control_differs:
            why = (
                "although its loads copied nothing"
                if control.loaded_bytes
                else "because nothing was loaded from the host pool: serve more requests, or "
                "give it a larger --pool or smaller --blocks-per-chunk"
            )
            differs = f"the control does not differ, {why}"
        return [(self.tokens_equal, equal), (self.control_differs, differs)]

    def print(self, console: Console) -> None:
        """Print the table and the verdicts."""
        runs = (self.without, self.kvoffload, self.control)
        table = Table(
            title=f"{self.without.requests} requests on vLLM {self.engine_version} (CPU)",
            caption="times are of a tiny model on CPU and say little about GPUs",
        )
        table.add_column("")
        for name in ("without offloading", "kvoffload-rs", "control"):
            table.add_column(name, justify="right")
        rows = [
            ("prompt tokens", [f"{run.prompt_tokens:,}" for run in runs]),
            ("  computed", [f"{run.computed_tokens:,}" for run in runs]),
            ("  in the engine's cache", [f"{run.gpu_hit_tokens:,}" for run in runs]),
            ("  in the host pool", [f"{run.external_hit_tokens:,}" for run in runs]),
            ("bytes stored", [human_bytes(run.stored_bytes) for run in runs]),
            ("bytes loaded", [human_bytes(run.loaded_bytes) for run in runs]),
            ("time to first token, p50", [f"{run.ttft_median_ms:,.1f} ms" for run in runs]),
            ("time to first token, p90", [f"{run.ttft_p90_ms:,.1f} ms" for run in runs]),
            ("time to serve all", [f"{run.serve_s:,.1f} s" for run in runs]),
            (
                "answers that differ",
                ["", *(f"{run.different_answers} of {run.requests}" for run in runs[1:])],
            ),
        ]
        for name, values in rows:
            table.add_row(name, *values)
        console.print(table)
        for good, sentence in self.verdicts():
            mark = "[green]✓[/green]" if good else "[red]✗[/red]"
            console.print(f"{mark} {sentence}", soft_wrap=True, highlight=False)


def differences(result: dict[str, Any], reference: dict[str, Any]) -> list[int]:
    """Indices of the requests whose tokens differ."""
    pairs = zip(result["tokens"], reference["tokens"], strict=True)
    return [index for index, (ours, theirs) in enumerate(pairs) if ours != theirs]


def _first_difference(result: dict[str, Any], reference: dict[str, Any]) -> str | None:
    different = differences(result, reference)
    if not different:
        return None
    request = different[0]
    ours, theirs = result["tokens"][request], reference["tokens"][request]
    common = min(len(ours), len(theirs))
    place = next((at for at in range(common) if ours[at] != theirs[at]), common)
    return (
        f"request {request}, token {place}: {ours[place : place + 1]} "
        f"instead of {theirs[place : place + 1]}"
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def human_bytes(count: int) -> str:
    """Bytes with a binary unit, as ``31.0 MiB``."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
