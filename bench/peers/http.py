#!/usr/bin/env -S python3 -B
"""http.py [--runs N] [--seconds SECS] [--clients N]: the server's CPU time of an HTTP connection, netmem's and nginx's.

wrk opens a connection for each request, which the server closes after an answer of 100 bytes. The servers take turns:
  `netmem serve http` behind a tap; the kernel of the tap's namespace has the clients
  Debian's nginx, one process, over a veth pair
The kernel's connections use CUBIC, as netmem's do: the routes of the namespaces say so (`congctl`), because a namespace must not choose it by
sysctl where the machine does not allow it. `ss` lists one of nginx's connections with it, or the command fails.
A server has CPU 0, and wrk CPU 1. CPU time is the run time of all threads of the server (`/proc/PID/task/*/schedstat`), softirqs at the end of
its system calls included. So a server on the kernel's sockets does not pay for segments that are received in softirqs of the client, and netmem
pays for those that the kernel receives while it writes to the tap. The run time of server and wrk together shows what moves from one to the
other. Prints us of a connection, and the ratio of netmem to nginx in each pair of runs: median (lowest..highest). Needs root, nginx and wrk. NETMEM names the command.
"""

import argparse
import os
import pathlib
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

from loss import CONGESTION, NETMEM, Namespace, run, tap

CONF = """
daemon off; master_process off; pid pid; error_log stderr;
events { worker_connections 1000; }
http {
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi; uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  server { listen 10.86.0.2:80 backlog=4096; location / { return 200 "BODY"; } }
}
""".replace("BODY", "x" * 100)


def inside(namespace, *command):
    return ["ip", "netns", "exec", namespace.name, *command]


def takes(namespace, interface, address):
    """Moves an interface into a namespace, whose connections over it use CUBIC."""
    namespace.takes(interface, address + "/24")
    route = ["10.86.0.0/24", "dev", interface, "proto", "kernel", "scope", "link", "src", address]
    run("ip", "-n", namespace.name, "route", "replace", *route, "congctl", CONGESTION)


# ADDRESS: holds a connection until its input ends.
HOLD = """
import socket, sys
with socket.create_connection((sys.argv[1], 80), 20):
    print("held", flush=True)
    sys.stdin.read()
"""


def check_congestion(home, clients):
    """Fails unless a connection of the server uses CUBIC at both ends."""
    hold = subprocess.Popen(inside(clients, sys.executable, "-c", HOLD, "10.86.0.2"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert hold.stdout.readline() == "held\n"
        for namespace in (home, clients):
            command = inside(namespace, "ss", "-tinHO", "state", "established")
            lines = subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True).stdout.splitlines()
            assert lines and all(CONGESTION in line.split() for line in lines), lines
    finally:
        hold.communicate()


def children_ns():
    """Run time of the processes that have ended: of wrk, as servers have not."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) * 1e9


class Server:
    """A process on CPU 0, the namespace of its clients, and its CPU time."""

    def __init__(self, command, clients):
        self.clients = clients
        self.process = subprocess.Popen(["taskset", "-c", "0", *command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def end(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def ns(self):
        threads = pathlib.Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads)

    def measure(self, args, seconds):
        """Microseconds of a connection: the server's, and those of server and clients."""
        before, clients = self.ns(), children_ns()
        wrk = ["taskset", "-c", "1", "wrk", "-t1", f"-c{args.clients}", f"-d{seconds}s", "--timeout", "20s", "-H", "Connection: close"]
        done = subprocess.run(inside(self.clients, *wrk, "http://10.86.0.2/100"), check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, timeout=seconds + 60)
        assert not re.search("Socket errors|Non-2xx", done.stdout), done.stdout
        server, clients = self.ns() - before, children_ns() - clients
        requests = int(re.search(r"(\d+) requests in", done.stdout)[1])
        return server / 1000 / requests, (server + clients) / 1000 / requests

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()


def netmem(clients):
    name = tap()
    server = Server([NETMEM, "serve", "http", "--port", f"tap:{name}", "--addr", "10.86.0.2/24"], clients)
    try:
        deadline = time.monotonic() + 20
        while not pathlib.Path("/sys/class/net", name).exists():
            assert time.monotonic() < deadline, "no tap appears"
            time.sleep(0.01)
        takes(clients, name, "10.86.0.1")
    except BaseException:
        server.end()
        raise
    return server


def nginx(clients, home, folder):
    ends = tap(), tap()
    run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    takes(clients, ends[0], "10.86.0.1")
    takes(home, ends[1], "10.86.0.2")
    pathlib.Path(folder, "nginx.conf").write_text(CONF)
    return Server(inside(home, "nginx", "-e", "stderr", "-p", folder, "-c", "nginx.conf"), clients)


def ready(server, args):
    """Warms a server up. It may not listen at first."""
    for _ in range(100):
        try:
            return server.measure(args, 1)
        except (AssertionError, subprocess.CalledProcessError, ZeroDivisionError):
            assert server.process.poll() is None, "the server has ended"
            time.sleep(0.05)
    raise AssertionError("the server does not answer")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--seconds", type=int, default=1)
    parser.add_argument("--clients", type=int, default=50)
    args = parser.parse_args()
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    missing = [program for program in ("wrk", "nginx", "taskset") if not shutil.which(program)]
    if missing or not os.access(NETMEM, os.X_OK) or os.geteuid() != 0:
        sys.exit(f"skipped: not root, no {NETMEM}, or not installed: {', '.join(missing)}")
    with Namespace() as first, Namespace() as second, Namespace() as third, tempfile.TemporaryDirectory() as folder:
        with netmem(first) as ours, nginx(second, third, folder) as theirs:
            servers = ours, theirs
            for server in servers:
                ready(server, args)
            check_congestion(third, second)
            pairs = []
            for number in range(args.runs):
                # Forwards and backwards.
                order = servers if number % 2 == 0 else servers[::-1]
                values = {server: server.measure(args, args.seconds) for server in order}
                pairs.append((values[ours], values[theirs]))
    print(f"the kernel's connections use {CONGESTION}")
    for which, more in enumerate(["", ", both sides"]):
        ours, theirs = [[run[which] for run in runs] for runs in zip(*pairs)]
        ratios = [one / other for one, other in zip(ours, theirs)]
        for name, values in [("netmem" + more, ours), ("nginx" + more, theirs), ("netmem / nginx" + more, ratios)]:
            print(f"{name:27} {statistics.median(values):.2f} ({min(values):.2f}..{max(values):.2f})")


if __name__ == "__main__":
    main()
