/* Pages filled by one thread and released by another: how a receive queue passes packets on.
 *
 *   main thread                     ring of fragments          second thread
 *   allocates 16 pages at a time -> [ f f f f . . . . ] ->     checks the bytes,
 *   and numbers them                                           releases them in bulk
 *
 * Usage: hand_over [PACKETS]. Prints the pool's books, which balance. */
#include <netmem.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { GROUP = 16, RING = 256 };

struct ring {
    netmem_frag frags[RING];
    size_t head, tail;
    bool done;
    pthread_mutex_t lock;
    pthread_cond_t changed;
};

static void check(netmem_status status, const char *what) {
    if (status != NETMEM_OK) {
        fprintf(stderr, "%s: %s: %s\n", what, netmem_status_name(status), netmem_error_text());
        exit(1);
    }
}

/* Returns how many fragments were received: 0 at the end. */
static size_t receive(struct ring *ring, netmem_frag *frags) {
    size_t n = 0;
    pthread_mutex_lock(&ring->lock);
    while (ring->head == ring->tail && !ring->done)
        pthread_cond_wait(&ring->changed, &ring->lock);
    while (n < GROUP && ring->tail < ring->head)
        frags[n++] = ring->frags[ring->tail++ % RING];
    pthread_cond_signal(&ring->changed);
    pthread_mutex_unlock(&ring->lock);
    return n;
}

static void *consume(void *context) {
    struct ring *ring = (struct ring *)context;
    netmem_frag frags[GROUP];
    uint64_t expected = 0;
    size_t n;
    while ((n = receive(ring, frags)) > 0) {
        for (size_t i = 0; i < n; i++) {
            uint64_t number;
            memcpy(&number, netmem_frag_data(&frags[i]), sizeof number);
            if (number != expected++ || netmem_frag_length(&frags[i]) != 60) {
                fprintf(stderr, "packet %llu is wrong\n", (unsigned long long)expected);
                exit(1);
            }
        }
        netmem_frags_release(frags, n);
    }
    return NULL;
}

int main(int argc, char **argv) {
    uint64_t packets = argc > 1 ? strtoull(argv[1], NULL, 10) : 100000;
    netmem_region_options region_options;
    memset(&region_options, 0, sizeof region_options);
    region_options.size = sizeof region_options;
    region_options.pages = 1024;
    netmem_region *region;
    check(netmem_region_create(&region_options, &region), "a region of 1024 pages");

    netmem_pool_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.name = "rx0";
    netmem_page_pool *pool;
    check(netmem_page_pool_create(region, &options, &pool), "a page pool");
    check(netmem_region_close(region), "the region's handle");

    static struct ring ring;
    pthread_mutex_init(&ring.lock, NULL);
    pthread_cond_init(&ring.changed, NULL);
    pthread_t consumer;
    if (pthread_create(&consumer, NULL, consume, &ring) != 0) {
        perror("pthread_create");
        return 1;
    }

    netmem_frag frags[GROUP];
    for (uint64_t sent = 0; sent < packets;) {
        uint64_t left = packets - sent;
        size_t n = netmem_page_pool_alloc(pool, frags, left < GROUP ? (size_t)left : (size_t)GROUP);
        for (size_t i = 0; i < n; i++, sent++) {
            memcpy(netmem_frag_data_mut(&frags[i]), &sent, sizeof sent);
            check(netmem_frag_truncate(&frags[i], 60), "a packet of 60 bytes");
        }
        pthread_mutex_lock(&ring.lock);
        for (size_t i = 0; i < n; i++) {
            while (ring.head - ring.tail == RING)
                pthread_cond_wait(&ring.changed, &ring.lock);
            ring.frags[ring.head++ % RING] = frags[i];
            pthread_cond_signal(&ring.changed);
        }
        pthread_mutex_unlock(&ring.lock);
    }
    pthread_mutex_lock(&ring.lock);
    ring.done = true;
    pthread_cond_signal(&ring.changed);
    pthread_mutex_unlock(&ring.lock);
    pthread_join(consumer, NULL);

    netmem_page_pool_stats stats;
    stats.size = sizeof stats;
    check(netmem_page_pool_close(pool, &stats), "the end of the pool");
    printf("packets %llu: allocated %llu, returned %llu, in flight %llu\n", (unsigned long long)packets,
           (unsigned long long)stats.allocated, (unsigned long long)stats.returned, (unsigned long long)stats.in_flight);
    return stats.allocated == packets && stats.in_flight == 0 ? 0 : 1;
}
