"""Machines made of Linux namespaces, for tests in which a whole host dies or falls silent.

A `Host` has its own network, process table, hostname, /tmp and /dev/shm. It sees the real machine's
other files, and shares its processors, memory, kernel and clock. That is enough for programs that
take themselves to own a machine, as Ray's do. The hosts of a `Fleet` hang on one switch, a bridge
in a network of its own, and reach each other and nothing else: neither the real machine nor the
internet.

Rules:
- A namespace is held by a process and has no name anywhere, so two fleets never meet. When its
  first process ends, Linux ends all others in it and takes its network away.
- A first process reads a pipe from the test process and ends when that closes, so hosts are gone
  also where the test process is killed.
- What a host writes to its /tmp stays in the fleet's folder, to be looked at after a failure.
It takes root, iproute2 and util-linux; `why_no_hosts` says what is lacking. With SSH, for which
openssh and rsync have to be there too, root can log in to each host with the key of the fleet; /tmp
is then root's home, so that nothing of the real machine's is touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

_TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname", "bash")
_SSH_TOOLS = ("sshd", "ssh", "ssh-keygen", "rsync")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SUBNET = "10.77.0"
_MACHINE = ("--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc")
_END_TIMEOUT_S = 20.0
_ANSWER_TIMEOUT_S = 20.0

# First process of the switch: it makes the bridge and holds the network until its stdin closes.
# The bridge is also the hosts' gateway, which leads nowhere: a program that asks for the route to
# the internet learns its own address, and one that takes it gets an error at once.
_SWITCH = """
set -euo pipefail
ip link set lo up
ip link add name br0 type bridge forward_delay 0
ip address add "$1.1/24" dev br0
ip link set br0 up
echo 1 > /proc/sys/net/ipv4/ip_forward
echo ready
read -r _ || exit 0
"""

# First process of a host. Arguments: its name, its folder, bytes of /dev/shm, and shared paths,
# which stay visible, read-only, also where they lie under the /tmp that the host's own one hides.
# Where it has settings of an sshd, that runs.
# Names of hosts come from a file and no name server is asked: none answers, and a try takes 5 s.
_BOOT = """
set -euo pipefail
name=$1 folder=$2 shm_bytes=$3; shift 3
hostname "$name"
ip link set lo up
for shared; do
    [[ $shared == /tmp/* ]] || continue
    mkdir -p "$folder$shared"
    mount --bind "$shared" "$folder$shared"
    mount -o remount,bind,ro "$folder$shared"
done
mount --bind "$folder/hosts" /etc/hosts
mount --bind /dev/null /etc/resolv.conf
mount -t tmpfs -o "mode=1777,size=$shm_bytes" tmpfs /dev/shm
mount --rbind "$folder/tmp" /tmp
cd /
if [[ -e /tmp/.ssh/sshd_config ]]; then
    mount --bind /tmp/.ssh/passwd /etc/passwd
    mount -t tmpfs tmpfs /run
    mkdir /run/sshd
    "$(type -P sshd)" -f /tmp/.ssh/sshd_config -E /tmp/.ssh/log
fi
echo ready
read -r _ || exit 0
"""


_SSHD_CONFIG = """
HostKey /tmp/.ssh/hostkey
PidFile none
StrictModes no
UsePAM no
UseDNS no
PrintMotd no
MaxStartups 64
MaxSessions 64
"""


def why_no_hosts(*, ssh: bool = False) -> str | None:
    """Return why this machine can't have hosts, which can be logged in to; None where it can."""
    if not sys.platform.startswith("linux"):
        return "hosts are made of Linux namespaces"
    if os.geteuid() != 0:
        return "only root may make namespaces"
    tools = _TOOLS + _SSH_TOOLS * ssh
    missing = [tool for tool in tools if shutil.which(tool, path=SYSTEM_PATH) is None]
    if missing:
        return f"programs are missing: {', '.join(missing)}"
    trial = (
        "ip link add name br0 type bridge && ip link add name v0 type veth peer name v1 "
        "&& mount -t tmpfs tmpfs /dev/shm"
    )
    found = subprocess.run(
        ["unshare", *_MACHINE, "bash", "-c", trial],
        env={"PATH": SYSTEM_PATH},
        capture_output=True,
        text=True,
    )
    if found.returncode != 0:
        return f"namespaces are not allowed here: {found.stderr.strip()}"
    return None


class Fleet:
    """Hosts h1 ... hN on one switch, all switched on; end it by `destroy` or as a context."""

    def __init__(
        self,
        folder: Path,
        num_hosts: int,
        *,
        shared: Sequence[Path] = (),
        shm_bytes: int = 2**28,
        ssh: bool = False,
    ) -> None:
        """Make the hosts.

        Args:
            folder: an empty one for the hosts' files.
            num_hosts: how many.
            shared: paths that the hosts have to see, read-only, wherever these lie.
            shm_bytes: size of each host's /dev/shm.
            ssh: whether one can log in to them.

        Raises:
            RuntimeError: they can't be made; says why.
        """
        self._held: dict[str, subprocess.Popen[str]] = {}
        self._folder = folder
        self._shared = [str(path.resolve()) for path in shared]
        self._shm_bytes = shm_bytes
        self._has_ssh = ssh
        if ssh:
            _make_key(self.key)
        self.hosts = [Host(self, f"h{i}", f"{_SUBNET}.{10 + i}") for i in range(1, num_hosts + 1)]
        try:
            self._hold("switch", ["--net"], _SWITCH, [_SUBNET])
            for host in self.hosts:
                host.power_on()
        except BaseException:
            self.destroy()
            raise

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.destroy()

    @property
    def key(self) -> Path:
        """The private key that all hosts let in."""
        return self._folder / "key"

    def destroy(self) -> None:
        """End every process on every host, and the networks with them."""
        for name in reversed(list(self._held)):
            self._let_go(name)

    def _boot(self, host: Host) -> None:
        (host.folder / "tmp").mkdir(parents=True, exist_ok=True)
        names = ["127.0.0.1 localhost", *(f"{each.address} {each.name}" for each in self.hosts)]
        (host.folder / "hosts").write_text("\n".join(names) + "\n")
        if self._has_ssh:
            self._prepare_ssh(host.folder / "tmp")
        arguments = [host.name, str(host.folder), str(self._shm_bytes), *self._shared]
        pid = self._hold(host.name, _MACHINE, _BOOT, arguments)
        self._on_switch("link", "add", host.name, "type", "veth", "peer", "eth0", "netns", str(pid))
        self._on_switch("link", "set", host.name, "master", "br0", "up")
        host.run(["ip", "address", "add", f"{host.address}/24", "dev", "eth0"])
        host.run(["ip", "link", "set", "eth0", "up"])
        host.run(["ip", "route", "add", "default", "via", f"{_SUBNET}.1"])

    def _prepare_ssh(self, home: Path) -> None:
        """Write what a host's sshd needs, and the files of a fresh account."""
        folder = home / ".ssh"
        if folder.exists():
            return
        folder.mkdir()
        _make_key(folder / "hostkey")
        shutil.copy(self.key.with_suffix(".pub"), folder / "authorized_keys")
        (folder / "sshd_config").write_text(_SSHD_CONFIG)
        users = [u for u in Path("/etc/passwd").read_text().splitlines() if u[:5] != "root:"]
        (folder / "passwd").write_text("\n".join(["root:x:0:0:root:/tmp:/bin/bash", *users, ""]))
        (home / ".bashrc").touch()

    def _take_away(self, host: Host) -> None:
        self._on_switch("link", "delete", host.name)
        self._let_go(host.name)

    def _on_switch(self, *command: str) -> None:
        _run(["nsenter", f"--net={_namespace(self._held['switch'], 'net')}", "ip", *command])

    def _entrance(self, host: Host) -> list[str]:
        holder = self._held.get(host.name)
        if holder is None:
            raise RuntimeError(f"{host.name} is off")
        kinds = {
            "net": "net",
            "mount": "mnt",
            "uts": "uts",
            "ipc": "ipc",
            "pid": "pid_for_children",
        }
        enter = [f"--{kind}={_namespace(holder, file)}" for kind, file in kinds.items()]
        return ["nsenter", *enter, "--", "env", "--chdir=/tmp"]

    def _hold(
        self, name: str, namespaces: Sequence[str], script: str, arguments: Sequence[str]
    ) -> int:
        """Start a first process in new namespaces; return the pid of their holder."""
        with (self._folder / f"{name}.log").open("a") as log:
            holder = subprocess.Popen(
                ["unshare", *namespaces, "bash", "-c", script, name, *arguments],
                env={"PATH": SYSTEM_PATH},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._held[name] = holder
        assert holder.stdout is not None
        if holder.stdout.readline() != "ready\n":
            raise RuntimeError(f"{name} did not start: {self._log(name)}")
        return holder.pid

    def _let_go(self, name: str) -> None:
        holder = self._held.pop(name)
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.close()
        holder.wait(_END_TIMEOUT_S)
        holder.stdout.close()

    def _log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-4000:]


class Host:
    """One machine of a fleet."""

    def __init__(self, fleet: Fleet, name: str, address: str) -> None:
        """Note where it belongs; the fleet switches it on."""
        self.name = name
        self.address = address
        self._fleet = fleet

    @property
    def folder(self) -> Path:
        """The host's /tmp is `tmp` in here."""
        return self._fleet._folder / self.name

    @property
    def log(self) -> str:
        """The end of what programs on the host wrote to stderr."""
        return self._fleet._log(self.name)

    def power_on(self) -> None:
        """Start the host, with the files in /tmp that it had, and plug it in."""
        self._fleet._boot(self)

    def power_off(self) -> None:
        """Take the host away at once: no process says farewell, no connection is closed."""
        self._fleet._take_away(self)

    def cut(self) -> None:
        """Pull the network cable: nothing is heard any more, neither of the host nor by it."""
        self._fleet._on_switch("link", "set", self.name, "down")

    def restore(self) -> None:
        """Put the network cable back in."""
        self._fleet._on_switch("link", "set", self.name, "up")

    def start(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a program on the host; stdin and stdout are pipes, stderr goes to the host's log.

        It ends with the host at the latest.

        Args:
            command: the program and its arguments.
            env: variables besides PATH, HOME and LANG; the test process' own are not passed on.
        """
        with (self._fleet._folder / f"{self.name}.log").open("a") as log:
            return subprocess.Popen(
                [*self._fleet._entrance(self), *map(str, command)],
                env={"PATH": SYSTEM_PATH, "HOME": "/tmp", "LANG": "C.UTF-8", **(env or {})},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def run(
        self,
        command: Sequence[str | Path],
        env: Mapping[str, str] | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> str:
        """Run a program on the host to its end and return its stdout; see `start`.

        Raises:
            RuntimeError: it failed or took too long; says what it wrote.
        """
        process = self.start(command, env)
        try:
            written, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise RuntimeError(f"{self.name}: {command} took over {timeout_s:g} s") from None
        if process.returncode != 0:
            raise RuntimeError(f"{self.name}: {command} failed: {written}\n{self.log}")
        return written

    def says(self, condition: str) -> bool:
        """Return whether a bash command succeeds on the host."""
        process = self.start(["bash", "-c", condition])
        process.communicate(timeout=_ANSWER_TIMEOUT_S)
        return process.returncode == 0

    def is_running(self, pid: int) -> bool:
        """Return whether a process of the host is there, by its id on the host."""
        return self.says(f"kill -0 {pid}")


def _make_key(path: Path) -> None:
    _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)])


def _namespace(holder: subprocess.Popen[str], file: str) -> str:
    return f"/proc/{holder.pid}/ns/{file}"


def _run(command: Sequence[str]) -> None:
    found = subprocess.run(command, env={"PATH": SYSTEM_PATH}, capture_output=True, text=True)
    if found.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {found.stderr.strip()}")
