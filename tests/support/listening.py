"""TCP ports that the processes of this machine listen on, from ``/proc``."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

_LISTEN = "0A"


class Listening(NamedTuple):
    """One listening socket and a process that holds it."""

    process: str
    address: str
    port: int

    @property
    def out_of_reach(self) -> bool:
        """Whether only this machine's own processes reach it."""
        address = ipaddress.ip_address(self.address)
        mapped = getattr(address, "ipv4_mapped", None)
        return (mapped or address).is_loopback


def listening_sockets(processes: Iterable[psutil.Process]) -> list[Listening]:
    """The listening sockets of these processes."""
    sockets = _listening_by_inode()
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            name = f"{process.pid} {process.name()}"
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    target = os.readlink(descriptor)
                    if target.startswith("socket:["):
                        inode = int(target[8:-1])
                        if inode in sockets:
                            found.append(Listening(name, *sockets[inode]))
    return found


def family(process: psutil.Process) -> list[psutil.Process]:
    """A process and all that descend from it."""
    return [process, *process.children(recursive=True)]


def _listening_by_inode() -> dict[int, tuple[str, int]]:
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                address, port = fields[1].split(":")
                sockets[int(fields[9])] = (_address(address), int(port, 16))
    return sockets


def _address(text: str) -> str:
    """An address as ``/proc`` has it: words of 32 bits, each in the machine's byte order."""
    words = (bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8))
    return str(ipaddress.ip_address(b"".join(words)))
