"""What an import loads: nothing heavy, and nothing that needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kvoffload_rs
import pytest

HEAVY = ("torch", "numpy", "vllm", "kvoffload_rs._core", "cuda", "rich")


def run(code: str) -> str:
    """Runs code in a new interpreter that refuses to load torch, numpy, vLLM and the core."""
    refuse = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {HEAVY!r} or name in {HEAVY!r}:\n"
        "            raise ImportError('refused: ' + name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", refuse + code], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "module",
    [
        "kvoffload_rs",
        "kvoffload_rs.errors",
        "kvoffload_rs.config",
        "kvoffload_rs.memory",
        "kvoffload_rs.values",
        "kvoffload_rs.vllm",
        "kvoffload_rs.vllm.plugin",
    ],
)
def test_imports_need_nothing(module: str) -> None:
    run(f"import {module}\nfor name in {HEAVY!r}: assert name not in sys.modules, name")


def test_config_works_without_anything() -> None:
    out = run(
        "from kvoffload_rs.config import Settings\n"
        "print(Settings.parse({'cpu_bytes_to_use': '1KiB'}).cpu_bytes)"
    )
    assert out.strip() == "1024"


def test_the_stub_matches_the_module(tmp_path: Path) -> None:
    package = Path(kvoffload_rs.__file__).parent
    result = subprocess.run(
        [sys.executable, "-m", "mypy.stubtest", "kvoffload_rs._core"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        # mypy finds an installed package by itself, and refuses to have it on its path.
        env={
            **os.environ,
            "MYPYPATH": "" if package.parent.name == "site-packages" else str(package.parent),
        },
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert (package / "py.typed").exists()


def test_public_names() -> None:
    assert set(kvoffload_rs.__all__) == set(dir(kvoffload_rs))
    for name in kvoffload_rs.__all__:
        assert getattr(kvoffload_rs, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        kvoffload_rs.nothing  # noqa: B018


def test_errors_are_the_same_classes_everywhere() -> None:
    from kvoffload_rs import errors

    assert kvoffload_rs.ConfigError is errors.ConfigError
    assert issubclass(errors.CapacityError, errors.ConfigError)
    assert issubclass(errors.TransferTimeoutError, errors.TransferError)
    assert issubclass(errors.VerifyError, errors.TransferError)


def test_vllm_package_knows_the_connector_and_the_spec() -> None:
    import kvoffload_rs.vllm as package

    assert dir(package) == ["KvOffloadConnector", "KvOffloadSpec"]
    with pytest.raises(AttributeError, match="Nothing"):
        package.Nothing  # noqa: B018
