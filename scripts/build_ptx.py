"""Makes `rust/kvoffload-transfer/src/cuda/fragments.ptx` from `fragments.cu`, or compares the two.

The compiler is NVRTC, which comes with the CUDA build of PyTorch or with
`pip install nvidia-cuda-nvrtc==13.0.88`. The text is labelled PTX 7.0, which every driver from
CUDA 11.0 on takes: nothing in it is newer (`ptxas` accepts it for sm_75 to sm_120).

Usage: python scripts/build_ptx.py [--check]
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "rust/kvoffload-transfer/src/cuda"
SOURCE, TARGET = FOLDER / "fragments.cu", FOLDER / "fragments.ptx"
#: Another version of the compiler may write the same program differently.
NVRTC = (13, 0)
OPTIONS = [b"--gpu-architecture=compute_75", b"--std=c++17"]


def main() -> int:
    """Builds or compares; 0 if all is well, 1 if the text differs, 2 if there is no compiler."""
    parser = argparse.ArgumentParser(description="Make the kernels' PTX.")
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    library = find_nvrtc()
    if library is None:
        print("no NVRTC 13.0: pip install nvidia-cuda-nvrtc==13.0.88", file=sys.stderr)
        return 2
    text = compile_ptx(library, SOURCE.read_bytes())
    if check:
        same = TARGET.read_text() == text
        print(f"{TARGET.name} is {'what' if same else 'NOT what'} {SOURCE.name} compiles to")
        return 0 if same else 1
    TARGET.write_text(text)
    print(f"wrote {TARGET}")
    return 0


def find_nvrtc() -> ctypes.CDLL | None:
    """NVRTC of the right version, from one of pip's packages."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13"):
        try:
            found = files(package) or []
        except PackageNotFoundError:
            continue
        for file in found:
            if re.fullmatch(r"libnvrtc\.so\.13", file.name):
                path = Path(str(file.locate()))
                # NVRTC looks for these by name alone, and finds them once they are loaded.
                for builtins in path.parent.glob("libnvrtc-builtins.so.13.*"):
                    ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
                library = ctypes.CDLL(str(path))
                major, minor = ctypes.c_int(), ctypes.c_int()
                library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
                if (major.value, minor.value) == NVRTC:
                    return library
    return None


def compile_ptx(nvrtc: ctypes.CDLL, source: bytes) -> str:
    """PTX of a CUDA C++ source, labelled with the oldest version that can hold it."""
    program = ctypes.c_void_p()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"fragments.cu", 0, None, None))
    options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
    failed = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    if failed:
        raise SystemExit(_text(nvrtc, program, "ProgramLog"))
    ptx = _text(nvrtc, program, "PTX")
    ptx, labels = re.subn(r"^\.version \d+\.\d+$", ".version 7.0", ptx, flags=re.MULTILINE)
    if labels != 1:
        raise SystemExit("the compiler's output has no .version line")
    head = "// Made from fragments.cu by scripts/build_ptx.py: do not edit.\n"
    return head + "\n".join(line.rstrip() for line in ptx.rstrip("\0").strip().splitlines()) + "\n"


def _text(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.value.decode()


def _check(answer: int) -> None:
    if answer:
        raise SystemExit(f"NVRTC answered {answer}")


if __name__ == "__main__":
    raise SystemExit(main())
