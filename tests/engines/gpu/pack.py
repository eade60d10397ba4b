"""Packs a vLLM or an SGLang for GPU machines without a network, and unpacks it there.

    python -m tests.engines.gpu.pack make WORK OUT [--engine sglang]      some ten minutes
    python -m tests.engines.gpu.pack unpack OUT SITE [--engine sglang]    there

There, PYTHONPATH=SITE:. does the rest. For machines with Python 3.12, torch 2.11 (CUDA 13) and
transformers; for SGLang, nvcc too. Device code of GPUs other than Hopper is left out.
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
from dataclasses import dataclass
from pathlib import Path

from tests.engines.gpu.prune import pruned

_SM = 90
_HERE = Path(__file__).parent
_ENTRY_POINTS = """\
[vllm.general_plugins]
deltasync = deltasync.integrations.vllm:register
[sglang.srt.plugins]
deltasync = deltasync.integrations.checkpoint_engine:register
"""


@dataclass(frozen=True)
class Recipe:
    """What is packed of an engine.

    Attributes:
        parts: Requirements, each with the only folder that is taken of it, or "". It takes the
            place of the same folder of parts before it.
        home: The folder that paths of libraries begin in.
        libraries: Those that stay, of all that lie in `packages`.
        packages: Of the parts.
        needed: Files of requirements.
        left_out: What stands in paths that Python does not need.
    """

    parts: tuple[tuple[str, str], ...]
    home: str
    libraries: tuple[str, ...]
    packages: tuple[str, ...]
    needed: tuple[str, ...]
    left_out: tuple[str, ...]


_LEFT_OUT = ("__pycache__", "/tests/", "zstandard/_cffi")
RECIPES = {
    # Its libraries are built against torch's stable ABI, so that those of 0.32 work with torch
    # 2.11, but for DeepGEMM's: that is taken from 0.26, which was built for torch 2.11.
    "vllm": Recipe(
        parts=(("vllm==0.32.0", ""), ("vllm==0.26.0", "vllm/third_party/deep_gemm/")),
        home="vllm",
        libraries=(
            "_C_stable_libtorch.abi3.so",
            "_moe_C_stable_libtorch.abi3.so",
            "_flashmla_C.abi3.so",
            "_flashmla_extension_C.abi3.so",
            "cumem_allocator.abi3.so",
            "fs_io_C.abi3.so",
            "spinloop.abi3.so",
            "vllm_flash_attn/_vllm_fa3_C.abi3.so",
            "third_party/deep_gemm/_C.cpython-312-x86_64-linux-gnu.so",
        ),
        packages=("vllm",),
        needed=("packages.txt",),
        left_out=(
            *_LEFT_OUT,
            "third_party/fmha_sm100",
            "third_party/tml_fa4",
            "serve/instrumentator/static",
            "tvm_ffi/include",
        ),
    ),
    # Its kernels are built for one torch: those of 0.4.5, the last for torch 2.11, are older than
    # SGLang 0.5.20 asks for. FlashAttention 3 alone would take 130 MiB, and is left out.
    "sglang": Recipe(
        parts=(("sglang==0.5.20", ""), ("sglang-kernel==0.4.5", "")),
        home="",
        libraries=(
            "sgl_kernel/sm90/common_ops.abi3.so",
            "sgl_kernel/flashmla_ops.abi3.so",
            "sglang/srt/mem_cache/rust_tree_core/mem_cache.cpython-312-x86_64-linux-gnu.so",
        ),
        packages=("sglang", "sgl_kernel"),
        needed=("packages.txt", "packages-sglang.txt"),
        left_out=(*_LEFT_OUT, "sglang/multimodal_gen", "sglang/test/", "sglang/benchmark"),
    ),
}


def make(work: Path, out: Path, engine: str) -> None:
    """Download, prune and compress."""
    recipe, tree, site = RECIPES[engine], work / "tree", work / "site"
    for number, (requirement, only) in enumerate(recipe.parts):
        _download([requirement], work / str(number))
        if only:
            shutil.rmtree(tree / only, ignore_errors=True)
        _unzip(work / str(number), tree, only=only)
    _download(
        [w for n in recipe.needed for w in ("--requirement", str(_HERE / n))], work / "needed"
    )
    _unzip(work / "needed", site)
    here = site / "deltasync-0.dist-info"
    here.mkdir(exist_ok=True)
    (here / "METADATA").write_text("Metadata-Version: 2.1\nName: deltasync\nVersion: 0\n")
    (here / "entry_points.txt").write_text(_ENTRY_POINTS)
    out.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        jobs = [
            pool.submit(_pack_library, tree / recipe.home / n, out, n) for n in recipe.libraries
        ]
        jobs.append(pool.submit(_pack_tree, [tree, site], out / "tree.tar.xz", recipe))
        for job in jobs:
            job.result()
    print(sum(file.stat().st_size for file in out.iterdir()) >> 20, "MiB")  # noqa: T201


def unpack(out: Path, site: Path, engine: str) -> None:
    """The opposite, and compile what Python reads."""
    site.mkdir(parents=True, exist_ok=True)
    home = site / RECIPES[engine].home
    with ProcessPoolExecutor() as pool:
        jobs = [pool.submit(_unpack_library, packed, home) for packed in out.glob("*.so.xz")]
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


def _unpack_library(packed: Path, home: Path) -> None:
    place = home / packed.name.removesuffix(".xz").replace("@", "/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(lzma.decompress(packed.read_bytes()))


def _pack_tree(trees: list[Path], packed: Path, recipe: Recipe) -> None:
    def wanted(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
        """What Python needs; the engine's own libraries are packed one by one."""
        is_own = info.name.split("/")[0] in recipe.packages
        if is_own and info.name.endswith(".so"):
            return None
        if info.name.endswith((".pyc", ".pyi", "vllm-rs")):
            return None
        return None if any(part in f"{info.name}/" for part in recipe.left_out) else info

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for tree in trees:
            for entry in sorted(tree.iterdir()):
                tar.add(entry, entry.name, filter=wanted)
    packed.write_bytes(lzma.compress(data.getvalue(), preset=9))


def _unpack_tree(packed: Path, site: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(lzma.decompress(packed.read_bytes()))) as tar:
        tar.extractall(site, filter="data")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.engines.gpu.pack")
    parser.add_argument("what", choices=("make", "unpack"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("to", type=Path)
    parser.add_argument("--engine", choices=RECIPES, default="vllm")
    chosen = parser.parse_args()
    {"make": make, "unpack": unpack}[chosen.what](chosen.folder, chosen.to, chosen.engine)


if __name__ == "__main__":
    main()
