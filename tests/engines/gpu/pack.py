"""Packs a vLLM for GPU machines without a network, and unpacks it there.

    python -m tests.engines.gpu.pack make WORK OUT     some ten minutes, and 8 GB in WORK
    python -m tests.engines.gpu.pack unpack OUT SITE   there; then PYTHONPATH=SITE:.

For machines with Python 3.12, torch 2.11 (CUDA 13) and transformers. vLLM's libraries are built
against torch's stable ABI, so that those of 0.32 work there, but for DeepGEMM's: that is taken from
0.26, which was built for torch 2.11. Device code of GPUs other than Hopper is left out.
"""

from __future__ import annotations

import argparse
import compileall
import io
import lzma
import shutil
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

from tests.engines.gpu.prune import pruned

_VLLM, _BUILT_FOR_TORCH_2_11 = "0.32.0", "0.26.0"
_SM = 90
_LIBRARIES = (
    "_C_stable_libtorch.abi3.so",
    "_moe_C_stable_libtorch.abi3.so",
    "_flashmla_C.abi3.so",
    "_flashmla_extension_C.abi3.so",
    "cumem_allocator.abi3.so",
    "fs_io_C.abi3.so",
    "spinloop.abi3.so",
    "vllm_flash_attn/_vllm_fa3_C.abi3.so",
    "third_party/deep_gemm/_C.cpython-312-x86_64-linux-gnu.so",
)
_NEEDED = Path(__file__).with_name("packages.txt")
_LEFT_OUT = (
    "__pycache__",
    "/tests/",
    "third_party/fmha_sm100",
    "third_party/tml_fa4",
    "serve/instrumentator/static",
    "zstandard/_cffi",
    "tvm_ffi/include",
)
_ENTRY_POINT = "[vllm.general_plugins]\ndeltasync = deltasync.integrations.vllm:register\n"


def make(work: Path, out: Path) -> None:
    """Download, prune and compress."""
    tree, site = work / "tree", work / "site"
    for version in (_VLLM, _BUILT_FOR_TORCH_2_11):
        _download([f"vllm=={version}"], work / version)
    _unzip(work / _VLLM, tree)
    shutil.rmtree(tree / "vllm" / "third_party" / "deep_gemm", ignore_errors=True)
    _unzip(work / _BUILT_FOR_TORCH_2_11, tree, only="vllm/third_party/deep_gemm/")
    _download(["--requirement", str(_NEEDED)], work / "needed")
    _unzip(work / "needed", site)
    here = site / "deltasync-0.dist-info"
    here.mkdir(exist_ok=True)
    (here / "METADATA").write_text("Metadata-Version: 2.1\nName: deltasync\nVersion: 0\n")
    (here / "entry_points.txt").write_text(_ENTRY_POINT)
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        jobs = [pool.submit(_pack_library, tree / "vllm" / name, out, name) for name in _LIBRARIES]
        jobs.append(pool.submit(_pack_tree, [tree, site], out / "tree.tar.xz"))
        for job in jobs:
            job.result()
    print(sum(file.stat().st_size for file in out.iterdir()) >> 20, "MiB")  # noqa: T201


def unpack(out: Path, site: Path) -> None:
    """The opposite, and compile what Python reads."""
    site.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        jobs = [pool.submit(_unpack_library, packed, site) for packed in out.glob("*.so.xz")]
        jobs.append(pool.submit(_unpack_tree, out / "tree.tar.xz", site))
        for job in jobs:
            job.result()
    compileall.compile_dir(str(site), quiet=2, workers=0)


def _download(packages: list[str], folder: Path) -> None:
    """Wheels for Python 3.12 on x86-64, without what they depend on."""
    platforms = [f"manylinux_2_{n}_x86_64" for n in range(39, 16, -1)]
    words = [
        word
        for name in (*platforms, "manylinux2014_x86_64", "any")
        for word in ("--platform", name)
    ]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    target = ["--python-version", "3.12", "--implementation", "cp", "--only-binary", ":all:"]
    subprocess.run([*pip, *target, *words, *packages], check=True)


def _unzip(wheels: Path, folder: Path, *, only: str = "") -> None:
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(only)]
            archive.extractall(folder, names)


def _pack_library(library: Path, out: Path, name: str) -> None:
    data = library.read_bytes()
    with suppress(ValueError):  # it has no device code
        data = pruned(data, _SM)
    packed = out / f"{name.replace('/', '@')}.xz"
    packed.write_bytes(lzma.compress(data, preset=9))


def _unpack_library(packed: Path, site: Path) -> None:
    place = site / "vllm" / packed.name.removesuffix(".xz").replace("@", "/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(lzma.decompress(packed.read_bytes()))


def _pack_tree(trees: list[Path], packed: Path) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for tree in trees:
            for entry in sorted(tree.iterdir()):
                tar.add(entry, entry.name, filter=_wanted)
    packed.write_bytes(lzma.compress(data.getvalue(), preset=9))


def _unpack_tree(packed: Path, site: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(packed.read_bytes()))) as tar:
        tar.extractall(site, filter="data")


def _wanted(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """What Python needs; vLLM's own libraries are packed one by one."""
    is_library = info.name.startswith("vllm/") and info.name.endswith(".so")
    if is_library or info.name.endswith((".pyc", ".pyi", "vllm-rs")):
        return None
    return None if any(part in f"{info.name}/" for part in _LEFT_OUT) else info


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.gpu.pack")
    parser.add_argument("what", choices=("make", "unpack"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("to", type=Path)
    chosen = parser.parse_args()
    {"make": make, "unpack": unpack}[chosen.what](chosen.folder, chosen.to)


if __name__ == "__main__":
    main()
