"""Broken and hostile receivers: named by the sender, and the good ones are served."""

from __future__ import annotations

import pytest
from torch import nn

from deltasync import DeltaSyncError, SyncStats
from deltasync.delta.bits import as_bits
from tests.worlds.links import Fleet, bits_equal, fleet, until
from tests.worlds.peers import Liar, Tamper, model, prepare, welcome, with_

WRONG = "0123456789abcdef"

LIES: dict[str, tuple[str, Tamper, str]] = {
    "garbage hello": ("hello", lambda _: [b"garbage"], "TruncatedFrame"),
    "hello of a format to come": (
        "hello",
        with_(format_versions=[99]),
        "format 2, the receiver [99]",
    ),
    "hello of other parameters": ("hello", with_(parameters=[[["x"], [3], 1]]), ""),
    "another message than held": ("held", lambda _: [welcome()], "answered the layout"),
    "another message than prepared": ("prepared", lambda _: [prepare()], "answered with prepare"),
}
for kind in ("held", "prepared", "committed"):
    LIES[f"{kind} as random bytes"] = (kind, lambda _: [bytes(range(100))], "BadMagic")
    LIES[f"no {kind}"] = (kind, lambda _: [], "TransportTimeout")
    LIES[f"{kind} twice"] = (kind, lambda message: [message] * 2, f"answered with {kind}")
for kind in ("prepared", "committed"):
    LIES[f"{kind} of another version"] = (kind, with_(version=99), kind)
    LIES[f"{kind} of another digest"] = (kind, with_(digest=WRONG), "DigestMismatch")


@pytest.mark.parametrize("name", LIES)
def test_a_bad_receiver_is_named_and_the_good_one_is_served(name: str) -> None:
    kind, tamper, reason = LIES[name]
    source, good, bad = model(3), model(3), model(3)
    with fleet(source) as here:
        here.add(good, engine="good")
        here.wait(1)
        liar = here.add(bad, engine="bad", wrap=lambda inner: Liar(inner, kind, tamper))
        if kind != "hello":
            here.wait(2)
        heard = list[str]()
        for turn in range(100):  # joining, and two deltas; more if a bad hello takes its time
            if turn > 2 and (heard or liar.errors):
                break
            version = here.sender.version
            stats = here.sender.send_weights(timeout_s=patience_s(reason))
            assert here.sender.version == stats.version == version + 1
            assert bits_equal(source, good)
            heard += [why for who, why in stats.lost.items() if who.startswith("bad")]
            assert not [who for who in stats.lost if who.startswith("good")]
            nudge(source)
        told = [str(error) for error in liar.errors]
        assert any(reason in why for why in [*heard, *told]), (heard, told)
        settle(here, 2)
        assert bits_equal(source, good)
        assert bits_equal(source, bad)


# Of two answers the first is a good one: that version is decided.
UNPREPARED = [n for n, (kind, _, _) in LIES.items() if kind == "prepared" and "twice" not in n]


@pytest.mark.promise(
    "All or nothing",
    "A version becomes final only when every receiver that takes it has staged it and "
    "predicts the trainer's digest.",
)
@pytest.mark.parametrize("name", UNPREPARED)
def test_a_version_that_nobody_prepared_is_not_decided(name: str) -> None:
    kind, tamper, reason = LIES[name]
    source, bad, good = model(3), model(3), model(3)
    with fleet(source) as here:
        here.add(good, engine="good")
        here.add(bad, engine="bad", wrap=lambda inner: Liar(inner, kind, tamper))
        here.wait(2)
        version = here.sender.send_weights().version
        until(lambda: all(one.receiver.version == version for one in here.serving.values()))
        nudge(source)
        here.serving["good/0"].receiver.detach()
        with pytest.raises(DeltaSyncError, match=reason):
            here.sender.send_weights(timeout_s=patience_s(reason))
        assert here.sender.version == version
        assert not here.serving["bad/0"].receiver.is_dirty
        here.serving["good/0"].receiver.attach()
        stats = settle(here, 2)  # the delta is sent again
        assert stats.nnz == 1
        assert bits_equal(source, bad)
        assert bits_equal(source, good)


def test_an_engine_that_left_a_write_half_done_gets_a_full_sync() -> None:
    source, same = model(3), model(3)
    tamper = with_(half_written=True)
    with fleet(source) as here:
        stats = here.join(same, wrap=lambda inner: Liar(inner, "held", tamper))
        assert stats.full_synced == 1
        assert bits_equal(source, same)


def patience_s(reason: str) -> float:
    """For who is silent the whole time is waited. The good one has to answer within it."""
    return 1 if reason == "TransportTimeout" else 60


def nudge(source: nn.Module) -> None:
    as_bits(source.get_parameter("a").data)[2, 3] ^= 1


def settle(here: Fleet, count: int) -> SyncStats:
    """Until all receivers are members and a sync finds nothing to complain of."""
    for _ in range(5):
        here.wait(count)
        stats = here.sender.send_weights(timeout_s=60)
        if not stats.lost and stats.receivers == count:
            return stats
    raise AssertionError("the fleet does not settle")
