"""Every exception deltasync raises, and what the caller can do about each.

* DeltaSyncError
  + ConfigError(ValueError)        fix the configuration or the call
    - CallOrderError               calls in the wrong order; correct the order
  + WireError(ValueError)          the bytes are wrong: nothing of them was written
    - TruncatedFrame               fewer or more bytes than the frame declares
    - BadMagic                     not a deltasync frame
    - UnsupportedVersion           a format version this build does not read
    - ChecksumMismatch             the header was damaged in transit
    - MalformedMessage             unknown kind, missing, extra or mistyped field
    - UnknownCodec                 a codec that nothing in this process reads
    - UnknownDtype                 a dtype code outside the closed table
    - LimitExceeded                a declared size beyond what this end accepts
    - InvalidTable                 a patch table that breaks a rule of the wire format
    - InvalidIndices               indices out of range, unsorted or repeated
  + SyncError
    - LayoutMismatch               the two models differ: names, shapes, dtypes or ties; stop
    - SourceChanged                a parameter changed shape under it; make a new sender
    - ReplicasDiffer               trainer ranks drifted apart; broadcast from one, send again
    - TargetMoved                  live storage was replaced between stage and commit; rejoin
    - VersionGap                   the delta does not fit the version held; rejoin
    - WrongStream                  the frame belongs to another training run; rejoin
    - ProtocolViolation            the peer sent what does not belong there; rejoin
    - DigestMismatch               the weights are not what the sender says; rejoin
      * WrongBase                  a delta was made from other old values; rejoin
    - DirtyReceiver                the weights may mix two versions or be corrupted; rejoin
    - Refused                      the sender turned it away; .kind, .message say why
    - SyncAborted                  no receiver took the version; nothing is lost, send again
    - NoReceivers                  nobody to send to; start a receiver
    - StepApplied                  the sync after a step failed; the step was applied
    - EngineFailed                 an engine did not do what it was asked; it says why
    - EngineTaken                  the engine follows another trainer; stop one, or take it over
  + TransportError
    - TransportTimeout(TimeoutError) the peer was too slow
    - PeerLost(ConnectionError)    the other process is gone; connect again
    - TransportClosed              this end was closed
    - TransportUnavailable         not on this machine; the text says what to use instead
  + StoreError                     the version held stays, and is served
    - StoreUnavailable             no answer within the limits; the next attempt covers it
    - StoreRefused                 full, forbidden, or not there: somebody must act
    - VersionMissing               no such version, or no way to it is left
    - ManifestInvalid(ValueError)  no record of this format; restore it, or upgrade
    - MacMismatch                  not signed with this key; do not use the store
    - ObjectDamaged                deleted or altered; take another way
    - WriterConflict               another writer continues the run; stop one of them
"""

from __future__ import annotations

import re
from typing import Any

_URL = re.compile(r"(?<=://)\S+")
# What stands before the host. A password with a slash in it breaks a URL, and is one all the same.
_USER = re.compile(r"^(?:[^/]*@|[^/@:]*:(?!\d+/)[^@]*@)")
_VALUE = re.compile(r"([?&][^=&]*=)[^&]*")


def redacted(text: str) -> str:
    """A text without the secrets that URLs in it may carry: users, passwords, values of queries."""
    return _URL.sub(lambda url: _VALUE.sub(r"\1***", _USER.sub("***@", url[0])), text)


class DeltaSyncError(Exception):
    """Root of everything deltasync raises on purpose. URLs in its text are `redacted`.

    May be copied, and sent between processes.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(redacted(one) if isinstance(one, str) else one for one in args))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, self.__dict__)


def _restored(kind: type[DeltaSyncError], args: tuple[Any, ...], state: Any) -> DeltaSyncError:
    """A copy of an error, whatever its constructor takes."""
    error = kind.__new__(kind)
    error.args = args  # OSErrors take none before __init__
    error.__dict__.update(state)
    return error


class ConfigError(DeltaSyncError, ValueError):
    """The configuration or the call is wrong."""


class CallOrderError(ConfigError):
    """A call in the wrong order, such as `commit` before `stage`."""


class WireError(DeltaSyncError, ValueError):
    """Received bytes break the wire format. Nothing of them was written.

    If the sync is written in place, as one larger than `max_staged_bytes` is, buckets before the
    bad one were written: the receiver `is_dirty` and refuses to serve until a full sync. Otherwise
    nothing was written.
    """


class TruncatedFrame(WireError):
    """Fewer or more bytes than the frame declares."""


class BadMagic(WireError):
    """The bytes are not a deltasync frame."""


class UnsupportedVersion(WireError):
    """A format version this build does not read."""


class ChecksumMismatch(WireError):
    """The header's checksum does not match its bytes."""


class MalformedMessage(WireError):
    """A message with an unknown kind or a missing, extra or mistyped field."""


class UnknownCodec(WireError):
    """A codec that nothing in this process reads: import deltasync.files."""


class UnknownDtype(WireError):
    """A dtype code outside the closed table."""


class LimitExceeded(WireError):
    """A declared size beyond what this end accepts."""


class InvalidTable(WireError):
    """A patch table that breaks a rule of the wire format.

    Attributes:
        row: Which row does; None where it is no single one.
    """

    def __init__(self, message: str, *, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


class InvalidIndices(WireError):
    """Indices out of range, unsorted or repeated."""


class SyncError(DeltaSyncError):
    """A sync could not be done; the receiver keeps its old version unless it says DIRTY."""


class LayoutMismatch(SyncError):
    """The trainer's and the engine's parameters differ."""


class SourceChanged(SyncError):
    """A parameter of the source changed its shape, appeared or disappeared."""


class ReplicasDiffer(SyncError):
    """Ranks of the trainer hold other values of what they should hold alike. Nothing was sent.

    The message names parameters and ranks.
    """


class TargetMoved(SyncError):
    """Live storage was replaced between stage and commit.

    Nothing of a staged sync was written. One received in place was: the receiver `is_dirty`.
    """


class VersionGap(SyncError):
    """A delta whose base is not the version held."""

    def __init__(self, *, held: int | None, base: int, offered: int) -> None:
        super().__init__(
            f"holds v{held}, was offered v{base} -> v{offered}; rejoin for a full sync"
        )
        self.held, self.base, self.offered = held, base, offered


class WrongStream(SyncError):
    """A message of another training run."""


class ProtocolViolation(SyncError):
    """The peer sent a message that the protocol does not allow at this point."""


class DigestMismatch(SyncError):
    """The weights are not, or would not become, what the sender says they are."""


class WrongBase(DigestMismatch):
    """A delta whose values are told by how they differ from others than those held.

    Raised before anything of its bucket is written. Rejoin for a full sync; of a patch file, find
    the weights that it was made from.
    """


class DirtyReceiver(SyncError):
    """The weights may mix two versions or be corrupted; they must not serve."""


class Refused(SyncError):
    """The sender turned this receiver away."""

    def __init__(self, *, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message = kind, message


class SyncAborted(SyncError):
    """No receiver took the version: none was decided, or all were lost after it. Send again.

    Attributes:
        may_follow: At a receiver: nothing was written, it is still a member, and the sender may
            retry the same version at once without the receiver that failed. Call `stage` again.
    """

    def __init__(self, message: str, *, may_follow: bool = False) -> None:
        super().__init__(message)
        self.may_follow = may_follow


class NoReceivers(SyncError):
    """No receiver is connected."""


class StepApplied(SyncError):
    """The sync after an optimizer step failed although the step itself was applied."""


class EngineFailed(SyncError):
    """An engine did not do what it was asked to do. The message is the engine's.

    Attributes:
        status: HTTP status of its response; None otherwise.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class EngineTaken(SyncError):
    """The engine follows another trainer, which the message names: stop it, or take over."""


class TransportError(DeltaSyncError):
    """A transport could not move a frame."""


class TransportTimeout(TransportError, TimeoutError):
    """A peer did not answer in time."""


class PeerLost(TransportError, ConnectionError):
    """The process at the other end is gone."""


class TransportClosed(TransportError):
    """This end of the transport was closed."""


class TransportUnavailable(TransportError):
    """This machine cannot run the transport."""


class StoreError(DeltaSyncError):
    """A version could not be published or fetched. What was held is still held."""


class StoreUnavailable(StoreError):
    """The store did not answer, or not in time, or with errors, within the retries allowed."""


class StoreRefused(StoreError):
    """The store answered that it will not: no space, no permission, no such bucket or folder."""


class VersionMissing(StoreError):
    """The store does not have the version, or not enough objects to arrive at it."""


class ManifestInvalid(StoreError, ValueError):
    """An object that should be a manifest or another record is none, or contradicts its key."""


class MacMismatch(StoreError):
    """A manifest is not signed with the key that was given."""


class ObjectDamaged(StoreError):
    """An object that a manifest names is missing, or does not have the bytes that it should."""


class WriterConflict(StoreError):
    """Another writer has published to the run. This one stops; no version has changed."""


_PERMANENT = (ConfigError, UnsupportedVersion, LayoutMismatch, MacMismatch)


def is_permanent(error: BaseException | None) -> bool:
    """Whether a call that raised this will not succeed before somebody changes one of the two ends.

    What depends on the order of calls, on the operating system, or on who else is connected may
    pass: whoever works in the background tries that again, and ends with what is permanent.
    """
    if isinstance(error, Refused):  # as ConfigError, also for those that are there at the moment
        return error.kind in {LayoutMismatch.__name__, UnsupportedVersion.__name__}
    may_pass = isinstance(error, CallOrderError) or isinstance(error and error.__cause__, OSError)
    return isinstance(error, _PERMANENT) and not may_pass
