#!/usr/bin/env -S python3 -B
"""pairs.py [DIR]: QEMU and DPDK's virtio_user, with as many queue pairs as our device has, and with one more.

Both read the answer to GET_QUEUE_NUM as a number of pairs, and the device answers with its rings, as other front ends read it. With as many
pairs, both front ends start. With one more, the device refuses the first ring that it does not have and names it, and serves the next
front end.
"""

import socket

import lib
from lib import Device, begin, debian13, fail, finish, start, until

PAIRS = 3


def qemu(name, path, pairs):
    """A machine without a system, which has started far enough to have asked the device for its properties."""
    return start(
        name, *debian13("usr/bin/qemu-system-x86_64"), "-L", lib.ROOT / "usr/share/qemu", "-L", lib.ROOT / "usr/share/seabios",
        "-nodefaults", "-display", "none", "-m", "128", "-machine", "q35,memory-backend=m",
        "-object", "memory-backend-memfd,id=m,size=128M,share=on", "-chardev", f"socket,id=c,path={path}",
        "-netdev", f"vhost-user,id=n,chardev=c,queues={pairs}",
        "-device", f"virtio-net-pci,netdev=n,mq=on,vectors={2 * pairs + 2},romfile=", "-monitor", f"unix:{lib.TMP}/{name}.mon,server,nowait",
    )  # fmt: skip


def monitor(name, command):
    """QEMU's answer to a command."""
    with socket.socket(socket.AF_UNIX) as talk:
        talk.connect(f"{lib.TMP}/{name}.mon")
        talk.sendall(f"{command}\n".encode())
        said = b""
        # It echoes the command, and its prompt is there before and after.
        while said.count(b"(qemu) ") < 2 or not said.endswith(b"(qemu) "):
            said += talk.recv(65536)
    return said.decode(errors="replace")


def refused():
    """How often the device has named the first ring that it does not have."""
    return device.log().count(f"there is no ring {2 * PAIRS}:")


def user(name, pairs):
    """virtio_user, with as many queues."""
    command = [
        "dpdk-testpmd", "-l", "0,1", "--no-pci", "--no-telemetry", "--no-huge", "-m", "256", "--no-shconf", f"--file-prefix=netmem-{name}",
        f"--vdev=net_virtio_user0,path={device.socket},queues={pairs},cq=1", "--", f"--rxq={pairs}", f"--txq={pairs}",
        "--total-num-mbufs=8192", "--forward-mode=txonly", "--stats-period=1", "--tx-first",
    ]  # fmt: skip
    return start(name, *command)


begin("dpdk-testpmd")
device = Device("device", "sink", queues=PAIRS)

machine = qemu("qemu-most", device.socket, PAIRS)
until("QEMU's monitor", lambda: (lib.TMP / "qemu-most.mon").exists() or machine.poll() is not None)
network = monitor("qemu-most", "info network")
if network.count("type=vhost-user") != PAIRS or refused():
    fail(f"QEMU has not {PAIRS} queue pairs: {network}")
machine.terminate()
machine.wait()
print(f"QEMU has {PAIRS} queue pairs")

machine = qemu("qemu-over", device.socket, PAIRS + 1)
until("the device refuses QEMU's ring", refused)
machine.kill()
machine.wait()
print(f"QEMU with {PAIRS + 1} is refused by name")

before = refused()
most = user("user-most", PAIRS)
until("every pair sends", lambda: most.poll() is not None or "Tx-pps: " in (lib.TMP / "user-most.log").read_text(errors="replace"))
if most.poll() is not None or refused() != before:
    fail(f"virtio_user does not run with {PAIRS} queue pairs")
most.terminate()
most.wait()
print(f"virtio_user has {PAIRS} queue pairs")

over = user("user-over", PAIRS + 1)
until("the device refuses virtio_user's ring", lambda: refused() > before or over.poll() is not None)
over.kill()
over.wait()
if refused() == before:
    fail(f"virtio_user with {PAIRS + 1} queue pairs ended, and the device refused nothing")
print(f"virtio_user with {PAIRS + 1} is refused by name")
device.stop()
finish(0)
