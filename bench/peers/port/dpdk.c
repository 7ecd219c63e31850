// Receives packets on DPDK's port 0, or sends packets there. The counterparts on netmem's side are
// `bench/examples/virtio_peer.rs` and `netmem device --port gen`.
//
//   dpdk-port EAL-OPTIONS -- receive RING BURST WARM-UP-SECONDS SECONDS read|count|echo|transmit
//   dpdk-port EAL-OPTIONS -- send RING BURST BYTES [PACKETS-PER-SECOND]
//
// `receive` takes bursts of packets. With `read` it reads the first 16 bytes of each packet, with `count` it reads none. It gives
// all packets of a burst back to their pool at once. With `echo` it exchanges the Ethernet addresses of each packet and sends the burst back;
// packets that the port does not take go back to the pool. With `transmit` it receives none: it
// allocates a burst, writes a frame of 60 bytes into each packet, and sends the burst. The last
// line of its output is
//
//   packets 12345678 elapsed_ns 2000000000 busy_ns 1500000000 preempted 3 idle_ns 400000000 begin_ns 987654321 ran_ns 1990000000
//
// Packets of echo and transmit are those that the port has taken. idle_ns is the time of polls that
// found nothing and were not interrupted: that took less than 1 us (as in `meter.rs`). begin_ns is
// CLOCK_MONOTONIC when the count began. ran_ns is the time for which the thread had its CPU; the
// seconds of the arguments are of this time, so that a receiver that is stopped between its turns
// receives as long.
//
// busy_ns is the receiver's own time. Time stamps are taken immediately before each rte_eth_rx_burst and after the packets were
// freed. Polls that found nothing do not count. A poll that took longer than 50 us is compared with the thread's CPU clock, so that
// time in which the thread did not run does not count either. `crates/measure/src/own_time.rs` has the same rules, so that both
// sides are measured alike.
//
// `send` sends frames until SIGTERM. All buffers of its pool have the frame from the start, so that none is filled while it sends.
// netmem's generator does not fill frames either.
#define _GNU_SOURCE // RUSAGE_THREAD
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#include <rte_cycles.h>
#include <rte_eal.h>
#include <rte_ethdev.h>
#include <rte_ether.h>
#include <rte_mbuf.h>
#include <rte_pause.h>
#include <rte_prefetch.h>

enum { CACHE = 512, MOST = 256, LONG_NS = 50000, LOOK = 200, IDLE_NS = 1000 };
// What is done with a packet before it goes back to its pool; with ECHO, it goes back to the port;
// with TRANSMIT, it comes from the pool.
enum work { COUNT, READ, ECHO, TRANSMIT };

static volatile sig_atomic_t stopped;

static void stop(int signal)
{
    (void)signal;
    stopped = 1;
}

static uint64_t nanoseconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

// Nanoseconds for which this thread has run.
static uint64_t ran(void)
{
    return nanoseconds(CLOCK_THREAD_CPUTIME_ID);
}

static uint64_t preempted(void)
{
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return (uint64_t)usage.ru_nivcsw;
}

// Times are in ticks of the time-stamp counter.
struct count {
    uint64_t packets, elapsed, busy, idle, ran_ns;
};

// To an address of nothing, with an EtherType for experiments.
static const uint8_t frame[60] = { [0] = 2, [6] = 2, [12] = 0x88, [13] = 0xb5 };

enum { POLLS = 256 }; // between two readings of the CPU clock

// The sum of what was read, so that the compiler cannot leave out the reads.
static uint64_t sum;

static void read_all(struct rte_mbuf **m, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        rte_prefetch0(rte_pktmbuf_mtod(m[i], void *));
    for (unsigned i = 0; i < n; i++) {
        uint64_t bytes[2];
        memcpy(bytes, rte_pktmbuf_mtod(m[i], void *), sizeof bytes);
        sum += bytes[0] ^ bytes[1];
    }
}

// Returns how many packets the port has taken.
static unsigned send_all(struct rte_mbuf **m, unsigned n)
{
    unsigned sent = rte_eth_tx_burst(0, 0, m, (uint16_t)n);
    rte_pktmbuf_free_bulk(m + sent, n - sent);
    return sent;
}

static unsigned transmit_all(struct rte_mempool *pool, struct rte_mbuf **m, unsigned n)
{
    // Without a free buffer, the port still looks for those that it has sent.
    if (rte_pktmbuf_alloc_bulk(pool, m, n) != 0)
        n = 0;
    for (unsigned i = 0; i < n; i++)
        memcpy(rte_pktmbuf_append(m[i], sizeof frame), frame, sizeof frame);
    return send_all(m, n);
}

static unsigned echo_all(struct rte_mbuf **m, unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        __builtin_prefetch(rte_pktmbuf_mtod(m[i], void *), 1);
    for (unsigned i = 0; i < n; i++) {
        struct rte_ether_hdr *header = rte_pktmbuf_mtod(m[i], struct rte_ether_hdr *);
        struct rte_ether_addr to = header->dst_addr;
        header->dst_addr = header->src_addr;
        header->src_addr = to;
    }
    return send_all(m, n);
}

// Receives for so many nanoseconds of CPU time, and longer if no packet has arrived by then.
static struct count receive(struct rte_mempool *pool, uint64_t for_ns, unsigned burst, enum work work)
{
    const double ns = 1e9 / (double)rte_get_tsc_hz();
    const uint64_t is_long = (uint64_t)(LONG_NS / ns), is_idle = (uint64_t)(IDLE_NS / ns);
    struct rte_mbuf *m[MOST];
    struct count c = { 0, 0, 0, 0, 0 };
    uint64_t begin = rte_rdtsc(), end = begin, seen = begin, seen_ran = ran(), began_ran = seen_ran;
    for (unsigned polls = 1; !stopped && (c.ran_ns < for_ns || c.packets == 0); polls++) {
        uint64_t start = rte_rdtsc();
        if (start - end > is_long || start - seen > LOOK * is_long) {
            seen = rte_rdtsc();
            seen_ran = ran();
            start = rte_rdtsc();
        }
        unsigned n = work == TRANSMIT ? transmit_all(pool, m, burst) : rte_eth_rx_burst(0, 0, m, (uint16_t)burst), done = n;
        if (n > 0 && work == ECHO) {
            done = echo_all(m, n);
        } else if (n > 0 && work != TRANSMIT) {
            if (work == READ)
                read_all(m, n);
            rte_pktmbuf_free_bulk(m, n);
        }
        end = rte_rdtsc();
        uint64_t took = end - start;
        if (took > is_long) {
            uint64_t at = rte_rdtsc(), has_run = ran();
            double own = (double)(has_run - seen_ran) / ns - (double)(start - seen);
            own = own < 0 ? 0 : own;
            took = own < (double)took ? (uint64_t)own : took;
            seen = at;
            seen_ran = has_run;
        }
        if (n > 0) {
            c.packets += done;
            c.busy += took;
        } else if (took < is_idle) {
            c.idle += took;
        }
        if (polls % POLLS == 0)
            c.ran_ns = ran() - began_ran;
    }
    c.ran_ns = ran() - began_ran;
    c.elapsed = end - begin;
    return c;
}

static void fill(struct rte_mempool *pool, void *bytes, void *object, unsigned index)
{
    (void)pool;
    (void)index;
    struct rte_mbuf *m = object;
    char *to = rte_pktmbuf_mtod(m, char *);
    memset(to, 0, *(uint16_t *)bytes);
    memcpy(to, frame, sizeof(struct rte_ether_hdr));
    memset(to, 0xff, 6); // the broadcast address
}

// At `rate` packets a second, or as fast as it can if that is 0. What it could not send for a millisecond, because the receiver
// was full or this program was stopped, it does not make up for.
static void transmit(struct rte_mempool *pool, unsigned burst, uint16_t bytes, uint64_t rate)
{
    struct rte_mbuf *m[MOST];
    unsigned have = 0;
    const uint64_t hz = rte_get_tsc_hz(), gap = rate > 0 ? burst * hz / rate : 0;
    uint64_t due = rte_rdtsc();
    rte_mempool_obj_iter(pool, fill, &bytes);
    while (!stopped) {
        uint64_t now = rte_rdtsc();
        if (gap > 0 && now < due) {
            rte_pause();
            continue;
        }
        due = RTE_MAX(due + gap, now > hz / 1000 ? now - hz / 1000 : 0);
        if (rte_pktmbuf_alloc_bulk(pool, m + have, burst - have) == 0) {
            for (unsigned i = have; i < burst; i++)
                m[i]->data_len = (uint16_t)(m[i]->pkt_len = bytes);
            have = burst;
        }
        unsigned sent = rte_eth_tx_burst(0, 0, m, (uint16_t)have);
        if (sent == 0)
            rte_pause();
        have -= sent;
        memmove(m, m + sent, have * sizeof m[0]);
    }
    rte_pktmbuf_free_bulk(m, have);
}

int main(int argc, char **argv)
{
    int used = rte_eal_init(argc, argv);
    if (used < 0)
        return 1;
    argc -= used;
    argv += used;
    int receives = argc == 7 && strcmp(argv[1], "receive") == 0;
    if (!receives && ((argc != 5 && argc != 6) || strcmp(argv[1], "send") != 0)) {
        fprintf(stderr, "dpdk-port: receive RING BURST WARM-UP-SECONDS SECONDS read|count|echo|transmit, or send RING BURST BYTES [RATE]\n");
        return 1;
    }
    uint16_t ring = (uint16_t)atoi(argv[2]);
    unsigned burst = RTE_MIN((unsigned)MOST, RTE_MAX(1u, (unsigned)atoi(argv[3])));
    signal(SIGTERM, stop);
    signal(SIGINT, stop);

    // Four times as many buffers as a ring has entries.
    struct rte_mempool *pool =
        rte_pktmbuf_pool_create("pool", 4u * ring - 1, CACHE, 0, RTE_MBUF_DEFAULT_BUF_SIZE, SOCKET_ID_ANY);
    struct rte_eth_conf conf;
    memset(&conf, 0, sizeof conf);
    if (pool == NULL || rte_eth_dev_configure(0, 1, 1, &conf) != 0 ||
        rte_eth_rx_queue_setup(0, 0, ring, SOCKET_ID_ANY, NULL, pool) != 0 ||
        rte_eth_tx_queue_setup(0, 0, ring, SOCKET_ID_ANY, NULL) != 0 || rte_eth_dev_start(0) != 0) {
        fprintf(stderr, "dpdk-port: no port, or no memory\n");
        return 1;
    }
    puts("ready");
    fflush(stdout);
    if (receives) {
        const double hz = (double)rte_get_tsc_hz();
        static const char *const names[] = { "count", "read", "echo", "transmit" };
        enum work work = COUNT;
        while (work < TRANSMIT && strcmp(argv[6], names[work]) != 0)
            work++;
        receive(pool, (uint64_t)(atof(argv[4]) * 1e9), burst, work);
        uint64_t before = preempted(), began = nanoseconds(CLOCK_MONOTONIC);
        struct count c = receive(pool, (uint64_t)(atof(argv[5]) * 1e9), burst, work);
        printf("sum %" PRIx64 "\n", sum);
        printf("packets %" PRIu64 " elapsed_ns %.0f busy_ns %.0f preempted %" PRIu64 " idle_ns %.0f begin_ns %" PRIu64 " ran_ns %" PRIu64 "\n", c.packets,
               (double)c.elapsed * 1e9 / hz, (double)c.busy * 1e9 / hz, preempted() - before, (double)c.idle * 1e9 / hz, began, c.ran_ns);
        fflush(stdout);
    } else {
        transmit(pool, burst, (uint16_t)atoi(argv[4]), argc == 6 ? (uint64_t)atoll(argv[5]) : 0);
    }
    rte_eth_dev_stop(0);
    rte_eth_dev_close(0);
    rte_eal_cleanup();
    return 0;
}
