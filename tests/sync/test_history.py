"""Any history of syncs, failures and joins ends bit-equal to a fresh dense copy."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from deltasync import DeltaSyncError, Policy, ReceiverOptions, SenderOptions
from deltasync.delta.bits import as_bits
from deltasync.errors import NoReceivers, SyncAborted, TransportError
from deltasync.transports.base import Frame, ReceiveTransport
from tests.worlds.links import Fleet, Model, ThroughReceiver, bits_equal, fleet


class Faulty(ThroughReceiver):
    """A link that damages one frame when it is told to: everything else passes through."""

    def __init__(self, inner: ReceiveTransport) -> None:
        super().__init__(inner)
        self.plan: list[tuple[str, int]] = []

    def receive(self, *, timeout_s: float) -> Frame:
        frame = self._inner.receive(timeout_s=timeout_s)
        if not self.plan:
            return frame
        fault, countdown = self.plan[0]
        if countdown:
            self.plan[0] = (fault, countdown - 1)
            return frame
        self.plan.pop(0)
        return damaged(frame, fault, lambda: self._inner.receive(timeout_s=timeout_s))


def damaged(frame: Frame, fault: str, next_frame: object) -> Frame:
    header, payload = frame.header, frame.payload
    match fault:
        case "flip header":
            middle = len(header) // 2
            header = header[:middle] + bytes([header[middle] ^ 4]) + header[middle + 1 :]
        case "flip payload" if payload is not None and len(payload):
            payload = payload.clone()
            payload[len(payload) * 2 // 3] ^= 16
        case "truncate" if payload is not None and len(payload):
            payload = payload[:-1].clone()
        case "extend" if payload is not None:
            payload = torch.cat([payload, torch.zeros(8, dtype=torch.uint8)])
        case "drop":
            return next_frame()  # type: ignore[operator, no-any-return]
        case "random":
            header = bytes((7 * i + 3) % 256 for i in range(len(header)))
    return Frame(header, payload)


FAULTS = ["flip header", "flip payload", "truncate", "extend", "drop", "random"]
DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn]


def fresh(numel: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    size = torch.empty((), dtype=dtype).element_size()
    return torch.randint(0, 256, (numel * size,), dtype=torch.uint8, generator=generator).view(
        dtype
    )


@st.composite
def models(draw: st.DrawFn) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    numels = draw(st.lists(st.integers(0, 400), min_size=1, max_size=4))
    tensors = {
        f"p{n}": fresh(numel, draw(st.sampled_from(DTYPES)), generator)
        for n, numel in enumerate(numels)
    }
    strided = fresh(60, torch.bfloat16, generator).view(6, 10).t()
    return tensors | {"strided": strided, "scalar": fresh(1, torch.float32, generator).view(())}


def mutate(model: Model, share: float, generator: torch.Generator) -> None:
    """Change about `share` of the bits patterns of every parameter, in place."""
    for parameter in model.parameters():
        new = fresh(parameter.numel(), parameter.dtype, generator).view(parameter.shape)
        bits = as_bits(parameter)
        chosen = torch.rand(bits.shape, generator=generator) < share
        bits[chosen] = as_bits(new)[chosen]


def blank(tensors: dict[str, Tensor]) -> Model:
    """A model of the same shapes, strides and dtypes with other bits."""
    return Model({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})


steps = st.one_of(
    st.tuples(st.just("sync"), st.sampled_from([0.0, 0.003, 0.05, 0.4, 1.0])),
    st.tuples(st.just("fault"), st.tuples(st.sampled_from(FAULTS), st.integers(0, 6))),
    st.tuples(st.just("invalidate"), st.integers(0, 1)),
    st.tuples(st.just("restart"), st.integers(0, 1)),
    st.tuples(st.just("corrupt"), st.integers(0, 1)),
    st.tuples(st.just("move source"), st.just(0)),
)

options = st.builds(
    SenderOptions,
    policy=st.builds(
        Policy,
        dense_above=st.sampled_from([None, 0.0, 0.3, 1.0]),
        chunk_numel=st.sampled_from([7, 64, 1 << 18]),
    ),
    bucket_bytes=st.sampled_from([256, 1000, 1 << 20]),
    max_inflight_bytes=st.sampled_from([0, 100, None]),
    compression=st.sampled_from(["none", "zstd", "gap", "block", "class"]),
)

receiver_options = st.builds(
    ReceiverOptions,
    max_staged_bytes=st.sampled_from([0, 3000, None]),
    scrub_every=st.just(1),
    chunk_numel=st.sampled_from([13, 1 << 18]),
    stall_timeout_s=st.just(0.3),
)


@pytest.mark.promise(
    "Bits",
    "After any history of steps, failures and joins, receivers hold the trainer's bits.",
)
@settings(
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=80,
    # An example may wait for timeouts: shrinking would take hours.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(models(), options, receiver_options, st.lists(steps, max_size=10), st.integers(0, 2**32))
def test_any_history_ends_bit_equal(
    tensors: dict[str, Tensor],
    sending: SenderOptions,
    receiving: ReceiverOptions,
    history: list[tuple[str, object]],
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    source = Model({name: tensor.clone() for name, tensor in tensors.items()})
    replicas = [blank(tensors), blank(tensors)]
    links: list[Faulty] = []
    with fleet(source, options=sending) as here:

        def start(n: int) -> None:
            def wrap(inner: ReceiveTransport) -> ReceiveTransport:
                links.append(Faulty(inner))
                return links[-1]

            here.add(replicas[n], engine=f"engine{n}", options=receiving, wrap=wrap)

        start(0)
        start(1)
        here.wait(2)
        for action, argument in history:
            match action:
                case "sync":
                    mutate(source, float(argument), generator)  # type: ignore[arg-type]
                    attempt(here)
                case "fault":
                    links[-1].plan.append(argument)  # type: ignore[arg-type]
                case "invalidate":
                    here.serving[f"engine{argument}/0"].receiver.invalidate()
                case "restart":
                    here.serving.pop(f"engine{argument}/0").stop()
                    start(int(argument))  # type: ignore[call-overload]
                case "corrupt":
                    flip_one_bit(replicas[int(argument)], generator)  # type: ignore[call-overload]
                case "move source":
                    for parameter in source.parameters():
                        parameter.data = parameter.data.clone()
        for link in links:
            link.plan.clear()
        mutate(source, 0.1, generator)
        settle(here, 2)
        assert all(bits_equal(source, replica) for replica in replicas)
        assert not any(serving.receiver.is_dirty for serving in here.serving.values())


def attempt(here: Fleet) -> None:
    with suppress(SyncAborted, NoReceivers, TransportError):
        here.sender.send_weights(timeout_s=1)


def settle(here: Fleet, count: int) -> None:
    """Sync until everybody has joined again and a scrub of all weights found nothing."""
    clean = 0
    for _ in range(40):
        try:
            here.wait(count)
            stats = here.sender.send_weights(timeout_s=1)
        except DeltaSyncError:
            clean = 0
            continue
        good = not stats.lost and not stats.joined and stats.receivers == count
        clean = clean + 1 if good else 0
        if clean == 2:  # between the two every receiver has scrubbed all its weights
            return
    raise AssertionError("the fleet does not settle")


def flip_one_bit(model: Model, generator: torch.Generator) -> None:
    parameter = max(model.parameters(), key=lambda p: p.is_contiguous() * p.numel())
    where = int(torch.randint(0, parameter.numel(), (1,), generator=generator))
    as_bits(parameter.data).view(-1)[where] ^= 1
