"""The recipe for torchrun on two hosts, whose firewalls drop all but the ports that it documents.

The hosts are network namespaces of this one, for which it takes root, `ip` and `nft`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integrations.test_torchrun import Host, check_a_node_that_comes_back, two_nodes

STORE, PORT, TRAINER, FOLLOWER = 29500, 29600, "10.77.0.1", "10.77.0.2"
RANGE = (30000, 30199)  # what gloo listens on
RULES = """
table inet only {{
  chain input {{
    type filter hook input priority 0; policy drop;
    iif lo accept
    ct state established accept
    tcp dport {{ {ports} }} accept
    meta l4proto tcp counter
  }}
}}
"""

pytestmark = [
    pytest.mark.timeout(170),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nft"),
        reason="network namespaces and firewalls take root, ip and nft",
    ),
]


def call(*command: str, told: str | None = None) -> str:
    done = subprocess.run(command, input=told, text=True, capture_output=True, check=False)
    assert done.returncode == 0, (command, done.stderr)
    return done.stdout


def on(name: str) -> Host:
    return "ip", "netns", "exec", name


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Namespaces of a host that trains and of one that follows, joined by a cable."""
    names = [f"deltasync-{os.getpid()}-{number}" for number in range(2)]
    own = f"{STORE}, {PORT}-{PORT + 5}, "
    with ExitStack() as stack:
        for name in names:
            call("ip", "netns", "add", name)
            stack.callback(call, "ip", "netns", "del", name)
        cable = ["type", "veth", "peer", "name", "cable", "netns", names[1]]
        call("ip", "-n", names[0], "link", "add", "cable", *cable)
        for name, address, ports in zip(names, (TRAINER, FOLLOWER), (own, ""), strict=True):
            call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                call("ip", "-n", name, "link", "set", device, "up")
            first, last = map(str, RANGE)
            call(*on(name), "sysctl", "-w", f"net.ipv4.ip_local_port_range={first} {last}")
            rules = RULES.format(ports=f"{ports}{first}-{last}")
            call(*on(name), "nft", "-f", "-", told=rules)
        yield names


def dropped(name: str) -> int:
    """TCP packets that the host's firewall did not let in."""
    rules = call(*on(name), "nft", "list", "ruleset")
    found = re.search(r"counter packets (\d+)", rules)
    assert found, rules
    return int(found[1])


@pytest.mark.promise(
    "Engines and trainers of several ranks",
    "Behind firewalls a torchrun of two nodes needs the documented ports alone.",
)
def test_nodes_need_the_documented_ports_alone(
    hosts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "cable")  # of the trainer's own group
    monkeypatch.setenv("DELTASYNC_SECRET", "of these two")
    with ExitStack() as stack:
        where = [on(name) for name in hosts]
        lines, second, again = two_nodes(
            stack, tmp_path, address=TRAINER, store=STORE, port=PORT, hosts=where
        )
        check_a_node_that_comes_back(lines, second, again)
        before = [dropped(name) for name in hosts]
    knock = f"import socket; socket.create_connection(({TRAINER!r}, {PORT + 6}), timeout=0.5)"
    done = subprocess.run(
        [*where[1], sys.executable, "-c", knock], capture_output=True, text=True, check=False
    )
    assert "TimeoutError" in done.stderr  # dropped, and not refused
    assert dropped(hosts[0]) > before[0]
    assert before == [0, 0]  # nothing has knocked anywhere else
