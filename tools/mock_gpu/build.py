"""Compile the libraries of the mock GPU: a CUDA runtime, NCCL, cuBLAS and a driver that do nothing but count."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

SOURCES = Path(__file__).parent / "stubs"
USERS = ("libtorch_cuda.so", "libc10_cuda.so", "libtorch_python.so", "libtorch_cuda_linalg.so")
"""libraries of torch that call CUDA"""
GENERATED = ("cuda", "__cuda", "cublas", "nccl")
"""prefixes of the functions that are replaced"""
CREATES = re.compile(r"cublas(Create_v2|LtCreate|Lt\w*(Desc|Layout|Preference)Create)")
MULTIPLIES = re.compile(r"cublas\w*([Gg]emm|LtMatmul$|[SDCZ]gemv|Dot|dot)\w*")
BODIES = {
    "cublasLtMatmulAlgoGetHeuristic": "(void *a, void *b, void *c, void *d, void *e, void *f, void *g, int asked,"
    " void *results, int *num) { *num = 1; memset(results, 0, 128); return 0; }",
    "cublasGetVersion_v2": "(void *handle, int *version) { *version = 130100; return 0; }",
}
"""functions that return more than success"""


def site_packages() -> Path:
    """Return the folder of the packages of this environment."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parents[1]


def build(folder: Path) -> None:
    """Compile the libraries into a folder, if the sources are newer."""
    packages, made = site_packages(), folder / "libmock.so"
    newest = max(path.stat().st_mtime for path in (*SOURCES.iterdir(), Path(__file__)))
    if made.exists() and made.stat().st_mtime > newest:
        return
    (folder / "driver").mkdir(parents=True, exist_ok=True)
    (folder / "generated.c").write_text("\n".join(generated(packages / "torch" / "lib")) + "\n")
    # Triton ships the whole set of headers
    includes = [
        f"-I{SOURCES}",
        *(f"-I{packages / path}" for path in ("triton/backends/nvidia/include", "nvidia/nccl/include")),
    ]
    sources = [SOURCES / "runtime.c", SOURCES / "nccl.c", folder / "generated.c"]
    _compile([*includes, *map(str, sources)], made)
    _compile([str(SOURCES / "driver.c")], folder / "driver" / "libcuda.so.1")


def _compile(arguments: list[str], out: Path) -> None:
    part = out.with_name(f"{out.name}.part")  # another rehearsal may run the old library
    options = ["-O1", "-w", "-shared", "-fPIC", *arguments, "-o", str(part), "-lpthread", "-ldl"]
    subprocess.run([os.environ.get("CC", "cc"), *options], check=True)
    part.replace(out)


def generated(libraries: Path) -> Iterator[str]:
    """Yield C code of every function that torch needs and no source file has.

    Args:
        libraries: the folder of torch's libraries.

    Yields:
        Lines of C.
    """
    written = set(re.findall(r"^(?:EXPORT )?[\w\* ]+?(\w+)\(", "".join(_c_sources()), re.MULTILINE))
    yield '#include <string.h>\n#include "mock.h"'
    for name in sorted(_needed(libraries) - written):
        yield _stub(name)


def _c_sources() -> Iterator[str]:
    return (re.sub(r"\{[^\n]*", "", path.read_text()) for path in SOURCES.glob("*.c") if path.name != "driver.c")


def _needed(libraries: Path) -> set[str]:
    names: set[str] = set()
    for library in USERS:
        listed = subprocess.run(
            ["nm", "-D", "--undefined-only", libraries / library], capture_output=True, text=True, check=True
        )
        names |= {line.split()[-1].split("@")[0] for line in listed.stdout.splitlines()}
    return {name for name in names if name.startswith(GENERATED)}


def _stub(name: str) -> str:
    if name == "cublasLtGetVersion":
        return f"unsigned long {name}(void) {{ return 130100; }}"
    if name in BODIES:
        return f"int {name}{BODIES[name]}"
    if CREATES.fullmatch(name):
        return f"int {name}(void **made) {{ *made = mock_new(4096); return 0; }}"
    if MULTIPLIES.fullmatch(name):
        return f"int {name}() {{ mock_add(gemms, 1); return 0; }}"
    return f"int {name}() {{ return 0; }}"


def environment(folder: Path, num_devices: int = 1) -> dict[str, str]:
    """Return the environment variables of a program that uses the mock GPU.

    Args:
        folder: where the libraries are.
        num_devices: number of GPUs that it sees.
    """
    return {
        **os.environ,
        "LD_PRELOAD": str(folder / "libmock.so"),
        "LD_LIBRARY_PATH": str(folder / "driver"),
        "MOCK_GPU_DEVICES": str(num_devices),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
