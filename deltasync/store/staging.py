"""One version on its way from a store into live weights."""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from deltasync.delta.ledger import digest_text
from deltasync.errors import DigestMismatch, ProtocolViolation
from deltasync.store.catalogue import Published
from deltasync.store.routes import Route
from deltasync.sync.protocol.receiver_session import ReceiverSession
from deltasync.sync.target.bound import BoundWeights
from deltasync.transports.base import Frame
from deltasync.wire import messages
from deltasync.wire.frame import decode


def is_version(weights: BoundWeights, published: Published) -> bool:
    """Whether weights are all there, and are a version by their digest."""
    live = weights.live
    is_whole = len(live.flats) == len(live.space.given)
    is_whole &= all(flat.held(0, 0) is None for flat in live.flats.values())
    return is_whole and live.ledger.total == int(published.manifest.digest, 16)


@dataclass(slots=True)
class StoredSync:
    """A route that was fetched, which comes as one sync.

    Attributes:
        route: The way that was taken.
        frames: What was not taken yet.
        reached: Numbers of the parameters that something has come for.
    """

    route: Route
    frames: Iterator[Frame]
    reached: set[int] = field(default_factory=set)

    def take(self, frame: Frame, session: ReceiverSession, weights: BoundWeights) -> None:
        """Stage one frame, which agrees with the manifests. Raises WireError, SyncError."""
        arrived = 0 if frame.payload is None else len(frame.payload)
        message, _ = decode(frame.header, arrived_bytes=arrived)
        match message:
            case messages.Layout():
                pass  # what the manifests say too
            case messages.Begin():
                session.on(message)
                weights.begin(message)
            case messages.Bucket():
                session.on(message)
                received = weights.stage(message, frame.payload)
                self.reached.update(received.parameters.tolist())
            case messages.Prepare():
                session.on(message)
            case _:
                raise ProtocolViolation(f"{message.kind} has no place in a delta")


def join(
    session: ReceiverSession, published: Published, weights: BoundWeights, *, is_full: bool
) -> None:
    """Let a session begin at a version: one that is held, or for a full sync one that comes."""
    session.on("greeted")
    layout = messages.Layout(
        stream_id=published.manifest.run,
        version=published.version,
        parameters=messages.entries(weights.live.specs),
        digest=published.manifest.digest,
    )
    session.on(layout)
    session.on(messages.Welcome(full_sync=(session.engine,) if is_full else ()))
    if not is_full:
        weights.proved = weights.live.ledger


def changed_along(route: Route) -> dict[int, str]:
    """The digest of each parameter that has changed on the way, after the last of its changes."""
    deltas = (step for step in route.steps if step.way.kind == "delta")
    return {number: digest for step in deltas for number, digest in step.to.manifest.changed}


def check_digests(route: Route, weights: BoundWeights, reached: Set[int]) -> None:
    """Compare what is staged with what the manifests say: on another base it is something else.

    A whole model must have the state digest. Of a model that is held in part, each changed
    parameter that is held whole must have its digest; one that is held in part must have been
    brought.

    Args:
        route: The way that was taken.
        weights: With all of it staged.
        reached: Numbers of the parameters that something has come for.

    Raises:
        DigestMismatch: Something is missing, or would be wrong.
        TargetMoved: Storage was replaced.
    """
    digest, _ = weights.predict()
    assert weights.staging is not None
    manifest, flats, specs = route.target.manifest, weights.live.flats, weights.live.specs
    parts = {number for number, flat in flats.items() if flat.held(0, 0) is not None}
    if len(flats) == len(specs) and not parts:
        if digest_text(digest) != manifest.digest:
            raise DigestMismatch(
                f"v{manifest.version} would have digest {digest_text(digest)}, its manifest says "
                f"{manifest.digest}: a part of it is missing or wrong"
            )
        return
    found = weights.staging.ledger.by_share()  # in the order of the layout
    for number, text in changed_along(route).items():
        name = specs[number].name if number < len(specs) else number
        if number in parts and number not in reached:
            raise DigestMismatch(f"v{manifest.version} changes {name}, and brings no bytes for it")
        if number in flats and number not in parts and int(found[number]) != int(text, 16):
            raise DigestMismatch(f"{name} would not be what v{manifest.version} says of it")
