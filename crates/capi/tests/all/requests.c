/* Requests to the device for sent frames, queues that only send, and busy polling. Usage: requests
 * OURS THEIRS, the two ends of a veth pair. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PAGES = 1024, RING = 128, ROOM = 64 };

static netmem_xsk_options queue_of(const char *interface) {
    netmem_xsk_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.interface = interface;
    options.fill = 256;
    options.rx_ring = RING;
    options.tx_ring = RING;
    return options;
}

static netmem_region *region_of(size_t pages) {
    netmem_region *region;
    netmem_region_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.pages = pages;
    options.no_huge_pages = 1;
    IS(NETMEM_OK, netmem_region_create(&options, &region));
    return region;
}

static netmem_page_pool *pool_of(netmem_region *region) {
    netmem_page_pool *pool;
    netmem_pool_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    IS(NETMEM_OK, netmem_page_pool_create(region, &options, &pool));
    return pool;
}

static netmem_umem *umem_of(netmem_region *region, uint8_t metadata) {
    netmem_umem *umem;
    netmem_umem_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.chunk = 2048;
    options.reserved[5] = 1;
    IS(NETMEM_ERR_ARGUMENT, netmem_umem_create(region, &options, &umem));
    options.reserved[5] = 0;
    options.tx_metadata = metadata;
    options.software_checksums = metadata;
    IS(NETMEM_OK, netmem_umem_create(region, &options, &umem));
    return umem;
}

/* A fragment of `length` bytes, with an Ethernet header for experiments, behind `room` free
 * bytes. */
static netmem_frag frame(netmem_page_pool *pool, size_t room, size_t length, unsigned char byte) {
    netmem_frag frag;
    HOLDS(netmem_page_pool_alloc(pool, &frag, 1) == 1);
    IS(NETMEM_OK, netmem_frag_advance(&frag, room));
    unsigned char *data = (unsigned char *)netmem_frag_data_mut(&frag);
    for (size_t i = 0; i < length; i++)
        data[i] = (unsigned char)(byte + 7 * i);
    memset(data, 0xff, 6);
    data[12] = 0x88, data[13] = 0xb5;
    IS(NETMEM_OK, netmem_frag_truncate(&frag, length));
    return frag;
}

static netmem_frag receive(netmem_xsk_rx *rx) {
    netmem_frag frag;
    for (size_t n = 0;;) {
        bool waits;
        IS(NETMEM_OK, netmem_xsk_rx_receive(rx, &frag, NULL, 1, &n));
        if (n == 1 && memcmp((const unsigned char *)netmem_frag_data(&frag) + 12, "\x88\xb5", 2) == 0)
            return frag;
        if (n == 1) {
            netmem_frag_release(&frag);
            continue;
        }
        IS(NETMEM_OK, netmem_xsk_rx_arm(rx, &waits));
        if (waits) {
            struct pollfd event;
            event.fd = netmem_xsk_rx_fd(rx);
            event.events = POLLIN;
            HOLDS(poll(&event, 1, -1) == 1);
            netmem_xsk_rx_disarm(rx);
        }
    }
}

/* The internet checksum of bytes. */
static uint16_t checksum(const unsigned char *data, size_t length) {
    uint32_t sum = 0;
    for (size_t i = 0; i < length; i++)
        sum += i % 2 == 0 ? (uint32_t)data[i] << 8 : data[i];
    while (sum > 0xffff)
        sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)~sum;
}

static netmem_xsk_request checksum_at(uint16_t start, uint16_t offset) {
    netmem_xsk_request request;
    memset(&request, 0, sizeof request);
    request.flags = NETMEM_XSK_CHECKSUM;
    request.checksum_start = start;
    request.checksum_offset = offset;
    return request;
}

/* One frame with a request: refused, and still the caller's. */
static void refused(netmem_status status, netmem_xsk_tx *tx, netmem_frag *frag, netmem_xsk_request request) {
    size_t n = 7, length = netmem_frag_length(frag);
    IS(status, netmem_xsk_tx_send_with(tx, frag, NULL, &request, 1, &n));
    HOLDS(n == 0 && netmem_frag_length(frag) == length);
}

static void refusals(netmem_xsk_tx *tx, netmem_page_pool *pool) {
    netmem_frag frag = frame(pool, ROOM, 100, 1), other;
    netmem_xsk_request request = checksum_at(34, 6), none;
    netmem_xsk_timestamp times[1];
    size_t n = 7;
    memset(&none, 0, sizeof none);
    IS(NETMEM_ERR_NULL, netmem_xsk_tx_send_with(NULL, &frag, NULL, &request, 1, &n));
    IS(NETMEM_ERR_NULL, netmem_xsk_tx_send_with(tx, &frag, NULL, &request, 1, NULL));
    IS(NETMEM_ERR_NULL, netmem_xsk_tx_send_with(tx, &frag, NULL, NULL, 1, &n));
    IS(NETMEM_ERR_NULL, netmem_xsk_tx_send_with(tx, NULL, NULL, &request, 1, &n));
    IS(NETMEM_OK, netmem_xsk_tx_send_with(tx, NULL, NULL, NULL, 0, &n));
    HOLDS(n == 0 && netmem_xsk_tx_timestamps(tx, NULL, 1) == 0 && netmem_xsk_tx_timestamps(tx, times, 1) == 0);
    request.flags = 8;
    refused(NETMEM_ERR_ARGUMENT, tx, &frag, request);
    /* A veth has no launch times, and would send the frame at once. */
    request.flags = NETMEM_XSK_LAUNCH_TIME;
    request.launch_time = 1;
    refused(NETMEM_ERR_UNSUPPORTED, tx, &frag, request);
    /* The last two bytes that a checksum can have are those before these. */
    refused(NETMEM_ERR_UNSENDABLE, tx, &frag, checksum_at(34, 65));
    refused(NETMEM_ERR_UNSENDABLE, tx, &frag, checksum_at(0xffff, 0xffff));
    /* What is in front of a shared fragment may be the other holder's. */
    IS(NETMEM_OK, netmem_frag_share(&frag, 0, 10, &other));
    refused(NETMEM_ERR_UNSENDABLE, tx, &frag, checksum_at(34, 6));
    netmem_frag_release(&other);
    netmem_frag_release(&frag);
    refused(NETMEM_ERR_ARGUMENT, tx, &frag, checksum_at(34, 6));
    /* The bytes in front of these frames are in no chunk, too few, and in the chunk before it,
     * which is another frame's. */
    const size_t rooms[3] = {0, 23, 2048 + 16};
    for (int i = 0; i < 3; i++) {
        frag = frame(pool, rooms[i], 100, 1);
        refused(NETMEM_ERR_UNSENDABLE, tx, &frag, checksum_at(34, 6));
        netmem_frag_release(&frag);
    }
    /* A frame of two chunks, whose checksum would be in the second. */
    frag = frame(pool, ROOM, 2500, 1);
    refused(NETMEM_ERR_UNSENDABLE, tx, &frag, checksum_at(2000, 100));
    netmem_frag_release(&frag);
    netmem_xsk_tx_stats stats;
    stats.size = sizeof stats;
    IS(NETMEM_OK, netmem_xsk_tx_get_stats(tx, &stats));
    HOLDS(stats.no_offload == 7 && stats.frames == 0);
    /* An older program has no such field. */
    stats.size = 112;
    stats.no_offload = 99;
    IS(NETMEM_OK, netmem_xsk_tx_get_stats(tx, &stats));
    HOLDS(stats.no_offload == 99);
}

/* The device, which the kernel stands in for, computes checksums, and reports when it has sent. */
static void requests(netmem_xsk_tx *tx, netmem_xsk_rx *rx, netmem_page_pool *pool) {
    const uint16_t start = 34, offset = 6;
    struct timespec now;
    HOLDS(clock_gettime(CLOCK_REALTIME, &now) == 0);
    const uint64_t begin = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
    for (unsigned i = 0; i < 40; i++) {
        /* Three frames: of two fragments with a checksum, without a request, and with both. */
        const size_t length = 60 + 13 * i;
        netmem_frag frags[4], received;
        const uint8_t flags[4] = {NETMEM_FRAG_MORE, 0, 0, 0};
        netmem_xsk_request all[4];
        unsigned char expected[2048];
        size_t n;
        memset(all, 0, sizeof all);
        for (int k = 0; k < 4; k++)
            frags[k] = frame(pool, ROOM, length, (unsigned char)(i + 50 * k));
        all[0] = all[3] = checksum_at(start, offset);
        /* That of a second fragment is not read. */
        all[1].flags = 77;
        all[3].flags |= NETMEM_XSK_TIMESTAMP;
        all[3].timestamp = 1000 + i;
        memcpy(expected, netmem_frag_data(&frags[3]), length);
        const uint16_t sum = checksum(expected + start, length - start);
        expected[start + offset] = (unsigned char)(sum >> 8);
        expected[start + offset + 1] = (unsigned char)sum;
        IS(NETMEM_OK, netmem_xsk_tx_send_with(tx, frags, flags, all, 4, &n));
        HOLDS(n == 4 && netmem_frag_data(&frags[3]) == NULL);
        for (int k = 0; k < 3; k++) {
            received = receive(rx);
            HOLDS(netmem_frag_length(&received) == (k == 0 ? 2 * length : length));
            const unsigned char *data = (const unsigned char *)netmem_frag_data(&received);
            if (k == 0)
                HOLDS(data[start + offset] != (unsigned char)(i + 7 * (start + offset)) ||
                      data[start + offset + 1] != (unsigned char)(i + 7 * (start + offset + 1)));
            if (k == 1)
                HOLDS(data[start + offset] == (unsigned char)(i + 100 + 7 * (start + offset)));
            if (k == 2)
                HOLDS(memcmp(data, expected, length) == 0);
            netmem_frag_release(&received);
        }
        netmem_xsk_tx_stats stats;
        stats.size = sizeof stats;
        do {
            netmem_xsk_tx_complete(tx, NULL);
            IS(NETMEM_OK, netmem_xsk_tx_get_stats(tx, &stats));
        } while (stats.outstanding > 0);
        netmem_xsk_timestamp times[4];
        HOLDS(netmem_xsk_tx_timestamps(tx, times, 4) == 1 && times[0].timestamp == 1000 + i);
        HOLDS(times[0].time == 0 || times[0].time >= begin);
        HOLDS(netmem_xsk_tx_timestamps(tx, times, 4) == 0);
    }
}

/* A queue that only sends is opened on fewer pages than another one posts. */
static void few_pages(const char *interface) {
    netmem_region *region = region_of(8);
    netmem_umem *umem = umem_of(region, 0);
    netmem_page_pool *pool = pool_of(region);
    netmem_xsk_options options = queue_of(interface);
    netmem_xsk_rx *rx;
    netmem_xsk_tx *tx;
    size_t n;
    IS(NETMEM_ERR_NO_PAGES, netmem_xsk_open(umem, &options, &rx, &tx));
    IS(NETMEM_ERR_NULL, netmem_xsk_open_tx(umem, &options, NULL));
    IS(NETMEM_ERR_NULL, netmem_xsk_open_tx(umem, NULL, &tx));
    IS(NETMEM_ERR_HANDLE, netmem_xsk_open_tx((netmem_umem *)region, &options, &tx));
    options.busy_poll_budget = 8;
    IS(NETMEM_ERR_ARGUMENT, netmem_xsk_open_tx(umem, &options, &tx));
    options.busy_poll_budget = 0;
    options.reserved_2 = 1;
    IS(NETMEM_ERR_ARGUMENT, netmem_xsk_open_tx(umem, &options, &tx));
    options.reserved_2 = 0;
    options.queue = 4;
    IS(NETMEM_ERR_NOT_FOUND, netmem_xsk_open_tx(umem, &options, &tx));
    options.queue = 0;
    IS(NETMEM_OK, netmem_xsk_open_tx(umem, &options, &tx));
    netmem_frag frag = frame(pool, ROOM, 60, 1);
    refused(NETMEM_ERR_ARGUMENT, tx, &frag, checksum_at(34, 6));
    netmem_xsk_request none;
    memset(&none, 0, sizeof none);
    IS(NETMEM_OK, netmem_xsk_tx_send_with(tx, &frag, NULL, &none, 1, &n));
    HOLDS(n == 1);
    IS(NETMEM_OK, netmem_xsk_tx_close(tx));
    IS(NETMEM_OK, netmem_umem_close(umem));
    IS(NETMEM_OK, netmem_page_pool_close(pool, NULL));
    IS(NETMEM_OK, netmem_region_close(region));
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    netmem_region *region = region_of(PAGES);
    netmem_umem *umem = umem_of(region, 1), *far_umem = umem_of(region, 0);
    netmem_page_pool *pool = pool_of(region);
    netmem_xsk_options options = queue_of(argv[1]), far_options = queue_of(argv[2]);
    netmem_xsk_tx *tx, *far_tx;
    netmem_xsk_rx *far_rx;
    few_pages(argv[1]);
    IS(NETMEM_OK, netmem_xsk_open_tx(umem, &options, &tx));

    netmem_xdp_program *program;
    netmem_xdp_options program_options;
    memset(&program_options, 0, sizeof program_options);
    program_options.size = sizeof program_options;
    IS(NETMEM_OK, netmem_xdp_program_attach(argv[2], &program_options, &program));
    far_options.busy_poll = 50;
    far_options.busy_poll_budget = 16;
    IS(NETMEM_OK, netmem_xsk_open(far_umem, &far_options, &far_rx, &far_tx));
    IS(NETMEM_OK, netmem_xdp_program_insert(program, far_rx));

    refusals(tx, pool);
    requests(tx, far_rx, pool);
    /* A queue with busy polling calls the driver each time. */
    netmem_xsk_rx_stats stats;
    stats.size = sizeof stats;
    IS(NETMEM_OK, netmem_xsk_rx_get_stats(far_rx, &stats));
    HOLDS(stats.wakeups >= 40);

    IS(NETMEM_OK, netmem_xsk_tx_close(tx));
    IS(NETMEM_OK, netmem_xsk_tx_close(far_tx));
    IS(NETMEM_OK, netmem_xsk_rx_close(far_rx, NULL));
    IS(NETMEM_OK, netmem_xdp_program_close(program));
    IS(NETMEM_OK, netmem_umem_close(umem));
    IS(NETMEM_OK, netmem_umem_close(far_umem));
    netmem_page_pool_stats books;
    books.size = sizeof books;
    IS(NETMEM_OK, netmem_page_pool_close(pool, &books));
    HOLDS(books.allocated == books.returned && books.in_flight == 0);
    IS(NETMEM_OK, netmem_region_close(region));
    puts("the requests were answered");
    return 0;
}
