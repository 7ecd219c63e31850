#!/usr/bin/env -S python3 -B
"""packetdrill.py [-v] [SCRIPT...]: packetdrill's own scripts for TCP on netmem-inet; prints which pass, and what is not as packetdrill.txt says.

Without SCRIPT (part of a name): all that packetdrill.txt does not leave out. packetdrill and the object (crates/packetdrill) are built in
target/. NETMEM_PACKETDRILL_SO names another object. packetdrill is not in the tree (it is under the GPL): NETMEM_PACKETDRILL names its
archive or folder, and otherwise shared/peers/packetdrill-*.tar.xz is looked for beside the tree. `packetdrill.py --find` fails
if it is nowhere. NETMEM_PACKETDRILL=none says that a run without it is meant.

A script runs in a mount namespace of its own, where the directories that it writes kernel settings to are empty ones. The commands `sysctl`,
`ip`, `tc` and `ethtool` write their settings there as well, and the object reads them.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", TREE / "target"))
LIST = Path(__file__).with_suffix(".txt")
# A script takes milliseconds. One that hangs ends as a failure.
TIMEOUT = 60

# Where the object reads settings.
SETTINGS = "/proc/sys/net/ipv4"

# Writes settings as files: net.ipv4.tcp_ecn=1, net/ipv4/tcp_ecn=1.
SYSCTL = """#!/bin/sh
for word; do
    case $word in
        *=*) name=${word%%=*}; name=${name##*[./]}; printf '%s\\n' "${word#*=}" > "/proc/sys/net/ipv4/$name" ;;
    esac
done
"""
# The last command is the setting.
KEEP = """#!/bin/sh
[ "$1" = tcp_metrics ] || printf '%s\\n' "$*" > "/proc/sys/net/ipv4/{name}"
"""
TOOLS = {"sysctl": SYSCTL, "ip": KEEP.format(name="route"), "tc": KEEP.format(name="qdisc"), "ethtool": KEEP.format(name="device")}

# What a script finds in /proc/sys/net/ipv4, as on Linux. set_sysctls.py restores values of before.
DEFAULTS = {"tcp_rmem": "4096 131072 6291456", "tcp_wmem": "4096 16384 4194304"}
EMPTY = "tcp_min_tso_segs tcp_mtu_probing tcp_base_mss tcp_timestamps tcp_slow_start_after_idle".split()

# In the script's namespace: $1 is the directory of settings.
INSIDE = """
mount --bind "$1" /proc/sys/net/ipv4 && mount -t tmpfs none /sys/module && mkdir -p /sys/module/tcp_cubic/parameters &&
    mount -t tmpfs none /tmp || exit 125
shift
exec "$@"
"""


def skip(why):
    print(f"skipped: {why}", flush=True)
    sys.exit(0)


def archive():
    given = os.environ.get("NETMEM_PACKETDRILL")
    if given:
        return Path(given)
    archives = (found for folder in TREE.parents for found in sorted(folder.glob("shared/peers/packetdrill-*.tar.xz")))
    return next(archives, None)


def built():
    """The folder gtests/net of packetdrill, with the program built."""
    source = archive()
    if source is None:
        skip("packetdrill's archive is not here (NETMEM_PACKETDRILL names it)")
    if source.is_dir():
        net = source / "gtests/net"
    else:
        root = TARGET / "tmp" / source.name.removesuffix(".tar.xz")
        net = root / "packetdrill/gtests/net"
    if not (net / "packetdrill/packetdrill").exists():
        for command in ["bison", "flex", "make", "cc", "xz"]:
            if not shutil.which(command):
                skip(f"{command} is not installed")
        if not source.is_dir():
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
            subprocess.run(["tar", "-C", root, "-xf", source], check=True)
        for command in [["./configure"], ["make", "packetdrill"]]:
            done = subprocess.run(command, cwd=net / "packetdrill", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode != 0:
                sys.exit(f"failed: {' '.join(command)}\n{done.stdout}")
    return net


def library():
    given = os.environ.get("NETMEM_PACKETDRILL_SO")
    if given:
        return Path(given).resolve()
    subprocess.run(["cargo", "build", "--quiet", "--offline", "--package", "netmem-packetdrill"], cwd=TREE, check=True)
    return TARGET / "debug/libnetmem_packetdrill.so"


def listed():
    """Names and folders that are left out, and the names of scripts that fail, each with the reason."""
    out, fails = {}, {}
    for line in LIST.read_text().splitlines():
        if line and not line.startswith("#"):
            kind, name, why = line.split(maxsplit=2)
            {"out": out, "fail": fails}[kind][name] = why
    return out, fails


def run(name, net, so, tools):
    """Whether a script passes, and what packetdrill said."""
    script = net / "tcp" / name
    with tempfile.TemporaryDirectory(dir=TARGET / "tmp", prefix="packetdrill.") as settings:
        for setting in EMPTY:
            (Path(settings) / setting).touch()
        for setting, value in DEFAULTS.items():
            (Path(settings) / setting).write_text(value + "\n")
        for line in script.read_text().splitlines():
            # The size of the segments that a large one was merged from is an option of packetdrill, and not in the packet.
            if line.startswith("--mss="):
                (Path(settings) / "segment").write_text(line.split("=")[1])
        packetdrill = [net / "packetdrill/packetdrill", f"--so_filename={so}", f"--so_flags={SETTINGS}"]
        if "--ip_version" not in script.read_text():
            packetdrill += ["--ip_version=ipv4", "--local_ip=192.168.0.2"]
        inside = ["env", f"PATH={tools}:{os.environ['PATH']}", f"LD_PRELOAD={so}", *packetdrill, script.name]
        command = ["unshare", "--mount", "sh", "-c", INSIDE, "sh", settings, *inside]
        try:
            done = subprocess.run(command, cwd=script.parent, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired as hung:
            return False, f"hung: {hung.output or ''}"
        if done.returncode == 125:
            return None, done.stdout
        return done.returncode == 0, done.stdout.strip()


def main():
    words = sys.argv[1:]
    if words == ["--find"]:
        sys.exit(0 if archive() else 1)
    if os.environ.get("NETMEM_PACKETDRILL") == "none":
        print("not run: NETMEM_PACKETDRILL=none")
        return
    verbose = "-v" in words
    words = [word for word in words if word != "-v"]
    if os.geteuid() != 0:
        skip("mount namespaces need root")
    for command in ["unshare", "mount"]:
        if not shutil.which(command):
            skip(f"{command} is not installed")
    net = built()
    so = library()
    out, fails = listed()
    names = sorted(str(path.relative_to(net / "tcp")) for path in (net / "tcp").rglob("*.pkt"))
    left_out = [name for name in names if any(name.startswith(prefix) for prefix in out)]
    wrong = [f"packetdrill.txt leaves out {prefix}, which is not there" for prefix in out if not any(name.startswith(prefix) for name in names)]
    wrong += [f"packetdrill.txt lists {name}, which is not there" for name in fails if name not in names]
    chosen = [name for name in names if name not in left_out]
    if words:
        chosen = [name for name in names if any(word in name for word in words)]

    with tempfile.TemporaryDirectory(dir=TARGET / "tmp", prefix="packetdrill.") as tools:
        for tool, text in TOOLS.items():
            path = Path(tools) / tool
            path.write_text(text)
            path.chmod(0o755)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            results = dict(zip(chosen, pool.map(lambda name: run(name, net, so, tools), chosen)))

    if any(passed is None for passed, _ in results.values()):
        skip("directories cannot be mounted here")
    for name, (passed, said) in results.items():
        if verbose or words or (not passed and name not in fails):
            print(f"{'pass' if passed else 'FAIL'} {name}")
            print("".join(f"     {line}\n" for line in said.splitlines()), end="")
        if not passed and name not in fails:
            wrong.append(f"{name} fails, and packetdrill.txt does not say why")
        if passed and name in fails:
            wrong.append(f"{name} passes: packetdrill.txt says that it fails")
    folders = {}
    for name, (passed, _) in results.items():
        count = folders.setdefault(name.split("/")[0], [0, 0])
        count[0] += passed
        count[1] += 1
    for folder, (passed, all) in folders.items():
        print(f"{folder:18} {passed:3} of {all:3}")
    total = sum(passed for passed, _ in folders.values())
    print(f"passed: {total} of {len(results)} scripts; {len(left_out)} of {len(names)} are left out")
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    sys.exit(1 if wrong and not words else 0)


main()
