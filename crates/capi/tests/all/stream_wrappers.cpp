/* The wrappers of TCP: payload goes to the kernel's echo on port 7 and back, and over a connection
 * of the stack to itself. Usage: stream_wrappers TAP, or stream_wrappers OURS THEIRS for AF_XDP on
 * both ends of a veth pair, where the stack on THEIRS is the peer. */
#include <netmem.hpp>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <poll.h>
#include <string>
#include <thread>
#include <vector>

using group = netmem::frag_group<8>;

/* Turns the stack until there is an event. */
static netmem_event next_event(netmem::stack &stack) {
    netmem_event event;
    while (!stack.next_event(event)) {
        if (stack.poll() > 0)
            continue;
        const std::int64_t left = stack.arm();
        if (left != 0) {
            pollfd wait = pollfd();
            wait.fd = stack.fd();
            wait.events = POLLIN;
            poll(&wait, 1, left < 0 ? -1 : static_cast<int>(left / 1000000 + 1));
        }
        stack.disarm();
    }
    return event;
}

/* Turns the stack until its peers have the end of each connection, and all its pages have
 * returned. */
static void end_of(netmem::stack &stack) {
    stack.shutdown();
    while (stack.poll() > 0 || !stack.is_shut_down()) {
    }
    netmem_stack_stats stats = stack.stats();
    for (int polls = 0; stats.send_pages + stats.pages > 0 && polls < 100000; polls++) {
        stack.poll();
        stats = stack.stats();
    }
    if (stats.send_pages + stats.pages > 0) {
        std::printf("%llu pages to send from and %llu received ones are left\n", static_cast<unsigned long long>(stats.send_pages),
                    static_cast<unsigned long long>(stats.pages));
        std::exit(1);
    }
}

/* Sends a page, and receives as many bytes. Returns whether they are the same. */
static bool echo(netmem::stack &stack, netmem::tcp &connection, int byte) {
    group frags;
    netmem::frag page = stack.alloc();
    std::memset(page.data_mut(), byte, page.size());
    frags.push(page);
    while (connection.send(frags) == 0)
        next_event(stack);
    std::size_t got = 0;
    while (got < 4096) {
        if (!connection.receive(frags))
            return false;
        if (frags.size() == 0)
            next_event(stack);
        for (std::size_t i = 0; i < frags.size(); i++) {
            const netmem::frag frag = frags.take(i);
            for (std::size_t at = 0; at < frag.size(); at++)
                if (frag.data()[at] != byte)
                    return false;
            got += frag.size();
        }
    }
    return got == 4096;
}

/* A connection of the stack to itself, which ends with the peer's abort. */
static bool to_itself(netmem::stack &stack) {
    netmem::tcp_listener listener = stack.listen(netmem::endpoint("[::]:0"));
    netmem_endpoint own = netmem::endpoint("192.0.2.2:1");
    own.port = listener.local().port;
    if (listener.accept())
        return false;
    netmem::tcp near = stack.connect(own), far;
    listener.set_context(&far);
    near.set_context(&near);
    while (!far) {
        const netmem_event event = next_event(stack);
        if (event.listener == listener.get() && event.context == &far)
            far = listener.accept();
    }
    group frags;
    if (near.remote().port != own.port || far.remote().port != near.local().port || near.write("hello", 5) != 5)
        return false;
    while (far.receive(frags) && frags.size() == 0)
        next_event(stack);
    if (frags.size() != 1 || std::memcmp(netmem_frag_data(&frags[0]), "hello", 5) != 0)
        return false;
    far.abort();
    try {
        while (near.receive(frags))
            next_event(stack);
        return false;
    } catch (const netmem::error &error) {
        return !far && error.status() == NETMEM_ERR_RESET;
    }
}

static int on_a_tap(const char *tap) {
    netmem_stack_options options = netmem::stack_options("192.0.2.2/24");
    try {
        netmem::stack none(options);
        return std::puts("a stack without a tap"), 1;
    } catch (const netmem::error &error) {
        if (error.status() != NETMEM_ERR_NULL)
            return std::puts(error.what()), 1;
    }
    options.tap = tap;
    netmem::stack opened(options), stack(std::move(opened));
    if (std::system(("ip addr add 192.0.2.1/24 dev " + std::string(tap)).c_str()) != 0)
        return 1;
    netmem::tcp connection = stack.connect(netmem::endpoint("192.0.2.1:7"));
    while (!connection.is_connected())
        next_event(stack);
    int echoed = 0;
    for (int i = 0; i < 100; i++)
        echoed += echo(stack, connection, i);
    connection.shutdown();
    group frags;
    while (connection.receive(frags))
        next_event(stack);
    const bool itself = to_itself(stack);
    end_of(stack);
    std::printf("%d pages there and back; %s\n", echoed, itself ? "to itself, too" : "not to itself");
    return 0;
}

/* An end of a veth pair: the frames for the address go to the stack. */
struct end {
    netmem::xdp_program program;
    netmem::stack stack;
};

static end open_end(const netmem::umem &umem, const char *interface, const char *address) {
    netmem::xdp_program program(interface);
    netmem::xsk queues = netmem::open_xsk(umem, netmem::xsk_options(interface, 0));
    program.insert(queues.rx);
    return end{std::move(program), netmem::stack(netmem::stack_options(address), umem, std::move(queues))};
}

/* Sends back what a connection sends. */
static void serve(const netmem::umem &umem, const char *interface, std::promise<void> &ready) {
    end end = open_end(umem, interface, "192.0.2.1/24");
    netmem::tcp_listener listener = end.stack.listen(netmem::endpoint("0.0.0.0:7"));
    netmem::tcp connection = listener.accept();
    ready.set_value();
    while (!connection) {
        next_event(end.stack);
        connection = listener.accept();
    }
    group frags;
    while (connection.receive(frags)) {
        if (frags.size() == 0)
            next_event(end.stack);
        while (frags.size() > 0 && connection.send(frags) == 0)
            next_event(end.stack);
    }
    connection = netmem::tcp();
    end_of(end.stack);
}

/* The queues of two sockets make no stack. */
static bool crossed(const netmem::umem &umem, const char *ours, const char *theirs) {
    netmem::xsk one = netmem::open_xsk(umem, netmem::xsk_options(ours, 0));
    netmem::xsk two = netmem::open_xsk(umem, netmem::xsk_options(theirs, 0));
    const netmem_stack_options options = netmem::stack_options("192.0.2.2/24");
    netmem_stack *none = nullptr;
    return netmem_stack_open_xsk(&options, umem.get(), one.rx.get(), two.tx.get(), &none) == NETMEM_ERR_ARGUMENT;
}

static int on_both_ends(const char *ours, const char *theirs) {
    netmem::region region(16384), other_region(64);
    netmem::umem umem(region), other(other_region);
    if (!crossed(umem, ours, theirs))
        return std::puts("a stack on the queues of two sockets"), 1;
    std::promise<void> ready;
    std::thread peer([&umem, theirs, &ready] { serve(umem, theirs, ready); });
    ready.get_future().wait();
    int echoed = 0;
    {
        netmem::xdp_program program(ours);
        netmem::xsk queues = netmem::open_xsk(umem, netmem::xsk_options(ours, 0));
        program.insert(queues.rx);
        const netmem_stack_options options = netmem::stack_options("192.0.2.2/24");
        netmem_stack_options large = options;
        large.mtu = 9000;
        netmem_stack_options greedy = options, small = netmem::stack_options("2001:db8::2/64");
        greedy.pages = 16000;
        small.mtu = 1279;
        netmem_stack *none = nullptr;
        if (netmem_stack_open_xsk(&options, other.get(), queues.rx.get(), queues.tx.get(), &none) != NETMEM_ERR_ARGUMENT
            || netmem_stack_open_xsk(&greedy, umem.get(), queues.rx.get(), queues.tx.get(), &none) != NETMEM_ERR_ARGUMENT
            || netmem_stack_open_xsk(&small, umem.get(), queues.rx.get(), queues.tx.get(), &none) != NETMEM_ERR_ARGUMENT
            || netmem_stack_open_xsk(&large, umem.get(), queues.rx.get(), queues.tx.get(), &none) != NETMEM_ERR_ARGUMENT)
            return std::puts("a stack on wrong queues"), 1;
        netmem::stack stack(options, umem, std::move(queues));
        netmem::page_pool pool(region, netmem::pool_options("own"));
        /* The program holds each page of the region that it can get. Headers have theirs. */
        netmem::tcp connection;
        {
            netmem::page_pool hoard(region, netmem::pool_options("hoard"));
            std::vector<netmem_frag> all(16384);
            all.resize(netmem_page_pool_alloc(hoard.get(), all.data(), all.size()));
            connection = stack.connect(netmem::endpoint("192.0.2.1:7"));
            while (!connection.is_connected())
                next_event(stack);
            netmem_frags_release(all.data(), all.size());
        }
        for (int i = 0; i < 100; i++)
            echoed += echo(stack, connection, i);
        /* A page of another pool on the region. */
        group frags;
        netmem::frag page = pool.alloc();
        page.truncate(1000);
        frags.push(page);
        if (connection.send(frags) != 1)
            return std::puts("a page of the region was not sent"), 1;
        connection.shutdown();
        std::size_t got = 0;
        while (connection.receive(frags)) {
            for (std::size_t i = 0; i < frags.size(); i++)
                got += netmem_frag_length(&frags[i]);
            next_event(stack);
        }
        if (got != 1000)
            return std::printf("%zu bytes of 1000\n", got), 1;
        end_of(stack);
    }
    peer.join();
    std::printf("%d pages there and back\n", echoed);
    return 0;
}

int main(int argc, char **argv) {
    return argc == 2 ? on_a_tap(argv[1]) : argc == 3 ? on_both_ends(argv[1], argv[2]) : 2;
}
