#!/usr/bin/env python3
"""loss.py [--link OPTIONS] [--seeds N] [--bytes N] [--jobs N]: netmem's TCP over a bad link, beside the kernel's over the same link.

For each seed, a stream of so many bytes goes
  from kernel to kernel, over `netmem link`, which joins two taps, in both directions
  from `netmem serve source`, which has the same link at its port, to the kernel
  from the kernel to `netmem serve discard`
Each run has namespaces of its own, so that no kernel knows the path already. The kernel's congestion control is that of netmem, CUBIC,
whatever the machine's default is. Prints medians in Mbit/s, and the median of the ratios of netmem to the kernel over the same seed. Runs wait most of the time, so that several are made at once. Needs root. NETMEM names the command.
"""

import argparse
import concurrent.futures
import itertools
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
NETMEM = os.environ.get("NETMEM", str(ROOT / "target/release/netmem"))
NAMES = itertools.count()
CONGESTION = "cubic"

# SEND|RECEIVE, ADDRESS, PORT, BYTES: connects and waits until all bytes are there. Prints the
# seconds since the connection was made.
CLIENT = """
import socket, sys, time
congestion, what, address, port, left = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
for _ in range(1000):
    try:
        s = socket.create_connection((address, port), 60)
        break
    except OSError:
        time.sleep(0.02)
s.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
begin = time.monotonic()
if what == "SEND":
    s.sendall(bytes(left))
    s.shutdown(socket.SHUT_WR)
    assert s.recv(1) == b""
else:
    while left > 0:
        got = len(s.recv(1 << 16))
        assert got
        left -= got
print(time.monotonic() - begin)
"""

# SEND|RECEIVE, PORT: serves a connection: it sends until the peer is gone, or receives until the
# peer's end.
SERVER = """
import socket, sys
with socket.create_server(("", int(sys.argv[3]))) as listener:
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, sys.argv[1].encode())
    s, _ = listener.accept()
    try:
        while s.sendall(bytes(1 << 16)) is None if sys.argv[2] == "SEND" else s.recv(1 << 16):
            pass
    except ConnectionError:
        pass
"""


def run(*command):
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


class Namespace:
    """A network namespace with an interface, which goes with the run."""

    def __init__(self):
        self.name = f"loss{os.getpid()}x{next(NAMES)}"
        run("ip", "netns", "add", self.name)

    def takes(self, tap, address):
        run("ip", "link", "set", tap, "netns", self.name)
        run("ip", "-n", self.name, "address", "add", address, "dev", tap)
        run("ip", "-n", self.name, "link", "set", tap, "up")

    def start(self, program, *args):
        command = ["ip", "netns", "exec", self.name, sys.executable, "-c", program, CONGESTION, *map(str, args)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        run("ip", "netns", "delete", self.name)


class Netmem:
    """The command, which ends with the run."""

    def __init__(self, *args):
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.process = subprocess.Popen([NETMEM, *args], **pipes)
        # Until then, it searches for its taps in this namespace.
        deadline = time.monotonic() + 20
        while not all(pathlib.Path("/sys/class/net", arg[4:]).exists() for arg in args if arg.startswith("tap:")):
            assert time.monotonic() < deadline, "no tap appears"
            time.sleep(0.01)
        if args[0] == "serve":
            line = self.process.stderr.readline()
            assert line.startswith("ready"), line

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=20)


def tap():
    return f"ls{os.getpid() % 100000}x{next(NAMES)}"


def seconds(client):
    out, _ = client.communicate(timeout=300)
    assert client.returncode == 0, "the client failed"
    return float(out)


def kernel(what, size, link):
    """A stream from kernel to kernel. `what` the client does."""
    left, right = tap(), tap()
    with Namespace() as here, Namespace() as there, Netmem("link", f"tap:{left}", f"tap:{right}", "--link", link):
        here.takes(left, "10.85.0.1/24")
        there.takes(right, "10.85.0.2/24")
        server = there.start(SERVER, "RECEIVE" if what == "SEND" else "SEND", 4000)
        try:
            return seconds(here.start(CLIENT, what, "10.85.0.2", 4000, size))
        finally:
            server.kill()
            server.communicate()


def netmem(what, size, link):
    """A stream between the kernel, which is the client, and netmem."""
    service, port = ("discard", 9) if what == "SEND" else ("source", 19)
    name = tap()
    with Namespace() as here, Netmem("serve", service, "--port", f"tap:{name}", "--addr", "10.85.0.2/24", "--link", link):
        here.takes(name, "10.85.0.1/24")
        return seconds(here.start(CLIENT, what, "10.85.0.2", port, size))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", default="loss=1%,delay=10ms", help="without a seed; the delay is one way")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--bytes", type=int, default=4_000_000)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--check", type=float, help="fail if a ratio is below this")
    args = parser.parse_args()
    # The client's side of the link is the same in both rows of a direction, so that the same
    # packets of a seed get lost.
    rows = {
        "kernel to kernel, the server sends": (kernel, "RECEIVE"),
        "netmem to kernel": (netmem, "RECEIVE"),
        "kernel to kernel, the client sends": (kernel, "SEND"),
        "kernel to netmem": (netmem, "SEND"),
    }
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        # Runs of a seed are made at the same time, so that what else the machine does is shared by
        # them.
        jobs = [(row, pool.submit(run, what, args.bytes, f"{args.link},seed={seed}"))
                for seed in range(1, args.seeds + 1) for row, (run, what) in rows.items()]
        rates = {row: [] for row in rows}
        for row, job in jobs:
            rates[row].append(args.bytes * 8e-6 / job.result())
    print(f"{args.bytes} bytes over {args.link}, {args.seeds} seeds; Mbit/s: median (lowest..highest)")
    failed = False
    for row, (run, what) in rows.items():
        values = rates[row]
        median = statistics.median(values)
        base = next(rates[other] for other, job in rows.items() if job == (kernel, what))
        ratio = statistics.median(value / kernels for value, kernels in zip(values, base))
        print(f"{row:34} {median:7.2f} ({min(values):.2f}..{max(values):.2f})  {ratio:.2f}")
        failed |= args.check is not None and ratio < args.check
    if failed:
        sys.exit(f"a ratio is less than {args.check} times that of the kernel")


if __name__ == "__main__":
    main()
