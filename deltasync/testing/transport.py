"""The contract that every transport keeps, as tests. Subclass `TransportContract` and run pytest.

    class TestMine(TransportContract):
        def ends(self, tmp_path):
            sender = partial(MySender, tmp_path / "socket")
            return Ends(sender, partial(MyReceiver, tmp_path / "socket"), crosses_processes=True)

Override nothing else: a transport is right when the contract passes as it is.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from deltasync.errors import ConfigError, PeerLost, TransportClosed, TransportTimeout
from deltasync.testing.links import (
    PATIENCE_S,
    PROMPT_S,
    Ends,
    Link,
    background,
    lost_peers,
    payload_of,
    same_frame,
    send_for_ever,
    sender_process,
    within,
)
from deltasync.testing.processes import Child
from deltasync.transports.base import Frame

SIZES = [1, 4095, 4096, (1 << 20) + 3]


class TransportContract(ABC):
    """What a sender and its receivers may rely on, whatever lies between them."""

    pytestmark = pytest.mark.timeout(90)

    @abstractmethod
    def ends(self, tmp_path: Path) -> Ends:
        """How to make the two ends of one new link."""

    @pytest.fixture
    def link(self, tmp_path: Path) -> Iterator[Link]:
        """A sender without receivers."""
        with ExitStack() as stack:
            yield Link(self.ends(tmp_path), stack)

    @pytest.fixture
    def processes(self, link: Link) -> Link:
        """The same for transports that cross processes."""
        if not link.ends.crosses_processes:
            pytest.skip("does not cross processes")
        return link

    # Frames

    def test_every_receiver_gets_the_same_bytes_in_order(self, link: Link) -> None:
        link.add(3)
        link.open()
        frames = [Frame(b"%d" % n, link.payload_of(n, seed=n)) for n in SIZES]
        for frame in [*frames, Frame(b"header only"), *reversed(frames)]:
            assert all(same_frame(got, frame) for got in link.exchange(frame))
        queued = [b"%d" % number for number in range(50)]  # nobody receives meanwhile
        for header in queued:
            link.sender.send(Frame(header), timeout_s=PATIENCE_S)
        for receiver in link.receivers:
            assert [receiver.receive(timeout_s=PATIENCE_S).header for _ in queued] == queued

    def test_buffers_of_every_size_are_sent(self, link: Link) -> None:
        link.add(2)
        link.open()
        for num_bytes in [*SIZES, 5, 0]:
            payload = link.payload_of(num_bytes, seed=3)
            buffer = link.sender.buffer(num_bytes, timeout_s=PATIENCE_S)
            assert (buffer.dtype, buffer.shape) == (torch.uint8, (num_bytes,))
            received = link.receive_later()
            link.sender.send(Frame(b"packed", buffer.copy_(payload)), timeout_s=PATIENCE_S)
            expected = Frame(b"packed", payload if num_bytes else None)
            assert all(same_frame(future.result(PATIENCE_S), expected) for future in received)

    def test_other_payloads_are_refused(self, link: Link) -> None:
        old = link.sender.buffer(10, timeout_s=PATIENCE_S)
        link.sender.send(Frame(b"to nobody", old), timeout_s=PATIENCE_S)
        buffer = link.sender.buffer(10, timeout_s=PATIENCE_S)
        for payload in (torch.zeros_like(buffer), buffer[:5], buffer.view(2, 5), old):
            with pytest.raises(ConfigError):
                link.sender.send(Frame(b"bad", payload), timeout_s=PATIENCE_S)
        with pytest.raises(ConfigError):
            link.sender.send(Frame(b""), timeout_s=PATIENCE_S)

    # Ownership of buffers

    def test_the_next_buffer_leaves_what_receivers_read_alone(self, link: Link) -> None:
        link.add(2)
        link.open()
        expected = link.payload_of(100_000)
        for _ in range(5):
            buffer = link.sender.buffer(100_000, timeout_s=PATIENCE_S)
            buffer.copy_(expected)
            received = link.receive_later(delay_s=0.05)
            link.sender.send(Frame(b"x", buffer), timeout_s=PATIENCE_S)
            link.sender.buffer(100_000, timeout_s=PATIENCE_S).fill_(0xEE)
            for future in received:
                payload = future.result(PATIENCE_S).payload
                assert payload is not None
                assert torch.equal(payload.to(expected.device), expected)

    def test_progress_leaves_what_is_read_alone(self, link: Link) -> None:
        link.add(1)
        link.open()
        frames = [Frame(b"%d" % n, link.payload_of(100_000, seed=n)) for n in range(6)]

        def send_all() -> None:
            for frame in frames:
                link.send(frame)

        sent = background(send_all)
        for frame in frames:
            received = link.receivers[0].receive(timeout_s=PATIENCE_S)
            for _ in range(20):
                link.receivers[0].progress()
                time.sleep(0.001)
            assert same_frame(received, frame)
        sent.result(PATIENCE_S)

    # Replies

    def test_who_replies_late_is_dropped_and_others_go_on(self, link: Link) -> None:
        link.add(1)
        link.open()
        late, good = link.peers[0], link.add_echo()
        received = link.receive_later()
        assert link.sender.open_epoch([late, good], timeout_s=PATIENCE_S) == {}
        link.sender.send(Frame(b"question"), timeout_s=PATIENCE_S)
        assert received[0].result(PATIENCE_S).header == b"question"
        with within(PROMPT_S):
            replies = link.sender.collect_replies(timeout_s=0.3)
        assert replies[good] == b"question"
        assert isinstance(replies[late], TransportTimeout)
        assert not link.sender.is_connected(late)
        with pytest.raises(PeerLost):
            link.receivers[0].receive(timeout_s=PROMPT_S)
        assert isinstance(link.sender.collect_replies(timeout_s=0)[late], PeerLost)

    def test_some_replies_come_before_the_others(self, link: Link) -> None:
        link.add(3)
        link.open()
        first, second, lost = link.peers
        assert link.sender.some_replies(link.peers, timeout_s=0) == {}
        link.receivers[1].reply(b"second", timeout_s=PATIENCE_S)
        got = link.sender.some_replies(link.peers, timeout_s=PATIENCE_S)
        assert got == {second: b"second"}
        assert link.sender.some_replies([first], timeout_s=0.05) == {}
        link.receivers[2].close()
        gone = link.sender.some_replies([first, lost], timeout_s=PATIENCE_S)
        assert isinstance(gone.pop(lost), PeerLost)
        assert not gone
        for number in (0, 1):
            link.receivers[number].reply(b"%d" % number, timeout_s=PATIENCE_S)
        got = link.sender.collect_replies(timeout_s=PATIENCE_S)
        assert isinstance(got.pop(lost), PeerLost)
        assert got == {first: b"0", second: b"1"}

    def test_some_peers_are_told(self, link: Link) -> None:
        link.add(3)
        link.open()
        link.sender.tell(link.peers[1:], b"for two", timeout_s=PATIENCE_S)
        link.sender.tell(link.peers[:1], b"for one", timeout_s=PATIENCE_S)
        link.sender.send(Frame(b"for all"), timeout_s=PATIENCE_S)
        for number, receiver in enumerate(link.receivers):
            first = b"for two" if number else b"for one"
            assert receiver.receive(timeout_s=PATIENCE_S).header == first
            assert receiver.receive(timeout_s=PATIENCE_S).header == b"for all"
        link.receivers[2].close()
        with within(PROMPT_S):
            assert link.peers[2] in link.sender.some_replies(link.peers, timeout_s=PATIENCE_S)
        with pytest.raises(PeerLost):
            link.sender.tell(link.peers[1:], b"gone", timeout_s=PATIENCE_S)
        assert link.receivers[1].receive(timeout_s=PATIENCE_S).header == b"gone"

    def test_losses_leave_frames_whole_where_it_is_said(self, link: Link) -> None:
        if not link.sender.outlives_losses:
            pytest.skip("a lost peer may take a payload from the others")
        link.add(2)
        link.open()
        link.receivers[1].close()
        lost = 0
        frames = [Frame(b"%d" % n, link.payload_of(50_000, seed=n)) for n in range(8)]

        def receive() -> list[bool]:
            return [
                same_frame(link.receivers[0].receive(timeout_s=PATIENCE_S), frame)
                for frame in frames
            ]

        received = background(receive)
        for frame in frames:
            try:
                link.send(frame)
            except PeerLost:
                lost += 1
        assert lost == 1
        assert all(received.result(PATIENCE_S))

    def test_short_timeouts_do_not_lose_frames(self, link: Link) -> None:
        link.add(1)
        frame = Frame(b"patience", link.payload_of(1 << 20))

        def receive() -> Frame:
            while True:
                try:
                    return link.receivers[0].receive(timeout_s=0.001)
                except TransportTimeout:
                    continue

        received = background(receive)
        assert link.sender.open_epoch(link.peers, timeout_s=PATIENCE_S) == {}
        link.send(frame)
        assert same_frame(received.result(PATIENCE_S), frame)

    # Membership

    def test_greetings_come_in_order(self, link: Link) -> None:
        assert link.sender.poll(timeout_s=0) == []
        peers = []
        for number in range(3):
            receiver = link.receiver()
            connected = background(
                lambda r=receiver, n=number: r.connect(b"%d" % n, timeout_s=PATIENCE_S)  # type: ignore[misc]
            )
            (greeting,) = link.sender.poll(timeout_s=PATIENCE_S)
            connected.result(PATIENCE_S)
            peers.append(greeting)
        assert [data for _, data in peers] == [b"0", b"1", b"2"]
        assert sorted(peers) == peers

    def test_a_receiver_that_closes_is_lost(self, link: Link) -> None:
        link.add(1)
        good = link.add_echo()
        lost = link.peers[0]
        received = link.receive_later()
        assert link.sender.open_epoch([lost, good], timeout_s=PATIENCE_S) == {}
        link.sender.send(Frame(b"open"), timeout_s=PATIENCE_S)
        assert received[0].result(PATIENCE_S).header == b"open"
        link.receivers[0].close()
        with within(PROMPT_S):
            assert isinstance(link.sender.collect_replies(timeout_s=PATIENCE_S)[lost], PeerLost)
        assert not link.sender.is_connected(lost)
        assert lost in link.sender.open_epoch([lost, good], timeout_s=PATIENCE_S)
        link.check([good])

    def test_sending_to_a_lost_peer_says_so_and_the_rest_stay(self, link: Link) -> None:
        link.add(1)
        good = link.add_echo()
        received = link.receive_later()
        assert link.sender.open_epoch([*link.peers, good], timeout_s=PATIENCE_S) == {}
        link.sender.send(Frame(b"open"), timeout_s=PATIENCE_S)
        received[0].result(PATIENCE_S)
        link.receivers[0].close()
        with within(PROMPT_S), pytest.raises(PeerLost):
            send_for_ever(link, Frame(b"to whom", link.payload_of(100)))
        link.send(Frame(b"end", link.payload_of(100)))

    def test_a_dropped_peer_gets_what_was_sent_and_is_told(self, link: Link) -> None:
        link.add(1)
        link.open()
        link.sender.send(Frame(b"last words"), timeout_s=PATIENCE_S)
        link.sender.drop(link.peers[0])
        link.sender.drop(link.peers[0])
        assert link.receivers[0].receive(timeout_s=PROMPT_S).header == b"last words"
        with pytest.raises(PeerLost):
            link.receivers[0].receive(timeout_s=PROMPT_S)
        with pytest.raises(PeerLost):
            link.receivers[0].reply(b"", timeout_s=PROMPT_S)
        assert isinstance(link.sender.collect_replies(timeout_s=0)[link.peers[0]], PeerLost)

    def test_a_receiver_that_connects_again_is_a_new_peer(self, link: Link) -> None:
        link.add(2)
        link.open()
        old = link.peers[0]
        link.peers[0] = link.connect(link.receivers[0])
        assert link.peers[0] > max(old, link.peers[1])
        assert not link.sender.is_connected(old)
        link.open()
        frame = Frame(b"again", link.payload_of(1000))
        assert all(same_frame(got, frame) for got in link.exchange(frame))

    def test_peers_that_never_were_are_lost(self, link: Link) -> None:
        assert isinstance(link.sender.open_epoch([17], timeout_s=1)[17], PeerLost)
        assert not link.sender.is_connected(17)
        with pytest.raises(PeerLost):
            link.receiver().receive(timeout_s=0)

    def test_a_reset_ends_every_connection_and_peers_come_back(self, link: Link) -> None:
        link.add(1)
        link.open()
        old = link.peers[0]
        for _ in range(2):
            link.sender.reset()
        assert not link.sender.is_connected(old)
        with pytest.raises(PeerLost):
            link.receivers[0].receive(timeout_s=PATIENCE_S)
        link.peers[0] = link.connect(link.receivers[0])
        assert link.peers[0] > old
        link.open()
        frame = Frame(b"again", link.payload_of(1000))
        assert all(same_frame(got, frame) for got in link.exchange(frame))

    # Closing

    def test_ends_close_at_the_end_of_a_with_block_or_twice(self, link: Link) -> None:
        link.add(1)
        with link.sender as sender, link.receivers[0] as receiver:
            link.open()
        assert (sender, receiver) == (link.sender, link.receivers[0])
        sender.close()
        receiver.close()
        sender.drop(link.peers[0])
        sender.reset()
        with pytest.raises(TransportClosed):
            sender.poll(timeout_s=0)
        with pytest.raises(TransportClosed):
            receiver.receive(timeout_s=0)

    def test_closing_wakes_whoever_waits(self, link: Link) -> None:
        link.add(1)
        link.open()
        collects = background(lambda: link.sender.collect_replies(timeout_s=60))
        receives = background(lambda: link.receivers[0].receive(timeout_s=60))
        time.sleep(0.1)
        with within(PROMPT_S):
            link.receivers[0].close()
            assert isinstance(receives.exception(PROMPT_S), TransportClosed)
        collects.result(PROMPT_S)
        polls = background(lambda: link.sender.poll(timeout_s=60))
        time.sleep(0.1)
        with within(PROMPT_S):
            link.sender.close()
            assert isinstance(polls.exception(PROMPT_S), TransportClosed)

    def test_receivers_notice_a_sender_that_closes(self, link: Link) -> None:
        link.add(2)
        link.open()
        received = link.receive_later()
        link.sender.close()
        for future in received:
            assert isinstance(future.exception(PROMPT_S), PeerLost)
        with pytest.raises(TransportTimeout):
            link.receivers[0].connect(b"anyone?", timeout_s=0.1)

    # Other processes

    def test_a_receiver_killed_while_receiving_is_lost(self, processes: Link) -> None:
        good = processes.add_echo()
        child, peer = processes.add_process()
        processes.check([good, peer])
        frame = Frame(b"large", processes.payload_of(4 << 20))
        timer = threading.Timer(0.2, child.kill)
        timer.start()
        with within(0.2 + 2 * PROMPT_S):
            assert peer in lost_peers(processes, [good, peer], frame, timeout_s=PATIENCE_S)
        processes.check([good])

    def test_a_stopped_receiver_is_late_and_dropped(self, processes: Link) -> None:
        good, also_good = processes.add_echo(), processes.add_echo()
        child, peer = processes.add_process()
        processes.check([peer, good, also_good])
        child.pause()
        with within(2 * PROMPT_S):
            peers, frame = [good, also_good, peer], Frame(b"hello?", processes.payload_of(4 << 20))
            assert lost_peers(processes, peers, frame, timeout_s=5.0) == {peer}
        assert not processes.sender.is_connected(peer)
        processes.check([good, also_good])

    def test_receivers_notice_a_killed_sender(self, tmp_path: Path) -> None:
        ends = self.ends(tmp_path)
        if not ends.crosses_processes:
            pytest.skip("does not cross processes")
        receivers = [ends.receiver(), ends.receiver()]
        with Child(sender_process, ends.sender, 2) as child:
            for receiver in receivers:
                # The sender is still starting: connecting waits for it.
                receiver.connect(b"hello", timeout_s=PATIENCE_S)
            received = [background(lambda r=r: r.receive(timeout_s=PATIENCE_S)) for r in receivers]  # type: ignore[misc]
            first = Frame(b"first", payload_of(1000))
            assert all(same_frame(future.result(PATIENCE_S), first) for future in received)
            child.kill()
        for receiver in receivers:
            with within(PROMPT_S), pytest.raises(PeerLost):
                receiver.receive(timeout_s=PATIENCE_S)
            receiver.close()
