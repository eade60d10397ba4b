"""One process: payloads coded and decoded where the weights are, and deltas folded there.

On a CPU kernels run under Triton's interpreter: what needs Triton is imported late, so that the
worker can ask for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

import deltasync
from benchmarks.gpu import ours
from benchmarks.gpu.baselines import Found, find_changes
from benchmarks.gpu.cases import Run
from benchmarks.gpu.kernels import seconds
from benchmarks.gpu.workload import mutate
from benchmarks.record import Result
from benchmarks.workload import bits_of, num_elements
from deltasync.delta.codecs.gap import encode_gaps
from deltasync.delta.patch import SparsePatch
from deltasync.wire.coded import HEADER_BYTES, Lengths

NVCOMP = ("ANS", "Zstd")
"""Of nvCOMP's algorithms, those that are tried as entropy coders."""

_MOST_DENSITY = 0.05
_FOLDED = 8
_SEED = 1


def codec(run: Run) -> Iterator[Result]:
    """Blocks beside plain payloads, folded deltas, and nvCOMP behind a codec."""
    device = run.setup.device("trainer")
    module = run.setup.model.build(device)
    differ = ours.Differ(module, kernels="triton")
    for density in (d for d in run.scale.densities if d <= _MOST_DENSITY):
        mutate(module, density, _SEED)
        differ.count()
        sizes = {
            "numel": num_elements(module),
            "parameters": len(differ.old),
            "density": density,
            "changed": differ.changed,
            "link": "",
        }
        yield from _blocks(run, module, differ, sizes)
        yield from _nvcomp(run, differ, sizes)
        mutate(module, density, _SEED)  # back again
        yield _fold(run, module, differ, sizes)


def _blocks(
    run: Run, module: nn.Module, differ: ours.Differ, sizes: dict[str, Any]
) -> Iterator[Result]:
    device = run.setup.device("trainer")
    plain, coded = differ.buckets(), differ.code()
    encoders = differ.encoders()
    alone = seconds(run, lambda: [encode() for encode in encoders], device)
    taken: dict[str, Any] = {
        "bytes": sum(len(one.data) for one in coded),
        "bound_bytes": sum(len(one.data) for one in plain),
    }
    yield run.record(
        "codec_block_encode",
        seconds(run, differ.code, device),
        seconds(run, differ.pack, device),
        baseline="diff and packing without a codec",
        parts={"encode_s": median(alone)},
        **sizes,
        **taken,
    )
    target = [one.clone() for one in differ.old]
    stagers = [ours.Stager(differ, target, one, kernels="triton") for one in (coded, plain)]
    decode_s = seconds(run, partial(_opened, stagers[0]), device)
    mine, theirs = (_write_samples(run, stager, target, module) for stager in stagers)
    yield run.record(
        "codec_block_write",
        mine,
        theirs,
        baseline="staging and writing what is not coded",
        parts={"decode_s": median(decode_s)},
        **sizes,
        **taken,
    )


def _write_samples(
    run: Run, stager: ours.Stager, target: Sequence[Tensor], module: nn.Module
) -> list[float]:
    """Seconds of each round. `target` is afterwards what it was."""
    device = run.setup.device("trainer")
    samples = seconds(run, partial(_written, stager), device, before=stager.undo)
    _check(target, module)
    stager.undo()
    return samples


def _opened(stager: ours.Stager) -> None:
    for _ in stager.open():
        pass


def _written(stager: ours.Stager) -> None:
    stager.stage()
    stager.commit()


def _check(target: Sequence[Tensor], module: nn.Module) -> None:
    """Raises unless flat tensors hold a module's bits."""
    if not all(map(torch.equal, (t.view(torch.int16) for t in target), bits_of(module))):
        raise RuntimeError("what was decoded is not what was sent")


def _fold(run: Run, module: nn.Module, differ: ours.Differ, sizes: dict[str, Any]) -> Result:
    """Several deltas of each parameter as one, against writing one of them."""
    device, named = run.setup.device("trainer"), dict(module.named_parameters())
    deltas = list[list[SparsePatch | None]]()
    old = [one.view(torch.int16).view(-1) for one in differ.old]
    for seed in range(_SEED, _SEED + _FOLDED):
        mutate(module, sizes["density"], seed)
        deltas.append(_patches(named, find_changes(bits_of(module), old)))
        mutate(module, sizes["density"], seed)
    target = [weights.detach().clone() for weights in named.values()]

    def apply(patches: Sequence[Any]) -> None:
        for weights, patch in zip(target, patches, strict=True):
            if patch is not None:
                deltasync.apply_patch(weights, patch)

    each = list(zip(*deltas, strict=True))
    folded = [deltasync.fold(steps) for steps in each]
    apply(folded)
    once = [one.clone() for one in target]
    for patches in deltas:
        apply(patches)
    if not all(map(torch.equal, once, target)):
        raise RuntimeError("a folded delta does not do what its deltas do")
    return run.record(
        "codec_fold",
        seconds(run, lambda: [deltasync.fold(steps) for steps in each], device),
        seconds(run, partial(apply, deltas[0]), device),
        baseline="apply_patch of one delta",
        **sizes,
    )


def _patches(named: dict[str, nn.Parameter], found: Found) -> list[SparsePatch | None]:
    """What changed of each parameter; None if nothing did."""
    return [
        SparsePatch(
            name=name,
            shape=tuple(weights.shape),
            indices=indices,
            values=values.view(weights.dtype),
        )
        if len(indices)
        else None
        for (name, weights), (indices, values) in zip(named.items(), found, strict=True)
    ]


def _nvcomp(run: Run, differ: ours.Differ, sizes: dict[str, Any]) -> Iterator[Result]:
    """nvCOMP as what comes behind `block`, and behind the gaps of all indices."""
    device = run.setup.device("trainer")
    if device.type != "cuda" or find_spec("nvidia") is None or find_spec("nvidia.nvcomp") is None:
        return
    nvcomp = import_module("nvidia.nvcomp")
    streams = {"block": _sections(differ.code()), "gap": _gaps(differ)}
    for algorithm in NVCOMP:
        coder = nvcomp.Codec(algorithm=algorithm)
        for name, stream in streams.items():
            array = nvcomp.as_array(stream)
            made = coder.encode(array)
            if not torch.equal(from_dlpack(coder.decode(made)).view(torch.uint8), stream):
                raise RuntimeError(f"{algorithm} does not return what it was given")
            encode, decode = partial(coder.encode, array), partial(coder.decode, made)
            taken = seconds(run, encode, device), seconds(run, decode, device)
            case = f"codec_nvcomp_{algorithm.lower()}_{name}"
            yield _rated(run, case, stream, made.buffer_size, taken, sizes)


def _rated(
    run: Run,
    case: str,
    stream: Tensor,
    num_bytes: int,
    taken: tuple[list[float], list[float]],
    sizes: dict[str, Any],
) -> Result:
    """Bytes and GB/s both ways, of what is not compressed."""
    encode_s, decode_s = taken
    rates = {
        "encode_gb_per_s": len(stream) / median(encode_s) / 1e9,
        "decode_gb_per_s": len(stream) / median(decode_s) / 1e9,
    }
    return run.record(
        case,
        encode_s,
        decode_s,
        baseline="decompressing it",
        parts=rates,
        bytes=num_bytes,
        bound_bytes=len(stream),
        **sizes,
    )


def _sections(coded: list[ours.Sent]) -> Tensor:
    """uint8[n]: all index and value blocks."""
    found = []
    for one in coded:
        lengths = Lengths.of(one.data[:HEADER_BYTES].cpu().numpy().data)
        found.append(one.data[HEADER_BYTES + lengths.stored[0] :])
    return torch.cat(found)


def _gaps(differ: ours.Differ) -> Tensor:
    """uint8[n]: the gaps of each parameter's indices, one after another."""
    blocks = [encode_gaps(indices.cpu().numpy()) for indices, _ in differ.found() if len(indices)]
    data = np.frombuffer(b"".join(blocks), np.uint8).copy()
    return torch.from_numpy(data).to(differ.old[0].device)
