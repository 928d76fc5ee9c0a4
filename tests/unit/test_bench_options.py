"""Options and cases of `kvoffload bench transfer`, and what it says without a GPU."""

from __future__ import annotations

import argparse
import itertools
import random
import subprocess
import sys
from typing import Any

import pytest
from bench_fakes import FakeCore, FakeTorch
from kvoffload_rs.cli import main
from kvoffload_rs.cli.bench import device, options
from kvoffload_rs.cli.bench.cases import LAYERS, MOST_FRAGMENTS, Geometry, make_plan, scattered
from kvoffload_rs.cli.bench.options import GIB, KIB, MIB, TransferOptions
from kvoffload_rs.errors import ConfigError, KvOffloadError


def parse(*words: str) -> TransferOptions:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return options.from_arguments(parser.parse_args(words))


def test_defaults() -> None:
    found = parse()
    assert found == TransferOptions()
    assert found.sizes == tuple(n * KIB for n in (2, 4, 8, 16, 32, 64, 128, 256, 1024))
    assert (found.case_bytes, found.pool, found.repeats) == (512 * MIB, 4 * GIB, 5)
    assert found.paths == ("auto", "direct", "staged")
    assert found.directions == ("d2h", "h2d", "both")
    assert found.vllm and not found.gemm and not found.adjacent


def test_everything_can_be_chosen() -> None:
    found = parse(
        *("--fragments", "4KiB, 100", "--bytes", "64MiB", "--paths", "staged,direct,staged"),
        *("--directions", "H2D", "--repeats", "2", "--pool", "1GiB", "--adjacent", "--gemm"),
        *("--no-vllm", "--device", "3", "--seed", "9"),
    )
    assert found == TransferOptions(
        fragments=(4096, 100),
        case_bytes=64 * MIB,
        paths=("staged", "direct"),
        directions=("h2d",),
        repeats=2,
        pool=GIB,
        adjacent=True,
        gemm=(8 * KIB, 64 * KIB),
        vllm=False,
        device=3,
        seed=9,
    )
    assert found.sizes == (100, 4096, 8192, 65536)


def test_quick_is_overruled_by_what_is_given() -> None:
    found = parse("--quick", "--repeats", "9", "--gemm", "4KiB")
    assert found.case_bytes == 256 * MIB and found.gemm_pairs == 10
    assert found.repeats == 9 and found.gemm == (4096,)


@pytest.mark.parametrize(
    "words",
    [
        ["--fragments", "4KiB,many"],
        ["--fragments", "0"],
        ["--paths", "auto,teleport"],
        ["--directions", "up"],
        ["--repeats", "0"],
    ],
)
def test_bad_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == 2
    assert words[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--fragments", "3"], "fragments"),
        (["--pool", "1GiB"], "pool"),
        (["--gemm", "--directions", "both"], "gemm"),
    ],
)
def test_bad_values(words: list[str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*words)
    assert caught.value.field == field and caught.value.hint


def test_a_chart_without_matplotlib_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="matplotlib"):
        parse("--chart", "out.png")


# --- cases ---


@pytest.mark.parametrize("fragment", TransferOptions().sizes)
def test_geometry_of_the_defaults(fragment: int) -> None:
    found = Geometry.of(fragment, 512 * MIB, 4 * GIB)
    assert found.fragments <= MOST_FRAGMENTS
    assert found.fragments == found.chunks * LAYERS
    assert found.job_bytes == min(512 * MIB, MOST_FRAGMENTS * fragment)
    assert found.num_slots * found.slot_bytes == 4 * GIB
    assert found.num_blocks * found.slot_bytes <= 4 * GIB


def test_a_pool_of_too_few_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 are needed"):
        Geometry.of(64 * MIB, 1, 4 * GIB)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("count", "limit"), [(1, 1), (5, 9), (5, 10), (1000, 5000), (0, 0)])
def test_scattered_numbers_are_all_apart(count: int, limit: int, seed: int) -> None:
    found = scattered(random.Random(seed), count, limit)
    ordered = sorted(found)
    assert len(found) == count and all(0 <= number < limit for number in found)
    assert all(b - a > 1 for a, b in itertools.pairwise(ordered))
    assert count < 1000 or found != ordered


def test_too_many_numbers_cannot_be_apart() -> None:
    with pytest.raises(ValueError, match="apart"):
        scattered(random.Random(0), 5, 8)


@pytest.mark.parametrize("adjacent", [False, True])
def test_jobs_of_a_plan_do_not_clash(adjacent: bool) -> None:
    geometry = Geometry.of(4096, 8 * MIB, 64 * MIB)
    plan = make_plan(geometry, 3, adjacent=adjacent)
    for mine, other, limit in (
        (plan.source, plan.target, geometry.num_blocks),
        (plan.slots, plan.other_slots, geometry.num_slots),
    ):
        assert len(mine) == len(other) == geometry.chunks
        assert len({*mine, *other}) == 2 * geometry.chunks
        assert max(*mine, *other) < limit
        gaps = {b - a for a, b in itertools.pairwise(mine)}
        assert gaps == {1} if adjacent else not gaps & {-1, 1}
    assert plan.source.itemsize == 4
    assert plan == make_plan(geometry, 3, adjacent=adjacent) != make_plan(geometry, 4)


def test_parts_of_a_plan_share_nothing() -> None:
    plan = make_plan(Geometry.of(4096, 1 * MIB, 64 * MIB), 1)
    parts = plan.parts(3)
    assert sorted(block for part in parts for block in part.source) == sorted(plan.source)
    pairs = dict(zip(plan.source, plan.slots, strict=True))
    assert all(
        pairs[a] == b for part in parts for a, b in zip(part.source, part.slots, strict=True)
    )
    assert len(plan.parts(1000)) == len(plan.source)


# --- without a GPU ---


def modules(monkeypatch: pytest.MonkeyPatch, **found: Any) -> None:
    def load(name: str) -> Any:
        module = found["torch" if name == "torch" else "core"]
        if isinstance(module, Exception):
            raise module
        return module

    monkeypatch.setattr(device.importlib, "import_module", load)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({"torch": ImportError("No module named 'torch'")}, "No module named 'torch'"),
        ({"torch": FakeTorch(), "core": ImportError("no core")}, "no core"),
        ({"torch": FakeTorch(), "core": object()}, "has no CUDA backend"),
        ({"torch": FakeTorch(), "core": FakeCore("libcuda.so.1 is missing")}, "libcuda.so.1"),
        ({"torch": FakeTorch(0), "core": FakeCore()}, "has no usable GPU"),
    ],
)
def test_what_is_missing_is_named(
    found: dict[str, Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    modules(monkeypatch, **found)
    with pytest.raises(device.CudaUnavailable, match=reason) as caught:
        device.open_device(0)
    assert isinstance(caught.value, KvOffloadError)
    assert main(["bench", "transfer", "--no-vllm", "--json"]) == 2
    out, err = capsys.readouterr()
    assert not out and reason in err


def test_an_unknown_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    modules(monkeypatch, torch=FakeTorch(2), core=FakeCore())
    assert device.open_device(1).name == "pretended GPU 1"
    with pytest.raises(ConfigError, match="there are 2 GPUs"):
        device.open_device(2)


def test_the_command_line_loads_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from kvoffload_rs.cli import main\n"
        "sys.exit(main(['bench', 'transfer']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "torch cannot be imported" in done.stderr and "Traceback" not in done.stderr
