#!/usr/bin/env -S python3 -B
"""dpdk.py [DIR]: DPDK's driver, virtio_user, on our device, in every ring format and on every path that it has for one.

DPDK 22.11 (the system's) and 24.11 (Debian 13's), with one and with two queue pairs. One testpmd has a virtio_user for each row of `ROWS`,
on a device of its own, and beside each a capture from which it sends and one into which it writes what it receives. A capture has random
frames of every length from 60 to 1514 bytes, and longer ones up to an MTU of 9000 where buffers are mergeable. The device sends each back with its addresses exchanged. All must come back on the queue
that they were sent on, in order, byte for byte.

Which path virtio_user took is what its log says: it drops a request that does not suit it without an error.
"""

import random
import sys

import lib
from lib import Device, Testpmd, begin, fail, read_pcap, until, write_pcap

JUMBO = 9000
# Name: virtio_user's words, and the receive and the transmit path.
ROWS = {
    "split": ("mrg_rxbuf=1,in_order=0", "mergeable buffer", "standard"),
    "split-small": ("mrg_rxbuf=0,in_order=0", "standard", "standard"),
    "split-vectorized": ("mrg_rxbuf=0,in_order=0,vectorized=1", "vectorized", "standard"),
    "split-in-order": ("mrg_rxbuf=1,in_order=1", "inorder", "inorder"),
    "split-in-order-small": ("mrg_rxbuf=0,in_order=1", "inorder", "inorder"),
    "packed": ("packed_vq=1,mrg_rxbuf=1,in_order=0", "packed ring mergeable buffer", "packed ring standard"),
    "packed-small": ("packed_vq=1,mrg_rxbuf=0,in_order=0", "packed ring standard", "packed ring standard"),
    "packed-in-order": ("packed_vq=1,mrg_rxbuf=1,in_order=1", "packed ring mergeable buffer", "packed ring standard"),
    "packed-in-order-small": ("packed_vq=1,mrg_rxbuf=0,in_order=1", "packed ring standard", "packed ring standard"),
    # Only with AVX-512, with in-order, and each ring by itself: a mergeable receive ring is not
    # vectorised, and its transmit ring is.
    "packed-vectorized": ("packed_vq=1,mrg_rxbuf=0,in_order=1,vectorized=1", "packed ring vectorized", "packed ring vectorized"),
    "packed-vectorized-tx": ("packed_vq=1,mrg_rxbuf=1,in_order=1,vectorized=1", "packed ring mergeable buffer", "packed ring vectorized"),
    # virtio_user listens, and the device connects.
    "split-server": ("server=1,mrg_rxbuf=1,in_order=0", "mergeable buffer", "standard"),
    "packed-server": ("server=1,packed_vq=1,mrg_rxbuf=1,in_order=0", "packed ring mergeable buffer", "packed ring standard"),
}


def matrix(version, queues):
    name = f"testpmd-{version}-{queues}"
    random_bytes = random.Random(f"{version} {queues}")
    vdevs, devices, sent = [], [], {}
    for index, (row, (words, _, _)) in enumerate(rows.items()):
        lengths = list(range(60, 1515))
        if "mrg_rxbuf=1" in words:
            # In chains and tables of descriptors to the device, and in several buffers from it.
            lengths += range(1515, JUMBO + 15, 75)
        random_bytes.shuffle(lengths)
        frames = [random_bytes.randbytes(length) for length in lengths]
        # Each queue has its own part.
        sent[row] = [frames[queue::queues] for queue in range(queues)]
        capture = [f"net_pcap{index}"]
        for queue in range(queues):
            path = lib.TMP / f"{name}-{row}-{queue}"
            write_pcap(f"{path}.in", sent[row][queue])
            capture += [f"rx_pcap={path}.in", f"tx_pcap={path}.out"]
        device = Device(f"device-{version}-{queues}-{row}", "echo", connect="server=1" in words, queues=queues)
        devices.append(device)
        control = ",cq=1" if queues > 1 else ""
        vdevs += [",".join(capture), f"net_virtio_user{index},path={device.socket},queues={queues},queue_size=256,{words}{control}"]
    options = [f"--rxq={queues}", f"--txq={queues}", "--total-num-mbufs=32768", "--forward-mode=io", "--disable-device-start"]
    # Vectors of 512 bits are only used where they are asked for.
    eal = ["--force-max-simd-bitwidth=512"] if avx512 else []
    testpmd = Testpmd(name, version, vdevs, options, eal)
    for index, (words, _, _) in enumerate(rows.values()):
        if "mrg_rxbuf=1" in words:
            testpmd.do(f"port config {2 * index + 1} rx_offload scatter on")
            testpmd.do(f"port config mtu {2 * index + 1} {JUMBO}")
    testpmd.do("port start all")
    for index, (row, (_, receive, transmit)) in enumerate(rows.items()):
        for way, path in [("Rx", receive), ("Tx", transmit)]:
            words = f"using {path} {way} path on port {2 * index + 1}\n"
            if words not in testpmd.log():
                fail(f"DPDK {version}, {row}: virtio_user is not {words!r}")
    testpmd.do("set burst tx delay 100 retry 100000")
    testpmd.do("set fwd io retry")
    testpmd.do("start")
    for index, row in enumerate(rows):
        whole = sum(map(len, sent[row]))
        until(f"DPDK {version}, {queues} queue pairs, {row}: {whole} frames are back", lambda: testpmd.counts(2 * index)[1] >= whole)
    testpmd.quit()
    total = sum(len(frames) for queues_of in sent.values() for frames in queues_of)
    for device in devices:
        device.stop()
    for row in rows:
        for queue in range(queues):
            expected = [frame[6:12] + frame[:6] + frame[12:] for frame in sent[row][queue]]
            if read_pcap(lib.TMP / f"{name}-{row}-{queue}.out") != expected:
                fail(f"DPDK {version}, {queues} queue pairs, {row}: queue {queue} has not brought back what was sent")
    print(f"DPDK {version}, {queues} queue pair(s): {len(rows)} rows: {total} frames came back as they were sent")


begin("dpdk-testpmd", "stdbuf")
with open("/proc/cpuinfo") as cpu:
    avx512 = {"avx512f", "avx512bw", "avx512vl"} <= set(cpu.read().split())
rows = {row: words for row, words in ROWS.items() if avx512 or "packed-vectorized" not in row}
if len(sys.argv) > 2:
    rows = {row: words for row, words in rows.items() if row in sys.argv[2:]}
if len(rows) < len(ROWS):
    print(f"left out: {', '.join(set(ROWS) - set(rows))}")
for version in ["22.11", "24.11"]:
    for queues in [1, 2]:
        matrix(version, queues)
print("passed: virtio_user on our device")
lib.finish(0)
