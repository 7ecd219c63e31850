#!/usr/bin/env -S python3 -B
"""run.py [-v] [--object OBJECT] [--expected LIST] [SCRIPT...]: packetdrill's own scripts for TCP on a stack, and those in scripts/ beside
this file; prints which pass, and what is not as the list says.

OBJECT is an example of this folder, which is built in target/ (netmem without the option), or the path of another project's shared object.
LIST has each script that fails or is not run, with the reason: examples/NAME/expected.txt for an example, and otherwise none.

Each script is run in the versions of IP for which packetdrill's own run_all.py runs it: with IPv4, with IPv6 over a link of 1520 bytes, and
with IPv4 addresses that are mapped into IPv6. It passes if all of them pass.

Without SCRIPT (part of a name): all that LIST does not leave out. packetdrill is built in target/. It is not in the tree (it is under the
GPL): NETMEM_PACKETDRILL names its archive or folder, and otherwise shared/peers/packetdrill-*.tar.xz is searched for in the folders above the
tree. `run.py --find` fails if there is none. NETMEM_PACKETDRILL=none says that a run without it is meant.

A script runs in a mount namespace of its own, where the directories that it writes kernel settings to are empty ones. The commands `sysctl`,
`ip`, `tc` and `ethtool` write their settings there as well, and the object reads them.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TREE = Path(__file__).resolve().parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", TREE / "target"))
EXAMPLES = Path(__file__).with_name("examples")
# Scripts of this project.
OWN = Path(__file__).with_name("scripts")
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
# The last command is the setting. What the object does not do is an error, which ends the script.
KEEP = """#!/bin/sh
case $* in
    {none}) exit ;;
{kept}    *) echo "the object has no {tool} $*" >&2; exit 1 ;;
esac
printf '%s\\n' "$*" > "/proc/sys/net/ipv4/$to"
"""


def keep(tool, none, **kept):
    """A command that writes what matches a pattern of `kept` to the file of that name, and does nothing for what matches `none`."""
    return KEEP.format(tool=tool, none=none, kept="".join(f"    {pattern}) to={name} ;;\n" for name, pattern in kept.items()))


TOOLS = {
    "sysctl": SYSCTL,
    "ip": keep("ip", none="tcp_metrics*", route="route*|-6\ route*", link="link\ set*mtu*"),
    "tc": keep("tc", none="qdisc\ delete*", qdisc="qdisc*pfifo*|qdisc\ *\ fq"),
    "ethtool": keep("ethtool", none="-k*", device="-K*"),
}

# What a script finds in /proc/sys/net/ipv4, as on Linux. set_sysctls.py restores values of before.
DEFAULTS = {"tcp_rmem": "4096 131072 6291456", "tcp_wmem": "4096 16384 4194304"}
EMPTY = "tcp_min_tso_segs tcp_mtu_probing tcp_base_mss tcp_timestamps tcp_slow_start_after_idle".split()

# What packetdrill is told for a version of IP. The object has these addresses, too.
V4 = ["--local_ip=192.168.0.2", "-DCODE=host_unreachable"]
CMSG_V4 = ["-DCMSG_LEVEL_IP=SOL_IP", "-DCMSG_TYPE_RECVERR=IP_RECVERR"]
CMSG_V6 = ["-DCMSG_LEVEL_IP=SOL_IPV6", "-DCMSG_TYPE_RECVERR=IPV6_RECVERR"]
VERSIONS = {"ipv4": V4 + CMSG_V4, "ipv6": ["--local_ip=fd::1", "--mtu=1520", *CMSG_V6], "ipv4-mapped-ipv6": V4 + CMSG_V6}

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


def library(name):
    """The object that --object names."""
    if (EXAMPLES / name).is_dir():
        subprocess.run(["cargo", "build", "--quiet", "--offline", "--package", "netmem-packetdrill", "--example", name], cwd=TREE, check=True)
        return TARGET / f"debug/examples/lib{name}.so"
    so = Path(name).resolve()
    if not so.is_file():
        sys.exit(f"{so} is not there, and no example of {EXAMPLES} has this name")
    return so


def listed(path):
    """What a list has: names and folders, each with the reason. `only`: no others are run. `out`: they are not run. `fail`: they fail."""
    kinds = {"only": {}, "out": {}, "fail": {}}
    for number, line in enumerate(path.read_text().splitlines() if path else [], 1):
        if line and not line.startswith("#"):
            kind, name, why = [*line.split(maxsplit=2), "", ""][:3]
            if kind not in kinds or not why:
                sys.exit(f"{path}:{number}: a line is `only`, `out` or `fail`, a name, and the reason")
            kinds[kind][name] = why
    return kinds.values()


def versions(script):
    """The versions of IP in which a script is run."""
    for line in script.read_text().splitlines():
        if line.startswith("--ip_version="):
            return [line.split("=")[1].strip()]
    return [version for version in VERSIONS if not script.stem.endswith("v4" if version == "ipv6" else "v6")]


def run(script, version, net, so, tools):
    """Whether a script passes, and what packetdrill said."""
    options = [f"--ip_version={version}", *VERSIONS[version]]
    with tempfile.TemporaryDirectory(dir=TARGET / "tmp", prefix="packetdrill.") as settings:
        for setting in EMPTY:
            (Path(settings) / setting).touch()
        for setting, value in DEFAULTS.items():
            (Path(settings) / setting).write_text(value + "\n")
        for line in script.read_text().splitlines():
            # The size of the segments that a large one was merged from is an option of packetdrill,
            # and not in the packet.
            if line.startswith("--mss="):
                (Path(settings) / "segment").write_text(line.split("=")[1])
            # packetdrill sets the MTU of the link that it makes, and here it makes none.
            if line.startswith("--mtu="):
                options.append(line.strip())
        for option in options:
            if option.startswith("--mtu="):
                (Path(settings) / "link").write_text(option.replace("--mtu=", "mtu "))
        packetdrill = [net / "packetdrill/packetdrill", f"--so_filename={so}", f"--so_flags={SETTINGS}", *options]
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--find", action="store_true")
    parser.add_argument("-v", dest="verbose", action="store_true")
    parser.add_argument("--object", default="netmem")
    parser.add_argument("--expected", type=Path)
    parser.add_argument("words", nargs="*", metavar="SCRIPT")
    given = parser.parse_args()
    if given.find:
        sys.exit(0 if archive() else 1)
    if os.environ.get("NETMEM_PACKETDRILL") == "none":
        print("not run: NETMEM_PACKETDRILL=none")
        return
    words, verbose = given.words, given.verbose
    if os.geteuid() != 0:
        skip("mount namespaces need root")
    for command in ["unshare", "mount"]:
        if not shutil.which(command):
            skip(f"{command} is not installed")
    net = built()
    so = library(given.object)
    its_list = EXAMPLES / given.object / "expected.txt"
    only, out, fails = listed(given.expected or (its_list if its_list.is_file() else None))
    scripts = {str(path.relative_to(net / "tcp")): path for path in sorted((net / "tcp").rglob("*.pkt"))}
    scripts |= {f"netmem/{path.name}": path for path in sorted(OWN.glob("*.pkt"))}
    among = lambda name, prefixes: any(name.startswith(prefix) for prefix in prefixes)
    left_out = [name for name in scripts if among(name, out) or (only and not among(name, only))]
    wrong = [f"the list has {prefix}, which is not there" for prefix in [*only, *out] if not any(name.startswith(prefix) for name in scripts)]
    wrong += [f"the list has {name}, which is not run" for name in fails if name not in scripts or name in left_out]
    chosen = [name for name in scripts if name not in left_out]
    if words:
        chosen = [name for name in scripts if any(word in name for word in words)]
    runs = [(name, version) for name in chosen for version in versions(scripts[name])]

    with tempfile.TemporaryDirectory(dir=TARGET / "tmp", prefix="packetdrill.") as tools:
        for tool, text in TOOLS.items():
            path = Path(tools) / tool
            path.write_text(text)
            path.chmod(0o755)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            results = dict(zip(runs, pool.map(lambda one: run(scripts[one[0]], one[1], net, so, tools), runs)))

    if any(passed is None for passed, _ in results.values()):
        skip("directories cannot be mounted here")
    for (name, version), (passed, said) in results.items():
        if verbose or words or passed == (name in fails):
            print(f"{'pass' if passed else 'FAIL'} {name} {version}")
            print("".join(f"     {line}\n" for line in said.splitlines()), end="")
        if not passed and name not in fails:
            wrong.append(f"{name} fails with {version}, and the list does not say why")
        if passed and name in fails:
            wrong.append(f"{name} passes with {version}: the list says that it fails")
    folders = {}
    for name in chosen:
        count = folders.setdefault(name.split("/")[0], [0, 0])
        count[0] += all(passed for (other, _), (passed, _) in results.items() if other == name)
        count[1] += 1
    for folder, (passed, of) in folders.items():
        print(f"{folder:18} {passed:3} of {of:3}")
    passed, of = (sum(count[n] for folder, count in folders.items() if folder != "netmem") for n in (0, 1))
    print(f"passed: {passed} of {of} scripts of packetdrill in all versions of IP; {len(left_out)} are left out; {len(results)} runs")
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    sys.exit(1 if wrong and not words else 0)


main()
