"""The CUDA backend on a machine without a driver: importable, and clear about what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvoffload_rs import _core, errors

core: Any = _core


@pytest.fixture
def no_driver() -> None:
    """Skip where the module has no CUDA backend, or where there is a driver."""
    if not hasattr(core, "CudaWorker"):
        pytest.skip("this build of kvoffload-rs has no CUDA backend")
    if core.cuda_available():
        pytest.skip("this machine has a CUDA driver")


def test_the_reason_is_given(no_driver: None) -> None:
    reason = core.cuda_unavailable_reason()
    assert isinstance(reason, str) and reason


def test_a_worker_is_refused_with_a_typed_error(no_driver: None) -> None:
    kind = errors.CudaUnavailableError  # type: ignore[attr-defined]
    assert issubclass(kind, errors.KvOffloadError)
    with pytest.raises(kind) as caught:
        core.CudaWorker(
            [(1 << 20, 8, 4096, 4096)],
            [[(0, 4096)]],
            device=0,
            blocks_per_chunk=1,
            num_slots=4,
            slot_bytes=4096,
        )
    assert str(caught.value)


def test_no_cuda_library_is_linked() -> None:
    """The driver is opened when it is first used, so that the module loads on any machine."""
    needed = _needed(Path(_core.__file__))
    assert needed, "no dependency at all: the file was not understood"
    assert not [name for name in needed if "cuda" in name.lower() or "nvidia" in name.lower()]


def _needed(file: Path) -> list[str]:
    """The shared libraries that the loader must find for a file."""
    elftools = pytest.importorskip("elftools.elf.elffile")
    with file.open("rb") as stream:
        dynamic = elftools.ELFFile(stream).get_section_by_name(".dynamic")
        tags = list(dynamic.iter_tags("DT_NEEDED"))
        return [tag.needed for tag in tags]
