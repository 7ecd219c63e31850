#!/usr/bin/env -S python3 -B
"""plug.py [DIR]: memory is plugged into a guest under ping and TCP and taken out again; the device sends from it and receives into it."""

import re
from pathlib import Path

import lib
from lib import HOST, Device, Guest, Ping, Stream, begin, fail, kernel, tap, until

# The guest starts with 256 MiB, below 4 GiB, which Linux calls DMA32. A module is plugged in above,
# in the zone Normal, which Linux allocates kernel memory from before it turns to DMA32: from then
# on, new network buffers are in it.
PLUGGED = {"first": 512, "second": 384}


def resident(device, mebibytes):
    """How many KiB of a mapped file of that size the device has touched; None if no such file is mapped."""
    smaps = Path(f"/proc/{device.process.pid}/smaps").read_text()
    found = None
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.M)[1:]:
        start, end = (int(address, 16) for address in mapping.split()[0].split("-"))
        if "memfd:memory-backend-memfd" in mapping and end - start == mebibytes << 20:
            found = (found or 0) + int(re.search(r"^Rss:\s+(\d+) kB", mapping, re.M)[1])
    return found


def plug(name):
    """Plugs a module in, and waits until the device maps it."""
    size = PLUGGED[name]
    if resident(device, size) is not None:
        fail(f"{size} MiB are mapped before they are plugged in")
    guest.qmp("object-add", **{"qom-type": "memory-backend-memfd", "id": f"of-{name}", "size": size << 20, "share": True})
    guest.qmp("device_add", driver="pc-dimm", id=name, memdev=f"of-{name}")
    until("the device maps what was plugged in", lambda: device.alive() and resident(device, size) is not None)
    stream.more()
    ping.more()


def memory():
    """What the guest has, in MiB."""
    return int(guest.sh("sed -n 's/^MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo")) >> 10


begin()
kernel()
tap("tap0", HOST)
device = Device("device", "tap:tap0")
guest = Guest("guest", device.socket, words="memhp_default_state=online_kernel")
print(guest.said("READY")[0])
ping, stream = Ping(), Stream()
stream.more()

plug("first")
until("the device uses what was plugged in", lambda: device.alive() and resident(device, PLUGGED["first"]) > 1024)
print(f"{PLUGGED['first']} MiB plugged in, of which the device has touched {resident(device, PLUGGED['first'])} KiB")

# Memory for what can be moved, so that it can be taken out again.
guest.sh("echo online_movable > /sys/devices/system/memory/auto_online_blocks")
plug("second")
until("the guest has both", lambda: memory() > sum(PLUGGED.values()))
guest.qmp("device_del", id="second")
until("the device unmaps what was taken out", lambda: device.alive() and resident(device, PLUGGED["second"]) is None)
print(f"{PLUGGED['second']} MiB plugged in and taken out")
stream.more()
ping.more()
if not PLUGGED["first"] < memory() < sum(PLUGGED.values()):
    fail(f"the guest has {memory()} MiB")

lost, line = ping.end()
print(line)
print(stream.end())
if lost:
    fail("pings are lost while memory comes and goes")
guest.quit()
device.stop()
print("passed: memory that comes and goes under traffic")
lib.finish(0)
