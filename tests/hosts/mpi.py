#!/usr/bin/env -S python3 -B
"""mpi.py: `mpirun -n 4` with packaging/hosts/rank.sh, each rank in a network namespace of its own on one bridge.

Incast of three to one, and each to each: one report, whose sums agree with what each rank prints of itself.
Env: NETMEM (the command), SECS (1).
"""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
NETMEM = Path(os.environ.get("NETMEM", TREE / "target/release/netmem"))
RANK = TREE / "packaging/hosts/rank.sh"
NAMES = [f"nmmpi{os.getpid()}x{rank}" for rank in range(4)]
HUB = f"nmmpi{os.getpid()}hub"
HOSTS = ["10.84.0.100", "10.84.0.1", "10.84.0.2", "10.84.0.3"]


def skip(why):
    print(f"skipped: {why}")
    sys.exit(0)


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def network():
    ip("netns", "add", HUB)
    ip("-n", HUB, "link", "add", "br0", "type", "bridge")
    ip("-n", HUB, "link", "set", "br0", "up")
    for rank, (name, address) in enumerate(zip(NAMES, HOSTS)):
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{rank}", "netns", HUB)
        ip("-n", HUB, "link", "set", f"p{rank}", "master", "br0", "up")
        ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")


def mpirun(tmp, *arguments):
    """The driver's report, and the lines of the ranks."""
    # The launcher's standard output is the driver's: agents print on standard error.
    program = f'exec ip netns exec "{NAMES[0][:-1]}$OMPI_COMM_WORLD_RANK" "$@"'
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "4", "sh", "-c", program, "rank", RANK, *arguments]
    env = os.environ | {
        "NETMEM_HOSTS": ",".join(HOSTS),
        "NETMEM_KEY": str(tmp / "key"),
        "PATH": f"{tmp}:{os.environ['PATH']}",
        "TMPDIR": str(tmp),
        # Ranks are processes of one machine: no other transport is looked for.
        "OMPI_MCA_plm": "isolated",
    }
    return subprocess.run(command, env=env, capture_output=True, text=True)


def check(tmp, arguments, each):
    done = mpirun(tmp, *arguments, "-t", os.environ.get("SECS", "1"), "--runs", "1", "--json")
    assert done.returncode == 0, done
    report = json.loads(done.stdout)
    parts = report["variants"][0]["parts"]
    lines = re.findall(r"(\d+) flow\(s\) from here, (\d+) to here; bytes in all: (\d+) sent, (\d+) received", done.stderr)
    assert len(lines) == 3 and {line[:2] for line in lines} == {each}, done.stderr
    own = next(part for part in parts if part["host"] == 0)
    for place, what in ((2, "sent"), (3, "received")):
        ranks = own[what] + sum(int(line[place]) for line in lines)
        assert ranks == sum(part[what] for part in parts), (what, done)
    sent, received = (sum(part[what] for part in parts) for what in ("sent", "received"))
    assert sent == received > 0, report
    flows = report["variants"][0]["flows"]
    gigabits = sum(flow["bits_per_s"] for flow in flows) / 1e9
    print(f"{' '.join(arguments)}: {len(flows)} flows, {gigabits:.2f} Gb/s, {sent} bytes sent by the ranks, {received} received")


for program in ("ip", "mpirun"):
    if not shutil.which(program):
        skip(f"{program} is not installed (on Debian: iproute2, openmpi-bin)")
if os.geteuid() != 0:
    skip("not root")
with tempfile.TemporaryDirectory(prefix="nmmpi") as folder:
    tmp = Path(folder)
    (tmp / "netmem").symlink_to(NETMEM)
    (tmp / "key").touch(0o600)
    (tmp / "key").write_text(secrets.token_hex(32))
    try:
        network()
        check(tmp, ["--reverse"], ("1", "0"))
        check(tmp, ["--all"], ("3", "3"))
    finally:
        for name in [*NAMES, HUB]:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
