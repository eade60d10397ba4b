"""A rank of a trainer connects anew while rank 0 waits for its answer."""

from __future__ import annotations

import pytest

from deltasync.errors import SyncAborted
from deltasync.sync.group import orders
from deltasync.sync.group.group import GroupCalls, TrainerGroup
from deltasync.sync.protocol.links import CallTimeout
from deltasync.transports import inprocess
from deltasync.wire.frame import encode


def test_a_rank_that_connects_anew_while_an_answer_is_owed_aborts_the_call_and_no_more() -> None:
    hub = inprocess.Sender()
    group = GroupCalls(TrainerGroup(hub, 3))

    def come(rank: int) -> inprocess.Receiver:
        link = hub.receiver()
        here = orders.Here(rank=rank, world=3, capture=None, address=None)
        link.connect(encode(here), timeout_s=5)
        return link

    first, second = come(1), come(2)
    group.gather(CallTimeout(0.2))
    group.order(orders.Declare(call=1))
    first.close()
    second.close()
    come(1)
    with pytest.raises(SyncAborted, match="rank 2 of the trainer did not come"):
        group.gather(CallTimeout(0.2))  # which has heard of rank 1's new connection
    with pytest.raises(SyncAborted, match="a rank of the trainer is gone"):
        group.order(orders.Declare(call=1))
    come(1)
    come(2)
    group.gather(CallTimeout(0.2))
    group.order(orders.Declare(call=1))
