/* What receiving a frame costs from C: groups of 64, which are released on the queue's thread. Only
 * the calls that received a whole group are timed, so that the kernel's work is not. Prints the
 * median of 32,768 groups, and the tenth and ninetieth percentile, in nanoseconds a frame. `cargo
 * run --release -p netmem-capi --example receive_cost -- OURS THEIRS` prints the same of the Rust
 * library.
 *
 * Usage: receive_cost OURS THEIRS, two interfaces of one queue, connected: a veth pair. */
#define _GNU_SOURCE
#include <netmem.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SAMPLES = 1 << 15, GROUP = 64, BURST = 1024, FILL = 2048 };

static void check(netmem_status status, const char *what) {
    if (status != NETMEM_OK) {
        fprintf(stderr, "%s: %s: %s\n", what, netmem_status_name(status), netmem_error_text());
        exit(1);
    }
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static int order(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void open_queue(netmem_umem *umem, const char *interface, netmem_xsk_rx **rx, netmem_xsk_tx **tx) {
    netmem_xdp_options program_options;
    memset(&program_options, 0, sizeof program_options);
    program_options.size = sizeof program_options;
    netmem_xsk_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.interface = interface;
    options.fill = FILL;
    netmem_xdp_program *program;
    check(netmem_xdp_program_attach(interface, &program_options, &program), "an XDP program");
    check(netmem_xsk_open(umem, &options, rx, tx), "a queue");
    check(netmem_xdp_program_insert(program, *rx), "the queue's place in the program");
}

/* Sends frames of 64 bytes. */
static void send_burst(netmem_page_pool *pool, netmem_xsk_tx *tx) {
    netmem_frag frags[GROUP];
    for (size_t done = 0; done < BURST; done += GROUP) {
        if (netmem_page_pool_alloc(pool, frags, GROUP) != GROUP)
            exit(1);
        for (size_t i = 0; i < GROUP; i++) {
            memset(netmem_frag_data_mut(&frags[i]), 0xff, 64);
            check(netmem_frag_truncate(&frags[i], 64), "a frame");
        }
        for (size_t sent = 0, n; sent < GROUP; sent += n) {
            check(netmem_xsk_tx_send(tx, frags + sent, NULL, GROUP - sent, &n), "a group of frames");
            netmem_xsk_tx_complete(tx, NULL);
        }
    }
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: receive_cost OURS THEIRS\n");
        return 2;
    }
    netmem_region_options region_options;
    memset(&region_options, 0, sizeof region_options);
    region_options.size = sizeof region_options;
    region_options.pages = 16384;
    netmem_umem_options umem_options;
    memset(&umem_options, 0, sizeof umem_options);
    umem_options.size = sizeof umem_options;
    netmem_pool_options pool_options;
    memset(&pool_options, 0, sizeof pool_options);
    pool_options.size = sizeof pool_options;
    netmem_region *region;
    netmem_umem *umem;
    netmem_page_pool *pool;
    netmem_xsk_rx *rx, *other_rx;
    netmem_xsk_tx *tx, *other_tx;
    check(netmem_region_create(&region_options, &region), "a region");
    check(netmem_umem_create(region, &umem_options, &umem), "a UMEM");
    check(netmem_page_pool_create(region, &pool_options, &pool), "a pool");
    open_queue(umem, argv[1], &rx, &other_tx);
    open_queue(umem, argv[2], &other_rx, &tx);

    static double samples[SAMPLES];
    netmem_frag frags[GROUP];
    size_t taken = 0;
    while (taken < SAMPLES) {
        send_burst(pool, tx);
        for (size_t got = 0, n; got < BURST; got += n) {
            double start = now();
            check(netmem_xsk_rx_receive(rx, frags, NULL, GROUP, &n), "a group of frames");
            netmem_xsk_rx_release(rx, frags, n);
            double spent = now() - start;
            if (n == GROUP && taken < SAMPLES)
                samples[taken++] = spent / GROUP;
        }
    }
    qsort(samples, SAMPLES, sizeof samples[0], order);
    printf("C, groups of 64: %.2f ns a frame (%.2f to %.2f)\n", samples[SAMPLES / 2], samples[SAMPLES / 10], samples[SAMPLES * 9 / 10]);
    return 0;
}
