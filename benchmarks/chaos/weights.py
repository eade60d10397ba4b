"""The weights of each version: a function of the seed and the version, which any process computes.

Nothing of deltasync's is in it, so that it can tell whether a store is right.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor, nn

_DTYPES = {
    "table": (torch.bfloat16, (96, 48)),
    "weight": (torch.float32, (64, 48)),
    "bias": (torch.float16, (257,)),
    "scale": (torch.bfloat16, ()),
    "empty": (torch.bfloat16, (0, 4)),
    "codes": (torch.float8_e4m3fn, (33, 31)),
}
_SHARES = (0.0, 0.001, 0.01, 0.01, 0.1, 1.0)


class Model(nn.Module):
    """A model of several dtypes, with a tied, an empty and a 0-d parameter. Its bits are random."""

    def __init__(self) -> None:
        super().__init__()
        for name, (dtype, shape) in _DTYPES.items():
            value = torch.zeros(shape, dtype=dtype)
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))
        self.register_parameter("tied", self.get_parameter("table"))


class Truth:
    """The weights of versions 1, 2, ... of one seed.

    Args:
        seed: Of all.

    Attributes:
        version: Where `bits` are.
        bits: The bytes of each parameter, uint8[bytes].
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.version, self.bits = 0, dict[str, np.ndarray]()

    def go(self, version: int) -> None:
        """Compute a version, from the one before it if that is at hand."""
        if version < self.version or self.version == 0:
            self._begin()
        while self.version < version:
            self._step()

    def fingerprint(self) -> str:
        """SHA-256 of all bytes."""
        return _sha256(self.bits)

    def write(self, model: Model) -> None:
        """Make the model hold the version."""
        for name, bits in self.bits.items():
            _bytes_of(model.get_parameter(name)).copy_(torch.from_numpy(bits))

    def _begin(self) -> None:
        chance = np.random.default_rng((self._seed, 0))
        sizes = {name: _size(name) for name in _DTYPES}
        self.bits = {name: chance.integers(0, 256, n, np.uint8) for name, n in sizes.items()}
        self.version = 1

    def _step(self) -> None:
        self.version += 1
        chance = np.random.default_rng((self._seed, self.version))
        share = chance.choice(_SHARES)
        for bits in self.bits.values():
            chosen = chance.random(bits.size) < share
            bits[chosen] = chance.integers(0, 256, int(chosen.sum()), np.uint8)


def fingerprint(model: Model) -> str:
    """SHA-256 of the bytes that a model holds."""
    return _sha256({name: _host(model.get_parameter(name)) for name in _DTYPES})


def fingerprint_of(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of the bytes of tensors by name."""
    found = {name: _host(tensors[name]) for name in _DTYPES if name in tensors}
    return _sha256({name: found.get(name, np.zeros(0, np.uint8)) for name in _DTYPES})


def _bytes_of(tensor: Tensor) -> Tensor:
    """The memory of a tensor, uint8[bytes]: a view."""
    return tensor.detach().view(-1).view(torch.uint8)


def _host(tensor: Tensor) -> np.ndarray:
    """The same bytes on the host; a view if they are there."""
    return _bytes_of(tensor).cpu().numpy()


def _size(name: str) -> int:
    dtype, shape = _DTYPES[name]
    return torch.empty(shape, dtype=dtype).nbytes


def _sha256(bits: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in _DTYPES:
        digest.update(bits[name].tobytes())
    return digest.hexdigest()
