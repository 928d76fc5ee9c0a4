"""The wheel that is published: its tag, what it links to, and an empty environment with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.process import ROOT

ALLOWED_LIBRARIES = {"libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0"}
ALLOWED_LIBRARIES |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "librt.so.1"}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command, show its output if it fails, and return what it printed."""
    # A make that runs these tests must not hand its own flags to the make started here.
    environment = {k: v for k, v in os.environ.items() if k not in {"MAKEFLAGS", "MAKELEVEL"}}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel of the present sources (made if it is missing or old)."""
    run("make", "wheel")
    (path,) = (ROOT / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def module(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled module, taken out of the wheel."""
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".so")]
        return Path(archive.extract(name, folder))


def test_tag(wheel: Path) -> None:
    """One wheel for every Python from 3.11 on."""
    assert re.fullmatch(
        r"kvoffload_rs-[\d.]+-cp311-abi3-manylinux_2_28_(x86_64|aarch64)\.whl", wheel.name
    )


def test_auditwheel_agrees(wheel: Path) -> None:
    """No symbol is newer than manylinux_2_28 allows."""
    # It wraps its lines where the wheel's name happens to end.
    report = " ".join(run(sys.executable, "-m", "auditwheel", "show", wheel).split())
    found = re.search(r'consistent with the following platform tag: "(manylinux_\w+)"', report)
    assert found, report
    glibc = tuple(int(part) for part in found[1].split("_")[1:3])
    assert glibc <= (2, 28), report


def test_links_to_the_c_library_only(module: Path) -> None:
    """CUDA, if it is ever used, is loaded at run time: the module must load without it."""
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.elffile import ELFFile

    with module.open("rb") as file:
        (dynamic,) = [s for s in ELFFile(file).iter_sections() if isinstance(s, DynamicSection)]
        needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
    assert needed <= ALLOWED_LIBRARIES


def test_contents(wheel: Path) -> None:
    """The package, its types and its licence are in; tests and sources are not."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = [n for n in names if n.endswith("entry_points.txt")]
        declared = archive.read(entry_points).decode()
    for wanted in ("kvoffload_rs/py.typed", "kvoffload_rs/_core.pyi", "kvoffload_rs/vllm/spec.py"):
        assert wanted in names
    assert any(name.endswith("LICENSE") for name in names)
    assert not [n for n in names if n.endswith((".rs", ".pyc", ".toml")) or "test" in n]
    assert "[vllm.general_plugins]" in declared
    assert "[console_scripts]" in declared


def test_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """pip brings one dependency; no torch, no vLLM, no CUDA is there or needed."""
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    program = """
import importlib.metadata, sys, kvoffload_rs, kvoffload_rs._core as core
manager = core.Manager(4)
request = manager.new_request()
assert manager.prepare_store([b"a" * 36], request)[0] == [b"a" * 36]
heavy = {"torch", "vllm", "numpy"} & set(sys.modules)
print(core.build_info()["version"], importlib.metadata.version("kvoffload-rs"), sorted(heavy))
"""
    version = wheel.name.split("-")[1]
    assert run(python, "-c", program, cwd=tmp_path).split() == [version, version, "[]"]
    help_text = run(tmp_path / "venv" / "bin" / "kvoffload", "--help", cwd=tmp_path)
    assert "demo" in help_text
