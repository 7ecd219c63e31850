#!/usr/bin/env -S python3 -B
"""plug.py [DIR]: memory is plugged into a guest under ping and TCP, and the device sends from it and receives into it."""

import re
from pathlib import Path

import lib
from lib import HOST, Device, Guest, Ping, Stream, begin, fail, kernel, tap, until

# The guest starts with 256 MiB, below 4 GiB, which Linux calls DMA32. A module is plugged in above, in the zone Normal, which Linux
# takes kernel memory from before it turns to DMA32: from then on, new network buffers are in it.
PLUGGED = {"dimm0": 512, "dimm1": 384}


def resident(device, mebibytes):
    """How many KiB of a mapped file of that size the device has touched; None if no such file is mapped."""
    smaps = Path(f"/proc/{device.process.pid}/smaps").read_text()
    found = None
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.M)[1:]:
        start, end = (int(address, 16) for address in mapping.split()[0].split("-"))
        if "memfd:memory-backend-memfd" in mapping and end - start == mebibytes << 20:
            found = (found or 0) + int(re.search(r"^Rss:\s+(\d+) kB", mapping, re.M)[1])
    return found


begin()
kernel()
tap("tap0", HOST)
device = Device("device", "tap:tap0")
guest = Guest("guest", device.socket, words="memhp_default_state=online_kernel")
print(guest.said("READY")[0])
ping, stream = Ping(), Stream()
for name, size in PLUGGED.items():
    stream.more()
    if resident(device, size) is not None:
        fail(f"{size} MiB are mapped before they are plugged in")
    guest.qmp("object-add", **{"qom-type": "memory-backend-memfd", "id": f"of-{name}", "size": size << 20, "share": True})
    guest.qmp("device_add", driver="pc-dimm", id=name, memdev=f"of-{name}")
    until("the device maps what was plugged in", lambda: resident(device, size) is not None)
    # Linux takes from the second module when the first is used up.
    if name == "dimm0":
        until("the device uses what was plugged in", lambda: device.alive() and resident(device, size) > 1024)
    stream.more()
    ping.more()
    print(f"{size} MiB plugged in, of which the device has touched {resident(device, size)} KiB")
total = int(guest.sh("sed -n 's/^MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo"))
if total < (256 + sum(PLUGGED.values())) * 1024 * 0.8:
    fail(f"the guest has {total} KiB, too few to have what was plugged in")
lost, line = ping.end()
print(line)
print(stream.end())
if lost:
    fail("pings are lost while memory is plugged in")
guest.quit()
device.stop()
print("passed: memory plugged in under traffic")
lib.finish(0)
