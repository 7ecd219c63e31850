/* What the header's table of misuse says, with a library that has debug assertions. */
#include "check.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *on_another_thread(void *context) {
    netmem_page_pool *pool = (netmem_page_pool *)context;
    netmem_frag frag;
    netmem_page_pool_stats stats;
    stats.size = sizeof stats;
    HOLDS(netmem_page_pool_alloc(pool, &frag, 1) == 0);
    HOLDS(strstr(netmem_error_text(), "another thread") != NULL);
    IS(NETMEM_ERR_THREAD, netmem_page_pool_get_stats(pool, &stats));
    IS(NETMEM_ERR_THREAD, netmem_page_pool_close(pool, NULL));
    return NULL;
}

static void structures(void) {
    netmem_region *region;
    struct {
        netmem_region_options options;
        uint64_t newer;
    } grown;
    memset(&grown, 0, sizeof grown);
    grown.options.pages = 8;
    IS(NETMEM_ERR_NULL, netmem_region_create(NULL, &region));
    IS(NETMEM_ERR_STRUCT_SIZE, netmem_region_create(&grown.options, &region));
    grown.options.size = (size_t)-1;
    IS(NETMEM_ERR_STRUCT_SIZE, netmem_region_create(&grown.options, &region));
    grown.options.size = sizeof grown;
    IS(NETMEM_ERR_NULL, netmem_region_create(&grown.options, NULL));
    IS(NETMEM_OK, netmem_region_create(&grown.options, &region));
    HOLDS(netmem_region_page_size(region) == 4096 && netmem_region_length(region) >= 8 * 4096);
    IS(NETMEM_OK, netmem_region_close(region));
    grown.newer = 1;
    IS(NETMEM_ERR_STRUCT_SIZE, netmem_region_create(&grown.options, &region));
    grown.newer = 0;
    grown.options.order = 60;
    IS(NETMEM_ERR_ARGUMENT, netmem_region_create(&grown.options, &region));
    grown.options.order = 0;
    grown.options.reserved[1] = 1;
    IS(NETMEM_ERR_ARGUMENT, netmem_region_create(&grown.options, &region));
}

static int released;

static void release(void *context) {
    free(context);
    released++;
}

static void foreign(void) {
    netmem_region *region;
    netmem_page_pool *pool;
    netmem_pool_options options;
    netmem_frag frag;
    char *memory = (char *)aligned_alloc(4096, 4 * 4096);
    HOLDS(memory != NULL);
    memset(memory, 7, 4 * 4096);
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    IS(NETMEM_ERR_NULL, netmem_region_from_memory(NULL, 4096, 0, release, NULL, &region));
    IS(NETMEM_ERR_ARGUMENT, netmem_region_from_memory(memory + 8, 4096, 0, release, memory, &region));
    IS(NETMEM_ERR_ARGUMENT, netmem_region_from_memory(memory, 100, 0, release, memory, &region));
    HOLDS(released == 0);
    IS(NETMEM_OK, netmem_region_from_memory(memory, 4 * 4096, 0, release, memory, &region));
    HOLDS(netmem_region_address(region) == memory);
    IS(NETMEM_OK, netmem_page_pool_create(region, &options, &pool));
    IS(NETMEM_OK, netmem_region_close(region));
    HOLDS(netmem_page_pool_alloc(pool, &frag, 1) == 1);
    HOLDS(*(const char *)netmem_frag_data(&frag) == 7);
    IS(NETMEM_OK, netmem_page_pool_close(pool, NULL));
    HOLDS(released == 0);
    netmem_frag_release(&frag);
    HOLDS(released == 1);
}

/* The last page of foreign memory is released by a pool of another region, and the callback uses
 * that pool, and the variables that are still to be released. */
struct reuse {
    void *memory;
    netmem_page_pool *pool;
    netmem_frag *frags;
};

static void reuse(void *context) {
    struct reuse *reuse = (struct reuse *)context;
    netmem_frag frag;
    netmem_page_pool_stats stats;
    stats.size = sizeof stats;
    HOLDS(netmem_page_pool_alloc(reuse->pool, &frag, 1) == 1);
    IS(NETMEM_OK, netmem_page_pool_get_stats(reuse->pool, &stats));
    /* Those of the pool were released before. */
    HOLDS(stats.in_flight == 1);
    for (int i = 0; i < 4; i++)
        HOLDS(netmem_frag_data(&reuse->frags[i]) == NULL);
    netmem_page_pool_release(reuse->pool, &frag, 1);
    free(reuse->memory);
    released++;
}

static void callbacks_use_the_pool(netmem_page_pool *pool) {
    netmem_region *region;
    netmem_page_pool *foreign;
    netmem_pool_options options;
    netmem_frag frags[4];
    struct reuse context;
    context.memory = aligned_alloc(4096, 4096);
    context.pool = pool;
    context.frags = frags;
    HOLDS(context.memory != NULL);
    memset(context.memory, 0, 4096);
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    IS(NETMEM_OK, netmem_region_from_memory(context.memory, 4096, 0, reuse, &context, &region));
    IS(NETMEM_OK, netmem_page_pool_create(region, &options, &foreign));
    IS(NETMEM_OK, netmem_region_close(region));
    HOLDS(netmem_page_pool_alloc(foreign, &frags[0], 1) == 1);
    IS(NETMEM_OK, netmem_page_pool_close(foreign, NULL));
    HOLDS(netmem_page_pool_alloc(pool, &frags[1], 3) == 3);
    released = 0;
    netmem_page_pool_release(pool, frags, 4);
    HOLDS(released == 1);
}

static void fragments(netmem_page_pool *pool) {
    netmem_frag frag, other, many[32], copy[4];
    IS(NETMEM_ERR_NULL, netmem_frag_write(NULL, 0, "", 0));
    HOLDS(netmem_page_pool_alloc(pool, &frag, 1) == 1);
    IS(NETMEM_ERR_RANGE, netmem_frag_write(&frag, 4096, "x", 1));
    IS(NETMEM_ERR_RANGE, netmem_frag_write(&frag, 1, "x", (size_t)-1));
    IS(NETMEM_ERR_NULL, netmem_frag_write(&frag, 0, NULL, 1));
    IS(NETMEM_OK, netmem_frag_write(&frag, 4090, "abcdef", 6));
    IS(NETMEM_ERR_ARGUMENT, netmem_frag_share(&frag, 0, 1, &frag));
    IS(NETMEM_ERR_ARGUMENT, netmem_frag_split(&frag, 1, &frag));
    IS(NETMEM_ERR_RANGE, netmem_frag_share(&frag, 4096, 1, &other));
    IS(NETMEM_ERR_RANGE, netmem_frag_share(&frag, 1, (size_t)-1, &other));
    IS(NETMEM_ERR_RANGE, netmem_frag_split(&frag, 4097, &other));
    IS(NETMEM_ERR_NULL, netmem_frag_split(&frag, 1, NULL));
    IS(NETMEM_ERR_RANGE, netmem_frag_advance(&frag, 4097));
    IS(NETMEM_ERR_RANGE, netmem_frag_truncate(&frag, 4097));
    IS(NETMEM_OK, netmem_frag_share(&frag, 4090, 6, &other));
    HOLDS(memcmp(netmem_frag_data(&other), "abcdef", 6) == 0);
    IS(NETMEM_ERR_SHARED, netmem_frag_write(&frag, 0, "x", 1));
    HOLDS(netmem_frag_data_mut(&frag) == NULL && !netmem_frag_is_writable(&frag));
    netmem_frag_release(&other);
    netmem_frag_release(&other);
    HOLDS(netmem_frag_is_writable(&frag));
    netmem_frag_release(&frag);
    netmem_frag_release(NULL);
    IS(NETMEM_ERR_ARGUMENT, netmem_frag_advance(&frag, 0));
    HOLDS(netmem_frag_data(&frag) == NULL && netmem_frag_length(&frag) == 0 && netmem_frag_page_index(&frag) == -1);

    /* More than there are: what there is, each page once. */
    size_t n = netmem_page_pool_alloc(pool, many, 32);
    HOLDS(n == 8);
    uint64_t seen = 0;
    for (size_t i = 0; i < n; i++)
        seen |= (uint64_t)1 << netmem_frag_page_index(&many[i]);
    HOLDS(seen == 0xff);
    HOLDS(netmem_page_pool_alloc(pool, copy, 4) == 0);
    netmem_page_pool_release(pool, many, 4);
    netmem_frags_release(many + 4, 4);
    netmem_frags_release(many, 8);
    netmem_frags_release(NULL, 3);
    HOLDS(netmem_page_pool_alloc(pool, NULL, 1) == 0);
}

int main(void) {
    structures();
    foreign();

    netmem_region *region;
    netmem_region_options region_options;
    memset(&region_options, 0, sizeof region_options);
    region_options.size = sizeof region_options;
    region_options.pages = 8;
    IS(NETMEM_OK, netmem_region_create(&region_options, &region));
    netmem_pool_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    netmem_page_pool *pool;
    netmem_shared_pool *shared;
    IS(NETMEM_ERR_NULL, netmem_page_pool_create(NULL, &options, &pool));
    IS(NETMEM_ERR_HANDLE, netmem_shared_pool_create((netmem_region *)"not a region, but a text", &options, &shared));
    options.prefill = 9;
    IS(NETMEM_ERR_NO_PAGES, netmem_page_pool_create(region, &options, &pool));
    options.prefill = 0;
    IS(NETMEM_OK, netmem_page_pool_create(region, &options, &pool));
    IS(NETMEM_OK, netmem_region_close(region));
    IS(NETMEM_ERR_HANDLE, netmem_region_close(region));
    HOLDS(netmem_region_page_size(region) == 0);

    fragments(pool);
    callbacks_use_the_pool(pool);
    pthread_t thread;
    HOLDS(pthread_create(&thread, NULL, on_another_thread, pool) == 0);
    pthread_join(thread, NULL);

    netmem_page_pool_stats stats;
    stats.size = 3;
    IS(NETMEM_ERR_STRUCT_SIZE, netmem_page_pool_close(pool, &stats));
    stats.size = sizeof stats;
    IS(NETMEM_OK, netmem_page_pool_close(pool, &stats));
    HOLDS(stats.allocated == stats.returned && stats.allocated == 13 && stats.in_flight == 0);
    IS(NETMEM_ERR_HANDLE, netmem_page_pool_close(pool, NULL));

    netmem_percpu_ref *count;
    bool last;
    IS(NETMEM_ERR_NULL, netmem_percpu_ref_create(NULL));
    IS(NETMEM_OK, netmem_percpu_ref_create(&count));
    IS(NETMEM_ERR_STATE, netmem_percpu_ref_destroy(count));
    IS(NETMEM_ERR_NULL, netmem_percpu_ref_kill(count, NULL));
    IS(NETMEM_OK, netmem_percpu_ref_kill(count, &last));
    HOLDS(last && netmem_percpu_ref_is_dying(count));
    IS(NETMEM_ERR_STATE, netmem_percpu_ref_kill(count, &last));
    IS(NETMEM_OK, netmem_percpu_ref_destroy(count));
    IS(NETMEM_ERR_HANDLE, netmem_percpu_ref_destroy(count));
    IS(NETMEM_ERR_NULL, netmem_rcu_read(NULL, NULL));
    IS(NETMEM_ERR_NULL, netmem_rcu_call(NULL, NULL));
    HOLDS(!netmem_rcuref_try_get(NULL, NULL));
    puts("each misuse was found");
    return 0;
}
