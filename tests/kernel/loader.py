#!/usr/bin/env -S python3 -B
"""loader.py LOADER [gpu | stand-in]: files from nc into device memory and back, through a tap (examples/loader.rs).

    nc ── kernel ── tap ── netmem device ── vhost-user ── loader        in network and process namespaces of this test

Each file comes back as it was sent. In the loader's memory, which this process opens as a device would and the loader never maps, its
extents have the file's checksum. Env: NETMEM, MIB (16), FILES (2).

gpu: the memory is that of the first NVIDIA GPU, and a kernel on it computes the checksum. NETMEM has the feature cuda.
stand-in: the same on a library that takes the place of the GPU's driver (tests/cuda/libcuda.c). This proves the order of the driver's
calls and their arguments in both processes, and that everything is released. It proves nothing about a GPU.
"""

import ctypes
import hashlib
import operator
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NETMEM = os.environ.get("NETMEM", str(Path(__file__).resolve().parents[2] / "target/release/netmem"))
GPU = sys.argv[2] if len(sys.argv) > 2 else None
MIB, FILES = int(os.environ.get("MIB", "16")), int(os.environ.get("FILES", "2"))
ADDRESS = "192.0.2.2"


def skip(why):
    print(f"skipped: {why}")
    sys.exit(0)


def fail(why):
    print(f"failed: {why}", file=sys.stderr)
    for log in sorted(tmp.glob("*.log")):
        print(f"---- {log.name}\n{log.read_text(errors='replace')[-2000:]}", file=sys.stderr)
    sys.exit(1)


def said(pattern, count=1):
    """Waits until the loader has said it so often, and returns what it said."""
    for _ in range(1200):
        found = re.findall(pattern, (tmp / "loader.log").read_text())
        if len(found) >= count:
            return found
        if loader.poll() is not None or device.poll() is not None:
            fail("a process has ended")
        time.sleep(0.05)
    fail(f"the loader never said {pattern!r}")


def start(name, *command, **options):
    return subprocess.Popen([str(word) for word in command], stdout=open(tmp / f"{name}.log", "wb"), stderr=subprocess.STDOUT, **options)


if os.geteuid() != 0:
    skip("network namespaces and taps need root")
if not os.path.exists("/dev/net/tun"):
    skip("there is no /dev/net/tun")
for command in ["unshare", "ip", "nc"] + (["cc"] if GPU == "stand-in" else []):
    if not shutil.which(command):
        skip(f"{command} is not installed")
if "-N" not in subprocess.run(["nc", "-h"], capture_output=True, text=True).stderr:
    skip("nc is not that of netcat-openbsd, which ends the stream at the end of its input (-N)")
if GPU == "gpu":
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as why:
        skip(f"no driver of a GPU is installed: {why}")
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        skip("libcuda.so.1 is installed, and finds no GPU")
if os.environ.get("NETMEM_LOADER_ALONE") != "1":
    # Interfaces and processes go with the namespaces.
    os.environ["NETMEM_LOADER_ALONE"] = "1"
    alone = ["unshare", "--net", "--pid", "--mount-proc", "--fork", "--kill-child"]
    os.execvp(alone[0], [*alone, sys.executable, "-B", os.path.abspath(sys.argv[0]), *sys.argv[1:]])

tmp = Path(tempfile.mkdtemp(prefix="netmem-loader."))
try:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if GPU == "stand-in":
        # Under the first name that is looked for.
        source = Path(__file__).resolve().parents[1] / "cuda/libcuda.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", tmp / "libcuda.so", source], check=True)
        # A loader in C has the library of Netmem there.
        os.environ["LD_LIBRARY_PATH"] = ":".join([str(tmp), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
        os.environ["NETMEM_FAKE_CUDA_LOG"] = str(tmp / "calls.log")
    importer = ["--cuda", "0"] if GPU else []
    device = start("device", NETMEM, "device", "--listen", tmp / "nic.sock", "--port", "tap:nm0", *importer, stdin=subprocess.DEVNULL)
    # /sys still shows the interfaces of the namespace before.
    while not (tmp / "nic.sock").is_socket() or subprocess.run(["ip", "link", "show", "nm0"], capture_output=True).returncode != 0:
        if device.poll() is not None:
            fail("the device has ended")
        time.sleep(0.02)
    subprocess.run(["ip", "addr", "add", "192.0.2.1/24", "dev", "nm0"], check=True)
    subprocess.run(["ip", "link", "set", "nm0", "up"], check=True)
    # A page of 4 KiB holds the payload of one frame, and files stay until the loader ends.
    loader = start("loader", sys.argv[1], tmp / "nic.sock", f"{ADDRESS}/24", FILES * MIB * 3 + 16, FILES, *importer[1:], stdin=subprocess.PIPE)
    said("files to port")
    for number in range(FILES):
        # Lengths that are no multiple of anything.
        content = random.Random(number).randbytes((MIB << 20) + 12345 * number + 1)
        (tmp / "file").write_bytes(content)
        begun = time.monotonic()
        with open(tmp / "file", "rb") as file:
            back = subprocess.run(["nc", "-N", ADDRESS, "9000"], stdin=file, capture_output=True, timeout=120)
        seconds = time.monotonic() - begun
        if back.returncode != 0 or back.stdout != content:
            fail(f"file {number}: nc ended with {back.returncode}, and {len(back.stdout)} of {len(content)} bytes came back, or others")
        extents = said(r"extents:(.*)\n", number + 1)[number].split()
        if GPU:
            # By the kernel: each byte times its position.
            checksum = said(r"checksum: (\d+)\n", number + 1)[number]
            if int(checksum) != sum(map(operator.mul, content, range(1, len(content) + 1))) % 2**64:
                fail(f"file {number} is not in the memory of the GPU as it was sent")
            print(f"{len(content)} bytes there and back in {seconds:.2f} s, in {len(extents)} extents, checksum {checksum}")
            continue
        [memory] = said(r"memory: (\S+)")
        checksum = hashlib.sha256()
        with open(memory, "rb") as file:
            for extent in extents:
                offset, length = map(int, extent.split("+"))
                checksum.update(os.pread(file.fileno(), length, offset))
        if checksum.digest() != hashlib.sha256(content).digest():
            fail(f"file {number} is not in the memory as it was sent")
        # By its file system and inode: files of two file systems may have one number. The device's
        # process has the mapping.
        stat = os.stat(memory)
        place = [f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}", str(stat.st_ino)]
        mapped = {name: place in (line.split()[3:5] for line in open(f"/proc/{process.pid}/maps")) for name, process in [("loader", loader), ("device", device)]}
        if mapped != {"loader": False, "device": True}:
            fail(f"the memory is mapped in: {mapped}")
        print(f"{len(content)} bytes there and back in {seconds:.2f} s, in {len(extents)} extents, sha256 {checksum.hexdigest()[:16]}")
    said(f"{FILES} files are back")
    loader.stdin.close()
    if loader.wait(30) != 0:
        fail(f"the loader ended with {loader.returncode}")
    device.terminate()
    if device.wait(30) != 0:
        fail(f"the device ended with {device.returncode}")
    if GPU == "stand-in":
        # A line of each process.
        calls = (tmp / "calls.log").read_text().splitlines()
        if len(calls) != 2 or not all(line.startswith("unreleased: 0 contexts, 0 handles, 0 ranges;") for line in calls):
            fail(f"the calls of the loader and of the device: {calls}")
        print("\n".join(calls))
    print("passed: files into device memory and back")
finally:
    shutil.rmtree(tmp, ignore_errors=True)
