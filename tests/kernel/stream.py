#!/usr/bin/env python3
"""A TCP stream whose bytes are hashed at both ends: `receive ADDRESS PORT`, or `send ADDRESS PORT MIB`. Prints bytes and hash."""
import hashlib
import os
import socket
import sys
import time

mode, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
digest, total = hashlib.sha256(), 0
if mode == "receive":
    with socket.create_server((address, port)) as server:
        server.settimeout(60)
        peer, _ = server.accept()
        peer.settimeout(60)
        while part := peer.recv(1 << 20):
            digest.update(part)
            total += len(part)
else:
    # The server may not be there yet.
    for attempt in range(200):
        try:
            peer = socket.create_connection((address, port), timeout=60)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    else:
        sys.exit("no server")
    block = os.urandom(1 << 20)
    for n in range(int(sys.argv[4])):
        # No two blocks are equal, and writes have odd lengths.
        part = n.to_bytes(8, "big") + block[n * 1001 % 9000 :]
        peer.sendall(part)
        digest.update(part)
        total += len(part)
    peer.shutdown(socket.SHUT_WR)
    peer.recv(1)
print(total, digest.hexdigest())
