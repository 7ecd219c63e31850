#!/usr/bin/env -S python3 -B
"""csum.py [DIR]: testpmd's checksum engine with segmentation (TSO) and receive offloads (LRO), on our device and a tap.

The engine sends TCP and UDP over IPv4 and IPv6 from a capture, and leaves checksums and segmentation to virtio_user, and so to the device.
What the device writes to the tap is read there, with what the kernel is told of it: a large segment has its size and a partial sum, and
no byte has changed. The other way, large segments are put on the tap; virtio_user receives them whole.
"""

import random
import socket
import struct
import sys

import lib
from lib import Device, Testpmd, begin, fail, read_pcap, tap, until, write_pcap

SOL_PACKET, PACKET_VNET_HDR = 263, 15
NEEDS_CSUM, TCPV4, TCPV6 = 1, 1, 4
SEGMENT = 800
# Features of the ring, as virtio_user asks for them.
ROWS = {"split": "packed_vq=0,in_order=0", "packed": "packed_vq=1,in_order=0"}


def checksum(data):
    total = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + bytes(len(data) % 2)))
    while total >> 16:
        total = (total >> 16) + (total & 0xFFFF)
    return ~total & 0xFFFF


class Frame:
    """TCP or UDP over IPv4 or IPv6, its sums right; `start` is the transport header's place and `place` the sum's."""

    def __init__(self, six, tcp, payload, number):
        source = random.Random(f"{six} {tcp} {payload} {number}")
        payload = source.randbytes(payload)
        self.six, self.tcp, self.start = six, tcp, 54 if six else 34
        self.place = self.start + (16 if tcp else 6)
        if tcp:
            transport = struct.pack("!HHIIBBHHH", 1000 + number, 2000, number << 16, 3, 5 << 4, 0x10, 512, 0, 0)
        else:
            transport = struct.pack("!HHHH", 1000 + number, 2000, 8 + len(payload), 0)
        self.headers = self.start + len(transport)
        protocol, length = 6 if tcp else 17, len(transport) + len(payload)
        if six:
            addresses = bytes([0xFD] * 16 + [0xFE] * 16)
            network = struct.pack("!IHBB", 6 << 28, length, protocol, 64) + addresses
        else:
            addresses = bytes([10, 0, 0, 1, 10, 0, 0, 2])
            network = struct.pack("!BBHHHBBH", 0x45, 0, 20 + length, number, 0, 64, protocol, 0) + addresses
            network = network[:10] + struct.pack("!H", checksum(network)) + network[12:]
        self.pseudo = addresses + struct.pack("!HH", protocol, length)
        ethernet = bytes.fromhex("020000000001 020000000002") + (b"\x86\xdd" if six else b"\x08\x00")
        sum_ = checksum(self.pseudo + transport + payload)
        self.bytes = self.with_sum(ethernet + network + transport + payload, sum_ or (0 if tcp else 0xFFFF))
        self.payload = len(payload)

    def with_sum(self, data, value):
        return data[: self.place] + struct.pack("!H", value) + data[self.place + 2 :]

    def partial(self):
        """With the sum of the pseudo-header alone."""
        return self.with_sum(self.bytes, ~checksum(self.pseudo) & 0xFFFF)


class Wire:
    """A tap from the kernel's side: frames with the header in which offloads are."""

    def __init__(self, name):
        self.socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        self.socket.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
        self.socket.bind((name, 0))
        self.socket.settimeout(0.1)

    def receive(self, count):
        frames = []

        def more():
            try:
                frames.append(self.socket.recv(1 << 17))
            except TimeoutError:
                pass
            return len(frames) >= count

        until(f"{count} frames at the tap", more)
        return [(struct.unpack("<BBHHHH", frame[:10]), frame[10:]) for frame in frames]

    def send(self, frame, size):
        """As a large segment of parts of `size` bytes."""
        header = struct.pack("<BBHHHH", NEEDS_CSUM, TCPV6 if frame.six else TCPV4, frame.headers, size, frame.start, frame.place - frame.start)
        self.socket.send(header + frame.partial())


def judge(row, frame, header, data):
    """What the device wrote to the tap for a frame of the engine's. Its addresses are the engine's own."""
    what = f"{row}: {'TCP' if frame.tcp else 'UDP'} over IPv{6 if frame.six else 4}, {frame.payload} bytes"
    flags, kind, _, size, start, offset = header
    large = frame.tcp and frame.payload > SEGMENT
    if (kind, size) != ((TCPV6 if frame.six else TCPV4, SEGMENT) if large else (0, 0)):
        fail(f"{what}: a segment of kind {kind} and size {size}")
    if flags != NEEDS_CSUM or (start, start + offset) != (frame.start, frame.place):
        fail(f"{what}: no partial sum at {frame.place}: {header}")
    # The sum of the pseudo-header stands in the sum's place: over it, the device of the next hop
    # computes the whole.
    whole = frame.with_sum(data, checksum(data[frame.start :]))
    if data[12:] != frame.partial()[12:] or whole[12:] != frame.bytes[12:]:
        fail(f"{what}: other bytes arrived")


def offloads(version):
    name = f"testpmd-{version}"
    taps, vdevs, devices = [f"tap{version[:2]}{index}" for index in range(len(ROWS))], [], []
    sent = [Frame(six, tcp, payload, number) for number, payload in enumerate([1, 200, 799, 800, 801, 1400, 5000, 8000]) for six in (0, 1) for tcp in (0, 1)]
    # Captures of 22.11 have at most 16128 bytes of a frame.
    received = [Frame(six, True, payload, number) for number, payload in enumerate([3000, 9001, 16000]) for six in (0, 1)]
    for index, (row, words) in enumerate(ROWS.items()):
        tap(taps[index])
        device = Device(f"device-{version}-{row}", f"tap:{taps[index]}")
        devices.append(device)
        path = lib.TMP / f"{name}-{row}"
        write_pcap(f"{path}.in", [frame.bytes for frame in sent])
        vdevs += [f"net_pcap{index},rx_pcap={path}.in,tx_pcap={path}.out", f"net_virtio_user{index},path={device.socket},queue_size=1024,mrg_rxbuf=1,{words}"]
    testpmd = Testpmd(name, version, vdevs, ["--total-num-mbufs=16384", "--forward-mode=csum", "--disable-device-start", "--max-pkt-len=9200"])
    testpmd.do("port stop all")
    for index in range(len(ROWS)):
        port = 2 * index + 1
        for offload in ["scatter", "tcp_lro", "udp_cksum", "tcp_cksum"]:
            testpmd.do(f"port config {port} rx_offload {offload} on")
        for command in [f"csum set tcp hw {port}", f"csum set udp hw {port}", f"tso set {SEGMENT} {port}"]:
            testpmd.do(command)
    testpmd.do("port start all")
    wires = [Wire(name) for name in taps]
    testpmd.do("set fwd csum")
    testpmd.do("start")
    for row, wire in zip(ROWS, wires):
        for frame, (header, data) in zip(sent, wire.receive(len(sent))):
            judge(row, frame, header, data)
        for frame in received:
            wire.send(frame, 1000)
    for index, row in enumerate(ROWS):
        until(f"{row}: virtio_user has received", lambda: testpmd.counts(2 * index)[1] >= len(received))
    testpmd.quit()
    for device in devices:
        device.stop()
    for row in ROWS:
        back = read_pcap(lib.TMP / f"{name}-{row}.out")
        # The engine computes the sums of a port that cannot.
        if [frame[12:] for frame in back] != [frame.bytes[12:] for frame in received]:
            fail(f"{row}: virtio_user has received other segments than were sent: {[len(frame) for frame in back]}")
    print(f"DPDK {version}: {len(sent)} frames of the checksum engine, and {len(received)} large segments to it, on {', '.join(ROWS)}")


begin("dpdk-testpmd", "stdbuf")
if len(sys.argv) > 2:
    ROWS = {row: words for row, words in ROWS.items() if row in sys.argv[2:]}
for version in ["22.11", "24.11"]:
    offloads(version)
print("passed: testpmd's checksum engine")
lib.finish(0)
