#!/usr/bin/env -S python3 -B
"""xsk.py DIR PROGRAM...: tests of AF_XDP in zero-copy mode, in a guest whose driver has it.

Each PROGRAM is a test program of the crate `xsk`, as NAME=PATH. The guest has two virtio-net cards on a hub of QEMU. Queues of ours are on the
first, in zero-copy mode, and a raw packet socket of the kernel is on the second. The kernel is that of Debian 13's backports: virtio-net
sends in this mode from Linux 6.13 on, and an older driver refuses it. The driver takes the mode only if the card uses the DMA
API (`iommu_platform=on`). A third card, on a hub of its own, does not.
"""

import sys
import time

import lib
from lib import Guest, begin, fail, kernel, run

# The tests that run in the guest, which is emulated and slow.
TESTS = {
    "all": [
        "frames::delivered_bytes_are_the_page",
        "frames::frames_are_echoed",
        "frames::frames_of_every_size_in_half_pages_with_headroom",
        "lifecycle::a_process_that_is_killed_leaves_nothing",
        "lifecycle::an_interface_that_is_down_for_a_while",
        "lifecycle::pages_come_home_from_eight_threads",
        "lifecycle::sockets_are_closed_with_frames_in_flight",
        "lifecycle::the_halves_of_a_socket_part",
        "queues::a_queue_that_only_sends_is_filled",
        "queues::a_sender_is_woken_by_late_completions",
        "queues::a_thread_sleeps_until_there_is_work",
        "queues::frames_are_redirected_to_virtio_and_back",
        "queues::without_need_wakeup_each_flush_is_a_call",
        "reopen::a_queue_is_opened_again_in_either_mode",
        "rx_metadata::metadata_in_memory_of_a_peer_behind_headroom",
        "rx_metadata::metadata_of_received_frames",
        "sharing::a_queue_that_only_sends",
    ],
    "quirks": ["the_mode_is_what_the_driver_has"],
}

programs = dict(word.split("=", 1) for word in sys.argv[2:])
begin("strip", netmem=False, backports=True)
if set(programs) != set(TESTS):
    fail(f"the programs are to be {sorted(TESTS)}, and are {sorted(programs)}")
for name, path in programs.items():
    # Debug information is twenty times as large as the program, and the guest unpacks it.
    run("strip", "-o", lib.TMP / name, path)
kernel(*(lib.TMP / name for name in programs), root=lib.ROOT.parent / "backports/root")


def card(number, hub=0, dma_api="on"):
    """QEMU's words for a card on a hub."""
    properties = f"mac=02:00:00:00:00:0{number},romfile=,disable-legacy=on,iommu_platform={dma_api}"
    return ["-netdev", f"hubport,id=net{number},hubid={hub}", "-device", f"virtio-net-pci,netdev=net{number},{properties}"]


# The kernel would measure its clock at boot, which goes wrong where the emulator has to wait for a
# CPU.
guest = Guest("guest", None, options=[*card(1), *card(2), *card(3, 1, "off")], words="clocksource=acpi_pm", mem=512)
guest.said("READY")
print(f"the guest is up: Linux {guest.sh('uname -r')}")
# The tests' frames are for addresses that no card has.
guest.sh("ip link set eth0 promisc on; ip link set eth1 promisc on up; ip link set eth2 up")
for name, tests in TESTS.items():
    begun = time.monotonic()
    variables = "NETMEM_NO_SKIP=1 NETMEM_KILLS=6 NETMEM_XSK_NICS=eth0,eth1 NETMEM_XSK_PLAIN=eth2"
    said = guest.sh(f"{variables} {name} --exact --test-threads 1 {' '.join(tests)}")
    if f"{len(tests)} passed; 0 failed" not in said:
        fail(f"{name}: {said}")
    print(f"{name}: {', '.join(tests)}, in {time.monotonic() - begun:.1f} s")
guest.quit()
print("passed: AF_XDP in zero-copy mode")
lib.finish(0)
