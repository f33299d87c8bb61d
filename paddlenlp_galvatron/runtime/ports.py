"""Free TCP ports of this host."""

from __future__ import annotations

import random
import socket

# Below Linux's range for outgoing connections (net.ipv4.ip_local_port_range starts at 32768), so that none of them
# takes a port between its choice and its use.
LOWEST, HIGHEST = 20000, 32767
ATTEMPTS = 200


def free_ports(count: int, address: str = "") -> list[int]:
    """Ports on which nothing listens, all different."""
    generator = random.SystemRandom()
    found: dict[int, socket.socket] = {}
    try:
        for _ in range(ATTEMPTS * count):
            if len(found) == count:
                return list(found)
            port = generator.randint(LOWEST, HIGHEST)
            probe = socket.socket()
            try:
                probe.bind((address, port))
                found[port] = probe
            except OSError:
                probe.close()
        raise OSError(f"no {count} free TCP ports between {LOWEST} and {HIGHEST}")
    finally:
        for probe in found.values():
            probe.close()
