#!/usr/bin/env -S python3 -B
"""dmabuf.py DIR PROGRAM...: tests of device memory in a guest whose kernel makes real dma-bufs.

Each PROGRAM is a test program of this tree, as NAME=PATH. It runs in the guest once with `/dev/udmabuf` and once with the heap `system`, with
the tests that TESTS names. The guest has no network card: device and driver are in the programs. The peer of the streams is the guest's
kernel, behind a tap. The device of the streams is a process of its own; it looks at the bytes in the dma-buf, and calls
`DMA_BUF_IOCTL_SYNC` before and after.
"""

import sys
import time

import lib
from lib import Guest, begin, fail, kernel, run

# The tests that run in the guest, which is emulated and slow.
TESTS = {
    "all": [
        "traffic::there_and_back",
        "traffic::one_binding_after_the_other",
        "streams_kernel::the_kernels_stream_over_ipv4",
        "streams_kernel::sent_from_device_memory",
    ],
}

programs = dict(word.split("=", 1) for word in sys.argv[2:])
begin("strip", netmem=False)
if set(programs) != set(TESTS):
    fail(f"the programs are to be {sorted(TESTS)}, and are {sorted(programs)}")
for name, path in programs.items():
    # Debug information is twenty times as large as the program, and the guest unpacks it.
    run("strip", "-o", lib.TMP / name, path)
kernel(*(lib.TMP / name for name in programs), modules=["tun"])
booting = time.monotonic()
guest = Guest("guest", None)
guest.said("READY")
print(f"the guest is up after {time.monotonic() - booting:.1f} s: Linux {guest.sh('uname -r')}")
for memory in ["udmabuf", "heap"]:
    for name, tests in TESTS.items():
        begun = time.monotonic()
        said = guest.sh(f"NETMEM_NO_SKIP=1 NETMEM_TEST_MEMORY={memory} {name} --exact --test-threads 1 {' '.join(tests)}")
        if f"{len(tests)} passed; 0 failed" not in said:
            fail(f"{name} on {memory}: {said}")
        print(f"{memory}: {name}: {', '.join(tests)}, in {time.monotonic() - begun:.1f} s")
guest.quit()
print("passed: device memory on real dma-bufs")
lib.finish(0)
