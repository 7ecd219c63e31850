#!/usr/bin/env -S python3 -B
"""xsk_port.py [DIR]: a guest with two queue pairs on two queues of an interface, by `netmem device --port xsk:IFACE --queues 2`.

The interface is an end of a veth pair with two queues, and the kernel is at the other end, without offloads. TCP streams go through the
guest until each queue pair has carried frames in both directions, and every byte that comes back is compared. The device is killed
without warning: no program is left on the interface. Another device takes its place, and the streams go on.
"""

import re
from pathlib import Path

import lib
from lib import HOST, Device, Guest, Stream, begin, fail, ip, kernel, run

# A stream is on either queue by its hash.
STREAMS = 40


def counters(said, pattern):
    return {name: int(value) for name, value in re.findall(rf"({pattern}): (\d+)", said)}


def redirected():
    """Frames that the program has redirected to a socket, for each queue of the interface."""
    return counters(run("ethtool", "-S", "v0"), r"rx_queue_\d_xdp_redirect")


def carried():
    """How often each receive queue of the guest's card has interrupted, and how often each transmit queue was kicked."""
    lines = [line.split() for line in guest.sh("grep -e -input /proc/interrupts").splitlines()]
    interrupts = {words[-1]: sum(map(int, words[1:3])) for words in lines}
    return interrupts | counters(guest.sh("ethtool -S eth0"), r"tx\d_kicks")


def programs():
    return "xdp" in run("ip", "link", "show", "v0")


begin("ethtool")
kernel("usr/sbin/ethtool")
ip("link add v0 numrxqueues 2 numtxqueues 2 type veth peer name v1 numrxqueues 2 numtxqueues 2")
for end in ("v0", "v1"):
    run("ethtool", "-K", end, *"tx off rx off gso off tso off gro off txvlan off rxvlan off".split())
    Path(f"/proc/sys/net/ipv6/conf/{end}/disable_ipv6").write_text("1")
    ip(f"link set {end} up")
ip(f"addr add {HOST}/24 dev v1")
device = Device("device", "xsk:v0", queues=2)
if not programs():
    fail("the device has no program on its interface")
guest = Guest("guest", device.socket, card=",romfile=,mq=on", queues=2, cpus=2)
print(guest.said("READY")[0])
guest.sh("ethtool -L eth0 combined 2")
streams = []
# The first frames of a queue are what neighbours ask.
while len(streams) < 2 or min(redirected().values()) < 20 or min(carried().values()) < 2:
    if len(streams) == STREAMS:
        fail(f"after {STREAMS} streams a queue has carried nothing: {redirected()} {carried()}")
    streams.append(Stream())
    streams[-1].more(1 << 16)
print(f"{len(streams)} streams: {redirected()} {carried()}")
if len(redirected()) != 2 or len(carried()) != 4:
    fail(f"there are not two queue pairs: {redirected()} {carried()}")
device.kill()
if programs():
    fail("the device was killed, and its program is still there")
device.start()
for stream in streams:
    stream.more(1 << 16)
    print(stream.end())
device.stop()
if programs():
    fail("the device has ended, and its program is still there")
guest.quit()
print("passed: a guest with two queue pairs on AF_XDP")
lib.finish(0)
