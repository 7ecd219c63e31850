/* What a page costs from C: allocated and released on the pool's thread, in bulk of 16 and singly.
 * Prints the median of 21 turns, in nanoseconds a page. `cargo run --release -p netmem-capi
 * --example cost` prints the same of the Rust library. */
#define _GNU_SOURCE
#include <netmem.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { TURNS = 21, PAGES = 1 << 20 };

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static int order(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void measure(netmem_page_pool *pool, const char *name, size_t group) {
    double turns[TURNS];
    netmem_frag frags[16];
    for (int turn = 0; turn < TURNS; turn++) {
        double start = now();
        for (size_t done = 0; done < PAGES; done += group) {
            if (netmem_page_pool_alloc(pool, frags, group) != group)
                exit(1);
            netmem_page_pool_release(pool, frags, group);
        }
        turns[turn] = (now() - start) / PAGES;
    }
    qsort(turns, TURNS, sizeof turns[0], order);
    printf("%s: %.2f ns a page (%.2f to %.2f)\n", name, turns[TURNS / 2], turns[0], turns[TURNS - 1]);
}

int main(void) {
    netmem_region_options region_options;
    memset(&region_options, 0, sizeof region_options);
    region_options.size = sizeof region_options;
    region_options.pages = 1024;
    netmem_pool_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    netmem_region *region;
    netmem_page_pool *pool;
    if (netmem_region_create(&region_options, &region) != NETMEM_OK || netmem_page_pool_create(region, &options, &pool) != NETMEM_OK) {
        fprintf(stderr, "%s\n", netmem_error_text());
        return 1;
    }
    netmem_region_close(region);
    measure(pool, "C, bulk of 16", 16);
    measure(pool, "C, singly", 1);
    return netmem_page_pool_close(pool, NULL) == NETMEM_OK ? 0 : 1;
}
