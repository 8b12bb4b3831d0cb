"""A cable between two network namespaces that delays each packet and loses some, as ``tc netem``.

    python -m tests.slow_cable DEVICE PID PID LATENCY LOSS

carries packets between two TUN devices in the namespaces of the processes. It writes "made" once
the devices exist, and ends with its standard input. Needs root.
"""

from __future__ import annotations

import fcntl
import os
import random
import selectors
import struct
import sys
import time
from collections import deque

from tests.netns import enter_network_of

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_INTERFACE = struct.Struct("16sH22x")
_PACKET_BYTES = 1 << 16
_BURST = 64
"""Packets that are read from one end before it is seen which others are due."""


def main() -> None:
    device, first, second, latency, loss = sys.argv[1:]
    ends = [_device(device, int(pid)) for pid in (first, second)]
    print("made", flush=True)  # noqa: T201
    _carry((ends[0], ends[1]), float(latency), float(loss))


def _device(name: str, pid: int) -> int:
    """A new TUN device in the network of process ``pid``: what is written there arrives there."""
    enter_network_of(pid)
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, _INTERFACE.pack(name.encode(), _IFF_TUN | _IFF_NO_PI))
    return end


def _carry(ends: tuple[int, int], latency: float, loss: float) -> None:
    lost = random.Random(0)
    under_way: deque[tuple[float, int, bytes]] = deque()
    with selectors.DefaultSelector() as ready:
        ready.register(sys.stdin, selectors.EVENT_READ)
        ready.register(ends[0], selectors.EVENT_READ, ends[1])
        ready.register(ends[1], selectors.EVENT_READ, ends[0])
        while True:
            wait = under_way[0][0] - time.monotonic() if under_way else None
            for key, _ in ready.select(None if wait is None else max(wait, 0)):
                if key.fileobj is sys.stdin:
                    return
                for packet in _burst(key.fd):
                    if lost.random() >= loss:
                        under_way.append((time.monotonic() + latency, key.data, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, end, packet = under_way.popleft()
                _write(end, packet)


def _burst(end: int) -> list[bytes]:
    """Packets that have come, in order."""
    packets: list[bytes] = []
    try:
        while len(packets) < _BURST:
            packets.append(os.read(end, _PACKET_BYTES))
    except BlockingIOError:
        pass
    return packets


def _write(end: int, packet: bytes) -> None:
    try:
        os.write(end, packet)
    except OSError:
        return  # the device is not up: as if nobody had plugged it in


if __name__ == "__main__":
    main()
