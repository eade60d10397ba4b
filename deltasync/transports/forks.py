"""What a forked child inherits of its parent's ends: nothing that it can use, hold or break.

A fork copies objects, descriptors and locks, and of all threads only the one that forked. So a
child closes the descriptors that it was given copies of, without a word on the connections, which
are the parent's: the other end hears that the parent is gone when the parent is. Objects are inert
in the child: calls raise TransportClosed, closing does nothing, and no lock is held by a thread
that is not there. What C++ made (process groups, stores) is never destroyed in a child, which would
wait for its threads; its descriptors stay open until the child ends.

Programs that are started, by `subprocess` or `exec`, inherit no descriptor made by Python.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import socket
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet

PARENTS_OWN = "this is of the process that forked this one; make another one here"


_Native = TypeVar("_Native")
_Closable = TypeVar("_Closable", bound=socket.socket | selectors.BaseSelector)

making = threading.RLock()
"""Hold it from the moment that a descriptor exists until its owner is known; never while waiting.

No fork happens meanwhile, so that no child has a descriptor of which it does not know.
"""
_closables: WeakSet[socket.socket | selectors.BaseSelector] = WeakSet()
_inert: WeakKeyDictionary[object, Callable[[Any], None]] = WeakKeyDictionary()
_natives: WeakSet[object] = WeakSet()


def closed_in_children(closable: _Closable) -> _Closable:
    """The same; children close it, which gives a descriptor up and does nothing else."""
    _closables.add(closable)
    return closable


def inert_in_children(forked: Callable[[], None]) -> None:
    """Let children call this method, which makes its object inert, while that lives.

    It is called in a child by its only thread. It must not block or raise. Nothing that is shared
    with the parent may change, and locks may be held for good.
    """
    assert isinstance(forked, MethodType)
    _inert[forked.__self__] = forked.__func__


def kept_in_children(native: _Native) -> _Native:
    """The same; children never destroy it."""
    _natives.add(native)
    return native


def keep(thing: object) -> None:
    """Let nothing destroy `thing`, not even the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def new_socket(family: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A socket that children close."""
    with making:
        return closed_in_children(socket.socket(family, kind))


def _end_in_child() -> None:
    for native in list(_natives):
        keep(native)
    for inert, forked in list(_inert.items()):
        forked(inert)
    for closable in list(_closables):
        with contextlib.suppress(OSError):
            closable.close()
    making.release()


os.register_at_fork(
    before=making.acquire, after_in_parent=making.release, after_in_child=_end_in_child
)
