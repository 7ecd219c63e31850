#!/usr/bin/env -S python3 -B
"""restart.py [DIR [connect]]: the device is killed and started again ten times under a guest's ping and TCP; the connection lives on.

The device listens, and QEMU connects to it again and again; with `connect`, QEMU listens, and the device connects.
"""

import sys
import time

import lib
from lib import HOST, Device, Guest, Ping, Stream, begin, kernel, tap

begin()
kernel()
tap("tap0", HOST)
connect = "connect" in sys.argv[2:]
device = Device("device", "tap:tap0", connect)
guest = Guest("guest", device.socket, "server=on" if connect else "reconnect-ms=100")
print(guest.said("READY")[0])
ping, stream = Ping(), Stream()
stream.more()
for _ in range(10):
    device.kill()
    time.sleep(0.2)
    device.start()
    ping.more()
    stream.more()
lost, line = ping.end()
print(line)
print(stream.end())
guest.quit()
device.stop()
print(f"passed: ten restarts of a device that {'connects' if connect else 'listens'}")
lib.finish(0)
