/* The driver or the device of C with a peer that is not Netmem's.
 *
 *   virtio_peer connect SOCKET FRAMES   sends frames to a device that sends them back
 *   virtio_peer listen SOCKET FRAMES    receives frames of a driver, and sends each back */
#include <netmem.hpp>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <poll.h>

namespace {

template <class Queue> void sleep_for(Queue &queue) {
    if (queue.arm()) {
        pollfd event = {queue.fd(), POLLIN, 0};
        poll(&event, 1, -1);
    }
    queue.disarm();
}

unsigned long there_and_back(const char *socket, unsigned long frames) {
    netmem_virtio_options options = netmem::virtio_options(socket);
    options.tx_pages = 64;
    netmem::virtio_net net(options);
    netmem::frag_group<32> to, from;
    unsigned long received = 0;
    while (received < frames) {
        net.tx[0].complete(net.rx[0]);
        for (netmem::frag frame; (frame = net.alloc());) {
            std::memset(frame.data_mut(), 2, 60);
            frame.truncate(60);
            if (!to.push(frame))
                break;
        }
        const std::size_t sent = net.tx[0].send(to), back = net.rx[0].receive(from);
        for (std::size_t i = 0; i < back; i++) {
            /* The peer has changed the addresses. */
            const netmem::frag frame = from.take(i);
            if (frame.size() != 60 || frame.data()[59] != 2)
                return 0;
            received++;
        }
        if (sent + back == 0)
            sleep_for(net.rx[0]);
    }
    return received;
}

unsigned long of_a_driver(const char *socket, unsigned long frames) {
    netmem::virtio_device device{netmem::region(1024)};
    device.listen(socket);
    std::puts("ready");
    std::fflush(stdout);
    netmem::frag_group<64> group;
    unsigned long received = 0;
    while (received < frames) {
        const std::size_t n = device.receive(group);
        received += n;
        if (n == 0)
            sleep_for(device);
        else
            device.send(group);
    }
    const netmem_virtio_device_stats stats = device.stats();
    device.check_connection();
    return stats.faults + stats.runts + stats.bad_header + stats.not_negotiated == 0 ? received : 0;
}

} // namespace

int main(int argc, char **argv) {
    if (argc != 4)
        return 2;
    const unsigned long frames = std::strtoul(argv[3], nullptr, 10);
    const bool connects = std::strcmp(argv[1], "connect") == 0;
    const unsigned long received = connects ? there_and_back(argv[2], frames) : of_a_driver(argv[2], frames);
    std::puts(received >= frames ? "each frame was received" : "other frames");
    return received >= frames ? 0 : 1;
}
