"""What the two ends of the collective transport say to each other; see collective.py."""

from __future__ import annotations

import struct

# Of everything but FRAME, which is a header alone, first. READY repeats that of what it answers;
# what is wrong follows.
TICKET = struct.Struct("<Q")
# Rank, size, store port, timeout; the back end follows, a space and the group's name.
GROUP = struct.Struct("<IIHxd")
# The longest payload that is to come.
ROOM = struct.Struct("<Q")
# Payload bytes, how long it may be in flight; the frame's header follows.
START = struct.Struct("<Qd")
MAX_COMPLAINT_BYTES = 2000
# How long ABANDON, or the loss that made a group fail, may take to show.
GRACE_S = 1.0
# How long the loss that made a broadcast fail may take to be told: the sender may be packing.
TELL_S = 5.0
# What is under way when a group is abandoned, or the connection ends, may still arrive.
MOMENT_S = 0.1
