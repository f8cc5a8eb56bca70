"""Hosts on one machine: namespaces with an address, a name, /dev/shm and processes of their own, joined by a switch.

Each is held by a process that reads from a pipe of this one's: when the pipe closes, however this process ends, the
kernel takes the host away with all of its processes, its memory and its cable. Nothing is left anywhere.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Self

from tests.helpers.paths import ROOT

_USER = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
_ENTER = ["--user", "--preserve-credentials"] if _USER else []
_SETUP = """set -e
read -r outside _ < /proc/self/stat
mount -t proc proc /proc
mount -t tmpfs -o size=512m tmpfs /dev/shm
mount --bind "$2" /etc/hosts
hostname "$1"
ip link set lo up
echo "$outside"
exec cat > /dev/null
"""


class Command:
    """A command that runs on a host; what it prints is in a file."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        """The exit status. Fails with what was printed where it does not end in time."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.log.name} has not ended after {timeout} s:\n{self.text[-8000:]}") from None

    def until(self, pattern: str, timeout: float) -> re.Match[str]:
        """Wait for a line that has ``pattern``."""
        end = time.monotonic() + timeout
        while (found := re.search(pattern, self.text, re.MULTILINE)) is None:
            ended = self.process.poll() is not None
            if (ended or time.monotonic() > end) and re.search(pattern, self.text, re.MULTILINE) is None:
                raise AssertionError(f"{self.log.name} does not say {pattern!r}:\n{self.text[-8000:]}")
            time.sleep(0.05)
        return found


class Host:
    """One of :class:`Hosts`; ``name`` is what others know it by."""

    def __init__(self, hosts: Hosts, number: int) -> None:
        self.hosts = hosts
        self.name = f"host{number}"
        self.address = f"10.77.0.{number + 1}"
        self._port = f"port{number}"
        self._commands: list[Command] = []
        options = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
        setup = ["bash", "-c", _SETUP, "setup", self.name, str(hosts.names)]
        self._holder = subprocess.Popen(
            [*hosts.inside(), "unshare", *options, *setup], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        self.pid = int(self._holder.stdout.readline() or "0")
        assert self.pid, f"{self.name} cannot be set up"
        cable = ["ip", "link", "add", "name", self._port, "type", "veth", "peer", "name", "eth0", "netns"]
        hosts.run(*cable, str(self.pid))
        hosts.run("ip", "link", "set", self._port, "master", "switch", "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def inside(self) -> list[str]:
        """What runs a command on this host."""
        return ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--pid", *_ENTER]

    def run(self, *command: str) -> str:
        return _run([*self.inside(), *command])

    def start(self, *command: str, **environment: str) -> Command:
        """Start ``command`` in the repository's folder. Its output goes to a file."""
        log = self.hosts.folder / f"{self.name}.{len(self._commands)}.log"
        whole = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | environment
        whole["PATH"] = f"{Path(sys.executable).parent}:{whole['PATH']}"
        here = ["bash", "-c", 'cd "$0" && exec "$@"', str(ROOT)]
        with log.open("wb") as out:
            started = subprocess.Popen(
                [*self.inside(), *here, *command], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=whole
            )
        self._commands.append(Command(started, log))
        return self._commands[-1]

    def cable(self, state: str) -> None:
        """``down``: pulled; nobody is told. ``up``: plugged in again."""
        self.hosts.run("ip", "link", "set", self._port, state)

    def throttle(self, rate: str) -> None:
        """Let what comes to this host come at ``rate``, as ``tc`` writes it."""
        queue = ["tbf", "rate", rate, "burst", "16k", "latency", "400ms"]
        self.hosts.run("tc", "qdisc", "replace", "dev", self._port, "root", *queue)

    def die(self) -> None:
        """All of its processes are killed at once, and its memory is gone."""
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.stdout.close()
        self._holder.wait(20)
        for command in self._commands:
            command.wait(20)


class Hosts:
    """``number`` hosts, ``host0`` and so on, which ping each other. Use as a context."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder = folder
        self.names = folder / "hosts"
        lines = [f"10.77.0.{n + 1} host{n}\n" for n in range(9)]
        self.names.write_text("".join(["127.0.0.1 localhost\n", *lines]))
        self._switch = subprocess.Popen(
            ["unshare", *_USER, "--net", "sh", "-c", "echo up; exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.hosts: list[Host] = []
        try:
            assert self._switch.stdout is not None
            assert self._switch.stdout.readline(), "there can be no switch"
            self.run("ip", "link", "add", "name", "switch", "type", "bridge")
            self.run("ip", "link", "set", "switch", "up")
            for _ in range(number):
                self.add()
        except BaseException:
            self.__exit__()
            raise

    def add(self) -> Host:
        """One more."""
        host = Host(self, len(self.hosts))
        self.hosts.append(host)
        return host

    def inside(self) -> list[str]:
        """What runs a command where the switch is."""
        return ["nsenter", f"--target={self._switch.pid}", "--net", *_ENTER]

    def run(self, *command: str) -> str:
        return _run([*self.inside(), *command])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.die()
        assert self._switch.stdin is not None and self._switch.stdout is not None
        self._switch.stdin.close()
        self._switch.wait(20)
        self._switch.stdout.close()


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@cache
def why_not() -> str:
    """Why there can be no hosts on this machine; empty where there can be."""
    script = (
        "mount -t proc proc /proc && mount -t tmpfs tmpfs /dev/shm && hostname h && "
        "ip link add name a0 type veth peer name a1 && ip link add name a2 type bridge"
    )
    command = ["unshare", *_USER, "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "sh", "-c", script]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"namespaces cannot be made: {error}"
    told = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else f"namespaces cannot be made: {told[-1] if told else done.returncode}"


def has_throttle() -> bool:
    """Whether links can be made slow. Not every kernel has the queue that this takes."""
    command = ["unshare", *_USER, "--net", "tc", "qdisc", "replace", "dev", "lo", "root", "tbf"]
    command += ["rate", "1mbit", "burst", "16k", "latency", "400ms"]
    return subprocess.run(command, capture_output=True).returncode == 0
