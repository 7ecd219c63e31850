"""Shared by the tests of real peers: the programs of Debian 13, a guest in its QEMU, traffic to the guest, and an end that leaves nothing.

A test calls `begin`, which runs it again in network and process namespaces of its own. Interfaces and processes go with the namespaces
when the test ends, however it ends. What is missing is named in a line that starts with `skipped:`, and the exit status is 0.
"""

import json
import os
import queue
import random
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[1]
NETMEM = os.environ.get("NETMEM", str(TREE / "target/release/netmem"))
# Long enough for a slow machine. It is there so that a test that hangs ends as a failure.
TIMEOUT = int(os.environ.get("TIMEOUT", "300"))

HOST, GUEST, MAC = "10.79.0.1", "10.79.0.2", "02:00:00:00:00:02"
# For the guest's kernel. It tests no cryptography and calibrates no timer: a boot is to be quick.
WORDS = f"console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable cryptomgr.notests no_timer_check lpj=4000000 netmem_addr={GUEST}/24"
TMP = None
ROOT = None
STARTED = {}


def skip(why):
    print(f"skipped: {why}", flush=True)
    finish(0)


def fail(why):
    print(f"failed: {why}", file=sys.stderr, flush=True)
    for path in sorted(TMP.glob("*.log")) if TMP else []:
        tail = path.read_bytes()[-3000:].decode(errors="replace").replace("\r", "")
        print(f"---- {path.name}\n{tail}", file=sys.stderr, flush=True)
    finish(1)


def finish(status):
    """Ends the test from any of its threads. The process namespace ends with this process, and every other process in it."""
    for process in STARTED.values():
        process.kill()
    if TMP:
        shutil.rmtree(TMP, ignore_errors=True)
    sys.stdout.flush()
    os._exit(status)


def begin(*commands, netmem=True, backports=False):
    """Call first. The first argument of a test is the directory where debian13.sh keeps its root. `netmem` says whether the command is needed,
    and `backports` whether the kernel of Debian 13's backports is: `ROOT.parent / "backports/root"`."""
    global TMP, ROOT
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else TREE / "target/tmp/debian13")
    if os.geteuid() != 0:
        skip("network namespaces and taps need root")
    if not os.path.exists("/dev/net/tun"):
        skip("there is no /dev/net/tun")
    if netmem and not os.access(NETMEM, os.X_OK):
        skip(f"no binary at {NETMEM} (cargo build --release, or set NETMEM)")
    for command in ["unshare", "ip", "cpio", "xz", *commands]:
        if not shutil.which(command):
            skip(f"{command} is not installed")
    if os.environ.get("NETMEM_PEERS_ALONE") != "1":
        for script in ["debian13.sh", *(["backports.sh"] if backports else [])]:
            built = subprocess.run([HERE / script, directory], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
            if built.returncode != 0:
                fail(f"{script} has made nothing")
            if not built.stdout.startswith("there:"):
                print(built.stdout, end="", flush=True)
            if built.stdout.startswith("skipped:"):
                sys.exit(0)
        os.environ["NETMEM_PEERS_ALONE"] = "1"
        alone = ["unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]
        os.execvp(alone[0], [*alone, sys.executable, "-B", os.path.abspath(sys.argv[0]), str(directory), *sys.argv[2:]])
    ROOT = directory.resolve() / "root"
    TMP = Path(tempfile.mkdtemp(prefix="netmem-peers."))
    # The first process of a namespace gets no signal that it has no handler for.
    for number in [signal.SIGTERM, signal.SIGINT, signal.SIGHUP]:
        signal.signal(number, lambda number, _: finish(128 + number))
    signal.signal(signal.SIGALRM, hung)
    signal.alarm(TIMEOUT)
    threading.excepthook = lambda args: (sys.__excepthook__(*args[:3]), fail("an exception in a thread"))
    sys.excepthook = lambda *args: (sys.__excepthook__(*args), fail("an exception"))
    ip("link set lo up")


def hung(_, frame):
    traceback.print_stack(frame)
    fail(f"the test was not over after {TIMEOUT} s")


def ip(words):
    run("ip", *words.split())


def run(*command):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        fail(f"{' '.join(map(str, command))}: {done.stdout}")
    return done.stdout


def until(what, condition, seconds=60):
    """Waits until `condition()` is true, and returns its value. The time is a watchdog's: it is no assertion about speed."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end:
            fail(f"{what}: not within {seconds} s")
        time.sleep(0.02)
    return value


def start(name, *command, **options):
    """A process in the background; `TMP/name.log` has its output."""
    log = open(TMP / f"{name}.log", "ab")
    process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, **options)
    STARTED[name] = process
    return process


def debian13(program):
    """The words that start a program of the Debian 13 root, outside of it, with the root's own loader and libraries."""
    libraries = ROOT / "usr/lib/x86_64-linux-gnu"
    return [ROOT / "usr/lib64/ld-linux-x86-64.so.2", "--library-path", libraries, ROOT / program]


class Testpmd:
    """An interactive testpmd of DPDK, `version` "22.11" (the system's) or "24.11" (Debian 13's), with one forwarding core and no huge pages.

    Its first words come from `vdevs`, one word each, and its ports have their order. `options` are testpmd's own.
    """

    def __init__(self, name, version, vdevs, options=(), eal=()):
        self.path = TMP / f"{name}.log"
        program = ["dpdk-testpmd"]
        if version == "24.11":
            plugins = ROOT / "usr/lib/x86_64-linux-gnu/dpdk/pmds-25.0"
            program = [*debian13("usr/bin/dpdk-testpmd"), "-d", plugins]
        command = [
            # By lines: its output is read while it runs.
            "stdbuf", "-oL", *program, "-l", "0,1", "--main-lcore", "0", "--no-pci", "--no-telemetry", "--no-huge", "-m", "256", "--no-shconf",
            f"--file-prefix=netmem-{os.getpid()}-{name}", "--log-level=pmd.net.virtio.init:info", *eal, *(f"--vdev={vdev}" for vdev in vdevs),
            "--", "-i", "--nb-cores=1", "--port-topology=paired", "--no-flush-rx", *options,
        ]
        with open(self.path, "wb") as log:
            self.process = subprocess.Popen([str(word) for word in command], stdin=subprocess.PIPE, stdout=log, stderr=log)
        STARTED[name] = self.process
        self.read = 0
        self.said("testpmd> ")

    def log(self):
        return self.path.read_text(errors="replace")

    def said(self, words):
        """Waits until it has said `words` since the last call, and returns what it said up to there."""

        def found():
            log = self.log()
            at = log.find(words, self.read)
            if at < 0 and self.process.poll() is not None:
                fail(f"testpmd ended with {self.process.returncode} and never said {words!r}")
            return log[: at + len(words)] if at >= 0 else None

        log = until(f"testpmd says {words!r}", found)
        before, self.read = log[self.read :], len(log)
        return before

    def do(self, command):
        """Has a command done, and returns what testpmd answers."""
        # The next prompt may be there before the command's end; what it echoes is not.
        self.process.stdin.write(f"{command}\nshow port 250 module_eeprom\n".encode())
        self.process.stdin.flush()
        return self.said("Invalid port 250")

    def counts(self, port):
        """Packets received and transmitted by a port."""
        said = self.do(f"show port stats {port}")
        return tuple(int(re.search(rf"{way}-packets: (\d+)", said)[1]) for way in ("RX", "TX"))

    def quit(self):
        """Ends it as it wants to be ended: captures are complete only then."""
        self.process.stdin.write(b"stop\nquit\n")
        self.process.stdin.flush()
        try:
            status = self.process.wait(30)
        except subprocess.TimeoutExpired:
            fail("testpmd does not end")
        if status != 0:
            fail(f"testpmd ended with {status}")


def write_pcap(path, frames):
    with open(path, "wb") as file:
        file.write(struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 262144, 1))
        for frame in frames:
            file.write(struct.pack("<IIII", 0, 0, len(frame), len(frame)) + frame)


def read_pcap(path):
    data, at, frames = Path(path).read_bytes(), 24, []
    while at < len(data):
        length, whole = struct.unpack_from("<8xII", data, at)
        if length != whole:
            fail(f"{path} has {length} of a frame's {whole} bytes")
        frames.append(data[at + 16 : at + 16 + length])
        at += 16 + length
    return frames


def tap(name, address=None, mac=None, words=""):
    """A tap that stays when the device that serves it ends. IPv6 is off, so that the kernel sends nothing on its own."""
    ip(f"tuntap add {name} mode tap vnet_hdr {words}")
    Path(f"/proc/sys/net/ipv6/conf/{name}/disable_ipv6").write_text("1")
    if mac:
        ip(f"link set {name} address {mac}")
    if address:
        ip(f"addr add {address}/24 dev {name}")
    ip(f"link set {name} up")


class Device:
    """`netmem device`, listening on `TMP/NAME.sock` or connecting to it."""

    def __init__(self, name, port, connect=False, words=(), queues=1):
        self.name, self.port, self.connect, self.words = name, port, connect, ["--queues", queues, "--threads", queues, *words]
        self.socket = TMP / f"{name}.sock"
        self.start()

    def start(self):
        role = "--connect" if self.connect else "--listen"
        self.process = start(self.name, NETMEM, "device", role, self.socket, "--port", self.port, *self.words)
        if not self.connect:
            until("the device's socket", lambda: self.alive() and self.socket.is_socket())

    def alive(self):
        if self.process.poll() is not None:
            fail(f"the device {self.name} ended by itself: {self.process.returncode}")
        return True

    def kill(self):
        """Without a word of warning."""
        self.alive()
        self.process.kill()
        self.process.wait()

    def stop(self):
        self.alive()
        self.process.terminate()
        try:
            status = self.process.wait(10)
        except subprocess.TimeoutExpired:
            fail(f"the device {self.name} does not end")
        if status != 0:
            fail(f"the device {self.name} ended with {status}")

    def log(self):
        return (TMP / f"{self.name}.log").read_text(errors="replace")


def kernel(*programs, modules=("failover", "net_failover", "virtio_net"), root=None):
    """Linux 6.12, or the kernel of another `root`, and an initramfs for it, in TMP: busybox, `init`, modules (those of virtio-net), and other
    programs, of the root or of this tree, with their libraries."""
    root = root or ROOT
    top = TMP / "initramfs"
    for directory in ["bin", "modules", "proc", "sys", "dev", "tmp"]:
        (top / directory).mkdir(parents=True)
    shutil.copy(ROOT / "usr/bin/busybox", top / "bin/busybox")
    (top / "bin/sh").symlink_to("busybox")
    shutil.copy(HERE / "init", top / "init")
    for program in programs:
        shutil.copy(ROOT / program, top / "bin")
        # The C library loads libgcc_s by itself, when a thread is cancelled.
        libraries = [ROOT / "usr/lib/x86_64-linux-gnu/libgcc_s.so.1"]
        libraries += re.findall(r"(/\S+) \(0x", run(*debian13("")[:-1], "--list", ROOT / program))
        (top / "lib").mkdir(exist_ok=True)
        (top / "lib64").mkdir(exist_ok=True)
        for library in libraries:
            if "ld-linux" not in str(library):
                shutil.copy(library, top / "lib")
        shutil.copy(ROOT / "usr/lib64/ld-linux-x86-64.so.2", top / "lib64")
    # In the order that insmod wants them: each needs the ones before it.
    for index, module in enumerate(modules):
        packed = next(root.glob(f"usr/lib/modules/*/kernel/**/{module}.ko.xz"))
        (top / f"modules/{index}-{module}.ko").write_bytes(subprocess.check_output(["xz", "-dc", packed]))
    archive = f"cd {top} && find . | cpio --quiet -o -H newc -R 0:0 | gzip -1 > {TMP}/initramfs.gz"
    subprocess.run(["bash", "-o", "pipefail", "-c", archive], check=True)
    # Newer packages have it beside the modules.
    kernels = [*root.glob("boot/vmlinuz-*"), *root.glob("usr/lib/modules/*/vmlinuz")]
    shutil.copy(kernels[0], TMP / "vmlinuz")


def card_at(socket, chardev, card, name, queues=1):
    """QEMU's words for a virtio-net card on the vhost-user back end at `socket`."""
    return [
        "-chardev", f"socket,id=vhost{name},path={socket},{chardev}", "-netdev", f"vhost-user,id=net{name},chardev=vhost{name},queues={queues}",
        "-device", f"virtio-net-pci,id=card{name},netdev=net{name},{card}",
    ]  # fmt: skip


class Guest:
    """A guest of QEMU 10 under emulation, with one virtio-net card on a vhost-user back end at `socket`, or with none.

    `chardev` says which side listens there, `card` are properties of the card, `words` go to init, `options` to QEMU, which `card_at` makes
    for further cards. Without `boot`, the firmware looks for a kernel itself.
    """

    def __init__(self, name, socket, chardev="reconnect-ms=100", card="", words="", options=(), mem=256, boot=True, queues=1, cpus=1):
        self.name = name
        self.qmp_path = TMP / f"{name}.qmp"
        self.lines = queue.Queue()
        self.events = []
        booted = ["-kernel", TMP / "vmlinuz", "-initrd", TMP / "initramfs.gz", "-append", f"{WORDS} {words}"] if boot else []
        command = [
            *debian13("usr/bin/qemu-system-x86_64"), "-L", ROOT / "usr/share/qemu", "-L", ROOT / "usr/share/seabios",
            "-accel", "tcg", "-M", "q35", "-cpu", "qemu64", "-smp", cpus, "-m", f"{mem},slots=4,maxmem=2G",
            "-nodefaults", "-no-user-config", "-display", "none",
            # The guest's memory must be a shared file: the back end maps it.
            "-object", f"memory-backend-memfd,id=mem,size={mem}M,share=on", "-machine", "memory-backend=mem",
            *(card_at(socket, chardev, f"mac={MAC}{card or ',romfile='}", "", queues) if socket else []),
            "-qmp", f"unix:{self.qmp_path},server=on,wait=off", "-serial", "stdio", *booted, *options,
        ]  # fmt: skip
        self.console = open(TMP / f"{name}.log", "ab")
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.console,
            env={**os.environ, "QEMU_MODULE_DIR": str(ROOT / "usr/lib/x86_64-linux-gnu/qemu")},
        )
        STARTED[name] = self.process
        threading.Thread(target=self._listen, daemon=True).start()
        until(f"{name}'s QMP socket", lambda: self.alive() and self._connect())
        self.qmp_file = self.qmp_socket.makefile("r")
        self.qmp_file.readline()
        self.qmp("qmp_capabilities")

    def alive(self):
        if self.process.poll() is not None:
            fail(f"{self.name}: QEMU ended by itself: {self.process.returncode}")
        return True

    def _connect(self):
        """Whether QEMU listens on its socket, which is there a moment before."""
        self.qmp_socket = socket.socket(socket.AF_UNIX)
        try:
            self.qmp_socket.connect(str(self.qmp_path))
        except (FileNotFoundError, ConnectionRefusedError):
            self.qmp_socket.close()
            return False
        return True

    def _listen(self):
        for line in self.process.stdout:
            self.console.write(line)
            self.console.flush()
            self.lines.put(line.decode(errors="replace").strip())

    def said(self, start):
        """The next line of the console that starts with `start`, and the lines before it."""
        before = []
        while True:
            try:
                line = self.lines.get(timeout=120)
            except queue.Empty:
                fail(f"{self.name} never said {start!r}")
            # The firmware leaves control sequences before the first line.
            if start in line:
                return line[line.index(start) :], before
            before.append(line)

    def sh(self, command):
        """Runs a line in the guest's shell and returns what it printed; a status other than 0 is a failure."""
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()
        end, output = self.said("END ")
        if end != "END 0":
            fail(f"{self.name}: {command}: {end}: {output}")
        return "\n".join(output)

    def qmp(self, command, **arguments):
        self.qmp_socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
        while True:
            line = self.qmp_file.readline()
            if not line:
                fail(f"{self.name}: QEMU closed its QMP socket at {command}")
            answer = json.loads(line)
            if "event" in answer:
                self.events.append(answer)
            elif "error" in answer:
                fail(f"{self.name}: {command} {arguments}: {answer['error']}")
            else:
                return answer["return"]

    def quit(self):
        self.alive()
        self.process.kill()
        self.process.wait()


class Ping:
    """Echo requests to the guest, one each `interval` seconds: when each was sent, and which were answered."""

    def __init__(self, interval=0.02):
        self.sent, self.answered, self.twice, self.gap = [], set(), 0, 0.0
        self.enough, self.ended, self.interval = threading.Event(), threading.Event(), interval
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
        self.socket.settimeout(0.1)
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._receive)]
        self.last = time.monotonic()
        for thread in self.threads:
            thread.start()

    def _send(self):
        while not self.enough.wait(self.interval):
            message = struct.pack("!BBHHH", 8, 0, 0, 0x4E4D, len(self.sent) & 0xFFFF) + bytes(range(56))
            total = sum(struct.unpack("!32H", message))
            total = (total >> 16) + (total & 0xFFFF)
            message = message[:2] + struct.pack("!H", ~(total + (total >> 16)) & 0xFFFF) + message[4:]
            try:
                self.socket.sendto(message, (GUEST, 0))
                self.sent.append(time.time())
            except OSError:
                # The address cannot be resolved while the device is away.
                pass

    def _receive(self):
        while not self.ended.is_set():
            try:
                packet = self.socket.recv(2048)
            except OSError:
                continue
            kind, _, _, name, number = struct.unpack("!BBHHH", packet[20:28])
            if kind != 0 or name != 0x4E4D:
                continue
            if packet[28:] != bytes(range(56)):
                fail(f"an echo reply with other bytes: {packet[28:].hex()}")
            now = time.monotonic()
            self.gap, self.last = max(self.gap, now - self.last), now
            self.twice += number in self.answered
            self.answered.add(number)

    def more(self, count=10):
        """Waits until `count` more requests were answered: traffic goes on."""
        target = len(self.answered) + count
        until("pings are answered again", lambda: len(self.answered) >= target)

    def end(self):
        sender, receiver = self.threads
        self.enough.set()
        sender.join()
        # Answers come in the order of the requests: what has no answer when the last request has
        # one is lost.
        end = time.monotonic() + 30
        while len(self.sent) - 1 & 0xFFFF not in self.answered and time.monotonic() < end:
            time.sleep(0.02)
        self.ended.set()
        receiver.join()
        lost = [when for number, when in enumerate(self.sent) if number not in self.answered]
        return lost, f"ping: {len(self.sent)} sent, {len(lost)} lost, {self.twice} answered twice, longest gap {self.gap * 1e3:.0f} ms"


class Stream:
    """One TCP connection to the guest's port 7: random bytes go there, and every byte that comes back is compared."""

    CHUNK = 16384

    def __init__(self, address=GUEST):
        self.socket = socket.create_connection((address, 7), timeout=30)
        # Generous: the connection must survive the test, and what kills it otherwise is its own
        # give-up time.
        self.socket.settimeout(120)
        self.checked, self.ended = 0, threading.Event()
        self.threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._receive)]
        for thread in self.threads:
            thread.start()

    def _send(self):
        source = random.Random(12)
        while not self.ended.is_set():
            try:
                self.socket.sendall(source.randbytes(self.CHUNK))
            except OSError as error:
                fail(f"the TCP connection is lost after {self.checked} bytes: {error}")
        self.socket.shutdown(socket.SHUT_WR)

    def _receive(self):
        source, expected = random.Random(12), b""
        while True:
            try:
                data = self.socket.recv(65536)
            except OSError as error:
                fail(f"the TCP connection is lost after {self.checked} bytes: {error}")
            if not data:
                if not self.ended.is_set():
                    fail(f"the guest closed the TCP connection after {self.checked} bytes")
                return
            while len(expected) < len(data):
                expected += source.randbytes(self.CHUNK)
            if expected[: len(data)] != data:
                fail(f"other bytes came back than were sent, after {self.checked} bytes")
            expected = expected[len(data) :]
            self.checked += len(data)

    def more(self, count=1 << 20):
        """Waits until `count` more bytes came back."""
        target = self.checked + count
        until("TCP goes on", lambda: self.checked >= target)

    def end(self):
        """Waits until every byte that was sent has come back."""
        self.ended.set()
        for thread in self.threads:
            thread.join()
        self.socket.close()
        return f"TCP: {self.checked} bytes back, each as it was sent"
