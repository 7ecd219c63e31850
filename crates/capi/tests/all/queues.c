/* What the header says of AF_XDP queues, with a library that has debug assertions. Usage: queues
 * OURS THEIRS, the two ends of a veth pair, of which THEIRS is deleted in the end. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP = 64, PAGES = 1024, FILL = 256, RING = 128 };

/* Waits until the queue has frames. */
static void wait_for(netmem_xsk_rx *rx) {
    bool waits;
    IS(NETMEM_OK, netmem_xsk_rx_arm(rx, &waits));
    if (waits) {
        struct pollfd event;
        event.fd = netmem_xsk_rx_fd(rx);
        event.events = POLLIN;
        HOLDS(poll(&event, 1, -1) == 1);
        netmem_xsk_rx_disarm(rx);
    }
}

/* Waits until the queue has frames, and receives them. */
static size_t receive(netmem_xsk_rx *rx, netmem_frag *frags, uint8_t *flags, size_t n) {
    size_t received = 0;
    IS(NETMEM_OK, netmem_xsk_rx_receive(rx, frags, flags, n, &received));
    while (received == 0) {
        wait_for(rx);
        IS(NETMEM_OK, netmem_xsk_rx_receive(rx, frags, flags, n, &received));
    }
    return received;
}

/* A fragment of `length` bytes with an Ethernet header for experiments. */
static netmem_frag frame(netmem_page_pool *pool, size_t length, unsigned char byte) {
    netmem_frag frag;
    HOLDS(netmem_page_pool_alloc(pool, &frag, 1) == 1);
    unsigned char *data = (unsigned char *)netmem_frag_data_mut(&frag);
    memset(data, byte, 4096);
    memset(data, 0xff, 6);
    data[12] = 0x88, data[13] = 0xb5;
    IS(NETMEM_OK, netmem_frag_truncate(&frag, length));
    return frag;
}

static netmem_xsk_options queue_of(const char *interface) {
    netmem_xsk_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.interface = interface;
    options.fill = FILL;
    options.rx_ring = RING;
    options.tx_ring = 64;
    return options;
}

struct queue {
    netmem_xsk_rx *rx;
    netmem_xsk_tx *tx;
    netmem_xdp_program *program;
};

static struct queue open_queue(netmem_umem *umem, const char *interface) {
    struct queue queue;
    netmem_xdp_options program_options;
    memset(&program_options, 0, sizeof program_options);
    program_options.size = sizeof program_options;
    netmem_xsk_options options = queue_of(interface);
    IS(NETMEM_OK, netmem_xdp_program_attach(interface, &program_options, &queue.program));
    IS(NETMEM_OK, netmem_xsk_open(umem, &options, &queue.rx, &queue.tx));
    IS(NETMEM_OK, netmem_xdp_program_insert(queue.program, queue.rx));
    return queue;
}

static void close_queue(struct queue *queue, uint64_t held, uint64_t unpolled) {
    netmem_xsk_rx_stats stats;
    IS(NETMEM_OK, netmem_xdp_program_close(queue->program));
    IS(NETMEM_OK, netmem_xsk_tx_close(queue->tx));
    stats.size = 1;
    IS(NETMEM_ERR_STRUCT_SIZE, netmem_xsk_rx_close(queue->rx, &stats));
    stats.size = sizeof stats;
    IS(NETMEM_OK, netmem_xsk_rx_close(queue->rx, &stats));
    HOLDS(stats.in_flight == held && stats.posted == 0 && stats.unpolled == unpolled);
    IS(NETMEM_ERR_HANDLE, netmem_xsk_rx_close(queue->rx, NULL));
    IS(NETMEM_ERR_HANDLE, netmem_xsk_tx_close(queue->tx));
    IS(NETMEM_ERR_HANDLE, netmem_xdp_program_close(queue->program));
}

static void opening(netmem_region *region, netmem_umem *umem, const char *interface) {
    netmem_umem_options umem_options;
    memset(&umem_options, 0, sizeof umem_options);
    netmem_umem *other;
    IS(NETMEM_ERR_STRUCT_SIZE, netmem_umem_create(region, &umem_options, &other));
    umem_options.size = sizeof umem_options;
    IS(NETMEM_ERR_NULL, netmem_umem_create(NULL, &umem_options, &other));
    umem_options.chunk = 3000;
    IS(NETMEM_ERR_ARGUMENT, netmem_umem_create(region, &umem_options, &other));
    umem_options.chunk = 2048;
    umem_options.headroom = 70000;
    IS(NETMEM_ERR_ARGUMENT, netmem_umem_create(region, &umem_options, &other));

    netmem_xdp_program *program;
    netmem_xdp_rule rule;
    memset(&rule, 0, sizeof rule);
    netmem_xdp_options program_options;
    memset(&program_options, 0, sizeof program_options);
    program_options.size = sizeof program_options;
    IS(NETMEM_ERR_NULL, netmem_xdp_program_attach(NULL, &program_options, &program));
    IS(NETMEM_ERR_NOT_FOUND, netmem_xdp_program_attach("none", &program_options, &program));
    program_options.rule_count = 1;
    IS(NETMEM_ERR_NULL, netmem_xdp_program_attach(interface, &program_options, &program));
    program_options.rules = &rule;
    program_options.rule_count = 0;
    IS(NETMEM_ERR_ARGUMENT, netmem_xdp_program_attach(interface, &program_options, &program));
    program_options.rule_count = 1;
    rule.address_length = 5;
    IS(NETMEM_ERR_ARGUMENT, netmem_xdp_program_attach(interface, &program_options, &program));
    rule.address_length = 0;
    program_options.pinned_map = "/none";
    IS(NETMEM_ERR_ARGUMENT, netmem_xdp_program_attach(interface, &program_options, &program));
    program_options.pinned_map = NULL;
    program_options.mode = 7;
    IS(NETMEM_ERR_ARGUMENT, netmem_xdp_program_attach(interface, &program_options, &program));
    program_options.mode = NETMEM_XDP_GENERIC;
    IS(NETMEM_OK, netmem_xdp_program_attach(interface, &program_options, &program));
    netmem_xdp_program *second;
    IS(NETMEM_ERR_BUSY, netmem_xdp_program_attach(interface, &program_options, &second));
    IS(NETMEM_OK, netmem_xdp_program_close(program));

    netmem_xsk_rx *rx;
    netmem_xsk_tx *tx;
    netmem_xsk_options options = queue_of(interface);
    IS(NETMEM_ERR_NULL, netmem_xsk_open(umem, &options, &rx, NULL));
    IS(NETMEM_ERR_HANDLE, netmem_xsk_open((netmem_umem *)region, &options, &rx, &tx));
    options.mode = NETMEM_XSK_ZERO_COPY;
    IS(NETMEM_ERR_UNSUPPORTED, netmem_xsk_open(umem, &options, &rx, &tx));
    options.mode = 9;
    IS(NETMEM_ERR_ARGUMENT, netmem_xsk_open(umem, &options, &rx, &tx));
    options.mode = NETMEM_XSK_COPY;
    options.rx_ring = 100;
    IS(NETMEM_ERR_ARGUMENT, netmem_xsk_open(umem, &options, &rx, &tx));
    options.rx_ring = 0;
    options.queue = 4;
    IS(NETMEM_ERR_NOT_FOUND, netmem_xsk_open(umem, &options, &rx, &tx));
    options.queue = 0;
    options.fill = PAGES + 1;
    IS(NETMEM_ERR_NO_PAGES, netmem_xsk_open(umem, &options, &rx, &tx));
    options.reserved[3] = 1;
    IS(NETMEM_ERR_ARGUMENT, netmem_xsk_open(umem, &options, &rx, &tx));
}

static void *on_another_thread(void *context) {
    struct queue *queue = (struct queue *)context;
    netmem_frag frags[GROUP];
    size_t n;
    bool waits;
    netmem_xsk_rx_stats rx_stats;
    netmem_xsk_tx_stats tx_stats;
    rx_stats.size = sizeof rx_stats;
    tx_stats.size = sizeof tx_stats;
    IS(NETMEM_ERR_THREAD, netmem_xsk_rx_receive(queue->rx, frags, NULL, GROUP, &n));
    IS(NETMEM_ERR_THREAD, netmem_xsk_rx_arm(queue->rx, &waits));
    IS(NETMEM_ERR_THREAD, netmem_xsk_rx_get_stats(queue->rx, &rx_stats));
    IS(NETMEM_ERR_THREAD, netmem_xsk_rx_close(queue->rx, NULL));
    IS(NETMEM_ERR_THREAD, netmem_xsk_rx_metadata(queue->rx, frags, frags + 1, 0));
    IS(NETMEM_ERR_THREAD, netmem_xdp_program_insert(queue->program, queue->rx));
    IS(NETMEM_ERR_THREAD, netmem_xsk_tx_send(queue->tx, frags, NULL, 0, &n));
    IS(NETMEM_ERR_THREAD, netmem_xsk_tx_arm(queue->tx, &waits));
    IS(NETMEM_ERR_THREAD, netmem_xsk_tx_get_stats(queue->tx, &tx_stats));
    IS(NETMEM_ERR_THREAD, netmem_xsk_tx_close(queue->tx));
    HOLDS(netmem_xsk_rx_fd(queue->rx) == -1 && netmem_xsk_tx_fd(queue->tx) == -1);
    HOLDS(netmem_xsk_tx_complete(queue->tx, NULL) == 0);
    return NULL;
}

/* A frame of three fragments, received as it came, and in one page or not at all. */
static void several_fragments(struct queue *near, struct queue *far, netmem_page_pool *pool) {
    netmem_frag sent[4], frags[GROUP];
    uint8_t flags[4] = {NETMEM_FRAG_MORE, NETMEM_FRAG_MORE, 0, 0}, seen[GROUP];
    size_t n, total = 0;
    for (int i = 0; i < 3; i++)
        sent[i] = frame(pool, 1000, (unsigned char)(1 + i));
    sent[3] = frame(pool, 100, 9);
    flags[3] = NETMEM_FRAG_MORE;
    IS(NETMEM_ERR_ARGUMENT, netmem_xsk_tx_send(far->tx, sent + 3, flags + 3, 1, &n));
    HOLDS(n == 0 && netmem_frag_length(&sent[3]) == 100);
    flags[3] = 2;
    IS(NETMEM_ERR_ARGUMENT, netmem_xsk_tx_send(far->tx, sent + 3, flags + 3, 1, &n));
    flags[3] = 0;
    IS(NETMEM_OK, netmem_xsk_tx_send(far->tx, sent, flags, 4, &n));
    HOLDS(n == 4 && netmem_frag_data(&sent[0]) == NULL && netmem_frag_data(&sent[3]) == NULL);
    IS(NETMEM_ERR_ARGUMENT, netmem_xsk_rx_receive(near->rx, frags, seen, NETMEM_FRAME_FRAGS - 1, &n));
    for (size_t frames = 0; frames < 2;) {
        n = receive(near->rx, frags, seen, GROUP);
        for (size_t i = 0; i < n; i++) {
            total += netmem_frag_length(&frags[i]);
            frames += seen[i] == 0;
        }
        netmem_xsk_rx_release(near->rx, frags, n);
    }
    HOLDS(total == 3100);

    /* 8000 bytes are in several chunks, and in no page. 3000 bytes of two fragments are in one. */
    sent[0] = frame(pool, 4096, 4);
    sent[1] = frame(pool, 3904, 5);
    sent[2] = frame(pool, 2000, 6);
    sent[3] = frame(pool, 1000, 7);
    flags[0] = flags[2] = NETMEM_FRAG_MORE;
    flags[1] = flags[3] = 0;
    IS(NETMEM_OK, netmem_xsk_tx_send(far->tx, sent, flags, 4, &n));
    HOLDS(n == 4);
    n = receive(near->rx, frags, NULL, GROUP);
    HOLDS(n == 1 && netmem_frag_length(&frags[0]) == 3000);
    HOLDS(((const unsigned char *)netmem_frag_data(&frags[0]))[2500] == 7);
    netmem_xsk_rx_release(near->rx, frags, n);
    netmem_xsk_rx_stats stats;
    stats.size = sizeof stats;
    IS(NETMEM_OK, netmem_xsk_rx_get_stats(near->rx, &stats));
    HOLDS(stats.bad_shape == 1 && stats.ring_full == 0 && stats.no_buffer == 0);

    /* Two frames of three chunks, and room for five fragments behind 16 frames of one: the second
     * one waits for the next call. */
    for (int i = 0; i < 15; i++) {
        sent[0] = frame(pool, 100, 1);
        IS(NETMEM_OK, netmem_xsk_tx_send(far->tx, sent, NULL, 1, &n));
    }
    for (int i = 0; i < 2; i++) {
        sent[0] = frame(pool, 4000, 2);
        sent[1] = frame(pool, 4000, 3);
        flags[0] = NETMEM_FRAG_MORE;
        flags[1] = 0;
        IS(NETMEM_OK, netmem_xsk_tx_send(far->tx, sent, flags, 2, &n));
    }
    size_t frames = 0, bytes = 0;
    while (frames < 17) {
        n = receive(near->rx, frags, seen, 20);
        HOLDS(n > 0 && seen[n - 1] == 0);
        for (size_t i = 0; i < n; i++) {
            frames += seen[i] == 0;
            bytes += netmem_frag_length(&frags[i]);
        }
        netmem_frags_release(frags, n);
    }
    HOLDS(frames == 17 && bytes == 15 * 100 + 2 * 8000);
}

/* Receives so many frames, and releases them. */
static void discard(struct queue *queue, size_t frames) {
    netmem_frag frags[GROUP];
    while (frames > 0) {
        size_t n = receive(queue->rx, frags, NULL, frames < GROUP ? frames : (size_t)GROUP);
        netmem_xsk_rx_release(queue->rx, frags, n);
        frames -= n;
    }
}

static void link_is(const char *interface, const char *state) {
    char command[64];
    snprintf(command, sizeof command, "ip link set %s %s", interface, state);
    HOLDS(system(command) == 0);
}

/* What a queue refuses, and who has the fragments then. */
static void refusals(struct queue *near, struct queue *far, netmem_page_pool *pool, netmem_page_pool *foreign) {
    netmem_frag frags[128];
    uint8_t flags[32];
    size_t n;
    bool waits;
    frags[0] = frame(pool, 60, 1);
    frags[1] = frame(foreign, 60, 2);
    frags[2] = frame(pool, 60, 3);
    IS(NETMEM_ERR_UNSENDABLE, netmem_xsk_tx_send(far->tx, frags, NULL, 3, &n));
    HOLDS(n == 1 && netmem_frag_data(&frags[0]) == NULL && netmem_frag_length(&frags[1]) == 60);
    netmem_frags_release(frags, 3);
    IS(NETMEM_ERR_ARGUMENT, netmem_xsk_tx_send(far->tx, frags, NULL, 1, &n));
    IS(NETMEM_ERR_NULL, netmem_xsk_tx_send(far->tx, NULL, NULL, 1, &n));
    IS(NETMEM_ERR_NULL, netmem_xsk_tx_send(far->tx, frags, NULL, 1, NULL));
    frags[0] = frame(pool, 0, 1);
    IS(NETMEM_ERR_UNSENDABLE, netmem_xsk_tx_send(far->tx, frags, NULL, 1, &n));
    netmem_frag_release(&frags[0]);
    for (int i = 0; i < 19; i++) {
        frags[i] = frame(pool, 60, 1);
        flags[i] = i < 18 ? NETMEM_FRAG_MORE : 0;
    }
    IS(NETMEM_ERR_UNSENDABLE, netmem_xsk_tx_send(far->tx, frags, flags, 19, &n));
    HOLDS(n == 0 && netmem_frag_length(&frags[18]) == 60);
    IS(NETMEM_OK, netmem_xsk_tx_send(far->tx, frags + 1, flags + 1, 18, &n));
    HOLDS(n == 18);
    netmem_frag_release(&frags[0]);
    netmem_xsk_rx_stats before;
    before.size = sizeof before;
    IS(NETMEM_OK, netmem_xsk_rx_get_stats(near->rx, &before));

    /* More frames than the TX ring has entries: all are sent in the end. */
    for (int i = 0; i < 96; i++)
        frags[i] = frame(pool, 60, (unsigned char)i);
    for (size_t done = 0; done < 96; done += n) {
        IS(NETMEM_OK, netmem_xsk_tx_send(far->tx, frags + done, NULL, 96 - done, &n));
        netmem_xsk_tx_complete(far->tx, NULL);
        IS(NETMEM_OK, netmem_xsk_tx_arm(far->tx, &waits));
        HOLDS(netmem_xsk_tx_fd(far->tx) >= 0);
        netmem_xsk_tx_disarm(far->tx);
    }
    discard(near, 2 + 96);
    netmem_xsk_tx_stats stats;
    stats.size = sizeof stats;
    IS(NETMEM_OK, netmem_xsk_tx_get_stats(far->tx, &stats));
    HOLDS(stats.unreachable == 1 && stats.bad_shape == 1 && stats.descriptors == stats.completed + stats.outstanding);

    /* Frames that are not received fill the ring: the others are counted. */
    for (int i = 0; i < 300; i++) {
        frags[0] = frame(pool, 60, 1);
        for (n = 0; n == 0;)
            IS(NETMEM_OK, netmem_xsk_tx_send(far->tx, frags, NULL, 1, &n));
    }
    netmem_xsk_rx_stats after;
    after.size = sizeof after;
    discard(near, RING);
    do
        IS(NETMEM_OK, netmem_xsk_rx_get_stats(near->rx, &after));
    while (after.ring_full < 300 - RING);
    HOLDS(after.ring_full == 300 - RING && after.no_buffer == 0 && before.ring_full == 0);
}

/* An interface that is down sends nothing: the TX ring is full, the rest stays with the caller, and
 * what is in the ring is sent when the interface is up. */
static void full(struct queue *near, struct queue *far, netmem_page_pool *pool, const char *interface) {
    netmem_frag frags[100];
    netmem_xsk_tx_stats stats;
    stats.size = sizeof stats;
    size_t n;
    bool waits;
    for (int i = 0; i < 100; i++)
        frags[i] = frame(pool, 60, 1);
    link_is(interface, "down");
    do {
        netmem_xsk_tx_complete(far->tx, NULL);
        IS(NETMEM_OK, netmem_xsk_tx_get_stats(far->tx, &stats));
    } while (stats.outstanding > 0);
    IS(NETMEM_OK, netmem_xsk_tx_send(far->tx, frags, NULL, 100, &n));
    HOLDS(n == 64 && netmem_frag_data(&frags[63]) == NULL);
    for (int i = 64; i < 100; i++)
        HOLDS(netmem_frag_length(&frags[i]) == 60);
    IS(NETMEM_OK, netmem_xsk_tx_get_stats(far->tx, &stats));
    HOLDS(stats.full > 0 && stats.down > 0 && stats.outstanding == 64);
    IS(NETMEM_OK, netmem_xsk_tx_arm(far->tx, &waits));
    HOLDS(!waits);
    link_is(interface, "up");
    while (stats.outstanding > 0) {
        netmem_xsk_tx_complete(far->tx, NULL);
        IS(NETMEM_OK, netmem_xsk_tx_get_stats(far->tx, &stats));
    }
    netmem_frags_release(frags, 100);
    discard(near, 64);
}

/* Frames hold bytes in front of them, which a program of the caller's own can write. They are in
 * the frame's chunk, of 2048 bytes here: those of the chunk before it are another frame's. */
static void metadata(netmem_region *region, const char *interface, netmem_page_pool *pool, netmem_page_pool *foreign) {
    netmem_umem_options umem_options;
    memset(&umem_options, 0, sizeof umem_options);
    umem_options.size = sizeof umem_options;
    umem_options.chunk = 2048;
    netmem_umem *halves;
    IS(NETMEM_OK, netmem_umem_create(region, &umem_options, &halves));
    struct queue queue = open_queue(halves, interface);
    IS(NETMEM_OK, netmem_umem_close(halves));
    netmem_frag frag = frame(pool, 4000, 7);
    unsigned char bytes[300];
    IS(NETMEM_OK, netmem_frag_write(&frag, 0, "0123456789abcdefghijklmnopqrstuv", 32));
    IS(NETMEM_ERR_RANGE, netmem_xsk_rx_metadata(queue.rx, &frag, bytes, 1));
    IS(NETMEM_OK, netmem_frag_advance(&frag, 32));
    IS(NETMEM_OK, netmem_xsk_rx_metadata(queue.rx, &frag, bytes, 8));
    HOLDS(memcmp(bytes, "opqrstuv", 8) == 0);
    IS(NETMEM_OK, netmem_xsk_rx_metadata(queue.rx, &frag, bytes, 32));
    HOLDS(memcmp(bytes, "0123", 4) == 0);
    IS(NETMEM_ERR_RANGE, netmem_xsk_rx_metadata(queue.rx, &frag, bytes, 33));
    IS(NETMEM_ERR_NULL, netmem_xsk_rx_metadata(queue.rx, &frag, NULL, 8));
    IS(NETMEM_ERR_NULL, netmem_xsk_rx_metadata(NULL, &frag, bytes, 8));
    IS(NETMEM_ERR_HANDLE, netmem_xsk_rx_metadata((netmem_xsk_rx *)queue.tx, &frag, bytes, 8));
    IS(NETMEM_OK, netmem_frag_advance(&frag, 500));
    IS(NETMEM_OK, netmem_xsk_rx_metadata(queue.rx, &frag, bytes, 256));
    IS(NETMEM_ERR_RANGE, netmem_xsk_rx_metadata(queue.rx, &frag, bytes, 257));
    /* The page's second chunk. */
    IS(NETMEM_OK, netmem_frag_advance(&frag, 2048 - 532 + 16));
    IS(NETMEM_OK, netmem_xsk_rx_metadata(queue.rx, &frag, bytes, 16));
    IS(NETMEM_ERR_RANGE, netmem_xsk_rx_metadata(queue.rx, &frag, bytes, 17));
    netmem_frag_release(&frag);
    IS(NETMEM_ERR_ARGUMENT, netmem_xsk_rx_metadata(queue.rx, &frag, bytes, 8));
    frag = frame(foreign, 1000, 7);
    IS(NETMEM_OK, netmem_frag_advance(&frag, 32));
    IS(NETMEM_ERR_ARGUMENT, netmem_xsk_rx_metadata(queue.rx, &frag, bytes, 8));
    netmem_frag_release(&frag);
    close_queue(&queue, 0, 0);
}

static int released;

static void release(void *memory) {
    free(memory);
    released++;
}

/* Memory of the program's own, which is released when its queue and its handles are closed. */
static void foreign_memory(const char *interface) {
    netmem_region *region;
    netmem_umem_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    netmem_umem *umem;
    void *memory = aligned_alloc(4096, (size_t)PAGES * 4096);
    HOLDS(memory != NULL);
    memset(memory, 0, (size_t)PAGES * 4096);
    IS(NETMEM_OK, netmem_region_from_memory(memory, (size_t)PAGES * 4096, 0, release, memory, &region));
    IS(NETMEM_OK, netmem_umem_create(region, &options, &umem));
    IS(NETMEM_OK, netmem_region_close(region));
    struct queue queue = open_queue(umem, interface);
    IS(NETMEM_OK, netmem_umem_close(umem));
    HOLDS(released == 0);
    close_queue(&queue, 0, 0);
    HOLDS(released == 1);
}

/* The last page of foreign memory is released by a queue of another region, and the callback uses
 * that queue. */
struct reuse {
    void *memory;
    netmem_xsk_rx *rx;
    uint64_t in_flight;
};

static void reuse(void *context) {
    struct reuse *reuse = (struct reuse *)context;
    netmem_frag frags[GROUP];
    netmem_xsk_rx_stats stats;
    size_t n;
    stats.size = sizeof stats;
    IS(NETMEM_OK, netmem_xsk_rx_receive(reuse->rx, frags, NULL, GROUP, &n));
    netmem_xsk_rx_release(reuse->rx, frags, n);
    IS(NETMEM_OK, netmem_xsk_rx_get_stats(reuse->rx, &stats));
    /* Those of the queue were released before. */
    HOLDS(stats.in_flight + 1 == reuse->in_flight);
    free(reuse->memory);
    released++;
}

static void callbacks_use_the_queue(struct queue *near, struct queue *far, netmem_page_pool *pool) {
    netmem_region *region;
    netmem_page_pool *foreign;
    netmem_pool_options options;
    netmem_frag frags[2];
    netmem_xsk_rx_stats stats;
    struct reuse context;
    size_t n;
    context.memory = aligned_alloc(4096, 4096);
    context.rx = near->rx;
    HOLDS(context.memory != NULL);
    memset(context.memory, 0, 4096);
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    IS(NETMEM_OK, netmem_region_from_memory(context.memory, 4096, 0, reuse, &context, &region));
    IS(NETMEM_OK, netmem_page_pool_create(region, &options, &foreign));
    IS(NETMEM_OK, netmem_region_close(region));
    HOLDS(netmem_page_pool_alloc(foreign, &frags[0], 1) == 1);
    IS(NETMEM_OK, netmem_page_pool_close(foreign, NULL));
    frags[1] = frame(pool, 60, 1);
    IS(NETMEM_OK, netmem_xsk_tx_send(far->tx, frags + 1, NULL, 1, &n));
    HOLDS(receive(near->rx, frags + 1, NULL, 1) == 1);
    stats.size = sizeof stats;
    IS(NETMEM_OK, netmem_xsk_rx_get_stats(near->rx, &stats));
    context.in_flight = stats.in_flight;
    released = 0;
    netmem_xsk_rx_release(near->rx, frags, 2);
    HOLDS(released == 1);
}

static netmem_page_pool *pool_of(netmem_region *region) {
    netmem_page_pool *pool;
    netmem_pool_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    IS(NETMEM_OK, netmem_page_pool_create(region, &options, &pool));
    return pool;
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    netmem_region *region, *elsewhere;
    netmem_region_options region_options;
    memset(&region_options, 0, sizeof region_options);
    region_options.size = sizeof region_options;
    region_options.pages = PAGES;
    IS(NETMEM_OK, netmem_region_create(&region_options, &region));
    region_options.pages = 8;
    IS(NETMEM_OK, netmem_region_create(&region_options, &elsewhere));
    netmem_page_pool *pool = pool_of(region), *foreign = pool_of(elsewhere);
    netmem_umem_options umem_options;
    memset(&umem_options, 0, sizeof umem_options);
    umem_options.size = sizeof umem_options;
    netmem_umem *umem;
    IS(NETMEM_OK, netmem_umem_create(region, &umem_options, &umem));
    opening(region, umem, argv[1]);
    foreign_memory(argv[1]);
    metadata(region, argv[1], pool, foreign);

    /* A region of 1024 pages, of which each turn posts 512: closing returns them. */
    netmem_frag held[2];
    size_t n;
    for (int turn = 0; turn < 4; turn++) {
        struct queue near = open_queue(umem, argv[1]), far = open_queue(umem, argv[2]);
        HOLDS(!netmem_xsk_rx_is_zero_copy(near.rx));
        held[0] = frame(pool, 60, 5);
        IS(NETMEM_OK, netmem_xsk_tx_send(far.tx, held, NULL, 1, &n));
        HOLDS(receive(near.rx, held, NULL, 2) == 1);
        netmem_frag second = frame(pool, 60, 6);
        IS(NETMEM_OK, netmem_xsk_tx_send(far.tx, &second, NULL, 1, &n));
        wait_for(near.rx);
        close_queue(&near, 1, 1);
        close_queue(&far, 0, 0);
        HOLDS(netmem_frag_length(&held[0]) == 60 && netmem_frag_is_writable(&held[0]));
        netmem_frag_release(&held[0]);
    }
    struct queue near = open_queue(umem, argv[1]), far = open_queue(umem, argv[2]);
    netmem_xsk_options options = queue_of(argv[1]);
    netmem_xsk_rx *rx;
    netmem_xsk_tx *tx;
    netmem_umem *second;
    IS(NETMEM_OK, netmem_umem_create(region, &umem_options, &second));
    IS(NETMEM_ERR_BUSY, netmem_xsk_open(second, &options, &rx, &tx));
    IS(NETMEM_ERR_BUSY, netmem_xsk_open(umem, &options, &rx, &tx));
    IS(NETMEM_OK, netmem_umem_close(second));
    several_fragments(&near, &far, pool);
    refusals(&near, &far, pool, foreign);
    full(&near, &far, pool, argv[2]);
    callbacks_use_the_queue(&near, &far, pool);
    pthread_t thread;
    netmem_xsk_rx_stats stats;
    stats.size = sizeof stats;
    IS(NETMEM_OK, netmem_xsk_rx_get_stats(far.rx, &stats));
    HOLDS(pthread_create(&thread, NULL, on_another_thread, &far) == 0 && pthread_join(thread, NULL) == 0);

    /* The end of the interface ends a wait, and stops the queues. */
    char command[64];
    snprintf(command, sizeof command, "ip link del %s", argv[2]);
    bool waits = false;
    IS(NETMEM_OK, netmem_xsk_rx_arm(near.rx, &waits));
    HOLDS(waits && system(command) == 0);
    struct pollfd event;
    event.fd = netmem_xsk_rx_fd(near.rx);
    event.events = POLLIN;
    HOLDS(poll(&event, 1, -1) == 1);
    IS(NETMEM_ERR_STOPPED, netmem_xsk_rx_arm(near.rx, &waits));
    IS(NETMEM_ERR_STOPPED, netmem_xsk_rx_receive(near.rx, held, NULL, 2, &n));
    held[0] = frame(pool, 60, 1);
    IS(NETMEM_ERR_STOPPED, netmem_xsk_tx_send(near.tx, held, NULL, 1, &n));
    HOLDS(n == 0 && netmem_frag_length(&held[0]) == 60);
    netmem_frag_release(&held[0]);
    close_queue(&near, 0, 0);
    close_queue(&far, 0, 0);
    IS(NETMEM_OK, netmem_umem_close(umem));
    IS(NETMEM_ERR_HANDLE, netmem_umem_close(umem));
    HOLDS(netmem_xsk_reclaim() == 0);
    netmem_page_pool_stats books;
    books.size = sizeof books;
    IS(NETMEM_OK, netmem_page_pool_close(pool, &books));
    HOLDS(books.allocated == books.returned && books.in_flight == 0);
    IS(NETMEM_OK, netmem_page_pool_close(foreign, NULL));
    IS(NETMEM_OK, netmem_region_close(region));
    IS(NETMEM_OK, netmem_region_close(elsewhere));
    puts("the queues did what the header says");
    return 0;
}
