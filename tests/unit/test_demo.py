"""The demo's orchestration with a stand-in for the engine: results, deaths, hangs, bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kvoffload_rs import cli
from kvoffload_rs.cli import demo, engine_process
from kvoffload_rs.cli.demo import DemoOptions

# Answers each request with its number; an engine whose loads copy nothing answers 99 instead.
ENGINE = """
import json, os, subprocess, sys, time
job = json.load(open(sys.argv[1]))
say = lambda **event: print(json.dumps(event), flush=True)
transfer = job["kv_transfer"]
extra = transfer["kv_connector_extra_config"] if transfer else {}
mode = os.environ.get("FAKE_MODE", "")
print("noise on standard error", file=sys.stderr)
print("seed", os.environ["PYTHONHASHSEED"], file=sys.stderr, flush=True)
if mode == "die" and extra:
    print("the reason of the death", file=sys.stderr)
    sys.exit(3)
if mode == "killed":
    os.kill(os.getpid(), 9)
if mode == "config" and extra:
    say(event="error", kind="config", message="CapacityError: too small")
    sys.exit(1)
if mode in ("hang", "orphan"):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(os.environ["FAKE_PIDS"], "w").write(f"{os.getpid()} {child.pid}")
    if mode == "hang":
        time.sleep(600)
say(event="ready", seconds=0.1)
count = len(job["requests"])
say(event="progress", done=count)
wrong = extra.get("fault_injection") == {"loads": "nothing"}
tokens = [[99 if wrong else n % 90] for n in range(count)]
assert (job["answers"] is None) == (transfer is None)
metrics = {"vllm:prompt_tokens_by_source{local_compute}": 5, "vllm:prefix_cache_hits": 1,
           "vllm:external_prefix_cache_hits": 7 if extra else 0, "vllm:num_preemptions": 0}
say(event="result", version="0.32.0", tokens=tokens, prompt_tokens=[9] * count,
    first_token_s=[0.5] * count, start_s=1.0, serve_s=2.0, metrics=metrics)
sys.exit(5 if mode == "late" and extra else 0)
"""


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(engine_process, "COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(demo.model, "write_model", lambda directory, seed: directory)
    monkeypatch.setattr(demo, "check_engine_installed", lambda: None)
    monkeypatch.setenv("FAKE_PIDS", str(tmp_path / "pids"))


def run(*arguments: str) -> int:
    return cli.main(["demo", "--users", "12", "--turns", "4", *arguments])


def left_over(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "tmp").iterdir())


def test_table_and_progress(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    out, err = capfd.readouterr()
    assert "48 requests on vLLM 0.32.0" in out
    assert out.count("✓") == 2
    assert "control that loads nothing: 48 of 48 requests" in err
    assert "noise" not in out + err
    assert left_over(tmp_path) == []


def test_json_is_all_there_is_on_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["tokens_equal"] is found["control_differs"] is True
    assert found["external_hit_tokens"] == 7


def test_a_failed_verdict_is_status_1(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "control_settings", lambda extra: extra)
    assert run("--json") == 1
    assert json.loads(capfd.readouterr().out)["control_differs"] is False


def test_the_runs_differ_in_nothing_but_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[dict[str, Any]] = []

    def record(name: str, job: dict[str, Any], *rest: Any) -> dict[str, Any]:
        jobs.append(job)
        return engine_process.run_engine(name, job, *rest)

    monkeypatch.setattr(demo, "run_engine", record)
    assert run("--policy", "arc", "--blocks-per-chunk", "2", "--pool", "8MiB") == 0
    without, kvoffload, control = jobs
    assert kvoffload["kv_transfer"]["kv_connector"] == "KvOffloadConnector"
    assert kvoffload["kv_transfer"]["kv_load_failure_policy"] == "recompute"
    for job in (kvoffload, control):
        assert job["engine"] == without["engine"]
        assert job["requests"] == without["requests"]
        assert len(job["answers"]) == len(job["requests"])
    extra = kvoffload["kv_transfer"]["kv_connector_extra_config"]
    assert extra == {
        "cpu_bytes_to_use": "8MiB",
        "eviction_policy": "arc",
        "block_size": 64,
    }
    assert control["kv_transfer"]["kv_connector_extra_config"] == {
        **extra,
        "fault_injection": {"loads": "nothing"},
    }


def test_through_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[dict[str, Any]] = []

    def record(name: str, job: dict[str, Any], *rest: Any) -> dict[str, Any]:
        jobs.append(job)
        return engine_process.run_engine(name, job, *rest)

    monkeypatch.setattr(demo, "run_engine", record)
    assert run("--through", "spec") == 0
    transfer = jobs[1]["kv_transfer"]
    assert transfer["kv_connector"] == "OffloadingConnector"
    assert transfer["kv_connector_extra_config"]["spec_name"] == "KvOffloadSpec"


@pytest.mark.parametrize(
    ("mode", "status", "says"),
    [
        (
            "die",
            1,
            ["with kvoffload-rs: the engine ended with status 3", "the reason of the death"],
        ),
        ("killed", 1, ["without offloading: the engine was killed by SIGKILL", "--keep-logs"]),
        ("late", 1, ["with kvoffload-rs: the engine ended with status 5"]),
        ("config", 2, ["with kvoffload-rs: CapacityError: too small"]),
    ],
)
def test_an_engine_that_fails(
    mode: str,
    status: int,
    says: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAKE_MODE", mode)
    assert run("--json") == status
    out, err = capfd.readouterr()
    assert out == ""
    for words in says:
        assert words in err
    assert "Traceback" not in err
    assert left_over(tmp_path) == []


def test_an_engine_that_hangs_is_ended_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_MODE", "hang")
    monkeypatch.setattr(engine_process, "SILENCE_S", 2.0)
    assert run() == 1
    assert "the engine reported nothing for 2 s" in capfd.readouterr().err
    assert_gone(tmp_path)


def test_children_of_a_finished_engine_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MODE", "orphan")
    monkeypatch.setattr(engine_process, "_EXIT_S", 1.0)
    assert run() == 0
    assert_gone(tmp_path)


@pytest.mark.parametrize(("number", "status"), [(2, 130), (15, 143)])
def test_signals_end_the_engine_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    monkeypatch.setenv("FAKE_MODE", "hang")
    starter = (
        "import signal, sys\n"
        # As in a terminal. A shell's background job, as these tests may be, ignores SIGINT.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from kvoffload_rs.cli import demo, engine_process, main\n"
        f"engine_process.COMMAND = {engine_process.COMMAND!r}\n"
        "demo.model.write_model = lambda directory, seed: directory\n"
        "demo.check_engine_installed = lambda: None\n"
        "sys.exit(main(['demo', '--users', '6', '--turns', '2']))\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    process = subprocess.Popen(
        [sys.executable, "-c", starter], env=environment, stderr=subprocess.PIPE
    )
    pids = tmp_path / "pids"
    wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert b"Traceback" not in err
    assert_gone(tmp_path)
    assert left_over(tmp_path) == []


def test_logs_are_kept_on_request(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("--keep-logs") == 0
    (kept,) = left_over(tmp_path)
    assert f"logs are in {kept}" in capfd.readouterr().err.replace("\n", "")
    log = (kept / "with-kvoffload-rs.log").read_text()
    assert "noise on standard error" in log
    assert "seed 0" in log


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--trace", "missing.jsonl"], "trace missing.jsonl cannot be read"),
        (["--pool", "5"], "--pool: cpu_bytes_to_use is 5 bytes, but one slot needs"),
        (["--pool", "many"], "--pool: cpu_bytes_to_use is 'many', which is no number of bytes"),
        (["--pool", "900000TiB"], "--pool: "),
        (["--blocks-per-chunk", "1000"], "so nothing would be offloaded"),
        (["--users", "1", "--turns", "1"], "Serve more requests or more users"),
        (["--trace", "t", "--users", "3"], "--users is for the built-in chat"),
        (["--trace", "t", "--turns", "3"], "--turns is for the built-in chat"),
        (["--requests", "0"], "'0' is not a whole number of at least 1"),
        (["--max-tokens", "x"], "'x' is not a whole number of at least 1"),
        (["--policy", "fifo"], "invalid choice: 'fifo'"),
    ],
)
def test_bad_input_is_status_2_and_no_traceback(
    arguments: list[str], says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(["demo", *arguments])
    except SystemExit as stop:
        status = stop.code  # type: ignore[assignment]
    out, err = capfd.readouterr()
    assert status == 2
    assert says in err
    assert "Traceback" not in err
    assert out == ""
    assert left_over(tmp_path) == []


def test_without_vllm_it_says_how_to_install(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["demo"]) == 2
    err = capfd.readouterr().err
    assert "vLLM is not installed" in err
    assert "make demo" in err


def test_options_have_the_documented_defaults() -> None:
    options = DemoOptions()
    work = demo.make_workload(options)
    assert len(work.requests) == 96
    assert demo.offload_settings(options, work)["cpu_bytes_to_use"] == "256MiB"


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_gone(tmp_path: Path) -> None:
    """No process of the stand-in is running any more."""
    for pid in (tmp_path / "pids").read_text().split():
        wait_until(lambda pid=pid: not is_running(pid))


def is_running(pid: str) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
