"""Payloads by one torch.distributed broadcast (gloo or NCCL), everything else over TCP.

The process group is deltasync's own: the application's default group is neither used nor created.
Members grant room for a payload ahead, and start its broadcast when they are told to:

    sender                                  receivers
    GROUP(rank) ------------------------->  join; READY when the group stands
    ROOM(bytes) ------------------------->  READY when a buffer of that length is free
    START(header) ----------------------->  broadcast; READY when the next buffer is free
    FRAME(header) ----------------------->  no payload; what was granted is void
    ABANDON ----------------------------->  leave the group; what does not come soon is lost; READY

A broadcast that waits for one member occupies the GPUs of all others. So START goes out when every
member has granted room, and the sender's GPU has done what it was given before the buffer was
handed out: then it packs, and nothing else is before the broadcast. A grant says that nobody reads
the member's buffer any more, and that it waits in `receive`, or calls `progress` and soon returns:
beside a payload that is read, only those grant that have called `progress` for one before. A sender
that takes its time to pack asks again.

`send` returns as soon as the broadcast has started: one payload is in flight while the next is
packed and the last is read. The end of a broadcast at the root does not prove delivery; a caller
that needs proof asks for replies, as a sync does.

The first payload forms a group. A group that lost a member is abandoned, never repaired; the next
payload forms a new one. The control plane can be signed with a secret. The payload and the back
end's rendezvous need a trusted network.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from deltasync.errors import (
    ConfigError,
    TransportError,
    TransportTimeout,
    TransportUnavailable,
)
from deltasync.transports.collective_receiver import (
    GROUP,
    MAX_COMPLAINT_BYTES,
    MOMENT_S,
    ROOM,
    START,
    TICKET,
    Receiver,
)
from deltasync.transports.control.connection import (
    BrokenProtocol,
    Kind,
    Pace,
    deadline_in,
    left_s,
    part_of,
)
from deltasync.transports.control.tcp import check_network, listen_tcp, warn_of_strangers
from deltasync.transports.marks import Mark
from deltasync.transports.process_group import (
    Broadcast,
    Join,
    Membership,
    bounded,
    device_of,
    serve_store,
)
from deltasync.transports.sockets import SocketSender

__all__ = ["Receiver", "Sender"]

# How long what was sent may take to leave before a connection is ended on purpose.
_FAREWELL_S = 5.0
# How long ABANDON, or the loss that made a group fail, may take to show.
_GRACE_S = 1.0
# The rest of a timeout is kept for telling who was late.
_WORK_SHARE = 0.8
_FRESH_S = 0.05  # who granted room longer ago may have gone to do something else
_LATE = "was not ready in time"


class Sender(SocketSender):
    """The sender's end: rank 0 of the group and the server of the control plane.

    Attributes:
        address: Host and port that receivers connect to.
        backend: The broadcasting library; receivers must use the same.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        backend: str = "gloo",
        device: torch.device | str | None = None,
        secret: bytes | None = None,
        store_port: int = 0,
    ) -> None:
        """Listen on `host`, which receivers must be able to reach.

        Raises ConfigError, which names the port, if it cannot listen there.

        Args:
            host: Address of the interface to listen on.
            port: 0 chooses a free port; see `address`.
            backend: "gloo" for CPUs or "nccl" for GPUs.
            device: Where payloads live; by default the CPU or the current GPU.
            secret: Signs the control plane; receivers must have the same secret. Without one, an
                address that is not loopback issues a Python warning.
            store_port: Of the rendezvous store, which receivers reach too; 0 chooses a free port.
        """
        check_network(host, secret)
        self.backend = backend
        device = device_of(backend, device)
        listener = listen_tcp(host, port)
        try:
            self._store_port, self._store = serve_store(host, store_port)
        except ConfigError:
            listener.close()
            raise
        self.address: tuple[str, int] = listener.getsockname()[:2]
        if secret is None:
            warn_of_strangers(*self.address)
        super().__init__(listener, device, Kind.READY, secret=secret)
        self._name = f"deltasync/{secrets.token_hex(8)}"
        self._membership = Membership(device, num_slots=2)
        self._turn = 0  # the slot of the next payload
        self._lent = Mark(device)  # when it was handed out
        self._ticket = 0  # of the last question
        self._asked_at = 0.0
        self._answers: dict[int, str] = {}  # to it; an empty text says that all is well
        self._room = 0  # bytes that members grant, or are asked for
        self._longest = 0  # payload of this group

    def poll(self, *, timeout_s: float) -> list[tuple[int, bytes]]:
        with self._gate.entered():
            greetings = super().poll(timeout_s=timeout_s)
            if self._membership.group is not None and self._losses(self._members):
                # Others may wait for a payload, and a rank may do nothing but poll from now on.
                self._abandon()
            return greetings

    def open_epoch(self, peers: Sequence[int], *, timeout_s: float) -> dict[int, TransportError]:
        """Return at once: the first payload forms the group, and all must be receiving then."""
        with self._gate.entered():
            self._pump(0)
            failures = self._wait(deadline_in(timeout_s), *self._membership.flights)
            if set(peers) != self._members:
                self._abandon()
            losses = super().open_epoch(peers, timeout_s=timeout_s)
            if losses:
                self._abandon()
            return losses | {peer: failures[peer] for peer in losses if peer in failures}

    def buffer(self, num_bytes: int, *, timeout_s: float) -> Tensor:
        """Wait until the payload before the last one has left.

        GPUs of receivers may wait for what the current stream is given between this and `send`.
        """
        with self._gate.entered():
            slot, deadline = self._membership.slots[self._turn], deadline_in(timeout_s)
            if slot.flight is not None:
                self._check(self._wait(deadline, slot.flight))
                slot.flight = None
            if self._membership.group is not None:
                self._invite(num_bytes)  # while it is packed
            self._lent.set()
            self._buffer = slot.view(num_bytes)
            return self._buffer

    def _early_replies(self, deadline: float) -> dict[int, bytes | TransportError]:
        """Those that are lost or hang keep a payload from those behind them, which then wait."""
        failures = self._wait(part_of(deadline, _WORK_SHARE), *self._membership.flights)
        self._remove(failures)
        early = part_of(deadline, _WORK_SHARE)
        replies = self._replies(self._epoch, early, len(self._epoch))
        if len(replies) < len(self._epoch):
            self._abandon()
        lost = [peer for peer, reply in replies.items() if not isinstance(reply, bytes)]
        return replies | {peer: failures[peer] for peer in lost if peer in failures}

    def _settle(self, peers: Collection[int]) -> None:
        if not self._members.isdisjoint(peers):
            self._membership.finish(_FAREWELL_S)

    def _dispose(self) -> None:
        super()._dispose()
        self._membership.leave()
        del self._store

    def _post(self, peers: Collection[int], header: bytes) -> None:
        self._room = 0
        super()._post(peers, header)

    def _remove(self, peers: Iterable[int]) -> None:
        """A group with one of them is abandoned."""
        gone = self._members & set(peers)
        if gone:
            super()._remove(gone)
            self._abandon()

    def _ask(self, kind: Kind, data: bytes = b"") -> None:
        """Say what every member answers."""
        self._ticket, self._asked_at, self._answers = self._ticket + 1, time.monotonic(), {}
        self._write(self._members, kind, TICKET.pack(self._ticket) + data)

    def _abandon(self) -> None:
        """Leave the group, and make all members leave."""
        self._membership.finish(MOMENT_S)
        self._membership.leave()
        self._room = self._longest = 0
        self._ask(Kind.ABANDON)

    def _invite(self, num_bytes: int) -> None:
        """Ask for room for a payload, unless members grant as much by themselves, or did lately."""
        if num_bytes > self._room or time.monotonic() > self._asked_at + _FRESH_S:
            self._room = self._longest = max(num_bytes, self._longest)
            self._ask(Kind.ROOM, ROOM.pack(self._room))

    def _send_payload(
        self, header: bytes, payload: Tensor, deadline: float
    ) -> dict[int, TransportError]:
        """Start to broadcast: when this returns, the payload is in flight, not delivered."""
        slot, self._buffer = self._membership.slots[self._turn], None
        failures = self._losses(self._members)
        if failures or not self._members:
            return failures
        slot.mark.set()
        if self._membership.group is None and (failures := self._form_group(deadline)):
            return failures
        self._invite(payload.numel())
        failures = self._wait(deadline, self._lent, answered=True)
        self._pump(0)  # who granted room and has died since would keep others' GPUs waiting
        if failures := failures or self._losses(self._members):
            return failures
        # Longer than it may take, so that it is we who find out who is late.
        patience_s = bounded(2 * left_s(deadline) + _GRACE_S)
        self._ask(Kind.START, START.pack(payload.numel(), patience_s) + header)
        self._membership.broadcast(slot, payload, patience_s, slot.mark)
        self._turn = 1 - self._turn
        return {}

    def _form_group(self, deadline: float) -> dict[int, TransportError]:
        """Form a group with the members of the epoch. Returns as `_wait`."""
        own_host = self._peers[min(self._members)].local_host
        self._ticket, self._answers = self._ticket + 1, {}
        name, size = f"{self._name}/{self._ticket}", len(self._members) + 1
        timeout_s = bounded(left_s(deadline))
        for rank, peer in enumerate(sorted(self._members), start=1):
            plan = GROUP.pack(rank, size, self._store_port, timeout_s)
            text = f"{self.backend} {name}".encode()
            self._write([peer], Kind.GROUP, TICKET.pack(self._ticket) + plan + text)
        join = self._membership.join = Join(
            self.backend,
            self._membership.stream,
            (self.address[0], self._store_port),
            name,
            rank=0,
            size=size,
            timeout_s=timeout_s,
            own_host=own_host,
        )
        failures = self._wait(deadline, join, answered=True)
        if not failures:
            self._membership.group, self._membership.join = join.group, None
        return failures

    def _wait(
        self, deadline: float, *jobs: Mark | Join | Broadcast, answered: bool = False
    ) -> dict[int, TransportError]:
        """Wait until `jobs` have ended well and, if asked for, all members have `answered` well.

        Otherwise abandons the group and returns those to blame, all of them dropped. Raises
        TransportUnavailable or TransportTimeout if that is nobody but this end.
        """
        missing = self._listen(part_of(deadline, _WORK_SHARE), *jobs, answered=answered)
        errors = [job.error for job in jobs if job.error is not None]
        complaints = {peer: text for peer, text in self._answers.items() if text}
        if not (errors or complaints or missing) and all(job.is_done() for job in jobs):
            return {}
        suspects = missing if answered else self._members
        why = _LATE if answered or not errors else errors[0]
        return self._blame(complaints or dict.fromkeys(suspects, why), deadline)

    def _blame(self, complaints: dict[int, str], deadline: float) -> dict[int, TransportError]:
        """Abandon the group and drop those to blame: the lost, else the late, else this end if it
        could not join, else who has something to complain of; of these, who is slow to leave.
        """
        join = self._membership.join
        self._abandon()
        # A lost member makes others fail, who are not to blame; so does one that was stopped.
        slow = self._listen(min(deadline, deadline_in(_GRACE_S)))
        late = self._listen(deadline)
        if losses := self._losses(self._members):
            return losses
        if late:
            return {p: self._expire(p, complaints.get(p, _LATE)) for p in late}
        if join is not None:
            grace = deadline_in(_GRACE_S)  # the others may have noticed first
            while complaints and not join.is_done() and time.monotonic() < grace:
                time.sleep(MOMENT_S / 10)
            if join.is_done() and join.error is not None:
                raise TransportUnavailable(f"no group could be formed: {join.error}")
        if not complaints:
            raise TransportTimeout("this end was not ready in time")
        complaints = {p: why for p, why in complaints.items() if p in slow} or complaints
        for peer, complaint in complaints.items():
            self._expire(peer, complaint)
        return {
            peer: TransportTimeout(text) if text == _LATE else self._loss(peer)
            for peer, text in complaints.items()
        }

    def _listen(
        self, deadline: float, *jobs: Mark | Join | Broadcast, answered: bool = True
    ) -> set[int]:
        """Wait until `jobs` have ended and, if asked for, all members have `answered`.

        Waits no longer once one is lost, or a job has failed or a member complains of one. Returns
        who has not answered.
        """
        pace = Pace(self._busy_s)
        while True:
            is_working = not all(job.is_done() for job in jobs)
            self._take_answers()
            silent = self._members - self._answers.keys() if answered else set[int]()
            has_failed = jobs and any([*self._answers.values(), *(job.error for job in jobs)])
            is_over = has_failed or not (is_working or silent)
            if is_over or self._losses(self._members) or time.monotonic() >= deadline:
                return silent
            self._pump(pace.pause_s(deadline) if is_working else left_s(deadline))

    def _take_answers(self) -> None:
        for peer in self._members - self._answers.keys():
            while (data := self._take(peer, Kind.READY)) is not None:
                if len(data) < TICKET.size:
                    self._end(peer, BrokenProtocol("an answer of the wrong size"))
                    break
                if TICKET.unpack_from(data)[0] == self._ticket:
                    complaint = data[TICKET.size :][:MAX_COMPLAINT_BYTES]
                    self._answers[peer] = complaint.decode(errors="replace")
                    break
