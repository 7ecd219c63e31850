#!/usr/bin/env -S python3 -B
"""reboot.py [DIR]: a guest is reset eleven times, ten of them after its driver had the device, and each time it pings the host."""

import lib
from lib import HOST, Device, Guest, begin, kernel, tap

begin()
kernel()
tap("tap0", HOST)
device = Device("device", "tap:tap0")
guest = Guest("guest", device.socket, words=f"netmem_once={HOST}")
guest.said("ONCE answered")
for reboot in range(10):
    # A ring still has buffers posted, and the next driver begins with other rings.
    guest.qmp("system_reset")
    guest.said("ONCE answered")
device.alive()
guest.quit()
device.stop()
print("passed: ten reboots of the guest")
lib.finish(0)
