"""Payloads by one torch.distributed broadcast (gloo or NCCL), everything else over TCP.

The process group is deltasync's own: the application's default group is neither used nor created.
Before its broadcast, a frame with a payload takes one round over the control plane:

    sender                                  receivers
    FRAME(size) ------------------------->  find a buffer that is not being read
    pack        <---------------- READY --
    PACKED ------------------------------>
    START(header) ----------------------->  broadcast; return the frame when it has arrived
    ABANDON ----------------------------->  or: leave the group; what does not arrive soon is lost

Nothing is broadcast before the payload is packed and every member is ready, because a broadcast
that waits for one member would block the GPUs of all others. So a receiver that is ready stays in
`receive` until START, or calls `progress` and soon returns. A receiver that still has a frame to
return, or reads one, is ready for the next payload only when that is packed.

`send` returns as soon as the broadcast has started: one payload is in flight while the next is
packed and the last is read. The end of a broadcast at the root does not prove delivery; a caller
that needs proof asks for replies, as a sync does.

The first payload forms a group, in a similar round (GROUP, READY, START, READY). A group that lost
a member is abandoned, never repaired; the next payload forms a new one. The control plane can be
signed with a secret. The payload and the back end's rendezvous need a trusted network.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from deltasync.errors import (
    ConfigError,
    TransportClosed,
    TransportError,
    TransportTimeout,
    TransportUnavailable,
)
from deltasync.transports.base import Capabilities, Frame
from deltasync.transports.collective_messages import (
    DEFAULT_MAX_PAYLOAD_BYTES,
    FRAME,
    GRACE_S,
    GROUP,
    MAX_COMPLAINT_BYTES,
    MOMENT_S,
    NO_PAYLOAD,
    TICKET,
)
from deltasync.transports.collective_receiver import Receiver
from deltasync.transports.control.connection import (
    BrokenProtocol,
    Kind,
    Pace,
    check_frame,
    check_size,
    deadline_in,
    left_s,
    part_of,
)
from deltasync.transports.control.tcp import check_network, listen_tcp, warn_of_strangers
from deltasync.transports.marks import Mark
from deltasync.transports.process_group import (
    GroupSpec,
    Join,
    Membership,
    PayloadBuffer,
    bounded,
    device_of,
    serve_store,
)
from deltasync.transports.sockets import SocketSender

__all__ = ["DEFAULT_MAX_PAYLOAD_BYTES", "Receiver", "Sender"]

# How long what was sent may take to leave before a connection is ended on purpose.
_FAREWELL_S = 5.0
# The rest of a timeout is kept for telling who was late.
_WORK_SHARE = 0.8
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
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
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
                address that is not loopback logs a warning.
            max_payload_bytes: Larger payloads are refused.
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
        capabilities = Capabilities((device.type,), max_payload_bytes)
        super().__init__(listener, capabilities, Kind.READY, secret=secret)
        self._name = f"deltasync/{secrets.token_hex(8)}"
        self._tickets = itertools.count(1)
        self._membership = Membership(device)
        self._slots = PayloadBuffer(device), PayloadBuffer(device)
        self._turn = 0  # the slot of the next payload
        self._announced: tuple[int, int] | None = None  # ticket and bytes of the next payload

    def poll(self, *, timeout_s: float) -> list[tuple[int, bytes]]:
        with self._gate.entered():
            greetings = self._server.poll(deadline_in(timeout_s))
            if self._membership.group is not None and self._server.losses(self._members):
                # Others may wait for a payload, and a rank may do nothing but poll from now on.
                self._membership.finish(MOMENT_S)
                self._abandon()
            return greetings

    def open_epoch(self, peers: Sequence[int], *, timeout_s: float) -> dict[int, TransportError]:
        """Return at once: the first payload forms the group, and all must be receiving then."""
        with self._gate.entered():
            self._server.pump(0)
            failures = self._settle(self._slots, deadline_in(timeout_s))
            if set(peers) != self._members:
                self._abandon()
            self._server.hear(peers)
            self._epoch, self._members = tuple(peers), set(peers)
            failures = self._server.losses(peers) | {p: failures[p] for p in peers if p in failures}
            self._remove(failures)
            return failures

    def buffer(self, num_bytes: int, *, timeout_s: float) -> Tensor:
        """Wait until the payload before the last one has left."""
        check_size(num_bytes, self._capabilities)
        with self._gate.entered():
            slot, deadline = self._slots[self._turn], deadline_in(timeout_s)
            self._check(self._settle([slot], deadline))
            if num_bytes and self._members and self._membership.group is not None:
                self._announced = self._announce(num_bytes, deadline)  # while it is packed
            return slot.view(num_bytes)

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        """Send a frame. When this returns, the payload is in flight, not delivered."""
        check_frame(frame, self._capabilities)
        deadline = deadline_in(timeout_s)
        with self._gate.entered():
            if frame.payload is None or frame.payload.numel() == 0:
                num_bytes = NO_PAYLOAD if frame.payload is None else 0
                self._post_header(self._members, frame.header, num_bytes)
                failures = self._server.flush(self._members, deadline)
            else:
                failures = self._send_payload(frame.header, frame.payload, deadline)
            self._check(failures)

    def collect_replies(self, *, timeout_s: float) -> dict[int, bytes | TransportError]:
        deadline = deadline_in(timeout_s)
        with self._gate.entered():
            failures = self._settle(self._slots, part_of(deadline, _WORK_SHARE))
            self._remove(failures)
            # Those that are lost or hang keep a payload from those behind them, which then wait.
            early = part_of(deadline, _WORK_SHARE)
            replies = self._server.arrived(self._epoch, Kind.REPLY, early, on_lost=self._remove)
            if missing := [peer for peer in self._epoch if peer not in replies]:
                self._abandon()
                replies |= self._checked(self._server.gather(missing, Kind.REPLY, deadline))
            for peer, reply in replies.items():
                if not isinstance(reply, bytes):
                    replies[peer] = failures.get(peer, reply)
            return replies

    def drop(self, peer: int) -> None:
        with contextlib.suppress(TransportClosed), self._gate.entered():
            if peer in self._members:
                self._membership.finish(_FAREWELL_S)
            self._server.drop(peer)
            self._remove([peer])

    def _dispose(self) -> None:
        self._membership.finish(_FAREWELL_S)
        self._server.close()
        self._leave()
        del self._store

    def _write(self, kind: Kind, data: bytes) -> None:
        self._server.write(self._members, kind, data)

    def _post_header(
        self, peers: Collection[int], header: bytes, num_bytes: int = NO_PAYLOAD
    ) -> None:
        """To receivers that are to be handed this first, whatever was announced."""
        self._announced = None
        self._server.write(peers, Kind.FRAME, FRAME.pack(0, num_bytes, 0.0) + header)

    def _remove(self, peers: Iterable[int]) -> None:
        """A group with one of them is abandoned."""
        gone = self._members & set(peers)
        if gone:
            super()._remove(gone)
            self._membership.finish(MOMENT_S)
            self._abandon()

    def _leave(self) -> None:
        for slot in self._slots:
            slot.abandon()
        self._membership.leave()

    def _abandon(self) -> int:
        """Leave the group, and make all members leave. Returns the ticket of their answers."""
        ticket = next(self._tickets)
        self._announced = None
        if self._membership.group is not None or self._membership.join is not None:
            self._leave()
        self._write(Kind.ABANDON, TICKET.pack(ticket))
        return ticket

    def _send_payload(
        self, header: bytes, payload: Tensor, deadline: float
    ) -> dict[int, TransportError]:
        """Start to broadcast `payload`. Returns the peers that failed, and why."""
        slot = self._slots[self._turn]
        failures = self._settle([slot], deadline) or self._server.losses(self._members)
        if failures or not self._members:
            return failures
        if not slot.holds(payload):
            payload = slot.view(payload.numel()).copy_(payload)
        slot.mark.set()
        if self._membership.group is None and (failures := self._form_group(deadline)):
            return failures
        if self._announced is None or self._announced[1] != payload.numel():
            self._announced = self._announce(payload.numel(), deadline)
        (ticket, _), self._announced = self._announced, None
        self._write(Kind.PACKED, TICKET.pack(ticket))
        if failures := self._round(ticket, deadline, slot.mark):
            return failures
        self._write(Kind.START, TICKET.pack(ticket) + header)
        # Longer than it may take, so that it is we who find out who is late.
        patience_s = bounded(2 * left_s(deadline) + GRACE_S)
        slot.flight = self._membership.broadcast(payload, patience_s)
        self._turn = 1 - self._turn
        return self._server.flush(self._members, deadline)

    def _announce(self, num_bytes: int, deadline: float) -> tuple[int, int]:
        """Announce a payload to the members. Returns its ticket and size."""
        ticket = next(self._tickets)
        self._write(Kind.FRAME, FRAME.pack(ticket, num_bytes, bounded(left_s(deadline))))
        return ticket, num_bytes

    def _form_group(self, deadline: float) -> dict[int, TransportError]:
        """Form a group with the members of the epoch. Returns the peers that failed, and why."""
        ticket = next(self._tickets)
        name, size = f"{self._name}/{ticket}", len(self._members) + 1
        text = f"{self.backend} {name}".encode()
        for rank, peer in enumerate(sorted(self._members), start=1):
            timeout_s = bounded(left_s(deadline))
            group = GROUP.pack(ticket, rank, size, self._store_port, timeout_s)
            self._server.write([peer], Kind.GROUP, group + text)
        if failures := self._round(ticket, deadline):
            return failures
        plan = GroupSpec(
            backend=self.backend,
            stream=self._membership.stream,
            store_host=self.address[0],
            store_port=self._store_port,
            name=name,
            rank=0,
            size=size,
            timeout_s=bounded(left_s(deadline)),
            own_host=self._server.local_host(min(self._members)),
        )
        self._write(Kind.START, TICKET.pack(ticket))
        join = self._membership.join = Join(plan)
        failures = self._round(ticket, deadline, join)
        if not failures:
            self._membership.group, self._membership.join = join.group, None
        return failures

    def _settle(self, slots: Sequence[PayloadBuffer], deadline: float) -> dict[int, TransportError]:
        """Wait until what was sent from `slots` has left.

        Otherwise abandons the group and returns those to blame, all of them dropped.
        """
        flights = [slot.flight for slot in slots if slot.flight is not None]
        end, pace, is_hurried = part_of(deadline, _WORK_SHARE), Pace(self._busy_s), False
        while not all(flight.is_done() for flight in flights):
            self._server.pump(pace.pause_s(end))
            if not is_hurried and self._server.losses(self._members):
                end, is_hurried = min(end, deadline_in(MOMENT_S)), True
            if time.monotonic() >= end:
                return self._blame(dict.fromkeys(self._members, _LATE), deadline)
        if errors := [flight.error for flight in flights if flight.error is not None]:
            return self._blame(dict.fromkeys(self._members, errors[0]), deadline)
        for slot in slots:
            slot.flight = None
        return {}

    def _round(
        self, ticket: int, deadline: float, job: Mark | Join | None = None
    ) -> dict[int, TransportError]:
        """Wait until all members have answered `ticket` well and `job` is done.

        Otherwise abandons the group and returns those to blame, all of them dropped. Raises
        TransportUnavailable or TransportTimeout if that is nobody but this end.
        """
        answers = self._answers(ticket, part_of(deadline, _WORK_SHARE), job)
        complaints = {peer: text for peer, text in answers.items() if text}
        if not complaints:  # with which the wait ends, however early that is for the others
            complaints = dict.fromkeys(self._members - answers.keys(), _LATE)
        is_fine = job is None or (job.is_done() and job.error is None)
        if is_fine and not complaints and not self._server.losses(self._members):
            return {}
        return self._blame(complaints, deadline, job)

    def _blame(
        self, complaints: dict[int, str], deadline: float, job: Mark | Join | None = None
    ) -> dict[int, TransportError]:
        """Abandon the group and drop those to blame: the lost, else the late, else this end if
        `job` failed, else who has something to complain of.
        """
        ticket = self._abandon()
        # A lost member makes others fail, who are not to blame; so does one that was stopped.
        if losses := self._server.losses(self._members):
            return losses
        here = self._answers(ticket, deadline, None)
        if losses := self._server.losses(self._members):
            return losses
        if late := self._members - here.keys():
            return {p: self._server.expire(p, complaints.get(p, _LATE)) for p in late}
        if job is not None:
            self._blame_this_end(job, is_alone=not complaints)
        for peer, complaint in complaints.items():
            self._server.expire(peer, complaint)
        return {
            peer: TransportTimeout(text) if text == _LATE else self._server.loss(peer)
            for peer, text in complaints.items()
        }

    def _blame_this_end(self, job: Mark | Join, *, is_alone: bool) -> None:
        grace = deadline_in(GRACE_S)  # the others may have noticed first
        pace = Pace()
        while not is_alone and not job.is_done() and time.monotonic() < grace:
            time.sleep(pace.pause_s(grace))
        if job.is_done() and job.error is not None:
            raise TransportUnavailable(f"no group could be formed: {job.error}")
        if is_alone:
            raise TransportTimeout("this end was not ready in time")

    def _answers(self, ticket: int, deadline: float, job: Mark | Join | None) -> dict[int, str]:
        """What the members answered to `ticket`, as far as it takes to know how this ends.

        An empty text says that all is well.
        """
        answers: dict[int, str] = {}
        pace = Pace(self._busy_s)
        while True:
            is_working = job is not None and not job.is_done()
            self._server.pump(pace.pause_s(deadline) if is_working else 0)
            self._take_answers(ticket, answers)
            is_lost = bool(self._server.losses(self._members))
            if is_lost or any(answers.values()) or time.monotonic() >= deadline:
                return answers
            if not is_working and (len(answers) == len(self._members) or (job and job.error)):
                return answers
            if not is_working:
                self._server.pump(left_s(deadline))

    def _take_answers(self, ticket: int, answers: dict[int, str]) -> None:
        for peer in self._members - answers.keys():
            while (data := self._server.take(peer, Kind.READY)) is not None:
                if len(data) < TICKET.size:
                    self._server.drop(peer, BrokenProtocol("an answer of the wrong size"))
                    break
                if TICKET.unpack_from(data)[0] == ticket:
                    complaint = data[TICKET.size :][:MAX_COMPLAINT_BYTES]
                    answers[peer] = complaint.decode(errors="replace")
                    break
