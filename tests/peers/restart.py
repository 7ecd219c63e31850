#!/usr/bin/env -S python3 -B
"""restart.py [DIR]: the device is killed and started again ten times under a guest's ping and TCP; the connection lives on."""

import time

import lib
from lib import HOST, Device, Guest, Ping, Stream, begin, fail, kernel, tap

begin()
kernel()
tap("tap0", HOST)
device = Device("device", "tap:tap0")
guest = Guest("guest", device.socket)
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
device.stop()
print("passed: ten restarts of the device")
lib.finish(0)
