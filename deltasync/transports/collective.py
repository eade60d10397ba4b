"""Payloads by one torch.distributed broadcast (gloo or NCCL), everything else over TCP.

The process group is deltasync's own: the application's default group is neither used nor made.
Completion at the root proves no delivery, so that each frame with a payload is a small protocol
over the control plane, in which a frame is received by all or by none:

    sender                                  receivers
    FRAME(size) ------------------------->  allocate
                <---------------- READY --  nobody waits inside the back end for a slow one
    START ------------------------------->  broadcast
                <---------------- READY --  it has arrived
    SENT -------------------------------->  the frame is handed out
    ABANDON ----------------------------->  or: it is not, and the group is left

A group is formed in the same way (GROUP, READY, START, READY) by the first payload. One that lost
a member is abandoned, never repaired; the next payload forms a new one. The control plane can be
signed with a secret; the payload and the back end's rendezvous belong on a trusted network.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from deltasync.errors import TransportClosed, TransportError, TransportTimeout
from deltasync.transports.base import Capabilities, Frame
from deltasync.transports.control import (
    BrokenProtocol,
    Deadline,
    Kind,
    Message,
    check_frame,
    check_size,
    failure,
)
from deltasync.transports.endpoints import Client, Gate, Server, check_secret, listen_tcp
from deltasync.transports.process_group import (
    Backend,
    Broadcast,
    Join,
    Membership,
    Plan,
    bounded,
    capabilities_of,
    device_of,
    serve_store,
)

DEFAULT_MAX_PAYLOAD_BYTES = 4 << 30
_FRAME = struct.Struct("<Qqd")  # ticket or 0, payload bytes or -1, timeout; the header follows
_GROUP = struct.Struct("<QIIHd")  # ticket, rank, size, store port, timeout; the name follows
_READY = struct.Struct("<Q?")  # ticket, whether it went well
_TICKET = struct.Struct("<Q")
_NO_PAYLOAD = -1
_MIN_POLL_S, _MAX_POLL_S = 0.00005, 0.001
_ANSWER_TIMEOUT_S = 5.0
_DIAL_TIMEOUT_S = 1.0
# How long a loss may take to show on the control plane after the back end has failed of it.
_GRACE_S = 1.0
# The rest of a timeout is kept for telling who was late.
_WORK_SHARE = 0.8


class Sender:
    """The sender's end: rank 0 of the group and the server of the control plane."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        backend: Backend = "gloo",
        device: torch.device | str | None = None,
        secret: bytes | None = None,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
    ) -> None:
        """Listen on `host`, which receivers must be able to reach.

        Args:
            host: Address of the interface to serve on.
            port: 0 picks a free one; see `address`.
            backend: "gloo" for CPUs, "nccl" for GPUs.
            device: Where payloads live; by default the CPU or the current GPU.
            secret: Sign the control plane; receivers must have the same.
            max_payload_bytes: Larger payloads are refused.
        """
        check_secret(secret)
        self._backend: Backend = backend
        self._device = device_of(backend, device)
        self._capabilities = capabilities_of(self._device, max_payload_bytes)
        listener = listen_tcp(host, port)
        self._host, self._port = listener.getsockname()[:2]
        self._gate = Gate()
        self._server = Server(listener, self._gate, kinds={Kind.REPLY, Kind.READY}, secret=secret)
        self._store_port, self._store = serve_store(host)
        self._name = f"deltasync/{secrets.token_hex(8)}"
        self._tickets = 0
        self._epoch: tuple[int, ...] = ()
        self._members: set[int] = set()
        self._membership = Membership()
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that receivers connect to."""
        return self._host, self._port

    def poll(self, *, timeout_s: float) -> list[tuple[int, bytes]]:
        with self._gate.entered():
            return self._server.poll(Deadline(timeout_s))

    def is_connected(self, peer: int) -> bool:
        with self._gate.entered():
            return self._server.is_connected(peer)

    def open_epoch(self, peers: Sequence[int], *, timeout_s: float) -> dict[int, TransportError]:
        """Never waits: the first payload forms the group, and every peer must be receiving then."""
        with self._gate.entered():
            self._server.pump(0)
            if set(peers) != self._members:
                self._membership.leave()
            self._epoch, self._members = tuple(peers), set(peers)
            self._remove(failures := self._server.losses(peers))
            return failures

    def buffer(self, num_bytes: int, *, timeout_s: float) -> Tensor:
        """Never waits."""
        check_size(num_bytes, self._capabilities)
        with self._gate.entered():
            if self._buffer.numel() < num_bytes:
                self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            return self._buffer[:num_bytes]

    def send(self, frame: Frame, *, timeout_s: float) -> None:
        """A payload has reached every peer when this returns."""
        check_frame(frame, self._capabilities)
        deadline = Deadline(timeout_s)
        with self._gate.entered():
            if frame.payload is None or frame.payload.numel() == 0:
                num_bytes = _NO_PAYLOAD if frame.payload is None else 0
                self._write(Kind.FRAME, _FRAME.pack(0, num_bytes, 0.0) + frame.header)
                failures = self._server.flush(self._members, deadline)
            else:
                failures = self._broadcast(frame.header, frame.payload, deadline)
            self._remove(failures)
            if failures:
                raise failure(failures)

    def collect_replies(self, *, timeout_s: float) -> dict[int, bytes | TransportError]:
        with self._gate.entered():
            replies = self._server.gather(self._epoch, Kind.REPLY, Deadline(timeout_s))
            self._remove(peer for peer, reply in replies.items() if not isinstance(reply, bytes))
            return replies

    def drop(self, peer: int) -> None:
        self._server.drop(peer)
        self._remove([peer])

    def close(self) -> None:
        self._gate.close(self._dispose)

    def _dispose(self) -> None:
        self._server.close()
        self._membership.leave()
        del self._store

    def _write(self, kind: Kind, data: bytes) -> None:
        self._server.write(self._members, kind, data)

    def _ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _remove(self, peers: Iterable[int]) -> None:
        """Go on without `peers`; a group that has one of them is of no more use."""
        gone = self._members & set(peers)
        if gone:
            self._members -= gone
            self._abandon()

    def _abandon(self) -> int:
        """Leave the group and tell everybody to; returns the ticket of their answers."""
        ticket = self._ticket()
        self._membership.leave()
        self._write(Kind.ABANDON, _TICKET.pack(ticket))
        return ticket

    def _form_group(self, deadline: Deadline) -> dict[int, TransportError]:
        """Form a group with the members of the epoch. Returns who could not, and why."""
        self._membership.leave()
        ticket = self._ticket()
        name = f"{self._name}/{ticket}"
        size = len(self._members) + 1
        for rank, peer in enumerate(sorted(self._members), start=1):
            timeout_s = bounded(deadline.remaining_s)
            group = _GROUP.pack(ticket, rank, size, self._store_port, timeout_s)
            self._server.write([peer], Kind.GROUP, group + name.encode())
        if failures := self._round(ticket, deadline):
            return failures
        plan = Plan(
            backend=self._backend,
            device=self._device,
            store_host=self._host,
            store_port=self._store_port,
            name=name,
            rank=0,
            size=size,
            timeout_s=bounded(deadline.remaining_s),
            own_host=self._server.local_host(min(self._members)),
        )
        self._write(Kind.START, _TICKET.pack(ticket))
        job = self._membership.job = Join(plan)
        failures = self._round(ticket, deadline, job)
        if not failures:
            self._membership.group, self._membership.job = job.group, None
        return failures

    def _broadcast(
        self, header: bytes, payload: Tensor, deadline: Deadline
    ) -> dict[int, TransportError]:
        """Bring `payload` to the members. Returns who failed, and why."""
        if failures := self._server.losses(self._members):
            return failures
        if self._membership.group is None and self._members:
            failures = self._form_group(deadline)
        if self._membership.group is None:
            return failures
        ticket = self._ticket()
        timeout_s = bounded(deadline.remaining_s)
        self._write(Kind.FRAME, _FRAME.pack(ticket, payload.numel(), timeout_s) + header)
        if failures := self._round(ticket, deadline):
            return failures
        self._write(Kind.START, _TICKET.pack(ticket))
        # No other reference to the group may be held here: dropping the last one can block.
        job = self._membership.job = Broadcast(self._membership.group, payload, timeout_s)
        if failures := self._round(ticket, deadline, job):
            return failures
        self._membership.job = None
        self._write(Kind.SENT, _TICKET.pack(ticket))
        return self._server.flush(self._members, deadline)

    def _round(
        self, ticket: int, deadline: Deadline, job: Join | Broadcast | None = None
    ) -> dict[int, TransportError]:
        """Wait until all members have answered `ticket` and `job` is done.

        Otherwise abandons the group and returns those to blame, all of them dropped.
        """
        answers = self._answers(ticket, deadline.part(_WORK_SHARE), job)
        failures = self._server.losses(self._members)
        error = job.error if job is not None else None
        unwell = {peer for peer in self._members if not answers.get(peer)}
        if not failures and not unwell and error is None and (job is None or job.is_done()):
            return {}
        ticket = self._abandon()
        # A lost member makes others fail, who are not to blame; so does one that was stopped.
        if failures:
            return failures
        here = self._answers(ticket, deadline, None)
        if failures := self._server.losses(self._members):
            return failures
        blamed = self._members - here.keys() or unwell or self._members
        complaint = error or "was not ready in time"
        return {peer: self._server.expire(peer, complaint) for peer in blamed}

    def _answers(
        self, ticket: int, deadline: Deadline, job: Join | Broadcast | None
    ) -> dict[int, bool]:
        """How the members answered `ticket`, as far as it takes to know how this ends."""
        answers: dict[int, bool] = {}
        pause_s = _MIN_POLL_S
        while True:
            working = job is not None and not job.is_done()
            self._server.pump(min(pause_s, deadline.remaining_s) if working else 0)
            self._take_answers(ticket, answers)
            lost = bool(self._server.losses(self._members))
            failed = lost or not all(answers.values())
            if failed or (len(answers) == len(self._members) and not working) or deadline.passed:
                return answers
            if job is not None and job.error is not None:
                deadline, job = Deadline(min(_GRACE_S, deadline.remaining_s)), None
            if working:
                pause_s = min(2 * pause_s, _MAX_POLL_S)
            else:
                self._server.pump(deadline.remaining_s)

    def _take_answers(self, ticket: int, answers: dict[int, bool]) -> None:
        for peer in self._members - answers.keys():
            while (data := self._server.take(peer, Kind.READY)) is not None:
                if len(data) != _READY.size:
                    self._server.drop(peer, BrokenProtocol("an answer of the wrong size"))
                    break
                answered, well = _READY.unpack(data)
                if answered == ticket:
                    answers[peer] = well
                    break


class Receiver:
    """A receiver's end: joins the groups that the sender forms, during `receive`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        backend: Backend = "gloo",
        device: torch.device | str | None = None,
        secret: bytes | None = None,
        max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES,
    ) -> None:
        """Connect to the sender at `host`:`port`; arguments as there. Nothing larger than
        `max_payload_bytes` is allocated, whatever the sender declares.
        """
        check_secret(secret)
        self._backend: Backend = backend
        self._device = device_of(backend, device)
        self._capabilities = capabilities_of(self._device, max_payload_bytes)
        self._address = host, port
        self._gate = Gate()
        self._client = Client(
            self._dial,
            self._gate,
            kinds={Kind.FRAME, Kind.GROUP, Kind.START, Kind.SENT, Kind.ABANDON},
            secret=secret,
        )
        self._membership = Membership()
        self._ticket = 0
        self._plan: Plan | None = None
        self._incoming: tuple[Frame, float] | None = None
        self._arrived: Frame | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def connect(self, greeting: bytes, *, timeout_s: float) -> None:
        """With a secret, waits for the sender to poll."""
        with self._gate.entered():
            self._leave()
            self._client.connect(greeting, Deadline(timeout_s))

    def receive(self, *, timeout_s: float) -> Frame:
        """What a timeout interrupts, the next call goes on with."""
        deadline = Deadline(timeout_s)
        pause_s = _MIN_POLL_S
        with self._gate.entered():
            while True:
                working = self._membership.job is not None
                wait_s = min(pause_s, deadline.remaining_s) if working else deadline.remaining_s
                expired = deadline.passed
                message = self._client.poll(wait_s)
                if message is not None and (frame := self._handle(message)) is not None:
                    return frame
                self._advance()
                pause_s = min(2 * pause_s, _MAX_POLL_S) if working else _MIN_POLL_S
                if message is None and expired:
                    raise TransportTimeout("nothing came in time")

    def reply(self, data: bytes, *, timeout_s: float) -> None:
        with self._gate.entered():
            self._client.write(Kind.REPLY, data, Deadline(timeout_s))

    def disconnect(self) -> None:
        with contextlib.suppress(TransportClosed), self._gate.entered():
            self._dispose()

    def close(self) -> None:
        self._gate.close(self._dispose)

    def _dispose(self) -> None:
        self._client.hang_up()
        self._leave()

    def _dial(self) -> socket.socket:
        # The timeout keeps a host that swallows packets from outlasting the caller's.
        return socket.create_connection(self._address, timeout=_DIAL_TIMEOUT_S)

    def _leave(self) -> None:
        """Be in no group and expect no frame."""
        if self._membership.leave():
            # The broadcast that was left may still write to it.
            self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._ticket = 0
        self._plan = self._incoming = self._arrived = None

    def _answer(self, ticket: int, *, well: bool) -> None:
        data = _READY.pack(ticket, well)
        self._client.write(Kind.READY, data, Deadline(_ANSWER_TIMEOUT_S))

    def _handle(self, message: Message) -> Frame | None:
        """Act on one message; returns a frame that is complete."""
        try:
            match message.kind:
                case Kind.FRAME:
                    return self._on_frame(message.data)
                case Kind.GROUP:
                    self._on_group(message.data)
                case Kind.START:
                    self._on_start(message.data)
                case Kind.SENT:
                    return self._on_sent(message.data)
                case Kind.ABANDON:
                    self._leave()
                    self._answer(_ticket_in(message.data), well=True)
        except BrokenProtocol:
            self._dispose()
            raise
        return None

    def _on_frame(self, data: bytes) -> Frame | None:
        if len(data) <= _FRAME.size:
            raise BrokenProtocol("a frame without a header")
        ticket, num_bytes, timeout_s = _FRAME.unpack_from(data)
        header = data[_FRAME.size :]
        if num_bytes == _NO_PAYLOAD:
            return Frame(header)
        limit = self._capabilities.max_payload_bytes
        if num_bytes < 0 or (limit is not None and num_bytes > limit):
            raise BrokenProtocol(f"a payload of {num_bytes} bytes; this end takes up to {limit}")
        if num_bytes == 0:
            return Frame(header, self._buffer[:0])
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        self._ticket = ticket
        self._incoming = Frame(header, self._buffer[:num_bytes]), bounded(timeout_s)
        self._answer(ticket, well=self._membership.group is not None)
        return None

    def _on_group(self, data: bytes) -> None:
        if len(data) <= _GROUP.size:
            raise BrokenProtocol("a group without a name")
        self._leave()
        self._ticket, rank, size, store_port, timeout_s = _GROUP.unpack_from(data)
        if not 0 < rank < size:
            raise BrokenProtocol(f"rank {rank} in a group of {size}")
        self._plan = Plan(
            backend=self._backend,
            device=self._device,
            store_host=self._address[0],
            store_port=store_port,
            name=data[_GROUP.size :].decode("ascii", errors="replace"),
            rank=rank,
            size=size,
            timeout_s=bounded(timeout_s),
            own_host=self._client.local_host,
        )
        self._answer(self._ticket, well=True)

    def _on_start(self, data: bytes) -> None:
        if _ticket_in(data) != self._ticket:
            raise BrokenProtocol("the start of something unknown")
        group = self._membership.group
        if self._plan is not None:
            self._membership.job, self._plan = Join(self._plan), None
        elif self._incoming is not None and group is not None:
            frame, timeout_s = self._incoming
            assert frame.payload is not None  # only frames with a payload are kept
            self._membership.job = Broadcast(group, frame.payload, timeout_s)
        else:
            raise BrokenProtocol("the start of nothing")

    def _advance(self) -> None:
        """Tell the sender of a job that has ended."""
        job = self._membership.job
        if job is None or not job.is_done():
            return
        ticket = self._ticket
        if job.error is not None:
            self._leave()
        elif isinstance(job, Join):
            self._membership.group = job.group
        elif self._incoming is not None:
            self._arrived, self._incoming = self._incoming[0], None
        self._membership.job = None
        self._answer(ticket, well=job.error is None)

    def _on_sent(self, data: bytes) -> Frame:
        frame, self._arrived = self._arrived, None
        if frame is None or _ticket_in(data) != self._ticket:
            raise BrokenProtocol("the end of a frame that has not arrived")
        return frame


def _ticket_in(data: bytes) -> int:
    if len(data) != _TICKET.size:
        raise BrokenProtocol("a ticket of the wrong size")
    ticket: int = _TICKET.unpack(data)[0]
    return ticket
