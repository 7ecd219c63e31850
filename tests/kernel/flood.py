"""flood.py ADDRESS FRAMES [SIZE]: UDP frames of SIZE bytes (60) to ADDRESS, as fast as one thread can make the kernel send them.

Half go one per system call (0.3 million/s here), half by UDP_SEGMENT, 50 frames per call (1.6 million/s), which a tap without
segmentation offload receives as single frames. Prints how many were sent; a refused one ends the program, for the count must be exact.
"""
import socket
import sys

UDP_SEGMENT = 103  # <linux/udp.h>; Python's socket module has no name for it
BURST = 50

address, frames = sys.argv[1], int(sys.argv[2])
payload = bytes((int(sys.argv[3]) if len(sys.argv) > 3 else 60) - 14 - 20 - 8)
single = frames - frames // 2 // BURST * BURST

with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    sock.connect((address, 9))
    for _ in range(single):
        sock.send(payload)
    sock.setsockopt(socket.IPPROTO_UDP, UDP_SEGMENT, len(payload))
    for _ in range((frames - single) // BURST):
        sock.send(payload * BURST)
print(frames)
