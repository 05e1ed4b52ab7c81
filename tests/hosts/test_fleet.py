"""The hosts that the other tests rely on: apart from each other, silent when cut, gone when off."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hosts.fleet import Fleet, Host
from tests.hosts.ray_on_hosts import PYTHON

pytestmark = pytest.mark.slow

_LISTEN = """
import socket
server = socket.create_server(("", 7000))
print("listening", flush=True)
while True:
    server.accept()[0].close()
"""
_CALL = "import socket, sys; socket.create_connection((sys.argv[1], 7000), 2).close()"


def can_reach(host: Host, other: Host) -> bool:
    try:
        host.run([PYTHON, "-c", _CALL, other.name])
    except RuntimeError:
        return False
    return True


def listen(host: Host) -> subprocess.Popen[str]:
    process = host.start([PYTHON, "-c", _LISTEN])
    assert process.stdout is not None
    assert process.stdout.readline() == "listening\n"
    return process


def test_a_cut_host_is_not_reached_until_its_link_is_restored(hosts: Sequence[Host]) -> None:
    first, second, third = hosts
    for host in (second, third):
        listen(host)
    assert can_reach(first, second)
    second.cut()
    assert not can_reach(first, second)
    assert not can_reach(second, third)
    assert can_reach(first, third)
    second.restore()
    assert can_reach(first, second)


def test_a_host_without_power_runs_nothing_and_comes_back_with_its_files(
    hosts: Sequence[Host],
) -> None:
    first, second, _ = hosts
    second.run(["touch", "/tmp/kept", "/dev/shm/lost"])
    server = listen(second)
    second.power_off()
    assert server.wait(60.0) != 0
    with pytest.raises(RuntimeError, match="is off"):
        second.run(["true"])
    second.power_on()
    assert second.run(["ls", "/dev/shm"]) == ""
    assert "kept" in second.run(["ls", "/tmp"]).split()
    assert not can_reach(first, second)
    listen(second)
    assert can_reach(first, second)


def test_a_program_that_takes_too_long_is_ended(hosts: Sequence[Host]) -> None:
    with pytest.raises(RuntimeError, match="took over"):
        hosts[0].run(["bash", "-c", "sleep infinity; true"], timeout_s=0.5)
    assert not hosts[0].says("grep -qsx sleep /proc/[0-9]*/comm")


def test_hosts_see_neither_each_others_files_nor_processes(hosts: Sequence[Host]) -> None:
    first, second, _ = hosts
    first.run(["touch", "/tmp/mine", "/dev/shm/mine"])
    listen(first)
    assert "mine" in first.run(["ls", "/tmp"]).split()
    assert "mine" not in second.run(["ls", "/tmp", "/dev/shm"]).split()
    assert "python" not in second.run(["bash", "-c", "cat /proc/[0-9]*/comm"])


def test_nothing_is_left_of_a_fleet(tmp_path: Path, hosts: Sequence[Host]) -> None:
    """Two fleets are up at once, with the same addresses; the end of one is no end of the other."""
    folder = tmp_path / "second"
    folder.mkdir()
    with Fleet(folder, 2) as fleet:
        server = fleet.hosts[0].start(["sleep", "infinity"])
        assert server.poll() is None
    assert server.wait(60.0) != 0
    assert hosts[0].run(["hostname"]) == "h1\n"
