// Measures DPDK's memory pools on request. `netmem-bench pool` builds this program, and its measurements take turns with those of
// netmem's own variants.
//
//   standard input                 standard output
//                                  ready                        once, when the environment is up
//   WHAT OPERATIONS LCORES         NANOSECONDS CPU-NANOSECONDS  of all operations; the second is how long this thread ran
//
// WHAT is mempool, which LCORES others do at the same time; mbuf, mbuf_bulk64, mbuf_burst64, without others; mbuf_remote: one lcore
// allocates and LCORES others free; or mbuf_remote_bulk, the same by bulk calls on both sides. Between two lines all threads sleep; when the input ends, so does the program.
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include <rte_eal.h>
#include <rte_launch.h>
#include <rte_lcore.h>
#include <rte_mbuf.h>
#include <rte_mempool.h>
#include <rte_pause.h>
#include <rte_ring.h>

enum { MBUFS = 8191, MBUFS_PER_LCORE = 512, CACHE = 256, ROOM = 2176, RING = 1024, BURST = 32, BLOCK = 64 };

static struct rte_mempool *pool;
static struct rte_ring *rings[RTE_MAX_LCORE];
static atomic_bool ended;

static uint64_t now(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

// Keeps the compiler from optimising an operation away: it must assume that the pointer is used here.
static inline void apart(void *p)
{
    __asm__ volatile("" : : "r"(p) : "memory");
}

// A variant: does so many operations, and returns whether it could.
typedef int work(uint64_t operations, unsigned lcores);

static int mempool(uint64_t operations, unsigned lcores)
{
    (void)lcores;
    for (uint64_t i = 0; i < operations; i++) {
        void *object;
        if (rte_mempool_get(pool, &object) != 0)
            return 0;
        apart(object);
        rte_mempool_put(pool, object);
    }
    return 1;
}

// Another lcore that does the same until the measurement has ended.
static int crowd(void *unused)
{
    (void)unused;
    while (!atomic_load_explicit(&ended, memory_order_acquire))
        if (!mempool(BLOCK, 0))
            return 1;
    return 0;
}

static int mbuf(uint64_t operations, unsigned lcores)
{
    (void)lcores;
    for (uint64_t i = 0; i < operations; i++) {
        struct rte_mbuf *m = rte_pktmbuf_alloc(pool);
        if (m == NULL)
            return 0;
        apart(m);
        rte_pktmbuf_free(m);
    }
    return 1;
}

static int mbuf_bulk64(uint64_t operations, unsigned lcores)
{
    (void)lcores;
    struct rte_mbuf *m[BLOCK];
    for (uint64_t i = 0; i < operations; i += BLOCK) {
        if (rte_pktmbuf_alloc_bulk(pool, m, BLOCK) != 0)
            return 0;
        apart(m);
        rte_pktmbuf_free_bulk(m, BLOCK);
    }
    return 1;
}

static int mbuf_burst64(uint64_t operations, unsigned lcores)
{
    (void)lcores;
    struct rte_mbuf *m[BLOCK];
    for (uint64_t i = 0; i < operations; i += BLOCK) {
        for (unsigned j = 0; j < BLOCK; j++)
            if ((m[j] = rte_pktmbuf_alloc(pool)) == NULL)
                return 0;
        apart(m);
        for (unsigned j = 0; j < BLOCK; j++)
            rte_pktmbuf_free(m[j]);
    }
    return 1;
}

static inline int drop_all(struct rte_ring *ring, int bulk)
{
    struct rte_mbuf *m[BURST];
    for (;;) {
        // Read before the ring is: if it is set, all mbufs that were sent are in the ring.
        int last = atomic_load_explicit(&ended, memory_order_acquire);
        unsigned n = rte_ring_sc_dequeue_burst(ring, (void **)m, BURST, NULL);
        if (bulk)
            rte_pktmbuf_free_bulk(m, n);
        else
            for (unsigned i = 0; i < n; i++)
                rte_pktmbuf_free(m[i]);
        if (n == 0) {
            if (last)
                return 0;
            rte_pause();
        }
    }
}

static int dropper(void *ring)
{
    return drop_all(ring, 0);
}

static int bulk_dropper(void *ring)
{
    return drop_all(ring, 1);
}

// Ends when the droppers have taken all mbufs out of their rings. At most one burst for each dropper is freed later.
static inline int pass_on(uint64_t operations, unsigned lcores, int bulk)
{
    struct rte_mbuf *m[BURST];
    unsigned at = 0;
    while (operations > 0) {
        at = at + 1 < lcores ? at + 1 : 0;
        unsigned want = operations < BURST ? (unsigned)operations : BURST, n = 0;
        if (rte_ring_free_count(rings[at]) < want) {
            rte_pause();
            continue;
        }
        if (bulk)
            n = rte_pktmbuf_alloc_bulk(pool, m, want) == 0 ? want : 0;
        else
            while (n < want && (m[n] = rte_pktmbuf_alloc(pool)) != NULL)
                n++;
        rte_ring_sp_enqueue_burst(rings[at], (void **)m, n, NULL);
        operations -= n;
    }
    for (unsigned i = 0; i < lcores; i++)
        while (!rte_ring_empty(rings[i]))
            rte_pause();
    return 1;
}

static int mbuf_remote(uint64_t operations, unsigned lcores)
{
    return pass_on(operations, lcores, 0);
}

static int mbuf_remote_bulk(uint64_t operations, unsigned lcores)
{
    return pass_on(operations, lcores, 1);
}

// What the other lcores do meanwhile; NULL for a variant without others.
static const struct variant {
    const char *name;
    work *work;
    lcore_function_t *others;
} all[] = {
    { "mempool", mempool, crowd },
    { "mbuf", mbuf, NULL },
    { "mbuf_bulk64", mbuf_bulk64, NULL },
    { "mbuf_burst64", mbuf_burst64, NULL },
    { "mbuf_remote", mbuf_remote, dropper },
    { "mbuf_remote_bulk", mbuf_remote_bulk, bulk_dropper },
};

static int measure(const struct variant *variant, uint64_t operations, unsigned lcores)
{
    work *work = variant->work;
    unsigned lcore, launched = 0;
    atomic_store(&ended, 0);
    RTE_LCORE_FOREACH_WORKER(lcore)
        if (launched < lcores && rte_eal_remote_launch(variant->others, rings[launched], lcore) == 0)
            launched++;
    int ok = launched == lcores && work(operations / 16 + 1, lcores);
    uint64_t cpu = now(CLOCK_THREAD_CPUTIME_ID), begin = now(CLOCK_MONOTONIC);
    ok = ok && work(operations, lcores);
    uint64_t end = now(CLOCK_MONOTONIC);
    cpu = now(CLOCK_THREAD_CPUTIME_ID) - cpu;
    atomic_store_explicit(&ended, 1, memory_order_release);
    rte_eal_mp_wait_lcore();
    if (!ok) {
        fprintf(stderr, "no mbufs, or fewer than %u other lcores\n", lcores);
        return 0;
    }
    printf("%" PRIu64 " %" PRIu64 "\n", end - begin, cpu);
    return 1;
}

int main(int argc, char **argv)
{
    // If the parent process ends, the kernel ends this one. If the parent has ended already, the input has ended, too.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (rte_eal_init(argc, argv) < 0)
        return 1;
    unsigned mbufs = RTE_MAX((unsigned)MBUFS, MBUFS_PER_LCORE * rte_lcore_count());
    pool = rte_pktmbuf_pool_create("pool", mbufs, CACHE, 0, ROOM, SOCKET_ID_ANY);
    for (unsigned i = 0; i + 1 < rte_lcore_count(); i++) {
        char name[16];
        snprintf(name, sizeof name, "ring%u", i);
        rings[i] = rte_ring_create(name, RING, SOCKET_ID_ANY, RING_F_SP_ENQ | RING_F_SC_DEQ);
        if (rings[i] == NULL)
            pool = NULL;
    }
    if (pool == NULL) {
        fprintf(stderr, "no memory for %u mbufs and a ring for each lcore\n", mbufs);
        return 1;
    }
    puts("ready");

    char line[128], what[32];
    uint64_t operations;
    unsigned lcores;
    while (fgets(line, sizeof line, stdin) != NULL) {
        const struct variant *found = NULL;
        if (sscanf(line, "%31s %" SCNu64 " %u", what, &operations, &lcores) == 3)
            for (size_t i = 0; i < sizeof all / sizeof *all; i++)
                if (strcmp(what, all[i].name) == 0 &&
                    (all[i].work == mempool || (lcores > 0) == (all[i].others != NULL)))
                    found = &all[i];
        if (found == NULL) {
            fprintf(stderr, "not understood: %s", line);
            return 1;
        }
        if (!measure(found, operations, lcores))
            return 1;
    }
    return 0;
}
