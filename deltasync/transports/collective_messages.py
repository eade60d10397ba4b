"""What the two ends of the collective transport say to each other; see collective.py."""

from __future__ import annotations

import struct

DEFAULT_MAX_PAYLOAD_BYTES = 4 << 30
# Ticket, payload bytes, timeout. Without a payload to come (ticket 0) the header follows; with one
# it follows START.
FRAME = struct.Struct("<Qqd")
NO_PAYLOAD = -1
# Ticket, rank, size, store port, timeout; the back end follows, a space and the group's name.
GROUP = struct.Struct("<QIIHxd")
# Of START, after which a frame's header follows; of READY, where what is wrong follows; of PACKED
# and ABANDON.
TICKET = struct.Struct("<Q")
MAX_COMPLAINT_BYTES = 2000
# How long ABANDON, or the loss that made a group fail, may take to show.
GRACE_S = 1.0
# How long the loss that made a broadcast fail may take to be told: the sender may be packing.
TELL_S = 5.0
# What is under way when a group is abandoned, or the connection ends, may still arrive.
MOMENT_S = 0.1
