"""Compile Horovod 0.28.1 for the installed torch, and install it next to it.

    pip download horovod==0.28.1 --no-deps --no-binary horovod
    python -m scripts.build_horovod horovod-0.28.1.tar.gz

Its last version, of 2023, does not compile with torch from 2.11 on as it is: torch requires a newer C++ standard, and
Python 3.12 has no distutils. Needs cmake and a C++20 compiler, and for GPUs nvcc. With GPUs, NCCL averages (the library
that torch brings), without them gloo. Two cores compile for 4 minutes.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

CHANGES: dict[str, tuple[tuple[str, str], ...]] = {
    "CMakeLists.txt": (
        ("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
        (r"set(CMAKE_CXX_STANDARD 17)\n", r"set(CMAKE_CXX_STANDARD 20)\n"),
    ),
    "horovod/torch/CMakeLists.txt": (
        ("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)"),
        (
            "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
            "import sysconfig; print(sysconfig.get_path('include'))",
        ),
    ),
    "horovod/common/ops/cuda/CMakeLists.txt": (("set(CMAKE_CUDA_STANDARD 11)", "set(CMAKE_CUDA_STANDARD 17)"),),
}
"""file -> texts and what replaces them"""

WITHOUT_GPUS = {
    "cmake/Modules/FindPytorch.cmake": (
        ('string(TOUPPER "${Pytorch_CUDA}" Pytorch_CUDA)', 'set(Pytorch_CUDA "FALSE")'),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="source archive of Horovod 0.28.1")
    args = parser.parse_args()
    if not args.archive.is_file():
        parser.error(f"no such file: {args.archive}; fix: pip download horovod==0.28.1 --no-deps --no-binary horovod")
    for program in ("cmake", "c++"):
        if shutil.which(program) is None:
            parser.error(f"{program} is not installed, and Horovod is compiled with it")
    on_gpus = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(args.archive) as archive:
            archive.extractall(folder, filter="data")
        [source] = Path(folder).iterdir()
        change(source, CHANGES if on_gpus else CHANGES | WITHOUT_GPUS)
        environment = os.environ | settings(on_gpus, Path(folder))
        subprocess.run([*installer(), "--no-deps", "--no-build-isolation", source], env=environment, check=True)


def change(source: Path, changes: dict[str, tuple[tuple[str, str], ...]]) -> None:
    """Replace texts in files of the source. Raises ValueError if one is missing."""
    for name, pairs in changes.items():
        text = (source / name).read_text()
        for old, new in pairs:
            if old not in text:
                raise ValueError(f"{name} is not that of Horovod 0.28.1: it lacks {old!r}")
            text = text.replace(old, new)
        (source / name).write_text(text)


def settings(on_gpus: bool, folder: Path) -> dict[str, str]:
    """Return the environment of the build: PyTorch only, gloo, and NCCL for GPUs."""
    found = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_CPU_OPERATIONS": "GLOO",
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "CXXFLAGS": "-include string",  # headers of newer compilers no longer include it by chance
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
    }
    if on_gpus:
        major, minor = torch.cuda.get_device_capability()
        found |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_BUILD_CUDA_CC_LIST": f"{major}{minor}"}
        found |= bundled_nccl(folder)
    return found


def bundled_nccl(folder: Path) -> dict[str, str]:
    """Return where the NCCL that torch brings is. Empty if it brings none."""
    spec = find_spec("nvidia.nccl") if find_spec("nvidia") else None
    for location in (spec.submodule_search_locations or []) if spec else []:
        library = next(Path(location).glob("lib/libnccl.so.*"), None)
        if library is not None:
            (folder / "lib").mkdir()
            (folder / "lib" / "libnccl.so").symlink_to(library)
            return {
                "HOROVOD_NCCL_INCLUDE": str(Path(location) / "include"),
                "HOROVOD_NCCL_LIB": str(folder / "lib"),
                "HOROVOD_NCCL_LINK": "SHARED",
            }
    return {}


def installer() -> list[str]:
    if shutil.which("uv"):
        return ["uv", "pip", "install", "--python", sys.executable]
    return [sys.executable, "-m", "pip", "install"]


if __name__ == "__main__":
    main()
