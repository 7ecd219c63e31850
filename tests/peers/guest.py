#!/usr/bin/env -S python3 -B
"""guest.py [DIR]: one boot of a guest with a card for each ring format, with and without event index, offloads and large frames.

The cards `packed` and `split` have two queue pairs with an interrupt for each ring (MSI-X), an MTU of 9000, and all offloads: `ethtool`
in the guest says that they are on, and the mean length of the frames that the guest counts says that they are used. iperf3 runs both ways,
over IPv4 and IPv6. The cards `packed-plain` and `split-plain` have no event index, one queue pair without MSI-X, and no offloads,
the packed one without mergeable buffers.

Through each card go echo requests of many lengths up to the MTU, each a frame of its own, and a TCP stream; every byte that comes back is
compared.
"""

import json
import random
import re
import socket
import struct
from pathlib import Path

import lib
from lib import Device, Guest, Stream, begin, card_at, debian13, fail, ip, kernel, start, tap, until

EVENT_IDX, PACKED = 29, 34
PLAIN = "csum=off,gso=off,host_tso4=off,host_tso6=off,host_ecn=off,host_ufo=off,host_uso=off,guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off,guest_uso4=off,guest_uso6=off"
PAIRS = "mq=on,vectors=6,host_mtu=9000,event_idx=on"
# Name: queue pairs, the MTU, properties of the card.
CARDS = {
    "packed": (2, 9000, f"packed=on,{PAIRS}"),
    "split": (2, 9000, f"packed=off,{PAIRS}"),
    "packed-plain": (1, 1500, f"packed=on,event_idx=off,mrg_rxbuf=off,vectors=0,{PLAIN}"),
    "split-plain": (1, 1500, f"packed=off,event_idx=off,vectors=0,{PLAIN}"),
}
# What `ethtool -k` of a card with offloads has on.
ON = ["tx-checksumming", "tcp-segmentation-offload", "tx-tcp-segmentation", "tx-tcp6-segmentation", "rx-gro-hw"]


def addresses(index):
    return f"10.79.{index}.1", f"10.79.{index}.2", f"fd79:{index}::1", f"fd79:{index}::2"


def echoes(address, mtu):
    """Echo requests that may not be fragmented, of many lengths up to the MTU. The guest's answers must have the same bytes."""
    icmp = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    # IP_MTU_DISCOVER, IP_PMTUDISC_DO: each is one frame, or an error.
    icmp.setsockopt(socket.IPPROTO_IP, 10, 2)
    icmp.settimeout(30)
    source, lengths = random.Random(address), [*range(1, mtu - 28, 101), mtu - 28]
    for number, length in enumerate(lengths):
        message = struct.pack("!BBHHH", 8, 0, 0, 0x4E4D, number) + source.randbytes(length)
        total = sum(struct.unpack(f"!{(len(message) + 1) // 2}H", message + bytes(len(message) % 2)))
        while total >> 16:
            total = (total >> 16) + (total & 0xFFFF)
        message = message[:2] + struct.pack("!H", ~total & 0xFFFF) + message[4:]
        icmp.sendto(message, (address, 0))
        while True:
            try:
                answer = icmp.recv(65536)[20:]
            except TimeoutError:
                fail(f"{address} does not answer an echo request of {length} bytes")
            if answer[0] == 0 and answer[4:8] == message[4:8]:
                break
        if answer[8:] != message[8:]:
            fail(f"{address} answers an echo request of {length} bytes with other bytes")
    return len(lengths)


def counters(interface):
    names = [f"{way}_{what}" for way in ("rx", "tx") for what in ("bytes", "packets")]
    values = guest.sh("cat " + " ".join(f"/sys/class/net/{interface}/statistics/{name}" for name in names)).split()
    return dict(zip(names, map(int, values)))


def iperf(interface, address, way):
    """Bits per second as the receiver has it, and the mean length of the frames with the data."""
    before = counters(interface)
    report = json.loads(guest.sh(f"iperf3 -c {address} -t 1 -P 2 -J {'-R' if way == 'rx' else ''}"))
    after = counters(interface)
    if "error" in report:
        fail(f"iperf3 over {interface}: {report['error']}")
    moved = {name: after[name] - before[name] for name in after}
    return report["end"]["sum_received"]["bits_per_second"], moved[f"{way}_bytes"] / max(1, moved[f"{way}_packets"])


def interrupts(interface):
    """How often each ring of a card with MSI-X has interrupted the guest, by the ring's name."""
    device = guest.sh(f"basename $(readlink -f /sys/class/net/{interface}/device)")
    lines = guest.sh(f"grep {device}- /proc/interrupts || true").splitlines()
    found = [(line.split(), re.search(rf"{device}-((?:in|out)put\.\d)", line)) for line in lines]
    return {ring[1]: sum(map(int, words[1:3])) for words, ring in found if ring and "MSIX" in " ".join(words)}


begin()
kernel("usr/bin/iperf3", "usr/sbin/ethtool")
devices, options = {}, []
for index, (name, (queues, mtu, card)) in enumerate(CARDS.items()):
    host, _, host6, _ = addresses(index)
    tap(f"tap{index}", host, words="multi_queue" if queues > 1 else "")
    ip(f"link set tap{index} mtu {mtu}")
    Path(f"/proc/sys/net/ipv6/conf/tap{index}/disable_ipv6").write_text("0")
    ip(f"addr add {host6}/64 dev tap{index} nodad")
    devices[name] = Device(f"device-{name}", f"tap:tap{index}", queues=queues, words=["--mtu", mtu])
    if index > 0:
        options += card_at(devices[name].socket, "reconnect-ms=100", f"mac=02:00:00:00:00:{index:02},romfile=,{card}", index, queues)
start("iperf3", *debian13("usr/bin/iperf3"), "-s")
queues, _, card = CARDS["packed"]
guest = Guest("guest", devices["packed"].socket, card=f",romfile=,{card}", options=options, queues=queues, cpus=2)
print(guest.said("READY")[0])
# Addresses are used at once: duplicates are not looked for.
guest.sh("for file in /proc/sys/net/ipv6/conf/*/accept_dad; do echo 0 > $file; done; echo 0 > /proc/sys/net/ipv6/conf/all/disable_ipv6")

for index, (name, (queues, mtu, card)) in enumerate(CARDS.items()):
    host, address, host6, address6 = addresses(index)
    eth, plain = f"eth{index}", "plain" in name
    driver = f"device=$(basename $(readlink -f /sys/class/net/{eth}/device)); cd /sys/bus/virtio/drivers/virtio_net"
    # The driver releases the card and binds to it again, which resets the device under posted
    # buffers.
    for _ in range(3):
        guest.sh(f"{driver}; echo $device > unbind; echo $device > bind; ip link set {eth} up; ip addr add {address}/24 dev {eth}")
        echoes(address, 200)
    guest.sh(f"ip addr add {address6}/64 dev {eth}")
    features = guest.sh(f"cat /sys/class/net/{eth}/device/features")
    for bit, word in [(PACKED, "packed=on"), (EVENT_IDX, "event_idx=on")]:
        if (features[bit] == "1") != (word in card):
            fail(f"{name}: feature {bit} is {features[bit]}")
    if guest.sh(f"cat /sys/class/net/{eth}/mtu") != str(mtu):
        fail(f"{name}: the MTU is not {mtu}")
    print(f"{name}: {echoes(address, mtu)} echo requests of up to {mtu} bytes")
    stream = Stream(address)
    stream.more(2 << 20)
    print(f"{name}: {stream.end()}")
    kept = guest.sh(f"ethtool -k {eth}")
    for offload in ON:
        if (f"{offload}: on" in kept) == plain:
            fail(f"{name}: {offload} is {'on' if plain else 'not on'}: {kept}")
    if plain:
        continue
    for pairs in [1, 2]:
        guest.sh(f"ethtool -L {eth} combined {pairs}")
        echoes(address, 200)
    if not re.search(r"Current hardware settings:(?s:.*)Combined:\s+2", guest.sh(f"ethtool -l {eth}")):
        fail(f"{name}: there are not two queue pairs")
    for way in ["tx", "rx"]:
        for peer in [host, host6]:
            speed, mean = iperf(eth, peer, way)
            print(f"{name}: iperf3 to {peer}, {way}: {speed / 1e6:.0f} Mbit/s, {mean:.0f} bytes a frame")
            if mean <= mtu + 14:
                fail(f"{name}: no large segments were {'sent' if way == 'tx' else 'received'}")
    vectors = interrupts(eth)
    if len(vectors) != 4 or min(vectors.values()) < 10:
        fail(f"{name}: not each of four rings has interrupted by a vector of its own: {vectors}")
    print(f"{name}: interrupts by ring: {vectors}")
print(f"passed: the guest is up for {guest.sh('cat /proc/uptime').split()[0]} s")
guest.quit()
for device in devices.values():
    device.stop()
lib.finish(0)
