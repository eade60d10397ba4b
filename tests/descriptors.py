"""What this process has open. A test counts its own: other threads open and close, too."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def open_links() -> list[str]:
    """What each descriptor of this process leads to."""
    links = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{name}"))
    return links


def open_below(folder: Path) -> list[str]:
    """The open ones of the files in `folder`, itself included."""
    return [link for link in open_links() if Path(link).is_relative_to(folder)]
