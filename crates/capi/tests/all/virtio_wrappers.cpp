/* The wrappers of the virtio driver and device: a driver on one thread, and a device on another
 * that echoes. Usage: virtio_wrappers SOCKET */
#include <netmem.hpp>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <poll.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

namespace {

template <class Queue> void sleep_for(Queue &queue) {
    if (queue.arm()) {
        pollfd event = {queue.fd(), POLLIN, 0};
        while (poll(&event, 1, -1) < 0) {
        }
    }
    queue.disarm();
}

std::atomic<unsigned> echoed;

void echo(netmem::virtio_device device, unsigned frames) {
    netmem::frag_group<64> group;
    while (echoed < frames) {
        if (device.receive(group) == 0) {
            sleep_for(device);
            continue;
        }
        while (group.size() > 0) {
            const std::size_t sent = device.send(group);
            echoed += static_cast<unsigned>(sent);
            /* The driver has posted no buffers. To arm is a pass, too. */
            if (sent == 0)
                sleep_for(device);
        }
    }
    /* Until all are delivered, and the driver has gone. */
    while (device.stats().sent + device.stats().guest_left < frames) {
        device.receive(group);
        std::this_thread::yield();
    }
    device.check_connection();
}

/* What one driver has allocated goes out by another one with its memory, which was moved. */
bool forwards() {
    netmem::virtio_device one{netmem::region(64)}, two{netmem::region(64)};
    int ends[2][2];
    for (int *pair : ends)
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0)
            return false;
    one.serve(ends[0][1]);
    two.serve(ends[1][1]);
    netmem_virtio_options options = netmem::virtio_options(nullptr);
    options.tx_pages = 4;
    options.fd = ends[0][0];
    netmem::virtio_net from(options);
    options.tx_pages = 0;
    options.fd = ends[1][0];
    options.share = from.get();
    netmem::virtio_net connected(options), to(std::move(connected));
    /* To itself, by another name so that no compiler warns. */
    netmem::virtio_net &same = to;
    to = std::move(same);
    if (connected.get() != nullptr || !connected.tx.empty() || to.rx.size() != 1 || !to.is_connected())
        return false;
    /* Both are swapped, and back. */
    std::swap(from, to);
    to = std::move(from);
    for (int *pair : ends)
        close(pair[0]), close(pair[1]);
    netmem::frag frame = from.alloc();
    std::memset(frame.data_mut(), 7, 60);
    frame.truncate(60);
    netmem::frag_group<4> group;
    if (!group.push(frame) || to.tx[0].send(group) != 1)
        return false;
    while (two.receive(group) == 0)
        std::this_thread::yield();
    return group.size() == 1 && group.take(0).data()[59] == 7;
}

} // namespace

int main(int argc, char **argv) {
    enum { FRAMES = 1000 };
    if (argc != 2)
        return 2;
    try {
        netmem::virtio_net none(netmem::virtio_options("/none"));
        return std::puts("a socket that is not there"), 1;
    } catch (const netmem::error &error) {
        if (error.status() != NETMEM_ERR_NOT_FOUND)
            return std::puts(error.what()), 1;
    }
    if (!forwards())
        return std::puts("two drivers with one memory"), 1;
    netmem::virtio_device device{netmem::region(256)};
    device.listen(argv[1]);
    std::thread thread(echo, std::move(device), FRAMES);

    netmem_virtio_options options = netmem::virtio_options(argv[1]);
    options.tx_pages = 64;
    netmem::virtio_net net(options);
    netmem::virtio_rx rx = std::move(net.rx[0]);
    netmem::virtio_tx tx = std::move(net.tx[0]);
    unsigned sent = 0, received = 0;
    netmem::frag_group<32> to, from;
    while (received < FRAMES) {
        tx.complete(rx);
        while (sent + to.size() < FRAMES) {
            netmem::frag frame = net.alloc();
            if (!frame)
                break;
            std::memset(frame.data_mut(), static_cast<int>(sent + to.size()), 60);
            frame.truncate(60);
            if (!to.push(frame))
                break;
        }
        const std::size_t now = tx.send(to);
        sent += static_cast<unsigned>(now);
        const std::size_t back = rx.receive(from);
        for (std::size_t i = 0; i < back; i++, received++) {
            const netmem::frag frame = from.take(i);
            if (frame.size() != 60 || frame.data()[59] != static_cast<unsigned char>(received))
                return std::printf("frame %u is another\n", received), 1;
        }
        if (now + back == 0)
            sleep_for(rx);
    }
    thread.join();
    std::printf("%u frames there and back; %llu received, %llu sent, %llu pages held\n", received,
                static_cast<unsigned long long>(rx.stats().frames), static_cast<unsigned long long>(tx.stats().frames),
                static_cast<unsigned long long>(rx.stats().in_flight - rx.stats().posted));
    return 0;
}
