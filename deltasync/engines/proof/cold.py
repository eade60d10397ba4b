"""A second instance of an engine's model, made as the first was: what a fresh engine would hold.

Only a part of it has memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from deltasync.delta.bits import as_bits, storage_of
from deltasync.delta.memory import is_lack_of_memory
from deltasync.engines.proof.reach import Reach
from deltasync.engines.routes.operations import Alone
from deltasync.errors import ConfigError, DeltaSyncError

_UNFILLED: frozenset[Any] = frozenset(
    {torch.empty, torch.empty_strided, torch.empty_like, torch.rand, torch.randn}
    | {torch.rand_like, torch.randn_like, Tensor.new_empty, Tensor.new_empty_strided}
)
# What engines and torch raise if a tensor has no memory, or if their code does not support it.
FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
)

T = TypeVar("T")

Weights = Iterable[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Startup:
    """How an engine gets from nothing to a model that serves.

    Attributes:
        make: Makes the model, without weights, on the device of the engine's own. Called in a
            context in which tensors that nothing is written to take no memory.
        work_on: Processes modules as the engine does once they have weights. Takes some modules in
            order, including those with nothing to do; may be called repeatedly.
        others: Modules of other models of the engine, such as a drafter's, that can be reached from
            the model. Syncs do not concern them.
    """

    make: Callable[[], nn.Module]
    work_on: Callable[[Sequence[nn.Module]], object] = lambda modules: None
    others: Sequence[nn.Module] = ()

    def load(self, model: nn.Module, weights: Weights) -> None:
        """Load some or all (checkpoint name, tensor) pairs by the model's own loader."""
        model.load_weights(weights)  # type: ignore[operator]


def with_room(device: torch.device, work: Callable[[torch.device], T]) -> T:
    """Do it on a device, or on the host, which takes far longer, if the device has no room.

    Raises ConfigError if there is none even then: the engine's work takes some, too.
    """
    for place in dict.fromkeys((device, torch.device("cpu"))):
        try:
            return work(place)
        except FAILURES as error:
            if not is_lack_of_memory(error):
                raise
    raise ConfigError(
        "there is no memory to find out where the engine moves weights: leave it more of the "
        "device, as with a lower gpu_memory_utilization of vLLM"
    )


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make parameters of this dtype within, as engines do when they make a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class ColdModel:
    """A model into which nothing was loaded.

    Args:
        startup: How it is made.
        device: The device on which its parts get memory.

    Attributes:
        device: The same.

    Raises:
        ConfigError: It cannot be made without memory.
    """

    def __init__(self, startup: Startup, device: torch.device) -> None:
        self._startup, self.device = startup, device
        self._unended: list[Callable[[], None]] = []  # what has to be restored
        try:
            try:
                self.model = self._made(_UNFILLED)
            except FAILURES:  # it mixes tensors with memory and without in a computation
                self.model = self._made(_UNFILLED | set(_device_constructors()))
        except FAILURES as error:
            raise ConfigError(
                "what a fresh engine makes of other weights cannot be found out: making its model "
                f"without memory raised {error!r}"
            ) from error

    def _made(self, without_memory: Collection[Any]) -> nn.Module:
        with torch.no_grad(), Alone(), WithoutMemory(without_memory):
            return self._startup.make()

    @contextmanager
    def with_memory(self, before: Reach, fill: Mapping[str, Tensor]) -> Iterator[set[str]]:
        """Give modules memory within the context; its content is then discarded.

        Tensors that were made with values have memory already, and keep what is written to them.

        Args:
            before: What is reached from the modules.
            fill: By path, values for tensors that were left empty; the others are filled with 0.

        Yields the paths of what was filled.
        """
        storages: dict[int, Tensor] = {}
        swapped: dict[int, tuple[Tensor, Tensor, dict[str, Any]]] = {}
        filled: set[str] = set()

        def restore() -> None:
            for tensor, real, attributes in swapped.values():
                if real.is_meta:
                    _swap(tensor, real)
                tensor.__dict__ = attributes  # an interrupt may have come between these and that
            before.put_back()

        with self._restoring(restore):
            for path, found in before.tensors.items():
                tensor = found.tensor
                if found.alias.is_meta and id(tensor) not in swapped:
                    real = self._real(tensor, storages)
                    given = fill.get(path)
                    if given is not None and (given.shape, given.dtype) == (real.shape, real.dtype):
                        as_bits(real).copy_(as_bits(given))
                        filled.add(path)
                    swapped[id(tensor)] = tensor, real, tensor.__dict__
                    _swap(tensor, real)
            yield filled

    @contextmanager
    def _restoring(self, restore: Callable[[], None]) -> Iterator[None]:
        """Restore something at the end; if that is interrupted, before the model is used again."""
        self._unended.append(restore)
        try:
            yield
        finally:
            restore()
            self._unended.remove(restore)

    def mend(self) -> None:
        """Restore what an interrupt has left as it was inside of a context."""
        while self._unended:
            self._unended[-1]()
            self._unended.pop()

    def start(self, weights: Weights, modules: Sequence[nn.Module]) -> None:
        """Load weights, and process modules as the engine then does.

        Raises what the engine raises if this is impossible with a part of the model.
        """
        with torch.no_grad(), Alone():
            self._startup.load(self.model, weights)
            self._startup.work_on(modules)

    @contextmanager
    def processing(
        self,
        before: Reach,
        modules: Sequence[nn.Module],
        given: Mapping[str, Tensor],
        *,
        is_watched: bool = True,
    ) -> Iterator[None]:
        """Process modules as the engine does after loading; within the context that is done.

        Args:
            before: What is reached from these modules, as it is now: it gets memory for this.
            modules: What is processed.
            given: By path, what was loaded. Nothing of it is kept.
            is_watched: Whether to raise ConfigError if the work would wait for other ranks.

        Raises what the engine raises.
        """
        made = {path: found.alias for path, found in before.tensors.items()}
        own = {p: one.clone() for p, one in made.items() if p in given and not one.is_meta}

        def restore() -> None:
            for path, bits in own.items():
                as_bits(made[path]).copy_(as_bits(bits))

        with self._restoring(restore):
            for path in own:
                as_bits(made[path]).copy_(as_bits(given[path]))
            alone = Alone() if is_watched else nullcontext()
            with self.with_memory(before, given), torch.no_grad(), alone:
                self._startup.work_on(modules)
                yield

    def _real(self, tensor: Tensor, storages: dict[int, Tensor]) -> Tensor:
        """The same tensor with memory, which shares storage as the original does."""
        size = tensor.untyped_storage().nbytes()
        base = storages.setdefault(
            storage_of(tensor), torch.zeros(size, dtype=torch.uint8, device=self.device)
        )
        plain = torch.empty(0, dtype=tensor.dtype, device=self.device)
        plain.set_(base.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        real: Tensor = torch.Tensor._make_subclass(type(tensor), plain, tensor.requires_grad)
        real.__dict__.update(tensor.__dict__)
        return real


@contextmanager
def refusing_failures() -> Iterator[None]:
    """Raise ConfigError if it cannot be found out what a fresh engine would compute with."""
    try:
        yield
    except DeltaSyncError:
        raise
    except FAILURES as error:
        raise ConfigError(
            f"what a fresh engine makes of other weights cannot be found out: {error!r}"
        ) from error


def _swap(one: Tensor, other: Tensor) -> None:
    """Swap two tensors of one class, wherever they are held.

    `torch.utils.swap_tensors` refuses tensors that have views.
    """
    torch._C._swap_tensor_impl(one, other)
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__


class WithoutMemory(TorchFunctionMode):
    """Lets torch functions make tensors without memory within its `with` block.

    Args:
        functions: Such as torch.empty.
    """

    def __init__(self, functions: Collection[Any]) -> None:
        super().__init__()
        self._functions = functions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._functions:
            kwargs["device"] = "meta"
            kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)
