#!/usr/bin/env -S python3 -B
"""ipxe.py [DIR]: firmware drives the device before the kernel does. iPXE, the option ROM of QEMU's card, gets an address by DHCP,
loads the kernel and its initramfs over HTTP, and starts it; then the kernel drives the device."""

import functools
import http.server
import socket
import struct
import threading

import lib
from lib import GUEST, HOST, MAC, WORDS, Device, Guest, Ping, Stream, begin, fail, kernel, tap

SCRIPT = f"""#!ipxe
kernel http://{HOST}/vmlinuz initrd=initramfs.gz {WORDS}
initrd http://{HOST}/initramfs.gz
boot
"""
ANSWERS = {1: 2, 3: 5}  # a DISCOVER is answered by an OFFER, a REQUEST by an ACK
served = []


def kind_of(message):
    """The type of a DHCP message (option 53), or 0."""
    at = 240
    while at + 2 < len(message) and message[at] != 255:
        if message[at] == 53:
            return message[at + 2]
        at += 2 + message[at + 1] if message[at] else 1
    return 0


def dhcp():
    """Gives the one guest its address, and the address of the script."""
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"tap0")
    server.bind(("", 67))
    host, guest = socket.inet_aton(HOST), socket.inet_aton(GUEST)
    while True:
        message = server.recv(2048)
        kind = kind_of(message)
        if message[0] != 1 or message[28:34] != bytes.fromhex(MAC.replace(":", "")) or kind not in ANSWERS:
            continue
        answer = struct.pack("!4B4s2H4s4s4s4s", 2, 1, 6, 0, message[4:8], 0, 0x8000, bytes(4), guest, host, bytes(4))
        answer += message[28:44] + bytes(64) + f"http://{HOST}/boot.ipxe".encode().ljust(128, b"\0") + b"\x63\x82\x53\x63"
        answer += bytes([53, 1, ANSWERS[kind], 54, 4, *host, 51, 4, 0, 0, 14, 16, 1, 4, 255, 255, 255, 0, 3, 4, *host, 255])
        server.sendto(answer, ("255.255.255.255", 68))
        served.append(f"DHCP {kind}")


class Files(http.server.SimpleHTTPRequestHandler):
    """Serves the test's directory, and remembers what it was asked for."""

    def log_message(self, format, *args):
        served.append(format % args)


begin()
kernel()
(lib.TMP / "boot.ipxe").write_text(SCRIPT)
tap("tap0", HOST)
web = http.server.ThreadingHTTPServer((HOST, 80), functools.partial(Files, directory=str(lib.TMP)))
for work in (dhcp, web.serve_forever):
    threading.Thread(target=work, daemon=True).start()
device = Device("device", "tap:tap0")
# With `graphics=off`, the firmware's console is the serial line. The option ROM is the card's own.
guest = Guest("guest", device.socket, card=",bootindex=0", boot=False, options=["-machine", "graphics=off"])
print(guest.said("READY")[0])
for need in ["DHCP 1", "DHCP 3", '"GET /boot.ipxe', '"GET /vmlinuz', '"GET /initramfs.gz']:
    if not any(line.startswith(need) for line in served):
        fail(f"the firmware asked for no {need!r}: {served}")
ping, stream = Ping(), Stream()
stream.more()
ping.more()
lost, line = ping.end()
print(line)
print(stream.end())
guest.quit()
device.stop()
print("passed: iPXE, and the kernel that it loaded")
lib.finish(0)
