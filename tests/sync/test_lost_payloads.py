"""Payloads that are lost with a receiver: over gloo they travel from one to the next."""

from __future__ import annotations

import pytest
import torch

from deltasync import ReceiverOptions, SenderOptions
from deltasync.errors import PeerLost
from deltasync.transports import collective
from deltasync.transports.base import ReceiveTransport
from tests.worlds.links import bits_equal, fleet, random_model, step

SHAPES = {"a": (64, 1024), "b": (33,), "c": (64, 512)}
OPTIONS = SenderOptions(bucket_bytes=120_000)
STAGED = ReceiverOptions(stall_timeout_s=60)


class End(collective.Receiver):
    """A receiver that has been ready for a payload, and passes it on to nobody.

    Attributes:
        dies_at: The payload, from 1 on; 0 for none.
    """

    dies_at = 0

    def _on_start(self, data: bytes) -> None:
        if self.dies_at and self._granted is not None:
            self.dies_at -= 1
            if self.dies_at == 0:
                self._forget()
                raise PeerLost("planted")
        super()._on_start(data)


class Link(collective.Sender):
    def receiver(self) -> End:
        return End(*self.address)


@pytest.mark.promise(
    "All or nothing",
    "Where a payload travels by way of other receivers and is lost with one of them, those "
    "that miss it stay members, and have the version when the call returns.",
)
@pytest.mark.timeout(300)  # gloo forms groups anew
def test_who_misses_a_payload_has_the_version_after_the_next_attempt() -> None:
    """One of three is lost at each place of the chain, and rejoins at its end."""
    source, generator = random_model(SHAPES, 0), torch.Generator().manual_seed(1)
    held = {f"e{number}": random_model(SHAPES, 1 + number) for number in range(3)}
    ends, order = list[ReceiveTransport](), list(held)

    def kept(link: ReceiveTransport) -> ReceiveTransport:
        ends.append(link)
        return link

    with fleet(source, options=OPTIONS, link=Link) as here:
        for name, module in held.items():
            here.add(module, engine=name, options=STAGED, wrap=kept)
        end_of = dict(zip(held, ends, strict=True))
        here.wait(3)
        here.sender.send_weights(timeout_s=60)
        for place, payload in ((0, 1), (0, 4), (1, 2), (2, 4)):
            dies = order.pop(place)
            order.append(dies)
            end = end_of[dies]
            assert isinstance(end, End)
            end.dies_at = payload
            step(source, generator, 0.6)
            stats = here.sender.send_weights(timeout_s=60)
            assert (stats.receivers, list(stats.lost)) == (2, [f"{dies}[0/1]"])
            assert stats.num_buckets == 4
            for name in held.keys() - {dies}:
                assert bits_equal(source, held[name])
                serving = here.serving[f"{name}/0"]
                assert (serving.errors, serving.receiver.is_dirty) == ([], False)
            here.serving[f"{dies}/0"].errors.clear()
            here.wait(3)
            assert here.sender.send_weights(timeout_s=60).receivers == 3
            assert all(bits_equal(source, module) for module in held.values())
