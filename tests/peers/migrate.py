#!/usr/bin/env -S python3 -B
"""migrate.py [DIR [packed]]: a guest migrates from one QEMU and device to another, under ping and TCP; what is lost is counted.

The two devices have taps on one bridge. The guest cannot announce itself (`guest_announce=off`), so the second device must: QEMU asks
it to send a RARP frame, by which the bridge learns where the guest is now. A request may be lost while the guest is stopped, or on its
way to or from a guest that is stopped; a request that is lost at any other time is a failure.

Bytes that the guest's program has copied are in pages that QEMU itself sees written. So a second connection is not read until the guest
has moved: what it brought lies in pages that only the device wrote, after QEMU had sent them once. Without the device's dirty log, the
guest finds other bytes in them.
"""

import hashlib
import random
import socket
import sys
import threading
import time

import lib
from lib import GUEST, HOST, MAC, Device, Guest, Ping, Stream, begin, fail, ip, kernel, tap, until

ETH_P_RARP = 0x8035
# Requests that were sent this long before the guest stopped, or after it went on, are counted as
# lost to the migration. It is long, for a machine under load, and still far shorter than the
# traffic on either side.
MARGIN = 1.5
UNREAD = random.Random(8).randbytes(1 << 20)

begin()
kernel()
ip("link add br0 type bridge")
tap("tap0")
tap("tap1")
for name in ["tap0", "tap1"]:
    ip(f"link set {name} master br0")
ip(f"addr add {HOST}/24 dev br0")
ip("link set br0 up")
rarp = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_RARP))
rarp.bind(("br0", ETH_P_RARP))
rarp.setblocking(False)

devices = [Device(f"device{n}", f"tap:tap{n}") for n in (0, 1)]
packed = "packed" in sys.argv[2:]
card = f",romfile=,guest_announce=off,packed={'on' if packed else 'off'}"
source = Guest("source", devices[0].socket, card=card)
ready = source.said("READY")[0]
if (ready.split()[-1][34] == "1") != packed:
    fail(f"the rings are not as they were asked for: {ready}")
print(ready)
source.sh("(nc -l -p 8 | { while ! [ -e /read ]; do sleep 0.1; done; md5sum; } > /sum) &")
target = Guest("target", devices[1].socket, card=card, options=["-incoming", f"unix:{lib.TMP}/migration.sock"])
ping, stream = Ping(), Stream()
ping.more(100)
stream.more()

# With a millisecond, it does not end while the stream dirties memory: it is given more below.
source.qmp("migrate-set-parameters", **{"downtime-limit": 1, "max-bandwidth": 64 << 20})
source.qmp("migrate", uri=f"unix:{lib.TMP}/migration.sock")


def hoard():
    """Sends to a connection that is not read yet. The first bytes are copied into a pipe of the guest's; the others wait unread."""
    connection = socket.create_connection((GUEST, 8), timeout=120)
    connection.sendall(UNREAD)
    connection.close()


def passes():
    return source.qmp("query-migrate").get("ram", {}).get("dirty-sync-count", 0)


until("all memory was sent once", lambda: passes() >= 2, 120)
source.qmp("migrate-set-parameters", **{"max-bandwidth": 8 << 20})
hoarder = threading.Thread(target=hoard, daemon=True)
hoarder.start()
# Until the guest's receive buffer is full.
time.sleep(0.5)
source.qmp("migrate-set-parameters", **{"downtime-limit": 300, "max-bandwidth": 1 << 30})


def over():
    status = source.qmp("query-migrate")
    if status["status"] in ("failed", "cancelled"):
        fail(f"the migration failed: {status}")
    return status if status["status"] == "completed" else None


status = until("the migration", over, 120)
until("the guest runs on the other side", lambda: target.qmp("query-status")["status"] == "running")
source.quit()
ping.more(100)
stream.more()
target.sh("touch /read; while ! [ -s /sum ]; do sleep 0.1; done")
hoarder.join()
if target.sh("cat /sum").split()[0] != hashlib.md5(UNREAD).hexdigest():
    fail("what the guest had received and not read is not what was sent")
uptime = target.sh("cut -d' ' -f1 /proc/uptime")
time.sleep(MARGIN)
ping.more(100)


def when(guest, event):
    for seen in guest.events:
        if seen["event"] == event:
            return seen["timestamp"]["seconds"] + seen["timestamp"]["microseconds"] / 1e6
    fail(f"{guest.name} had no event {event}")


stopped, went_on = when(source, "STOP"), when(target, "RESUME")
lost, line = ping.end()
print(f"migrated {status['ram']['transferred'] >> 20} MiB in {status['total-time']} ms, stopped for {(went_on - stopped) * 1e3:.0f} ms")
print(line)
print(stream.end())
others = [when for when in lost if not stopped - MARGIN < when < went_on + MARGIN]
if others:
    fail(f"{len(others)} pings were lost while the guest was not being moved")
try:
    frame = rarp.recv(2048)
except BlockingIOError:
    fail("the second device sent no RARP frame")
if frame[6:12] != bytes.fromhex(MAC.replace(":", "")):
    fail(f"the RARP frame is not in the guest's name: {frame.hex()}")
target.quit()
for device in devices:
    device.stop()
print(f"passed: live migration with {'packed' if packed else 'split'} rings (the guest is up for {uptime} s)")
lib.finish(0)
