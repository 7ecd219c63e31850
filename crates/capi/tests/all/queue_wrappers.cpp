/* The wrappers of queues: frames go from one end of a veth pair to the other, and back, in one page
 * each; then one thread sends and another receives. Usage: queue_wrappers OURS THEIRS. */
#include <netmem.hpp>

#include <cstdio>
#include <cstring>
#include <poll.h>
#include <thread>

using group = netmem::frag_group<16>;

static void receive(netmem::xsk_rx &rx, group &frames) {
    while (rx.receive(frames) == 0) {
        if (rx.arm()) {
            pollfd event = pollfd();
            event.fd = rx.fd();
            event.events = POLLIN;
            poll(&event, 1, -1);
        }
        rx.disarm();
    }
}

/* The two queues of a socket on two threads. Returns how many frames arrived. There are chunks for
 * all of them. */
static std::size_t two_threads(const char *ours, const char *theirs) {
    netmem::region region(4096);
    netmem::umem umem(region);
    netmem::xdp_program near_program(ours);
    netmem::xsk near = netmem::open_xsk(umem, netmem::xsk_options(ours, 0));
    near_program.insert(near.rx);
    netmem::xsk far = netmem::open_xsk(umem, netmem::xsk_options(theirs, 0));
    std::thread sender([&region, &far] {
        netmem::xsk_tx tx(std::move(far.tx));
        netmem::page_pool pool(region, netmem::pool_options("tx"));
        for (int i = 0; i < 1000; i++) {
            group frames;
            netmem::frag frame = pool.alloc();
            std::memset(frame.data_mut(), 0xff, 60);
            frame.truncate(60);
            frames.push(frame);
            while (frames.size() > 0) {
                tx.send(frames);
                tx.complete();
            }
        }
    });
    std::size_t received = 0;
    while (received < 1000) {
        group frames;
        receive(near.rx, frames);
        received += frames.size();
        far.rx.receive(frames);
    }
    sender.join();
    return near.rx.stats().frames;
}

/* A request of a queue that only sends. */
static bool request(const netmem::region &region, const char *ours) {
    netmem_umem_options options = netmem_umem_options();
    options.size = sizeof options;
    options.tx_metadata = options.software_checksums = 1;
    netmem::umem umem(region, options);
    netmem::page_pool pool(region, netmem::pool_options("tx"));
    netmem::xsk_tx tx = netmem::open_xsk_tx(umem, netmem::xsk_options(ours, 0));
    group frames;
    netmem::frag frame = pool.alloc();
    std::memset(frame.data_mut(), 0xff, 100);
    frame.advance(24);
    frame.truncate(60);
    frames.push(frame);
    netmem_xsk_request request = netmem_xsk_request();
    request.flags = NETMEM_XSK_CHECKSUM | NETMEM_XSK_TIMESTAMP;
    request.checksum_start = 59;
    request.timestamp = 7;
    try {
        tx.send(frames, &request);
        return false;
    } catch (const netmem::error &error) {
        if (error.status() != NETMEM_ERR_UNSENDABLE || frames.size() != 1)
            return false;
    }
    request.checksum_start = 34;
    if (tx.send(frames, &request) != 1 || frames.size() != 0)
        return false;
    netmem_xsk_timestamp times[2];
    std::size_t n = 0;
    while (n == 0) {
        tx.complete();
        n = tx.timestamps(times, 2);
    }
    try {
        netmem::xsk_grant none("/none");
        return false;
    } catch (const netmem::error &error) {
        return n == 1 && times[0].timestamp == 7 && error.status() == NETMEM_ERR_NOT_FOUND;
    }
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    netmem::region region(1024);
    netmem::umem umem(region);
    netmem::page_pool pool(region, netmem::pool_options("tx"));
    if (!request(region, argv[1]))
        return std::puts("the request was not answered"), 1;
    netmem_xsk_options near_options = netmem::xsk_options(argv[1], 0), far_options = netmem::xsk_options(argv[2], 0);
    near_options.fill = far_options.fill = 256;
    int echoed = 0;
    unsigned long long held = 0;
    {
        netmem::xdp_program near_program(argv[1]), far_program(argv[2]);
        netmem::xsk near = netmem::open_xsk(umem, near_options), far = netmem::open_xsk(umem, far_options);
        near_program.insert(near.rx);
        far_program.insert(far.rx);
        try {
            netmem::umem other(region);
            netmem::xsk second = netmem::open_xsk(other, near_options);
            return std::puts("a queue was opened twice"), 1;
        } catch (const netmem::error &error) {
            if (error.status() != NETMEM_ERR_BUSY)
                return std::puts(error.what()), 1;
        }
        for (int i = 0; i < 100; i++) {
            group frames;
            netmem::frag frame = pool.alloc();
            std::memset(frame.data_mut(), i, 60);
            std::memset(frame.data_mut(), 0xff, 6);
            frame.truncate(60);
            frames.push(frame);
            if (frame || far.tx.send(frames) != 1 || frames.size() != 0)
                return std::puts("the frame was not sent"), 1;
            receive(near.rx, frames);
            near.tx.send(frames);
            receive(far.rx, frames);
            unsigned char front[256];
            far.rx.metadata(frames[0], front, sizeof front);
            netmem::frag back = frames.take(0);
            if (frames.size() == 1 && back.size() == 60 && back.data()[30] == i)
                echoed++;
            far.tx.complete(far.rx);
            near.tx.complete(near.rx);
        }
        /* A group that a queue can neither release nor fill is released all the same. */
        const auto in_flight = pool.stats().in_flight;
        group left;
        netmem::frag last = pool.alloc();
        left.push(last);
        try {
            netmem::xsk_rx(nullptr).receive(left);
            return std::puts("no queue has received"), 1;
        } catch (const netmem::error &error) {
            if (error.status() != NETMEM_ERR_NULL || left.size() != 0 || pool.stats().in_flight != in_flight)
                return std::puts("the fragments of a group are lost"), 1;
        }
        /* What cannot be sent stays in the group. */
        netmem::region other(8);
        netmem::page_pool others(other, netmem::pool_options("other"));
        group mixed;
        netmem::frag own = pool.alloc(), foreign = others.alloc();
        own.truncate(60);
        mixed.push(own);
        mixed.push(foreign);
        try {
            far.tx.send(mixed);
            return std::puts("a page of another region was sent"), 1;
        } catch (const netmem::error &error) {
            if (error.status() != NETMEM_ERR_UNSENDABLE || mixed.size() != 1 || netmem_frag_length(&mixed[0]) != 4096)
                return std::puts(error.what()), 1;
        }
        netmem::xsk moved = std::move(near);
        near = std::move(moved);
        held = near.rx.stats().in_flight - near.rx.stats().posted;
    }
    std::printf("%d frames there and back; %llu pages held; ", echoed, held);
    std::printf("%zu frames from thread to thread\n", two_threads(argv[1], argv[2]));
    return 0;
}
