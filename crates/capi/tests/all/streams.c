/* What the header says of TCP, with a library that has debug assertions. Usage: streams TAP, in a
 * network namespace where the kernel listens on port 7 (which echoes), 9 (which resets), 11 (which
 * expects to be reset), 13 (which sends 20 MiB) and 15 (which never reads). */
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PAGE = 4096, PAGES = 2048, DEAF = 24, TOTAL = 1 << 20, GROUP = 16, SENT = 20 << 20 };

static void run(const char *command, const char *tap) {
    char line[128];
    snprintf(line, sizeof line, command, tap);
    HOLDS(system(line) == 0);
}

/* Turns the stack once, and sleeps if it has no work. */
static void turn(netmem_stack *stack) {
    size_t work;
    int64_t left;
    IS(NETMEM_OK, netmem_stack_poll(stack, &work));
    IS(NETMEM_OK, netmem_stack_arm(stack, &left));
    if (work == 0 && left != 0) {
        struct pollfd wait;
        wait.fd = netmem_stack_fd(stack);
        wait.events = POLLIN;
        HOLDS(wait.fd >= 0 && poll(&wait, 1, left < 0 ? -1 : (int)(left / 1000000) + 1) >= 0);
    }
    netmem_stack_disarm(stack);
}

/* A connection to an address that no station has. It ends after some seconds, while other tests
 * run. */
static netmem_tcp *nowhere;
static bool nowhere_ended;

/* The next event, but for that of `nowhere`. */
static bool has_event(netmem_stack *stack, netmem_event *event) {
    bool has = netmem_stack_next_event(stack, event);
    if (has && nowhere != NULL && event->connection == nowhere) {
        nowhere_ended = true;
        has = netmem_stack_next_event(stack, event);
    }
    return has;
}

/* Turns the stack until there is an event. */
static netmem_event next_event(netmem_stack *stack) {
    netmem_event event;
    memset(&event, 0, sizeof event);
    event.size = sizeof event;
    while (!has_event(stack, &event))
        turn(stack);
    return event;
}

/* The next event is one of `tcp`, with one of `flags`. */
static void await(netmem_stack *stack, netmem_tcp *tcp, uint32_t flags) {
    netmem_event event = next_event(stack);
    HOLDS(event.connection == tcp && event.listener == NULL && event.context == (void *)stack);
    HOLDS((event.flags & flags) != 0 && event.reserved == 0);
}

static netmem_endpoint endpoint(const char *text) {
    netmem_endpoint endpoint;
    IS(NETMEM_OK, netmem_endpoint_parse(text, &endpoint));
    return endpoint;
}

/* A connection whose context is the stack. */
static netmem_tcp *begin_with(netmem_stack *stack, const char *to, const netmem_tcp_options *options) {
    netmem_endpoint remote = endpoint(to);
    netmem_tcp *tcp;
    IS(NETMEM_OK, netmem_tcp_connect(stack, &remote, options, &tcp));
    IS(NETMEM_OK, netmem_tcp_set_context(tcp, stack));
    return tcp;
}

static netmem_tcp *begin(netmem_stack *stack, const char *to) { return begin_with(stack, to, NULL); }

static netmem_tcp *connected(netmem_stack *stack, const char *to) {
    netmem_tcp *tcp = begin(stack, to);
    bool is_connected = true;
    IS(NETMEM_OK, netmem_tcp_is_connected(tcp, &is_connected));
    HOLDS(!is_connected);
    await(stack, tcp, NETMEM_EVENT_WRITE);
    IS(NETMEM_OK, netmem_tcp_is_connected(tcp, &is_connected));
    HOLDS(is_connected);
    return tcp;
}

/* Receives until the connection ends, and returns how. */
static netmem_status ends(netmem_stack *stack, netmem_tcp *tcp) {
    for (;;) {
        netmem_frag frags[GROUP];
        size_t received;
        netmem_status status = netmem_tcp_receive(tcp, frags, GROUP, &received);
        if (status != NETMEM_OK)
            return status;
        netmem_frags_release(frags, received);
        if (received == 0)
            await(stack, tcp, NETMEM_EVENT_READ);
    }
}

static netmem_stack *opening(const char *tap) {
    netmem_stack_options options;
    netmem_stack *stack, *other;
    memset(&options, 0, sizeof options);
    IS(NETMEM_ERR_NULL, netmem_stack_open_tap(NULL, &stack));
    IS(NETMEM_ERR_STRUCT_SIZE, netmem_stack_open_tap(&options, &stack));
    options.size = sizeof options;
    IS(NETMEM_ERR_NULL, netmem_stack_open_tap(&options, NULL));
    IS(NETMEM_ERR_NULL, netmem_stack_open_tap(&options, &stack));
    options.tap = tap;
    IS(NETMEM_ERR_ARGUMENT, netmem_stack_open_tap(&options, &stack));
    options.addresses = "192.0.2.2";
    IS(NETMEM_ERR_ARGUMENT, netmem_stack_open_tap(&options, &stack));
    options.addresses = "192.0.2.2/24  fd77::2/64";
    options.gateways = "a router";
    IS(NETMEM_ERR_ARGUMENT, netmem_stack_open_tap(&options, &stack));
    options.gateways = "198.51.100.1";
    IS(NETMEM_ERR_ARGUMENT, netmem_stack_open_tap(&options, &stack));
    options.gateways = "192.0.2.1";
    options.mtu = 1279;
    IS(NETMEM_ERR_ARGUMENT, netmem_stack_open_tap(&options, &stack));
    options.mtu = 9000;
    options.reserved[5] = 1;
    IS(NETMEM_ERR_ARGUMENT, netmem_stack_open_tap(&options, &stack));
    options.reserved[5] = 0;
    options.pages = 2049;
    IS(NETMEM_ERR_ARGUMENT, netmem_stack_open_tap(&options, &stack));
    options.pages = 2048;
    options.tap = "a name that is too long";
    IS(NETMEM_ERR_ARGUMENT, netmem_stack_open_tap(&options, &stack));
    options.tap = tap;
    IS(NETMEM_OK, netmem_stack_open_tap(&options, &stack));
    options.addresses = "192.0.2.3/24";
    IS(NETMEM_ERR_BUSY, netmem_stack_open_tap(&options, &other));
    IS(NETMEM_ERR_NULL, netmem_stack_open_xsk(&options, NULL, NULL, NULL, &other));
    run("ip addr add 192.0.2.1/24 dev %s", tap);
    run("ip link set %s mtu 9000", tap);
    run("ip link set lo up", tap);
    run("ip addr add 198.51.100.1/32 dev lo", tap);
    return stack;
}

static void endpoints(void) {
    netmem_endpoint at = endpoint("192.0.2.2:80");
    HOLDS(at.address_length == 4 && at.port == 80 && memcmp(at.address, "\xc0\0\2\2", 4) == 0);
    at = endpoint("[fd77::2]:8080");
    HOLDS(at.address_length == 16 && at.port == 8080 && at.address[0] == 0xfd && at.address[15] == 2);
    IS(NETMEM_ERR_ARGUMENT, netmem_endpoint_parse("192.0.2.2", &at));
    IS(NETMEM_ERR_NULL, netmem_endpoint_parse(NULL, &at));
    IS(NETMEM_ERR_NULL, netmem_endpoint_parse("192.0.2.2:80", NULL));
}

static void listening(netmem_stack *stack) {
    netmem_tcp_listener *listener, *second;
    netmem_tcp *tcp = (netmem_tcp *)stack;
    netmem_tcp_options options;
    netmem_endpoint local = endpoint("192.0.2.2:80"), bound;
    memset(&options, 0, sizeof options);
    IS(NETMEM_ERR_NULL, netmem_tcp_listen(NULL, &local, NULL, &listener));
    IS(NETMEM_ERR_NULL, netmem_tcp_listen(stack, NULL, NULL, &listener));
    IS(NETMEM_ERR_NULL, netmem_tcp_listen(stack, &local, NULL, NULL));
    IS(NETMEM_ERR_STRUCT_SIZE, netmem_tcp_listen(stack, &local, &options, &listener));
    options.size = sizeof options;
    options.reserved[6] = 1;
    IS(NETMEM_ERR_ARGUMENT, netmem_tcp_listen(stack, &local, &options, &listener));
    options.reserved[6] = 0;
    IS(NETMEM_ERR_HANDLE, netmem_tcp_listen((netmem_stack *)"not a stack, but a text", &local, &options, &listener));
    local.address_length = 5;
    IS(NETMEM_ERR_ARGUMENT, netmem_tcp_listen(stack, &local, &options, &listener));
    local = endpoint("192.0.2.9:80");
    IS(NETMEM_ERR_ARGUMENT, netmem_tcp_listen(stack, &local, &options, &listener));
    local = endpoint("192.0.2.2:80");
    IS(NETMEM_OK, netmem_tcp_listen(stack, &local, &options, &listener));
    IS(NETMEM_ERR_IN_USE, netmem_tcp_listen(stack, &local, &options, &second));
    memset(&local, 0, sizeof local);
    IS(NETMEM_OK, netmem_tcp_listen(stack, &local, NULL, &second));
    IS(NETMEM_OK, netmem_tcp_listener_local(second, &bound));
    HOLDS(bound.port != 0);
    IS(NETMEM_ERR_NULL, netmem_tcp_accept(listener, NULL));
    IS(NETMEM_ERR_NULL, netmem_tcp_accept(NULL, &tcp));
    IS(NETMEM_OK, netmem_tcp_accept(listener, &tcp));
    HOLDS(tcp == NULL);
    /* A connection of the stack to itself. */
    netmem_tcp *ours = begin(stack, "192.0.2.2:80");
    IS(NETMEM_OK, netmem_tcp_listener_set_context(listener, &bound));
    netmem_event event = next_event(stack);
    if (event.connection == ours)
        event = next_event(stack);
    HOLDS(event.listener == listener && event.connection == NULL && event.context == &bound && event.flags == NETMEM_EVENT_READ);
    IS(NETMEM_OK, netmem_tcp_accept(listener, &tcp));
    netmem_endpoint ends[2], mirrored[2];
    IS(NETMEM_OK, netmem_tcp_endpoints(ours, &ends[0], &ends[1]));
    IS(NETMEM_OK, netmem_tcp_endpoints(tcp, &mirrored[1], &mirrored[0]));
    IS(NETMEM_OK, netmem_tcp_endpoints(tcp, NULL, NULL));
    HOLDS(memcmp(ends, mirrored, sizeof ends) == 0 && ends[1].port == 80);
    IS(NETMEM_OK, netmem_tcp_listener_close(second));
    IS(NETMEM_OK, netmem_tcp_listener_close(listener));
    IS(NETMEM_ERR_HANDLE, netmem_tcp_accept(listener, &tcp));
    IS(NETMEM_ERR_HANDLE, netmem_tcp_listener_close(listener));
    IS(NETMEM_ERR_HANDLE, netmem_tcp_close((netmem_tcp *)stack));
    IS(NETMEM_OK, netmem_tcp_close(ours));
    IS(NETMEM_OK, netmem_tcp_abort(tcp));
    IS(NETMEM_ERR_HANDLE, netmem_tcp_abort(tcp));
}

static void failing(netmem_stack *stack, const char *tap) {
    netmem_endpoint remote = endpoint("[2001:db8::9]:7"), local = endpoint("192.0.2.2:4000");
    netmem_tcp_options options;
    netmem_tcp *tcp, *other;
    netmem_frag frag;
    netmem_event event;
    bool is_connected;
    size_t n;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.local = &local;
    IS(NETMEM_ERR_UNREACHABLE, netmem_tcp_connect(stack, &remote, NULL, &tcp));
    remote = endpoint("192.0.2.1:0");
    IS(NETMEM_ERR_ARGUMENT, netmem_tcp_connect(stack, &remote, NULL, &tcp));
    remote = endpoint("[::]:7");
    IS(NETMEM_ERR_ARGUMENT, netmem_tcp_connect(stack, &remote, NULL, &tcp));
    remote.address_length = 0;
    IS(NETMEM_ERR_ARGUMENT, netmem_tcp_connect(stack, &remote, NULL, &tcp));
    remote = endpoint("192.0.2.1:81");
    IS(NETMEM_ERR_NULL, netmem_tcp_connect(stack, NULL, NULL, &tcp));
    IS(NETMEM_ERR_NULL, netmem_tcp_connect(stack, &remote, NULL, NULL));
    IS(NETMEM_OK, netmem_tcp_connect(stack, &remote, &options, &tcp));
    IS(NETMEM_ERR_IN_USE, netmem_tcp_connect(stack, &remote, &options, &other));
    IS(NETMEM_OK, netmem_tcp_set_context(tcp, stack));
    await(stack, tcp, NETMEM_EVENT_WRITE);
    IS(NETMEM_ERR_REFUSED, netmem_tcp_is_connected(tcp, &is_connected));
    IS(NETMEM_ERR_REFUSED, netmem_tcp_receive(tcp, &frag, 1, &n));
    IS(NETMEM_ERR_REFUSED, netmem_tcp_write(tcp, "x", 1, &n));
    HOLDS(n == 0);
    IS(NETMEM_OK, netmem_tcp_close(tcp));
    /* A closed connection has no event, also if one waits. */
    tcp = begin(stack, "192.0.2.1:81");
    int64_t left = 1;
    while (left != 0) {
        IS(NETMEM_OK, netmem_stack_poll(stack, &n));
        if (n == 0)
            IS(NETMEM_OK, netmem_stack_arm(stack, &left));
        netmem_stack_disarm(stack);
        if (netmem_tcp_is_connected(tcp, &is_connected) == NETMEM_OK)
            left = 1;
    }
    IS(NETMEM_OK, netmem_tcp_close(tcp));
    event.size = sizeof event;
    HOLDS(!netmem_stack_next_event(stack, &event));
    event.size = 8;
    HOLDS(!netmem_stack_next_event(stack, &event) && strstr(netmem_error_text(), "netmem_event.size is 8") != NULL);
    HOLDS(!netmem_stack_next_event(stack, NULL) && !netmem_stack_next_event(NULL, &event));
    /* Through the router. There is none for IPv6. */
    IS(NETMEM_OK, netmem_tcp_close(connected(stack, "198.51.100.1:7")));
    /* Shut down before it has been made. */
    tcp = begin(stack, "192.0.2.1:7");
    IS(NETMEM_OK, netmem_tcp_shutdown(tcp));
    await(stack, tcp, NETMEM_EVENT_WRITE);
    IS(NETMEM_ERR_SHUT_DOWN, netmem_tcp_is_connected(tcp, &is_connected));
    IS(NETMEM_ERR_SHUT_DOWN, netmem_tcp_write(tcp, "x", 1, &n));
    IS(NETMEM_OK, netmem_tcp_close(tcp));
    nowhere = begin(stack, "192.0.2.77:7");
    /* No answer arrives. */
    options.local = NULL;
    options.user_timeout = 300;
    tcp = begin_with(stack, "192.0.2.1:7", &options);
    await(stack, tcp, NETMEM_EVENT_WRITE);
    run("ip link set %s down", tap);
    IS(NETMEM_OK, netmem_tcp_write(tcp, "x", 1, &n));
    IS(NETMEM_ERR_TIMED_OUT, ends(stack, tcp));
    IS(NETMEM_OK, netmem_tcp_close(tcp));
    run("ip link set %s up", tap);
    /* The peer resets, and is reset. */
    tcp = connected(stack, "192.0.2.1:9");
    IS(NETMEM_OK, netmem_tcp_write(tcp, "x", 1, &n));
    IS(NETMEM_ERR_RESET, ends(stack, tcp));
    IS(NETMEM_OK, netmem_tcp_close(tcp));
    tcp = connected(stack, "192.0.2.1:11");
    IS(NETMEM_OK, netmem_tcp_abort(tcp));
}

static unsigned char pattern(size_t at) { return (unsigned char)(at * 131 >> 7); }

/* Fills a page. */
static void fill(netmem_frag *frag, size_t at) {
    unsigned char *bytes = (unsigned char *)netmem_frag_data_mut(frag);
    HOLDS(bytes != NULL && netmem_frag_length(frag) == PAGE);
    for (size_t i = 0; i < PAGE; i++)
        bytes[i] = pattern(at + i);
}

/* Sends fragments as long as there is room, and compares what comes back. */
static void echoed(netmem_stack *stack) {
    netmem_endpoint remote = endpoint("192.0.2.1:7");
    netmem_tcp_options options;
    netmem_tcp *tcp;
    netmem_frag page, frags[GROUP];
    size_t sent_bytes = 0, got = 0, refused = 0, n;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.send_buffer = 16 * PAGE;
    IS(NETMEM_OK, netmem_tcp_connect(stack, &remote, &options, &tcp));
    /* Before the handshake is complete. */
    HOLDS(netmem_stack_alloc(stack, &page, 1) == 1);
    fill(&page, 0);
    IS(NETMEM_OK, netmem_tcp_send(tcp, &page, 1, false, &n));
    HOLDS(n == 1 && netmem_frag_data(&page) == NULL);
    sent_bytes = PAGE;
    bool can_send = true;
    for (;;) {
        while (can_send && sent_bytes < TOTAL) {
            HOLDS(netmem_stack_alloc(stack, &page, 1) == 1);
            fill(&page, sent_bytes);
            IS(NETMEM_OK, netmem_tcp_send(tcp, &page, 1, true, &n));
            can_send = n == 1;
            sent_bytes += n * PAGE;
            refused += 1 - n;
            netmem_frag_release(&page);
        }
        if (can_send && sent_bytes == TOTAL) {
            sent_bytes++;
            IS(NETMEM_OK, netmem_tcp_shutdown(tcp));
            IS(NETMEM_ERR_SHUT_DOWN, netmem_tcp_write(tcp, "x", 1, &n));
        }
        netmem_status status = netmem_tcp_receive(tcp, frags, GROUP, &n);
        if (status != NETMEM_OK) {
            IS(NETMEM_ERR_END, status);
            break;
        }
        for (size_t i = 0; i < n; i++) {
            const unsigned char *bytes = (const unsigned char *)netmem_frag_data(&frags[i]);
            for (size_t at = 0; at < netmem_frag_length(&frags[i]); at++)
                if (bytes[at] != pattern(got++))
                    HOLDS(!"the same byte");
        }
        netmem_frags_release(frags, n);
        if (n < GROUP) {
            netmem_event event = next_event(stack);
            HOLDS(event.connection == tcp);
            if (event.flags & NETMEM_EVENT_WRITE)
                can_send = true;
        }
    }
    HOLDS(got == TOTAL && refused > 1);
    IS(NETMEM_ERR_END, netmem_tcp_receive(tcp, frags, GROUP, &n));
    IS(NETMEM_OK, netmem_tcp_close(tcp));
}

/* What cannot be sent stays with the caller. A received fragment is sent as it is. */
static void fragments(netmem_stack *stack) {
    netmem_tcp *tcp = connected(stack, "192.0.2.1:7");
    netmem_frag frag, foreign, many[2];
    netmem_region_options region_options;
    netmem_pool_options pool_options;
    netmem_region *region;
    netmem_page_pool *pool;
    netmem_stack_stats stats;
    size_t n;
    stats.size = sizeof stats;
    memset(&region_options, 0, sizeof region_options);
    region_options.size = sizeof region_options;
    region_options.pages = 8;
    memset(&pool_options, 0, sizeof pool_options);
    pool_options.size = sizeof pool_options;
    IS(NETMEM_OK, netmem_region_create(&region_options, &region));
    IS(NETMEM_OK, netmem_page_pool_create(region, &pool_options, &pool));
    HOLDS(netmem_page_pool_alloc(pool, &foreign, 1) == 1);
    HOLDS(netmem_stack_alloc(stack, &frag, 1) == 1);
    IS(NETMEM_OK, netmem_frag_write(&frag, 0, "hello", 5));
    IS(NETMEM_OK, netmem_frag_truncate(&frag, 5));
    many[0] = frag, many[1] = foreign;
    IS(NETMEM_ERR_NULL, netmem_tcp_send(tcp, many, 2, false, NULL));
    IS(NETMEM_ERR_NULL, netmem_tcp_send(tcp, NULL, 1, false, &n));
    IS(NETMEM_ERR_NULL, netmem_tcp_send(NULL, many, 2, false, &n));
    IS(NETMEM_ERR_UNSENDABLE, netmem_tcp_send(tcp, many, 2, false, &n));
    HOLDS(n == 1 && netmem_frag_data(&many[0]) == NULL && netmem_frag_length(&many[1]) == PAGE);
    /* What was accepted does not wait for what was not. */
    IS(NETMEM_OK, netmem_stack_get_stats(stack, &stats));
    uint64_t sent = stats.sent;
    IS(NETMEM_OK, netmem_stack_poll(stack, NULL));
    IS(NETMEM_OK, netmem_stack_get_stats(stack, &stats));
    HOLDS(stats.sent == sent + 1);
    IS(NETMEM_ERR_ARGUMENT, netmem_tcp_send(tcp, many, 1, false, &n));
    HOLDS(n == 0);
    IS(NETMEM_OK, netmem_tcp_send(tcp, NULL, 0, false, &n));
    netmem_frag_release(&many[1]);
    IS(NETMEM_ERR_ARGUMENT, netmem_tcp_receive(tcp, &frag, 0, &n));
    IS(NETMEM_ERR_NULL, netmem_tcp_receive(tcp, NULL, 1, &n));
    IS(NETMEM_ERR_NULL, netmem_tcp_receive(tcp, &frag, 1, NULL));
    IS(NETMEM_ERR_NULL, netmem_tcp_write(tcp, NULL, 1, &n));
    IS(NETMEM_ERR_NULL, netmem_tcp_write(tcp, "x", 1, NULL));
    for (int round = 0; round < 3; round++) {
        IS(NETMEM_OK, netmem_tcp_receive(tcp, &frag, 1, &n));
        while (n == 0) {
            await(stack, tcp, NETMEM_EVENT_READ);
            IS(NETMEM_OK, netmem_tcp_receive(tcp, &frag, 1, &n));
        }
        HOLDS(netmem_frag_length(&frag) == 5 && memcmp(netmem_frag_data(&frag), "hello", 5) == 0);
        IS(NETMEM_OK, netmem_tcp_send(tcp, &frag, 1, false, &n));
        HOLDS(n == 1);
    }
    HOLDS(netmem_stack_alloc(stack, NULL, 1) == 0 && netmem_stack_alloc(NULL, many, 1) == 0);
    IS(NETMEM_OK, netmem_tcp_close(tcp));
    IS(NETMEM_OK, netmem_page_pool_close(pool, NULL));
    IS(NETMEM_OK, netmem_region_close(region));
}

/* All pages are held, some by peers that do not read. The program's loop over events ends, and a
 * new connection has pages for its headers. */
static void short_of_pages(netmem_stack *stack) {
    static netmem_frag all[PAGES + 1];
    static char bytes[1 << 18];
    netmem_tcp *deaf[DEAF];
    netmem_event event;
    size_t events = 0, n;
    event.size = sizeof event;
    for (int i = 0; i < DEAF; i++)
        deaf[i] = connected(stack, "192.0.2.1:15");
    /* What was sent before has been acknowledged, and returns. */
    size_t held = 0;
    while (held < PAGES) {
        held += netmem_stack_alloc(stack, all + held, PAGES + 1 - held);
        IS(NETMEM_OK, netmem_stack_poll(stack, NULL));
    }
    HOLDS(held == PAGES && netmem_stack_alloc(stack, &all[PAGES], 1) == 0);
    for (int i = 0; i < DEAF; i++)
        do {
            IS(NETMEM_OK, netmem_tcp_write(deaf[i], bytes, sizeof bytes, &n));
            turn(stack);
        } while (n > 0);
    for (int i = 0; i < DEAF; i++)
        IS(NETMEM_OK, netmem_tcp_write(deaf[i], bytes, sizeof bytes, &n));
    while (has_event(stack, &event)) {
        HOLDS(events++ < 10 * DEAF);
        IS(NETMEM_OK, netmem_tcp_write(event.connection, bytes, sizeof bytes, &n));
    }
    netmem_tcp *more = begin(stack, "192.0.2.1:7");
    bool is_connected = false;
    while (!is_connected) {
        event = next_event(stack);
        if (event.connection != more)
            IS(NETMEM_OK, netmem_tcp_write(event.connection, bytes, sizeof bytes, &n));
        IS(NETMEM_OK, netmem_tcp_is_connected(more, &is_connected));
    }
    IS(NETMEM_OK, netmem_tcp_close(more));
    for (int i = 0; i < DEAF; i++)
        IS(NETMEM_OK, netmem_tcp_abort(deaf[i]));
    netmem_frags_release(all, PAGES);
}

/* A program that keeps what it receives, until the device has no page to receive into. What was
 * dropped meanwhile is sent again. */
static void hoarding(netmem_stack *stack) {
    enum { MOST = 6000 };
    static netmem_frag kept[MOST];
    netmem_tcp *tcp = connected(stack, "192.0.2.1:13");
    netmem_stack_stats stats;
    size_t n, held = 0, got = 0;
    stats.size = sizeof stats;
    do {
        IS(NETMEM_OK, netmem_tcp_receive(tcp, kept + held, MOST - held, &n));
        held += n;
        HOLDS(held < MOST);
        turn(stack);
        IS(NETMEM_OK, netmem_stack_get_stats(stack, &stats));
    } while (stats.short_of_pages == 0);
    for (size_t i = 0; i < held; i++)
        got += netmem_frag_length(&kept[i]);
    netmem_frags_release(kept, held);
    HOLDS(held > 2048 && got < (size_t)SENT);
    for (;;) {
        netmem_status status = netmem_tcp_receive(tcp, kept, GROUP, &n);
        if (status != NETMEM_OK) {
            IS(NETMEM_ERR_END, status);
            break;
        }
        for (size_t i = 0; i < n; i++)
            got += netmem_frag_length(&kept[i]);
        netmem_frags_release(kept, n);
        if (n < GROUP)
            next_event(stack);
    }
    HOLDS(got == (size_t)SENT);
    IS(NETMEM_OK, netmem_tcp_close(tcp));
}

struct handles {
    netmem_stack *stack;
    netmem_tcp_listener *listener;
    netmem_tcp *tcp;
};

static void *on_another_thread(void *context) {
    struct handles *handles = (struct handles *)context;
    netmem_endpoint local = endpoint("192.0.2.2:81");
    netmem_tcp_listener *listener;
    netmem_tcp *tcp;
    netmem_frag frag;
    netmem_event event;
    netmem_stack_stats stats;
    int64_t left;
    size_t n;
    bool is_connected;
    event.size = sizeof event;
    stats.size = sizeof stats;
    IS(NETMEM_ERR_THREAD, netmem_stack_poll(handles->stack, &n));
    IS(NETMEM_ERR_THREAD, netmem_stack_arm(handles->stack, &left));
    HOLDS(netmem_stack_fd(handles->stack) == -1);
    HOLDS(!netmem_stack_next_event(handles->stack, &event));
    HOLDS(strstr(netmem_error_text(), "another thread") != NULL);
    HOLDS(netmem_stack_alloc(handles->stack, &frag, 1) == 0);
    IS(NETMEM_ERR_THREAD, netmem_stack_get_stats(handles->stack, &stats));
    IS(NETMEM_ERR_THREAD, netmem_stack_shutdown(handles->stack));
    HOLDS(!netmem_stack_is_shut_down(handles->stack));
    IS(NETMEM_ERR_THREAD, netmem_stack_close(handles->stack, NULL));
    IS(NETMEM_ERR_THREAD, netmem_tcp_listen(handles->stack, &local, NULL, &listener));
    IS(NETMEM_ERR_THREAD, netmem_tcp_connect(handles->stack, &local, NULL, &tcp));
    IS(NETMEM_ERR_THREAD, netmem_tcp_accept(handles->listener, &tcp));
    IS(NETMEM_ERR_THREAD, netmem_tcp_listener_local(handles->listener, &local));
    IS(NETMEM_ERR_THREAD, netmem_tcp_listener_set_context(handles->listener, NULL));
    IS(NETMEM_ERR_THREAD, netmem_tcp_listener_close(handles->listener));
    IS(NETMEM_ERR_THREAD, netmem_tcp_is_connected(handles->tcp, &is_connected));
    IS(NETMEM_ERR_THREAD, netmem_tcp_endpoints(handles->tcp, &local, NULL));
    IS(NETMEM_ERR_THREAD, netmem_tcp_set_context(handles->tcp, NULL));
    IS(NETMEM_ERR_THREAD, netmem_tcp_receive(handles->tcp, &frag, 1, &n));
    IS(NETMEM_ERR_THREAD, netmem_tcp_send(handles->tcp, &frag, 1, false, &n));
    IS(NETMEM_ERR_THREAD, netmem_tcp_write(handles->tcp, "x", 1, &n));
    IS(NETMEM_ERR_THREAD, netmem_tcp_shutdown(handles->tcp));
    IS(NETMEM_ERR_THREAD, netmem_tcp_close(handles->tcp));
    IS(NETMEM_ERR_THREAD, netmem_tcp_abort(handles->tcp));
    return NULL;
}

/* The interface goes, then the stack, then what the program has of it. */
static void closing(netmem_stack *stack, const char *tap) {
    struct handles handles;
    netmem_endpoint local = endpoint("[::]:80");
    netmem_stack_stats stats;
    netmem_frag frag, more;
    netmem_event event;
    bool is_connected;
    size_t n;
    memset(&event, 0, sizeof event);
    event.size = sizeof event;
    while (!nowhere_ended)
        if (!has_event(stack, &event))
            turn(stack);
    IS(NETMEM_ERR_UNREACHABLE, netmem_tcp_is_connected(nowhere, &is_connected));
    IS(NETMEM_OK, netmem_tcp_close(nowhere));
    handles.stack = stack;
    IS(NETMEM_OK, netmem_tcp_listen(stack, &local, NULL, &handles.listener));
    handles.tcp = connected(stack, "192.0.2.1:7");
    pthread_t thread;
    HOLDS(pthread_create(&thread, NULL, on_another_thread, &handles) == 0);
    pthread_join(thread, NULL);
    IS(NETMEM_OK, netmem_tcp_write(handles.tcp, "kept", 4, &n));
    IS(NETMEM_OK, netmem_tcp_receive(handles.tcp, &frag, 1, &n));
    HOLDS(n == 0);
    await(stack, handles.tcp, NETMEM_EVENT_READ);
    IS(NETMEM_OK, netmem_tcp_receive(handles.tcp, &frag, 1, &n));
    HOLDS(n == 1);
    IS(NETMEM_OK, netmem_tcp_receive(handles.tcp, &more, 1, &n));
    HOLDS(n == 0);
    stats.size = 8;
    IS(NETMEM_ERR_STRUCT_SIZE, netmem_stack_get_stats(stack, &stats));
    IS(NETMEM_ERR_STRUCT_SIZE, netmem_stack_close(stack, &stats));
    stats.size = sizeof stats;
    IS(NETMEM_OK, netmem_stack_get_stats(stack, &stats));
    HOLDS(stats.connections > 0 && stats.received > 20 && stats.sent > 20 && stats.malformed == 0);

    run("ip link del %s", tap);
    netmem_status status = NETMEM_OK;
    while (status == NETMEM_OK) {
        int64_t left;
        status = netmem_stack_poll(stack, &n);
        if (status == NETMEM_OK && n == 0)
            status = netmem_stack_arm(stack, &left);
        if (status == NETMEM_OK && n == 0 && left != 0) {
            struct pollfd wait;
            wait.fd = netmem_stack_fd(stack);
            wait.events = POLLIN;
            poll(&wait, 1, left < 0 ? -1 : (int)(left / 1000000) + 1);
        }
        netmem_stack_disarm(stack);
    }
    IS(NETMEM_ERR_STOPPED, status);
    HOLDS(netmem_stack_next_event(stack, &event) && event.connection == handles.tcp);
    IS(NETMEM_ERR_STOPPED, netmem_tcp_receive(handles.tcp, &more, 1, &n));
    IS(NETMEM_ERR_STOPPED, netmem_tcp_write(handles.tcp, "x", 1, &n));

    netmem_endpoint remote = endpoint("192.0.2.2:80");
    netmem_tcp *second;
    netmem_tcp_listener *other;
    IS(NETMEM_OK, netmem_stack_shutdown(stack));
    IS(NETMEM_ERR_CLOSED, netmem_tcp_connect(stack, &remote, NULL, &second));
    local = endpoint("192.0.2.2:81");
    IS(NETMEM_ERR_CLOSED, netmem_tcp_listen(stack, &local, NULL, &other));
    IS(NETMEM_OK, netmem_stack_close(stack, &stats));
    IS(NETMEM_ERR_HANDLE, netmem_stack_close(stack, NULL));
    IS(NETMEM_ERR_HANDLE, netmem_stack_poll(stack, NULL));
    IS(NETMEM_ERR_HANDLE, netmem_tcp_connect(stack, &remote, NULL, &second));
    HOLDS(netmem_stack_fd(stack) == -1);
    IS(NETMEM_ERR_CLOSED, netmem_tcp_accept(handles.listener, &second));
    IS(NETMEM_ERR_CLOSED, netmem_tcp_receive(handles.tcp, &more, 1, &n));
    IS(NETMEM_ERR_CLOSED, netmem_tcp_send(handles.tcp, &frag, 1, false, &n));
    HOLDS(n == 0);
    IS(NETMEM_ERR_CLOSED, netmem_tcp_write(handles.tcp, "x", 1, &n));
    IS(NETMEM_ERR_CLOSED, netmem_tcp_is_connected(handles.tcp, &is_connected));
    IS(NETMEM_OK, netmem_tcp_shutdown(handles.tcp));
    IS(NETMEM_OK, netmem_tcp_set_context(handles.tcp, NULL));
    IS(NETMEM_OK, netmem_tcp_endpoints(handles.tcp, &local, &remote));
    HOLDS(remote.port == 7);
    HOLDS(memcmp(netmem_frag_data(&frag), "kept", 4) == 0);
    IS(NETMEM_OK, netmem_tcp_close(handles.tcp));
    IS(NETMEM_OK, netmem_tcp_listener_close(handles.listener));
    netmem_frag_release(&frag);
}

int main(int argc, char **argv) {
    if (argc != 2)
        return 2;
    endpoints();
    netmem_stack *stack = opening(argv[1]);
    listening(stack);
    failing(stack, argv[1]);
    echoed(stack);
    fragments(stack);
    short_of_pages(stack);
    hoarding(stack);
    closing(stack, argv[1]);
    puts("the stack did what the header says");
    return 0;
}
