/* A packet counter on a vhost-user socket.
 *
 *   packet_counter connect SOCKET   is the driver: counts what a device sends, for instance
 *                                   `netmem device --listen SOCKET --port tap:nm0`
 *   packet_counter listen SOCKET    is the device: counts what a virtual machine sends, for instance
 *                                   QEMU with `-chardev socket,id=c,path=SOCKET -netdev vhost-user,chardev=c`
 *
 * No privilege is needed. Ends with standard input, or when the device that it has connected to is
 * gone, and prints what was received and lost. */
#define _POSIX_C_SOURCE 200809L
#include <netmem.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { GROUP = 64, TURNS = 256, PAGES = 4096, ETHERNET = 14 };

static void check(netmem_status status, const char *what) {
    if (status != NETMEM_OK) {
        fprintf(stderr, "%s: %s: %s\n", what, netmem_status_name(status), netmem_error_text());
        exit(1);
    }
}

struct counts {
    unsigned long long frames, bytes, ipv4, ipv6, arp, other;
};

/* Counts frames, each of which is one fragment. */
static void count(struct counts *counts, const netmem_frag *frags, size_t n) {
    for (size_t i = 0; i < n; i++) {
        unsigned char header[ETHERNET];
        size_t length = netmem_frag_length(&frags[i]);
        counts->frames++;
        counts->bytes += length;
        if (length < ETHERNET)
            continue;
        /* The other side can change the page at any time: what is looked at is a copy. */
        memcpy(header, netmem_frag_data(&frags[i]), ETHERNET);
        switch (header[12] << 8 | header[13]) {
        case 0x0800:
            counts->ipv4++;
            break;
        case 0x86dd:
            counts->ipv6++;
            break;
        case 0x0806:
            counts->arp++;
            break;
        default:
            counts->other++;
        }
    }
}

static void print(const struct counts *counts) {
    printf("%llu frames, %llu bytes: IPv4 %llu, IPv6 %llu, ARP %llu, other %llu; ", counts->frames, counts->bytes,
           counts->ipv4, counts->ipv6, counts->arp, counts->other);
}

/* Whether standard input goes on. Waits `timeout` milliseconds for it, or for the descriptor. */
static bool input_goes_on(int fd, int timeout) {
    struct pollfd events[2];
    memset(events, 0, sizeof events);
    events[0].fd = fd;
    events[1].fd = STDIN_FILENO;
    events[0].events = events[1].events = POLLIN;
    char byte;
    return poll(events, 2, timeout) <= 0 || events[1].revents == 0 || read(STDIN_FILENO, &byte, 1) > 0;
}

/* Receives until standard input ends and no frame is left, or the device has gone. */
static void receive(netmem_virtio_rx *rx, struct counts *counts) {
    netmem_frag frags[GROUP];
    bool goes_on = true;
    for (unsigned turn = 1;; turn++) {
        size_t received = 0;
        netmem_status status = netmem_virtio_rx_receive(rx, frags, NULL, GROUP, &received);
        if (status == NETMEM_ERR_STOPPED) {
            fprintf(stderr, "%s\n", netmem_error_text());
            return;
        }
        check(status, "a group of frames");
        count(counts, frags, received);
        netmem_virtio_rx_release(rx, frags, received);
        if (received > 0) {
            /* Under load the thread never sleeps. */
            goes_on = goes_on && (turn % TURNS != 0 || input_goes_on(-1, 0));
            continue;
        }
        if (!goes_on)
            return;
        bool sleeps = false;
        status = netmem_virtio_rx_arm(rx, &sleeps);
        if (status != NETMEM_ERR_STOPPED)
            check(status, "a wait for frames");
        goes_on = input_goes_on(netmem_virtio_rx_fd(rx), sleeps ? -1 : 0);
        netmem_virtio_rx_disarm(rx);
    }
}

static int of_a_device(const char *socket) {
    netmem_virtio_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.socket = socket;
    netmem_virtio_net *net;
    netmem_virtio_rx *rx;
    netmem_virtio_tx *tx;
    check(netmem_virtio_connect(&options, &net, &rx, &tx), "the device");
    printf("ready\n");
    fflush(stdout);
    struct counts counts;
    memset(&counts, 0, sizeof counts);
    receive(rx, &counts);

    netmem_virtio_rx_stats stats;
    stats.size = sizeof stats;
    check(netmem_virtio_tx_close(tx), "the end of the transmit queue");
    check(netmem_virtio_rx_close(rx, &stats), "the end of the receive queue");
    check(netmem_virtio_net_close(net), "the end of the device");
    print(&counts);
    printf("lost: runts %llu, bad header %llu, not negotiated %llu; pages held %llu\n", (unsigned long long)stats.runts,
           (unsigned long long)stats.bad_header, (unsigned long long)stats.not_negotiated,
           (unsigned long long)stats.in_flight);
    return stats.in_flight == 0 && stats.frames == counts.frames ? 0 : 1;
}

/* Counts until standard input ends and no frame is left. */
static void serve(netmem_virtio_device *device, struct counts *counts) {
    netmem_frag frags[GROUP];
    bool goes_on = true;
    for (unsigned turn = 1;; turn++) {
        size_t received;
        check(netmem_virtio_device_receive(device, frags, NULL, GROUP, &received), "a group of frames");
        count(counts, frags, received);
        netmem_frags_release(frags, received);
        if (received > 0) {
            goes_on = goes_on && (turn % TURNS != 0 || input_goes_on(-1, 0));
            continue;
        }
        if (!goes_on)
            return;
        bool sleeps;
        check(netmem_virtio_device_arm(device, &sleeps), "a wait for frames");
        goes_on = input_goes_on(netmem_virtio_device_fd(device), sleeps ? -1 : 0);
        netmem_virtio_device_disarm(device);
        if (netmem_virtio_device_check(device) != NETMEM_OK)
            fprintf(stderr, "a virtual machine was dropped: %s\n", netmem_error_text());
    }
}

static int of_virtual_machines(const char *socket) {
    netmem_region_options region_options;
    memset(&region_options, 0, sizeof region_options);
    region_options.size = sizeof region_options;
    region_options.pages = PAGES;
    netmem_region *region;
    check(netmem_region_create(&region_options, &region), "a region");
    netmem_virtio_device_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    netmem_virtio_device *device;
    check(netmem_virtio_device_create(region, &options, &device), "the device");
    check(netmem_region_close(region), "the region's handle");
    check(netmem_virtio_device_listen(device, socket), "the socket");
    /* A front end that shortens its memory ends its own rings, and not this process. */
    check(netmem_sigbus_install(), "the handler of SIGBUS");
    printf("ready\n");
    fflush(stdout);
    struct counts counts;
    memset(&counts, 0, sizeof counts);
    serve(device, &counts);

    netmem_virtio_device_stats stats;
    stats.size = sizeof stats;
    check(netmem_virtio_device_close(device, &stats), "the end of the device");
    print(&counts);
    printf("lost: runts %llu, bad header %llu, not negotiated %llu, no page %llu; rings stopped %llu\n",
           (unsigned long long)stats.runts, (unsigned long long)stats.bad_header, (unsigned long long)stats.not_negotiated,
           (unsigned long long)stats.no_page, (unsigned long long)stats.faults);
    return stats.received == counts.frames ? 0 : 1;
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "connect") == 0)
        return of_a_device(argv[2]);
    if (argc == 3 && strcmp(argv[1], "listen") == 0)
        return of_virtual_machines(argv[2]);
    fprintf(stderr, "usage: packet_counter connect|listen SOCKET\n");
    return 2;
}
