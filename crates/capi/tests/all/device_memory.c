/* Device memory as the header describes it: two stacks, each with memory of its own, and a cable
 * between their devices. The library has debug assertions. `whole`: the devices do not split frames
 * behind the headers, as devices of others do.
 *
 * Usage: device_memory SOCKET SOCKET [whole] */
#ifndef _GNU_SOURCE /* which g++ defines */
#define _GNU_SOURCE
#endif
#include "check.h"
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { MIB = 1 << 20, N = 256, LENGTH = 100000 };

static bool whole;

static netmem_devmem_stats stats_of(const netmem_devmem *memory) {
    netmem_devmem_stats stats;
    stats.size = sizeof stats;
    IS(NETMEM_OK, netmem_devmem_get_stats(memory, &stats));
    return stats;
}

static void memory_alone(void) {
    netmem_devmem *memory, *bound;
    netmem_devmem_stats stats;
    uint64_t address;
    char bytes[8];
    int ends[2];
    IS(NETMEM_ERR_NULL, netmem_devmem_create(MIB, NULL));
    IS(NETMEM_ERR_ARGUMENT, netmem_devmem_create(0, &memory));
    IS(NETMEM_ERR_ARGUMENT, netmem_devmem_create(MIB + 1, &memory));
    IS(NETMEM_ERR_ARGUMENT, netmem_devmem_create((size_t)-1 - 4095, &memory));
    IS(NETMEM_ERR_ARGUMENT, netmem_devmem_bind(-1, &bound));
    IS(NETMEM_ERR_ARGUMENT, netmem_devmem_bind(1 << 20, &bound));
    HOLDS(pipe(ends) == 0);
    IS(NETMEM_ERR_ARGUMENT, netmem_devmem_bind(ends[0], &bound));
    /* The process has as many descriptors as it may. */
    struct rlimit limit, none;
    HOLDS(getrlimit(RLIMIT_NOFILE, &limit) == 0);
    none = limit;
    none.rlim_cur = (rlim_t)ends[1] + 1;
    HOLDS(setrlimit(RLIMIT_NOFILE, &none) == 0);
    IS(NETMEM_ERR_SYSTEM, netmem_devmem_bind(ends[0], &bound));
    HOLDS(setrlimit(RLIMIT_NOFILE, &limit) == 0);
    close(ends[0]);
    close(ends[1]);
    IS(NETMEM_OK, netmem_devmem_create(MIB, &memory));
    stats = stats_of(memory);
    HOLDS(stats.id != 0 && stats.bytes == MIB && stats.page_size == 4096 && stats.in_use == 0 && stats.queues == 0);
    stats.size = 7;
    IS(NETMEM_ERR_STRUCT_SIZE, netmem_devmem_get_stats(memory, &stats));
    IS(NETMEM_OK, netmem_devmem_write(memory, MIB - 4, "last", 4));
    IS(NETMEM_OK, netmem_devmem_read(memory, MIB - 4, bytes, 4));
    HOLDS(memcmp(bytes, "last", 4) == 0);
    IS(NETMEM_ERR_RANGE, netmem_devmem_read(memory, MIB - 4, bytes, 5));
    IS(NETMEM_ERR_RANGE, netmem_devmem_write(memory, (uint64_t)-1, "x", 1));
    IS(NETMEM_ERR_NULL, netmem_devmem_read(memory, 0, NULL, 1));
    IS(NETMEM_ERR_NULL, netmem_devmem_write(NULL, 0, "x", 1));
    IS(NETMEM_ERR_UNSUPPORTED, netmem_devmem_device_address(memory, &address));
    HOLDS(netmem_devmem_fd(memory) >= 0 && netmem_devmem_fd(NULL) == -1);

    /* Two bindings of one file: the descriptor may be closed. */
    int fd = memfd_create("device-memory", MFD_ALLOW_SEALING);
    HOLDS(fd >= 0 && ftruncate(fd, 2 * MIB) == 0);
    IS(NETMEM_OK, netmem_devmem_bind(fd, &bound));
    HOLDS(ftruncate(fd, MIB) != 0);
    close(fd);
    HOLDS(stats_of(bound).bytes == 2 * MIB && stats_of(bound).id != stats_of(memory).id);
    IS(NETMEM_OK, netmem_devmem_write(bound, MIB, "there", 5));
    IS(NETMEM_OK, netmem_devmem_close(bound));
    IS(NETMEM_ERR_HANDLE, netmem_devmem_close(bound));
    IS(NETMEM_ERR_HANDLE, netmem_devmem_read(bound, 0, bytes, 1));
    IS(NETMEM_OK, netmem_devmem_close(memory));
    IS(NETMEM_ERR_NULL, netmem_devmem_close(NULL));
}

static netmem_devmem_stack_options options(const char *socket, const char *address) {
    netmem_devmem_stack_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.socket = socket;
    options.address = address;
    return options;
}

static void stacks_that_cannot_be(const netmem_devmem *memory, const char *socket) {
    netmem_devmem_stack *stack;
    netmem_devmem *small;
    netmem_devmem_stack_options given = options(socket, "10.0.0.1/24");
    IS(NETMEM_ERR_NULL, netmem_devmem_stack_open(NULL, &given, &stack));
    IS(NETMEM_ERR_NULL, netmem_devmem_stack_open(memory, NULL, &stack));
    IS(NETMEM_ERR_NULL, netmem_devmem_stack_open(memory, &given, NULL));
    given.size = 8;
    IS(NETMEM_ERR_STRUCT_SIZE, netmem_devmem_stack_open(memory, &given, &stack));
    given = options(NULL, "10.0.0.1/24");
    IS(NETMEM_ERR_NULL, netmem_devmem_stack_open(memory, &given, &stack));
    given = options(socket, "10.0.0.1");
    IS(NETMEM_ERR_ARGUMENT, netmem_devmem_stack_open(memory, &given, &stack));
    given = options("/there/is/no/such/device", "10.0.0.1/24");
    IS(NETMEM_ERR_NOT_FOUND, netmem_devmem_stack_open(memory, &given, &stack));
    HOLDS(strstr(netmem_error_text(), "/there/is/no/such/device") != NULL);
    given = options(socket, "10.0.0.1/24");
    given.pages = 2048;
    IS(NETMEM_ERR_ARGUMENT, netmem_devmem_stack_open(memory, &given, &stack));
    given.pages = 0;
    given.reserved[2] = 1;
    IS(NETMEM_ERR_ARGUMENT, netmem_devmem_stack_open(memory, &given, &stack));
    given.reserved[2] = 0;
    static const uint16_t no_mtus[] = {1, 575, 1501, 65535};
    for (size_t i = 0; i < sizeof no_mtus / sizeof *no_mtus; i++) {
        given.mtu = no_mtus[i];
        IS(NETMEM_ERR_ARGUMENT, netmem_devmem_stack_open(memory, &given, &stack));
        HOLDS(strstr(netmem_error_text(), "576 to 1500") != NULL);
    }
    given.address = "fd00::1/64";
    given.mtu = 1279;
    IS(NETMEM_ERR_ARGUMENT, netmem_devmem_stack_open(memory, &given, &stack));
    HOLDS(strstr(netmem_error_text(), "1280 to 1500") != NULL);
    static const char *const no_hosts[] = {"0.0.0.0/8", "224.0.0.1/24", "255.255.255.255/0", "::/64", "ff02::1/64"};
    for (size_t i = 0; i < sizeof no_hosts / sizeof *no_hosts; i++) {
        given = options(socket, no_hosts[i]);
        IS(NETMEM_ERR_ARGUMENT, netmem_devmem_stack_open(memory, &given, &stack));
        HOLDS(strstr(netmem_error_text(), no_hosts[i]) != NULL);
    }
    given = options(socket, "10.0.0.1/24");
    given.mac[0] = 1;
    IS(NETMEM_ERR_ARGUMENT, netmem_devmem_stack_open(memory, &given, &stack));
    HOLDS(strstr(netmem_error_text(), "01:00:00:00:00:00") != NULL);
    given.mac[0] = 0;
    IS(NETMEM_OK, netmem_devmem_create(4 * MIB, &small));
    IS(NETMEM_ERR_ARGUMENT, netmem_devmem_stack_open(small, &given, &stack));
    IS(NETMEM_ERR_HANDLE, netmem_devmem_stack_open((const netmem_devmem *)"not memory, but a text", &given, &stack));
    IS(NETMEM_OK, netmem_devmem_close(small));
}

static size_t poll_once(netmem_devmem_stack *stack) {
    size_t work = 0;
    IS(NETMEM_OK, netmem_devmem_stack_poll(stack, &work));
    return work;
}

/* Does the work of both stacks, and sleeps if there is none. */
static void turn(netmem_devmem_stack *a, netmem_devmem_stack *b) {
    struct pollfd fds[2];
    if (poll_once(a) + poll_once(b) > 0)
        return;
    int64_t after = 0, other = 0;
    IS(NETMEM_OK, netmem_devmem_stack_arm(a, &after));
    IS(NETMEM_OK, netmem_devmem_stack_arm(b, &other));
    if (after < 0 || (other >= 0 && other < after))
        after = other;
    fds[0].fd = netmem_devmem_stack_fd(a);
    fds[1].fd = netmem_devmem_stack_fd(b);
    fds[0].events = fds[1].events = POLLIN;
    poll(fds, 2, after < 0 ? -1 : (int)((after + 999999) / 1000000));
    netmem_devmem_stack_disarm(a);
    netmem_devmem_stack_disarm(b);
}

struct handles {
    netmem_devmem_stack *stack;
    netmem_devmem_listener *listener;
    netmem_devmem_stream *stream;
    netmem_devmem_returner *returner;
    const netmem_devmem_extent *extents;
    size_t n;
    size_t returned;
};

static void *on_another_thread(void *context) {
    struct handles *handles = (struct handles *)context;
    netmem_devmem_stream *stream;
    netmem_devmem_extent extent;
    netmem_devmem_stack_stats stats;
    size_t n;
    stats.size = sizeof stats;
    IS(NETMEM_ERR_THREAD, netmem_devmem_stack_poll(handles->stack, NULL));
    HOLDS(strstr(netmem_error_text(), "another thread") != NULL);
    HOLDS(netmem_devmem_stack_fd(handles->stack) == -1);
    IS(NETMEM_ERR_THREAD, netmem_devmem_stack_get_stats(handles->stack, &stats));
    IS(NETMEM_ERR_THREAD, netmem_devmem_stack_close(handles->stack, 0));
    IS(NETMEM_ERR_THREAD, netmem_devmem_accept(handles->listener, &stream));
    IS(NETMEM_ERR_THREAD, netmem_devmem_listener_close(handles->listener));
    IS(NETMEM_ERR_THREAD, netmem_devmem_stream_receive(handles->stream, &extent, 1, &n, NULL));
    IS(NETMEM_ERR_THREAD, netmem_devmem_stream_close(handles->stream));
    /* Tokens are returned on any thread. */
    IS(NETMEM_OK, netmem_devmem_return(handles->returner, handles->extents, handles->n, &handles->returned));
    return NULL;
}

/* The thread that opened a stack owns it, also if another one uses it first. */
static void *first_use(void *context) {
    IS(NETMEM_ERR_THREAD, netmem_devmem_stack_poll((netmem_devmem_stack *)context, NULL));
    HOLDS(strstr(netmem_error_text(), "another thread") != NULL);
    return NULL;
}

static netmem_devmem_stream_stats stream_stats(netmem_devmem_stream *stream) {
    netmem_devmem_stream_stats stats;
    stats.size = sizeof stats;
    IS(NETMEM_OK, netmem_devmem_stream_get_stats(stream, &stats));
    return stats;
}

static unsigned char byte_at(size_t at) {
    return (unsigned char)(at * 7 + at / 251);
}

/* LENGTH bytes of b's memory, sent to a. Returns how many extents a has received. */
static size_t across(netmem_devmem_stack *a, netmem_devmem_stack *b, const netmem_devmem *to, const netmem_devmem *from,
                     struct handles *ends, netmem_devmem_stream *sender, netmem_devmem_extent *extents) {
    static unsigned char bytes[LENGTH], got[LENGTH];
    uint64_t ranges[4], id = stats_of(to).id, there = 0;
    size_t n = 0, sent = 0, received;
    bool accepted = false, ended = true;
    for (size_t i = 0; i < LENGTH; i++)
        bytes[i] = byte_at(i);
    IS(NETMEM_OK, netmem_devmem_write(from, 12345, bytes, LENGTH));
    IS(NETMEM_ERR_RANGE, netmem_devmem_stream_send(sender, from, 12345, 0, false, &accepted));
    IS(NETMEM_ERR_RANGE, netmem_devmem_stream_send(sender, from, stats_of(from).bytes - 1, 2, false, &accepted));
    IS(NETMEM_ERR_NULL, netmem_devmem_stream_send(sender, NULL, 0, 1, false, &accepted));
    IS(NETMEM_ERR_NULL, netmem_devmem_stream_send(sender, from, 0, 1, false, NULL));
    IS(NETMEM_ERR_UNSUPPORTED, netmem_devmem_stream_send(sender, to, 0, 1, false, &accepted));
    IS(NETMEM_OK, netmem_devmem_stream_send(sender, from, 12345, LENGTH, false, &accepted));
    HOLDS(accepted);
    while (there < LENGTH || sent == 0) {
        turn(a, b);
        if (sent == 0)
            IS(NETMEM_OK, netmem_devmem_stream_sent(sender, ranges, 4, &sent));
        IS(NETMEM_OK, netmem_devmem_stream_receive(ends->stream, extents + n, N - n, &received, &ended));
        for (size_t i = n; i < n + received; i++) {
            HOLDS(!ended && there + extents[i].length <= LENGTH);
            if (extents[i].memory == 0) {
                size_t read;
                IS(NETMEM_OK, netmem_devmem_stream_read(ends->stream, got + there, extents[i].length, &read));
                HOLDS(whole && extents[i].tokens == 0 && read == extents[i].length);
            } else {
                HOLDS(extents[i].memory == id && extents[i].tokens > 0);
                IS(NETMEM_OK, netmem_devmem_read(to, extents[i].offset, got + there, extents[i].length));
            }
            there += extents[i].length;
        }
        n += received;
        HOLDS(n < N);
    }
    HOLDS(sent == 1 && ranges[0] == 0);
    HOLDS(memcmp(bytes, got, LENGTH) == 0);
    return n;
}

static void streams(netmem_devmem_stack *a, netmem_devmem_stack *b, const netmem_devmem *to, const netmem_devmem *from) {
    struct handles ends;
    netmem_devmem_listener *again;
    netmem_devmem_stream *sender, *none;
    netmem_devmem_extent extents[N], wrong;
    size_t n, done;
    bool ended = false;
    IS(NETMEM_ERR_ARGUMENT, netmem_devmem_listen(a, 0, &ends.listener));
    IS(NETMEM_OK, netmem_devmem_listen(a, 9000, &ends.listener));
    IS(NETMEM_ERR_IN_USE, netmem_devmem_listen(a, 9000, &again));
    IS(NETMEM_ERR_ARGUMENT, netmem_devmem_connect(b, "10.0.0.1", &sender));
    IS(NETMEM_ERR_UNREACHABLE, netmem_devmem_connect(b, "192.0.2.1:9000", &sender));
    IS(NETMEM_OK, netmem_devmem_accept(ends.listener, &none));
    HOLDS(none == NULL);
    IS(NETMEM_OK, netmem_devmem_connect(b, "10.0.0.1:9000", &sender));
    do {
        turn(a, b);
        IS(NETMEM_OK, netmem_devmem_accept(ends.listener, &ends.stream));
    } while (ends.stream == NULL);
    IS(NETMEM_OK, netmem_devmem_stream_receive(ends.stream, extents, N, &n, &ended));
    HOLDS(n == 0 && !ended);

    n = across(a, b, to, from, &ends, sender, extents);
    netmem_devmem_stream_stats stats = stream_stats(ends.stream);
    HOLDS(stats.device_bytes + stats.host_bytes == LENGTH && (stats.host_bytes > 0) == whole);
    HOLDS(stats.held == stats.pages && stats.held >= stats.device_bytes / 4096 && stats.held > 0);

    /* Tokens that the stream does not hold are ignored. */
    IS(NETMEM_ERR_NULL, netmem_devmem_returner_open(ends.stream, NULL));
    IS(NETMEM_OK, netmem_devmem_returner_open(ends.stream, &ends.returner));
    IS(NETMEM_ERR_NULL, netmem_devmem_return(ends.returner, NULL, 1, &done));
    wrong = extents[0];
    wrong.memory = stats_of(to).id;
    wrong.tokens = (uint32_t)-1;
    IS(NETMEM_ERR_ARGUMENT, netmem_devmem_return(ends.returner, &wrong, 1, &done));
    wrong.tokens = 1;
    wrong.token = (uint32_t)-2;
    IS(NETMEM_OK, netmem_devmem_return(ends.returner, &wrong, 1, &done));
    HOLDS(done == 0 && stream_stats(ends.stream).held == stats.held);
    ends.stack = a;
    ends.extents = extents;
    ends.n = n;
    pthread_t thread;
    HOLDS(pthread_create(&thread, NULL, on_another_thread, &ends) == 0);
    pthread_join(thread, NULL);
    HOLDS(ends.returned == stats.held && stream_stats(ends.stream).held == 0);
    IS(NETMEM_OK, netmem_devmem_return(ends.returner, extents, n, &done));
    HOLDS(done == 0);
    HOLDS(stream_stats(ends.stream).excess_tokens == stats.held && stream_stats(ends.stream).unknown_tokens == 1);

    /* Host bytes of the application, and the end of the stream. */
    IS(NETMEM_OK, netmem_devmem_stream_write(sender, "a header", 8, &done));
    HOLDS(done == 8);
    IS(NETMEM_OK, netmem_devmem_stream_shutdown(sender));
    IS(NETMEM_ERR_SHUT_DOWN, netmem_devmem_stream_send(sender, from, 0, 1, false, &ended));
    char header[11];
    n = 0;
    for (ended = false; !ended;) {
        turn(a, b);
        IS(NETMEM_OK, netmem_devmem_stream_receive(ends.stream, extents + n, N - n, &done, &ended));
        n += done;
    }
    HOLDS(n == 1 && extents[0].length == 8);
    if (extents[0].memory == 0) {
        IS(NETMEM_OK, netmem_devmem_stream_read(ends.stream, header, 3, &done));
        HOLDS(done == 3);
        IS(NETMEM_OK, netmem_devmem_stream_read(ends.stream, header + 3, 8, &done));
        HOLDS(done == 5 && whole);
    } else {
        IS(NETMEM_OK, netmem_devmem_read(to, extents[0].offset, header, 8));
    }
    HOLDS(memcmp(header, "a header", 8) == 0);
    IS(NETMEM_OK, netmem_devmem_stream_read(ends.stream, header, 8, &done));
    HOLDS(done == 0);

    /* The stack ends before its streams, and a returner after them. */
    IS(NETMEM_OK, netmem_devmem_stack_close(a, 0));
    IS(NETMEM_ERR_HANDLE, netmem_devmem_stack_close(a, 0));
    IS(NETMEM_ERR_CLOSED, netmem_devmem_stream_send(ends.stream, to, 0, 1, false, &ended));
    IS(NETMEM_ERR_CLOSED, netmem_devmem_accept(ends.listener, &none));
    IS(NETMEM_OK, netmem_devmem_listener_close(ends.listener));
    IS(NETMEM_OK, netmem_devmem_stream_close(ends.stream));
    IS(NETMEM_ERR_HANDLE, netmem_devmem_stream_close(ends.stream));
    IS(NETMEM_OK, netmem_devmem_return(ends.returner, extents, 1, &done));
    HOLDS(done == extents[0].tokens);
    IS(NETMEM_OK, netmem_devmem_returner_close(ends.returner));
    IS(NETMEM_ERR_HANDLE, netmem_devmem_returner_close(ends.returner));
    IS(NETMEM_OK, netmem_devmem_stream_close(sender));
    IS(NETMEM_OK, netmem_devmem_stack_close(b, 0));
}

/* Ends the library's connection to the device. */
static void cut(const char *socket) {
    struct sockaddr_un peer;
    int found = 0;
    for (int fd = 3; fd < 1024; fd++) {
        socklen_t length = sizeof peer;
        memset(&peer, 0, sizeof peer);
        if (getpeername(fd, (struct sockaddr *)&peer, &length) == 0 && peer.sun_family == AF_UNIX && strcmp(peer.sun_path, socket) == 0) {
            HOLDS(shutdown(fd, SHUT_RDWR) == 0);
            found++;
        }
    }
    HOLDS(found == 1);
}

/* A program that never sleeps learns that the device is gone, too. */
static void device_gone(const netmem_devmem *memory, const char *socket) {
    netmem_devmem_stack *stack;
    netmem_devmem_stream *stream;
    netmem_devmem_extent extent;
    netmem_devmem_stack_options given = options(socket, "10.0.0.1/24");
    netmem_status status;
    size_t n;
    IS(NETMEM_OK, netmem_devmem_stack_open(memory, &given, &stack));
    IS(NETMEM_OK, netmem_devmem_connect(stack, "10.0.0.9:9", &stream));
    IS(NETMEM_OK, netmem_devmem_stack_poll(stack, NULL));
    IS(NETMEM_OK, netmem_devmem_stream_receive(stream, &extent, 1, &n, NULL));
    cut(socket);
    do
        status = netmem_devmem_stack_poll(stack, NULL);
    while (status == NETMEM_OK);
    IS(NETMEM_ERR_STOPPED, status);
    IS(NETMEM_ERR_STOPPED, netmem_devmem_stream_receive(stream, &extent, 1, &n, NULL));
    IS(NETMEM_OK, netmem_devmem_stream_close(stream));
    /* The end of the stream may be work. Then it is the same again. */
    do
        status = netmem_devmem_stack_poll(stack, NULL);
    while (status == NETMEM_OK);
    IS(NETMEM_ERR_STOPPED, status);
    IS(NETMEM_OK, netmem_devmem_stack_close(stack, 0));
}

int main(int argc, char **argv) {
    if (argc < 3)
        return 2;
    netmem_devmem *to, *from;
    netmem_devmem_stack *a, *b;
    whole = argc > 3;
    memory_alone();
    IS(NETMEM_OK, netmem_devmem_create(8 * MIB, &to));
    IS(NETMEM_OK, netmem_devmem_create(8 * MIB, &from));
    stacks_that_cannot_be(to, argv[1]);
    netmem_devmem_stack_options given = options(argv[1], "10.0.0.1/24");
    given.foreign = whole;
    IS(NETMEM_OK, netmem_devmem_stack_open(to, &given, &a));
    HOLDS(stats_of(to).queues == 1);
    pthread_t thread;
    HOLDS(pthread_create(&thread, NULL, first_use, a) == 0);
    pthread_join(thread, NULL);
    given = options(argv[2], "10.0.0.2/24");
    IS(NETMEM_OK, netmem_devmem_stack_open(from, &given, &b));
    streams(a, b, to, from);
    HOLDS(stats_of(to).queues == 0 && stats_of(to).in_use == 0);
    device_gone(to, argv[1]);
    IS(NETMEM_OK, netmem_devmem_close(to));
    IS(NETMEM_OK, netmem_devmem_close(from));
    puts("device memory did what the header says");
    return 0;
}
