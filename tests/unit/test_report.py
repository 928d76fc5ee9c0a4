"""The figures, the verdicts, the table and the JSON object; and what progress looks like."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from kvoffload_rs.cli import report as reports
from kvoffload_rs.cli.progress import LiveProgress, PlainProgress, make_progress
from kvoffload_rs.cli.report import Report, RunFigures, differences, human_bytes, percentile
from kvoffload_rs.cli.workload import Turn, Workload
from rich.console import Console

WORK = Workload([Turn(0, [5] * 40), Turn(1, [6] * 40)], 3, {"kind": "chat"})
SETTINGS = {"cpu_bytes_to_use": "1MiB"}


def result(tokens: list[list[int]], external: int = 0, loaded: int = 0) -> dict[str, Any]:
    metrics = {
        "vllm:prompt_tokens_by_source{local_compute}": 80 - external,
        "vllm:prefix_cache_hits": 0,
        "vllm:external_prefix_cache_hits": external,
        "vllm:num_preemptions": 0,
    }
    if loaded:
        metrics |= {"vllm:kv_offload_store_bytes": 4096, "vllm:kv_offload_load_bytes": loaded}
    return {
        "tokens": tokens,
        "prompt_tokens": [40, 40],
        "first_token_s": [0.010, 0.030],
        "metrics": metrics,
        "version": "0.32.0",
        "start_s": 2.0,
        "serve_s": 1.5,
    }


GOOD = [[7, 8, 9], [7, 8, 10]]
WITHOUT = result(GOOD)
SAME = result(GOOD, external=32, loaded=2048)
WRONG = result([[7, 8, 9], [7, 1, 10]], external=32, loaded=2048)


def make(kvoffload: dict[str, Any] = SAME, control: dict[str, Any] = WRONG) -> Report:
    return Report.of(WORK, SETTINGS, WITHOUT, kvoffload, control)


def text_of(report: Report) -> str:
    console = Console(file=io.StringIO(), width=100)
    report.print(console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_figures_of_a_run() -> None:
    figures = RunFigures.of(SAME, WITHOUT)
    assert figures.requests == 2
    assert figures.prompt_tokens == 80
    assert figures.computed_tokens == 48
    assert figures.external_hit_tokens == 32
    assert (figures.stored_bytes, figures.loaded_bytes) == (4096, 2048)
    assert (figures.ttft_median_ms, figures.ttft_p90_ms) == (20.0, 30.0)
    assert (figures.generated_tokens, figures.distinct_generated_tokens) == (6, 4)
    assert figures.different_answers == 0


def test_an_engine_without_offloading_stores_nothing() -> None:
    figures = RunFigures.of(WITHOUT, WITHOUT)
    assert (figures.stored_bytes, figures.loaded_bytes) == (0, 0)


def test_both_verdicts_hold() -> None:
    report = make()
    assert report.tokens_equal and report.control_differs and report.passed
    assert report.first_difference is None
    text = text_of(report)
    assert "✓ every token equals the run without offloading" in text
    assert "✓ the control differs (1 of 2 answers)" in text


def test_wrong_tokens_fail_and_the_place_is_named() -> None:
    report = make(kvoffload=WRONG)
    assert not report.tokens_equal and not report.passed
    assert report.first_difference == "request 1, token 1: [1] instead of [8]"
    assert "✗ 1 of 2 answers differ from the run without offloading" in text_of(report)
    assert "request 1, token 1: [1] instead of [8]" in text_of(report)


def test_a_missing_token_is_a_difference() -> None:
    report = make(kvoffload=result([[7, 8], [7, 8, 10]], external=32, loaded=1))
    assert report.first_difference == "request 0, token 2: [] instead of [9]"


def test_a_control_that_does_not_differ_fails() -> None:
    report = make(control=SAME)
    assert report.tokens_equal and not report.control_differs and not report.passed
    assert "✗ the control does not differ, although its loads copied nothing" in text_of(report)


def test_a_control_without_loads_says_what_to_do() -> None:
    report = make(control=WITHOUT)
    assert not report.passed
    assert "because nothing was loaded from the host pool: serve more requests" in text_of(report)


def test_a_lost_request_is_an_error_not_a_match() -> None:
    with pytest.raises(ValueError, match="zip"):
        differences(result([[7, 8, 9]]), WITHOUT)


def test_the_table_has_every_figure() -> None:
    text = text_of(make())
    for words in (
        "2 requests on vLLM 0.32.0",
        "prompt tokens",
        "computed",
        "in the host pool",
        "in the engine's cache",
        "4.0 KiB",
        "2.0 KiB",
        "time to first token, p50",
        "20.0 ms",
        "30.0 ms",
        "0 of 2",
        "1 of 2",
    ):
        assert words in text


def test_json_is_one_object_with_the_promised_keys() -> None:
    found = json.loads(json.dumps(make().as_json()))
    promised = {
        "tokens_equal": True,
        "control_differs": True,
        "external_hit_tokens": 32,
        "stored_bytes": 4096,
        "loaded_bytes": 2048,
        "engine": {"name": "vllm", "version": "0.32.0"},
    }
    assert {key: found[key] for key in promised} == promised
    assert found["requests"] == 2
    assert found["computed_tokens"] == 48
    assert found["settings"] == SETTINGS
    assert found["workload"] == {"kind": "chat", "max_model_len": 64, "engine_blocks": 5}
    assert set(found["runs"]) == {"without", "kvoffload", "control"}
    assert found["runs"]["control"]["different_answers"] == 1
    assert found["runs"]["without"]["computed_tokens"] == 80


def test_json_of_a_failure() -> None:
    found = make(kvoffload=WRONG, control=SAME).as_json()
    assert found["tokens_equal"] is False
    assert found["control_differs"] is False
    assert found["first_difference"] == "request 1, token 1: [1] instead of [8]"


@pytest.mark.parametrize(
    ("values", "percent", "found"),
    [([3.0], 90, 3.0), ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 90, 9), ([2, 1], 50, 1), ([2, 1], 0, 1)],
)
def test_percentile(values: list[float], percent: float, found: float) -> None:
    assert percentile(values, percent) == found


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 << 30, "5.0 GiB"),
        (1 << 60, "1048576.0 TiB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_plain_progress_is_a_line_a_quarter() -> None:
    console = Console(file=io.StringIO(), width=40)
    progress = make_progress(console)
    assert isinstance(progress, PlainProgress)
    progress.note("[bold] is no markup here")
    progress.starting("one", 8)
    progress.ready(2.0)
    for done in range(1, 9):
        progress.done(done)
    progress.close()
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "[bold] is no markup here",
        "one: starting the engine",
        "one: engine ready after 2.0 s",
        "one: 2 of 8 requests",
        "one: 4 of 8 requests",
        "one: 6 of 8 requests",
        "one: 8 of 8 requests",
    ]


def test_live_progress_shows_one_bar_an_engine() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    progress = make_progress(console)
    assert isinstance(progress, LiveProgress)
    for name in ("one", "two"):
        progress.starting(name, 4)
        progress.ready(1.0)
        progress.done(4)
    progress.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "one" in shown and "two" in shown and "4/4" in shown


def test_every_figure_is_in_the_json() -> None:
    fields = set(reports.RunFigures.__dataclass_fields__)
    assert fields <= set(make().as_json()["runs"]["kvoffload"])
