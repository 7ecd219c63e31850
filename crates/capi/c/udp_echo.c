/* A UDP echo server on AF_XDP. Each answer is sent from the page that its request came in.
 *
 *   netmem_xsk_rx_receive ──► a group of fragments ──► answers ──► netmem_xsk_tx_send ── sent ──┐
 *            ▲                                     └── others ──► netmem_xsk_rx_release ──┐     │
 *            └──────────────────────── the queue's pool ◄─────────────────────────────────┴─────┘
 *                                                                     netmem_xsk_tx_complete
 *
 * The XDP program redirects UDP to the port only. The kernel has the interface's other traffic: it
 * keeps its addresses, and answers ARP and neighbour solicitations.
 *
 * Usage: udp_echo INTERFACE PORT. Serves queue 0. Needs CAP_NET_RAW, CAP_BPF, CAP_PERFMON and
 * CAP_NET_ADMIN. Ends with standard input, and prints what was received and lost. */
#define _POSIX_C_SOURCE 200809L
#include <netmem.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { GROUP = 64, PAGES = 4096, UDP = 17, TURNS = 256 };

static void check(netmem_status status, const char *what) {
    if (status != NETMEM_OK) {
        fprintf(stderr, "%s: %s: %s\n", what, netmem_status_name(status), netmem_error_text());
        exit(1);
    }
}

static void swap(unsigned char *a, unsigned char *b, size_t n) {
    unsigned char kept[16];
    memcpy(kept, a, n);
    memcpy(a, b, n);
    memcpy(b, kept, n);
}

/* Makes a request its answer: addresses and ports change places. The checksums stay right, because
 * the same words are summed. Returns false if it is no UDP packet to the port. */
static bool answer(netmem_frag *frag, unsigned port) {
    unsigned char *frame = (unsigned char *)netmem_frag_data_mut(frag);
    size_t length = netmem_frag_length(frag), addresses, size, udp;
    if (frame == NULL || length < 34)
        return false;
    unsigned char *ip = frame + 14;
    unsigned type = (unsigned)frame[12] << 8 | frame[13];
    if (type == 0x0800 && ip[9] == UDP) {
        addresses = 12, size = 4, udp = (ip[0] & 15u) * 4u;
    } else if (type == 0x86dd && ip[6] == UDP) {
        addresses = 8, size = 16, udp = 40;
    } else {
        return false;
    }
    if (udp < addresses + 2 * size || length < 14 + udp + 8)
        return false;
    unsigned char *ports = ip + udp;
    if (((unsigned)ports[2] << 8 | ports[3]) != port)
        return false;
    swap(frame, frame + 6, 6);
    swap(ip + addresses, ip + addresses + size, size);
    swap(ports, ports + 2, 2);
    return true;
}

/* Whether standard input goes on. Waits `timeout` milliseconds for it, or for one of the first two
 * descriptors. */
static bool input_goes_on(int rx, int tx, int timeout) {
    struct pollfd events[3];
    memset(events, 0, sizeof events);
    events[0].fd = rx;
    events[1].fd = tx;
    events[2].fd = STDIN_FILENO;
    events[0].events = events[1].events = events[2].events = POLLIN;
    char byte;
    return poll(events, 3, timeout) <= 0 || events[2].revents == 0 || read(STDIN_FILENO, &byte, 1) > 0;
}

/* Sleeps until there are frames, or the kernel is done with answers. Returns false at the end of
 * standard input. */
static bool wait_for_frames(netmem_xsk_rx *rx, netmem_xsk_tx *tx) {
    bool rx_sleeps, tx_sleeps;
    check(netmem_xsk_rx_arm(rx, &rx_sleeps), "a wait for frames");
    /* This tells the kernel again of answers that it has not sent. If it still does not send them,
     * for instance because memory is short, nothing wakes this thread: it tries again in a
     * millisecond. */
    check(netmem_xsk_tx_arm(tx, &tx_sleeps), "a wait for completions");
    int timeout = !rx_sleeps ? 0 : !tx_sleeps ? 1 : -1;
    bool goes_on = input_goes_on(netmem_xsk_rx_fd(rx), netmem_xsk_tx_fd(tx), timeout);
    netmem_xsk_rx_disarm(rx);
    netmem_xsk_tx_disarm(tx);
    return goes_on;
}

/* Returns how many requests were answered. */
static unsigned long long serve(netmem_xsk_rx *rx, netmem_xsk_tx *tx, unsigned port) {
    unsigned long long answered = 0;
    netmem_frag frags[GROUP];
    for (unsigned turn = 1;; turn++) {
        size_t received, answers = 0, sent;
        netmem_xsk_tx_complete(tx, rx);
        check(netmem_xsk_rx_receive(rx, frags, NULL, GROUP, &received), "a group of frames");
        if (received == 0) {
            if (!wait_for_frames(rx, tx))
                return answered;
            continue;
        }
        /* Under load the thread never sleeps. */
        bool goes_on = turn % TURNS != 0 || input_goes_on(-1, -1, 0);
        /* Answers to the front. */
        for (size_t i = 0; i < received; i++)
            if (answer(&frags[i], port)) {
                netmem_frag kept = frags[answers];
                frags[answers++] = frags[i];
                frags[i] = kept;
            }
        check(netmem_xsk_tx_send(tx, frags, NULL, answers, &sent), "a group of answers");
        answered += sent;
        /* What was sent is empty, and ignored. The rest is no request, or found the queue full. */
        netmem_xsk_rx_release(rx, frags, received);
        if (!goes_on)
            return answered;
    }
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: udp_echo INTERFACE PORT\n");
        return 2;
    }
    unsigned port = (unsigned)atoi(argv[2]) & 0xffff;

    netmem_region_options region_options;
    memset(&region_options, 0, sizeof region_options);
    region_options.size = sizeof region_options;
    region_options.pages = PAGES;
    netmem_region *region;
    check(netmem_region_create(&region_options, &region), "a region");
    netmem_umem_options umem_options;
    memset(&umem_options, 0, sizeof umem_options);
    umem_options.size = sizeof umem_options;
    netmem_umem *umem;
    check(netmem_umem_create(region, &umem_options, &umem), "a UMEM");

    netmem_xdp_rule rule;
    memset(&rule, 0, sizeof rule);
    rule.protocol = UDP;
    rule.port = (uint16_t)port;
    netmem_xdp_options program_options;
    memset(&program_options, 0, sizeof program_options);
    program_options.size = sizeof program_options;
    program_options.rules = &rule;
    program_options.rule_count = 1;
    netmem_xdp_program *program;
    check(netmem_xdp_program_attach(argv[1], &program_options, &program), "the XDP program");

    netmem_xsk_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.interface = argv[1];
    netmem_xsk_rx *rx;
    netmem_xsk_tx *tx;
    check(netmem_xsk_open(umem, &options, &rx, &tx), "a queue");
    check(netmem_xdp_program_insert(program, rx), "the queue's place in the program");
    check(netmem_umem_close(umem), "the UMEM's handle");
    check(netmem_region_close(region), "the region's handle");
    printf("ready\n");
    fflush(stdout);

    unsigned long long answered = serve(rx, tx, port);

    /* The kernel has the port again. */
    check(netmem_xdp_program_close(program), "the end of the program");
    check(netmem_xsk_tx_close(tx), "the end of the transmit queue");
    netmem_xsk_rx_stats stats;
    stats.size = sizeof stats;
    check(netmem_xsk_rx_close(rx, &stats), "the end of the receive queue");
    printf("received %llu, answered %llu, lost: ring full %llu, no buffer %llu, bad shape %llu; pages held %llu\n",
           (unsigned long long)stats.frames, answered, (unsigned long long)stats.ring_full,
           (unsigned long long)stats.no_buffer, (unsigned long long)stats.bad_shape,
           (unsigned long long)stats.in_flight);
    return stats.in_flight == 0 ? 0 : 1;
}
