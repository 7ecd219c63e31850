/* A driver of two queue pairs, each of which a thread of its own receives from.
 * Usage: virtio_pairs SOCKET FRAMES, of a device that sends so many frames to each pair. */
#include <netmem.hpp>

#include <cstdio>
#include <cstdlib>
#include <poll.h>
#include <thread>
#include <utility>

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    const unsigned long frames = std::strtoul(argv[2], nullptr, 10);
    netmem_virtio_options options = netmem::virtio_options(argv[1]);
    options.pairs = 2;
    netmem::virtio_net net(options);
    std::thread threads[2];
    unsigned long received[2] = {0, 0};
    for (int i = 0; i < 2; i++)
        threads[i] = std::thread(
            [frames](netmem::virtio_rx rx, unsigned long &count) {
                netmem::frag_group<64> group;
                while (count < frames) {
                    count += rx.receive(group);
                    if (group.size() == 0 && rx.arm()) {
                        pollfd event = {rx.fd(), POLLIN, 0};
                        poll(&event, 1, -1);
                    }
                    rx.disarm();
                }
            },
            std::move(net.rx[static_cast<std::size_t>(i)]), std::ref(received[i]));
    for (std::thread &thread : threads)
        thread.join();
    std::printf("%lu and %lu frames\n", received[0], received[1]);
    return 0;
}
