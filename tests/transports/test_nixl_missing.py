"""Where NIXL is not installed, its transport says what to do."""

import sys

import pytest

from deltasync.errors import TransportUnavailable
from deltasync.transports.nixl import Receiver, Sender


@pytest.mark.promise("Errors", "`TransportUnavailable` says what to use instead.")
def test_without_the_library_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)  # as an import that fails leaves it
    with pytest.raises(TransportUnavailable, match=r"pip install nixl"):
        Sender()
    with pytest.raises(TransportUnavailable, match="use the collective transport"):
        Receiver("127.0.0.1", 1)
