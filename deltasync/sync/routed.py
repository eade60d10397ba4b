"""A target that reaches an engine's weights as the engine's own loader does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from deltasync.delta.bits import Flat, identity
from deltasync.delta.loading import Loader
from deltasync.delta.recorder import CheckpointTensor, Load, Recording, record
from deltasync.errors import ConfigError, TargetMoved
from deltasync.sync.source import ModuleWatch
from deltasync.sync.target import match_parameters
from deltasync.wire.messages import ParameterSpec


class RoutedTarget:
    """An engine whose parameters are not the checkpoint's: fused, stacked, transposed, padded.

    The engine's loader is run once on tensors without data, which shows where the elements of each
    checkpoint tensor are kept; deltas are written there. That is believed once it is proved: by
    weights that have the trainer's digest when they are read back through it, after joining or
    after a full sync that the loader itself has written.

    Args:
        module: The engine's model, loaded. It must keep its storage between syncs; if it is
            released, reloaded or replaced, call the receiver's `invalidate`.
        checkpoint: Names, shapes and dtypes of the tensors that `load` takes.
        load: The loader; by default the module's `load_weights`. It is called with a few tensors at
            a time, in the engine's pause. Tensors are given in the dtype that the engine keeps.
        finish: Called after each full sync: what the engine does to weights once they are loaded.
    """

    def __init__(
        self,
        module: nn.Module,
        checkpoint: Sequence[CheckpointTensor],
        *,
        load: Load | None = None,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._module, self._checkpoint = module, tuple(checkpoint)
        self.load: Load = load or module.load_weights  # type: ignore[assignment]
        self._finish = finish
        self._watch = ModuleWatch(module)
        self._proved_for: object = None  # the storage

    def parameters(self) -> tuple[ParameterSpec, ...]:
        """The checkpoint tensors that the loader takes something of.

        Raises:
            ConfigError: Some have no route; the text says which, and why.
        """
        return self._specs(self._recorded())

    def bind(self, layout: Sequence[ParameterSpec]) -> dict[int, Flat]:
        """Find each parameter of the layout in the engine. Raises as `parameters` too."""
        recording = self._recorded()
        held = self._specs(recording)
        numbers = match_parameters(held, layout)
        live = self._live()
        self._watch = ModuleWatch(self._module)
        flats: dict[int, Flat] = {}
        for number, spec in zip(numbers, held, strict=True):
            [piece] = recording.pieces[spec.name]
            flats[number] = Flat.of(piece.view(live[piece.live]), name=spec.name)
        return flats

    def check_unmoved(self) -> None:
        """Compare the address, size, strides and dtype of every tensor of the module."""
        if not self._watch.is_unmoved():
            raise TargetMoved("storage of the engine was replaced; rejoin")

    def loader(self) -> Loader | None:
        """What writes full syncs until the routes are proved."""
        return None if self._proved_for == self._storage() else self

    def proved(self) -> None:
        """Weights were read back through the routes and are the trainer's."""
        self._proved_for = self._storage()

    def finish(self) -> None:
        """What the engine does once weights are loaded. Raises TargetMoved if that moves them."""
        self._finish()
        self.check_unmoved()

    def _live(self) -> dict[str, Tensor]:
        return dict(self._module.named_parameters()) | dict(self._module.named_buffers())

    def _specs(self, recording: Recording) -> tuple[ParameterSpec, ...]:
        return tuple(
            ParameterSpec((one.name,), one.shape, recording.dtypes[one.name])
            for one in self._checkpoint
            if recording.pieces[one.name]
        )

    def _storage(self) -> list[tuple[object, ...]]:
        return [identity(tensor) for tensor in self._live().values()]

    def _recorded(self) -> Recording:
        """Where things are now. Raises ConfigError unless that is known of everything."""
        recording = record(self.load, self._checkpoint, self._live())
        whys = {f"{name!r} {why}" for name, why in recording.refused.items()}
        whys |= {f"{name!r}: {why}" for name, why in recording.uncovered.items()}
        for one in self._checkpoint:
            pieces = recording.pieces.get(one.name, ())
            if len(pieces) > 1 or not all(piece.is_whole(one.numel) for piece in pieces):
                whys.add(f"{one.name!r} is kept in parts that are not next to each other")
        if whys:
            raise ConfigError(f"{len(whys)} tensors have no route: {'; '.join(sorted(whys)[:5])}")
        return recording
