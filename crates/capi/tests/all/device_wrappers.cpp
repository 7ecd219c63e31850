/* The wrappers of device memory: two stacks on one thread, a cable between their devices, and a
 * thread that returns tokens.
 *
 * Usage: device_wrappers SOCKET SOCKET */
#include <netmem.hpp>

#include <cstdio>
#include <cstring>
#include <poll.h>
#include <thread>
#include <type_traits>
#include <vector>

/* Nanoseconds, as of the other stack. */
static_assert(std::is_same<decltype(std::declval<netmem::devmem_stack &>().arm()), std::int64_t>::value, "nanoseconds");
static_assert(std::is_same<decltype(std::declval<netmem::stack &>().arm()), std::int64_t>::value, "nanoseconds");

static void turn(netmem::devmem_stack &a, netmem::devmem_stack &b) {
    if (a.poll() + b.poll() > 0)
        return;
    std::int64_t after = a.arm(), other = b.arm();
    if (after < 0 || (other >= 0 && other < after))
        after = other;
    pollfd fds[2] = {{a.fd(), POLLIN, 0}, {b.fd(), POLLIN, 0}};
    poll(fds, 2, after < 0 ? -1 : static_cast<int>((after + 999999) / 1000000));
    a.disarm();
    b.disarm();
}

int main(int argc, char **argv) {
    if (argc < 3)
        return 2;
    constexpr std::size_t length = 3000000, bytes = 16 << 20;
    netmem::devmem to(bytes), from(bytes);
    netmem::devmem_stack a(to, netmem::devmem_stack_options(argv[1], "10.0.0.1/24"));
    netmem::devmem_stack b(from, netmem::devmem_stack_options(argv[2], "10.0.0.2/24"));
    netmem::devmem_listener listener = a.listen(9000);
    netmem::devmem_stream sender = b.connect("10.0.0.1:9000"), receiver = listener.accept();
    while (!receiver) {
        turn(a, b);
        receiver = listener.accept();
    }

    std::vector<unsigned char> sent(length), got(length);
    for (std::size_t i = 0; i < length; i++)
        sent[i] = static_cast<unsigned char>(i * 3 + i / 256);
    from.write(4096, sent.data(), length);
    if (!sender.send(from, 4096, length))
        return 1;
    sender.shutdown();
    std::vector<netmem_devmem_extent> extents(4096);
    std::size_t n = 0, there = 0;
    for (bool ended = false; !ended; turn(a, b)) {
        std::size_t received = receiver.receive(&extents[n], extents.size() - n, ended);
        for (std::size_t end = n + received; n < end; n++) {
            to.read(extents[n].offset, &got[there], extents[n].length);
            there += extents[n].length;
        }
    }
    std::uint64_t range = 1;
    while (sender.sent(&range, 1) == 0)
        turn(a, b);

    netmem::devmem_returner returner = receiver.returner();
    const std::size_t held = receiver.stats().held;
    std::size_t returned = 0;
    std::thread([&] { returned = returner.give_back(extents.data(), n); }).join();
    std::printf("%zu bytes, %s; pages: %s returned, %llu held; range %llu\n", there, sent == got ? "as they were sent" : "others",
                returned == held ? "all" : "not all", static_cast<unsigned long long>(receiver.stats().held),
                static_cast<unsigned long long>(range));
    try {
        netmem::devmem small(4096 + 1);
    } catch (const netmem::error &error) {
        std::printf("%s\n", netmem_status_name(error.status()));
    }
#ifdef CHECKED
    std::thread([&] {
        try {
            a.close(0);
        } catch (const netmem::error &error) {
            std::printf("%s", netmem_status_name(error.status()));
        }
    }).join();
    std::puts(a.fd() >= 0 ? ", and the stack is open" : ", and the stack is lost");
#endif
    a.close(0);
    return 0;
}
