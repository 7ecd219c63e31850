/* What the header says of the virtio driver and device, with a library that has debug assertions.
 * Both are on this thread. Usage: virtio SOCKET OTHER, the paths of two sockets that are not
 * there. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { GROUP = 64, PAGES = 512, TX_PAGES = 32, RING = 64 };

static netmem_region *memory(size_t pages) {
    netmem_region *region;
    netmem_region_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.pages = pages;
    IS(NETMEM_OK, netmem_region_create(&options, &region));
    return region;
}

static netmem_virtio_device_options device_options(void) {
    netmem_virtio_device_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    return options;
}

static netmem_virtio_device *new_device(void) {
    netmem_virtio_device *device;
    netmem_region *region = memory(PAGES);
    netmem_virtio_device_options options = device_options();
    IS(NETMEM_OK, netmem_virtio_device_create(region, &options, &device));
    IS(NETMEM_OK, netmem_region_close(region));
    return device;
}

static netmem_virtio_options driver_options(const char *socket) {
    netmem_virtio_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.socket = socket;
    options.ring = RING;
    options.tx_pages = TX_PAGES;
    return options;
}

struct driver {
    netmem_virtio_net *net;
    netmem_virtio_rx *rx;
    netmem_virtio_tx *tx;
};

/* A driver that is connected to the device by a pair of sockets, or by the path in the options. */
static struct driver connected(netmem_virtio_device *device, netmem_virtio_options options) {
    struct driver driver;
    if (options.socket == NULL) {
        int ends[2];
        HOLDS(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        netmem_status served;
        do {
            /* The front end before may still be leaving. */
            served = netmem_virtio_device_serve(device, ends[1]);
        } while (served == NETMEM_ERR_BUSY);
        IS(NETMEM_OK, served);
        IS(NETMEM_ERR_BUSY, netmem_virtio_device_serve(device, ends[1]));
        options.fd = ends[0];
        IS(NETMEM_OK, netmem_virtio_connect(&options, &driver.net, &driver.rx, &driver.tx));
        /* They were duplicated. */
        HOLDS(close(ends[0]) == 0 && close(ends[1]) == 0);
    } else {
        IS(NETMEM_OK, netmem_virtio_connect(&options, &driver.net, &driver.rx, &driver.tx));
    }
    HOLDS(netmem_virtio_net_is_connected(driver.net));
    return driver;
}

static netmem_virtio_rx_stats close_driver(struct driver *driver) {
    netmem_virtio_rx_stats stats;
    netmem_virtio_tx_stats tx;
    tx.size = sizeof tx;
    IS(NETMEM_OK, netmem_virtio_tx_get_stats(driver->tx, &tx));
    HOLDS(tx.frames == tx.completed + tx.outstanding + tx.unconfirmed);
    IS(NETMEM_OK, netmem_virtio_net_close(driver->net));
    IS(NETMEM_OK, netmem_virtio_tx_close(driver->tx));
    stats.size = 1;
    IS(NETMEM_ERR_STRUCT_SIZE, netmem_virtio_rx_close(driver->rx, &stats));
    stats.size = sizeof stats;
    IS(NETMEM_OK, netmem_virtio_rx_close(driver->rx, &stats));
    HOLDS(stats.quarantined == 0);
    IS(NETMEM_ERR_HANDLE, netmem_virtio_rx_close(driver->rx, NULL));
    IS(NETMEM_ERR_HANDLE, netmem_virtio_tx_close(driver->tx));
    IS(NETMEM_ERR_HANDLE, netmem_virtio_net_close(driver->net));
    return stats;
}

static void opening(const char *socket) {
    struct driver driver;
    netmem_virtio_options options = driver_options(socket);
    IS(NETMEM_ERR_NOT_FOUND, netmem_virtio_connect(&options, &driver.net, &driver.rx, &driver.tx));
    IS(NETMEM_ERR_NULL, netmem_virtio_connect(NULL, &driver.net, &driver.rx, &driver.tx));
    IS(NETMEM_ERR_NULL, netmem_virtio_connect(&options, NULL, &driver.rx, &driver.tx));
    IS(NETMEM_ERR_NULL, netmem_virtio_connect(&options, &driver.net, NULL, &driver.tx));
    IS(NETMEM_ERR_NULL, netmem_virtio_connect(&options, &driver.net, &driver.rx, NULL));
    options.size = 8;
    IS(NETMEM_ERR_STRUCT_SIZE, netmem_virtio_connect(&options, &driver.net, &driver.rx, &driver.tx));
    options = driver_options(NULL);
    options.fd = -1;
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_connect(&options, &driver.net, &driver.rx, &driver.tx));
    options.fd = 12345;
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_connect(&options, &driver.net, &driver.rx, &driver.tx));
    /* Descriptor 0 is the default of the structure, and a file is no socket. */
    options.fd = 0;
    IS(NETMEM_ERR_NULL, netmem_virtio_connect(&options, &driver.net, &driver.rx, &driver.tx));
    int pipes[2], packets[2];
    HOLDS(pipe(pipes) == 0 && socketpair(AF_UNIX, SOCK_SEQPACKET, 0, packets) == 0);
    options.fd = pipes[0];
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_connect(&options, &driver.net, &driver.rx, &driver.tx));
    options.fd = packets[0];
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_connect(&options, &driver.net, &driver.rx, &driver.tx));
    options.socket = socket;
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_connect(&options, &driver.net, &driver.rx, &driver.tx));
    options = driver_options(socket);
    options.mode = 3;
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_connect(&options, &driver.net, &driver.rx, &driver.tx));
    options = driver_options(socket);
    options.reserved[1] = 1;
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_connect(&options, &driver.net, &driver.rx, &driver.tx));
    /* Before memory is allocated for as many queues, or for as large rings. */
    options = driver_options(socket);
    options.pairs = 65535;
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_connect(&options, &driver.net, &driver.rx, &driver.tx));
    options = driver_options(socket);
    options.ring = 65535;
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_connect(&options, &driver.net, &driver.rx, &driver.tx));

    netmem_virtio_device *device;
    netmem_region *region = memory(4);
    netmem_virtio_device_options given = device_options();
    IS(NETMEM_ERR_NULL, netmem_virtio_device_create(NULL, &given, &device));
    IS(NETMEM_ERR_NULL, netmem_virtio_device_create(region, &given, NULL));
    given.mtu = 10;
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_device_create(region, &given, &device));
    given = device_options();
    given.reserved[4] = 1;
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_device_create(region, &given, &device));
    given.size = sizeof given - 1;
    IS(NETMEM_ERR_STRUCT_SIZE, netmem_virtio_device_create(region, &given, &device));
    IS(NETMEM_OK, netmem_region_close(region));

    device = new_device();
    IS(NETMEM_ERR_NULL, netmem_virtio_device_listen(device, NULL));
    IS(NETMEM_ERR_NOT_FOUND, netmem_virtio_device_listen(device, "/none/socket"));
    IS(NETMEM_OK, netmem_virtio_device_listen(device, socket));
    IS(NETMEM_ERR_STATE, netmem_virtio_device_listen(device, socket));
    netmem_virtio_device *second = new_device();
    IS(NETMEM_ERR_BUSY, netmem_virtio_device_listen(second, socket));
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_device_serve(second, -1));
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_device_serve(second, 12345));
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_device_serve(second, pipes[0]));
    for (int i = 0; i < 2; i++)
        HOLDS(close(pipes[i]) == 0 && close(packets[i]) == 0);
    /* What the device refuses. */
    options = driver_options(socket);
    options.pairs = 2;
    netmem_virtio_rx *rx[2];
    netmem_virtio_tx *tx[2];
    IS(NETMEM_ERR_NOT_FOUND, netmem_virtio_connect(&options, &driver.net, rx, tx));
    options = driver_options(socket);
    options.ring = 100;
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_connect(&options, &driver.net, &driver.rx, &driver.tx));
    options = driver_options(socket);
    options.max_frame = 9000;
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_connect(&options, &driver.net, &driver.rx, &driver.tx));
    IS(NETMEM_OK, netmem_virtio_device_check(device));
    netmem_virtio_device_stats stats;
    stats.size = 1;
    IS(NETMEM_ERR_STRUCT_SIZE, netmem_virtio_device_close(device, &stats));
    IS(NETMEM_OK, netmem_virtio_device_close(device, NULL));
    IS(NETMEM_ERR_HANDLE, netmem_virtio_device_close(device, NULL));
    IS(NETMEM_OK, netmem_virtio_device_close(second, NULL));
    HOLDS(access(socket, F_OK) != 0);
    IS(NETMEM_OK, netmem_sigbus_install());
    IS(NETMEM_OK, netmem_sigbus_install());
}

/* A fragment of `length` bytes to send. */
static netmem_frag frame(netmem_virtio_net *net, size_t length, unsigned char byte) {
    netmem_frag frag;
    HOLDS(netmem_virtio_net_alloc(net, &frag, 1) == 1);
    HOLDS(netmem_frag_length(&frag) == 4096 - 64 && netmem_frag_is_writable(&frag));
    memset(netmem_frag_data_mut(&frag), byte, netmem_frag_length(&frag));
    IS(NETMEM_OK, netmem_frag_truncate(&frag, length));
    return frag;
}

/* Passes of the device until it has received fragments. */
static size_t of_driver(netmem_virtio_device *device, netmem_frag *frags, uint8_t *flags) {
    size_t received = 0;
    while (received == 0)
        IS(NETMEM_OK, netmem_virtio_device_receive(device, frags, flags, GROUP, &received));
    return received;
}

/* Passes of the device until the driver has received fragments. */
static size_t of_device(netmem_virtio_device *device, netmem_virtio_rx *rx, netmem_frag *frags, uint8_t *flags) {
    netmem_frag none[GROUP];
    size_t received = 0, others;
    while (received == 0) {
        IS(NETMEM_OK, netmem_virtio_device_receive(device, none, NULL, GROUP, &others));
        HOLDS(others == 0);
        IS(NETMEM_OK, netmem_virtio_rx_receive(rx, frags, flags, GROUP, &received));
    }
    return received;
}

static bool has(const netmem_frag *frag, size_t length, unsigned char byte) {
    const unsigned char *bytes = (const unsigned char *)netmem_frag_data(frag);
    for (size_t i = 0; i < netmem_frag_length(frag); i++)
        if (bytes[i] != byte)
            return false;
    return netmem_frag_length(frag) == length;
}

/* Each length there and back. The device sends its pages as they are, the driver those that it has
 * received. */
static void there_and_back(void) {
    netmem_virtio_device *device = new_device();
    struct driver driver = connected(device, driver_options(NULL));
    netmem_frag frag, back;
    size_t n;
    for (size_t length = 14; length <= 1518; length += 47) {
        unsigned char byte = (unsigned char)length;
        frag = frame(driver.net, length, byte);
        for (int turn = 0; turn < 2; turn++) {
            IS(NETMEM_OK, netmem_virtio_tx_send(driver.tx, &frag, NULL, 1, &n));
            HOLDS(n == 1 && netmem_frag_length(&frag) == 0);
            netmem_frag got[GROUP];
            HOLDS(of_driver(device, got, NULL) == 1 && has(&got[0], length, byte));
            /* Shared with another holder it is copied, and the holder keeps it. */
            if (turn == 1)
                IS(NETMEM_OK, netmem_frag_share(&got[0], 0, length, &back));
            IS(NETMEM_OK, netmem_virtio_device_send(device, got, NULL, 1, &n));
            HOLDS(n == 1 && netmem_frag_length(&got[0]) == 0);
            if (turn == 1) {
                HOLDS(has(&back, length, byte));
                netmem_frag_release(&back);
            }
            HOLDS(of_device(device, driver.rx, got, NULL) == 1 && has(&got[0], length, byte));
            frag = got[0];
            HOLDS(netmem_virtio_tx_complete(driver.tx, turn == 0 ? driver.rx : NULL) == 1);
        }
        netmem_virtio_rx_release(driver.rx, &frag, 1);
        HOLDS(netmem_frag_length(&frag) == 0);
    }
    netmem_virtio_device_stats stats;
    stats.size = sizeof stats;
    IS(NETMEM_OK, netmem_virtio_device_get_stats(device, &stats));
    HOLDS(stats.received == 66 && stats.sent == 66 && stats.received_bytes == stats.sent_bytes);
    netmem_virtio_rx_stats closed = close_driver(&driver);
    HOLDS(closed.frames == 66 && closed.bytes == stats.sent_bytes && closed.in_flight == 0);
    IS(NETMEM_OK, netmem_virtio_device_close(device, &stats));
    HOLDS(stats.faults == 0 && stats.connection_errors == 0);
}

/* A frame of several fragments in both directions. */
static void several_fragments(void) {
    netmem_virtio_device *device = new_device();
    netmem_virtio_options options = driver_options(NULL);
    options.mode = NETMEM_VIRTIO_MERGEABLE;
    options.max_frame = 9018;
    struct driver driver = connected(device, options);
    netmem_frag frags[GROUP];
    uint8_t flags[GROUP];
    size_t n, bytes = 0;
    for (int i = 0; i < 3; i++) {
        frags[i] = frame(driver.net, 3000, 7);
        flags[i] = i < 2 ? NETMEM_FRAG_MORE : 0;
    }
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_tx_send(driver.tx, frags, flags, 2, &n));
    HOLDS(n == 0 && netmem_frag_length(&frags[0]) == 3000);
    IS(NETMEM_OK, netmem_virtio_tx_send(driver.tx, frags, flags, 3, &n));
    HOLDS(n == 3);
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_device_receive(device, frags, flags, NETMEM_FRAME_FRAGS - 1, &n));
    n = of_driver(device, frags, flags);
    HOLDS(n == 3 && flags[0] == NETMEM_FRAG_MORE && flags[1] == NETMEM_FRAG_MORE && flags[2] == 0);
    for (size_t i = 0; i < n; i++) {
        HOLDS(has(&frags[i], netmem_frag_length(&frags[i]), 7));
        bytes += netmem_frag_length(&frags[i]);
    }
    HOLDS(bytes == 9000);
    IS(NETMEM_OK, netmem_virtio_device_send(device, frags, flags, n, &n));
    HOLDS(n == 3);
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_rx_receive(driver.rx, frags, flags, NETMEM_FRAME_FRAGS - 1, &n));
    n = of_device(device, driver.rx, frags, flags);
    bytes = 0;
    for (size_t i = 0; i < n; i++) {
        HOLDS(flags[i] == (i + 1 < n ? NETMEM_FRAG_MORE : 0));
        bytes += netmem_frag_length(&frags[i]);
    }
    HOLDS(n > 1 && bytes == 9000);
    /* Sent again from where they are. The device has no flags then, and no page for it. */
    IS(NETMEM_OK, netmem_virtio_tx_send(driver.tx, frags, flags, n, &n));
    netmem_virtio_device_stats stats;
    stats.size = sizeof stats;
    do {
        IS(NETMEM_OK, netmem_virtio_device_receive(device, frags, NULL, GROUP, &n));
        HOLDS(n == 0);
        IS(NETMEM_OK, netmem_virtio_device_get_stats(device, &stats));
    } while (stats.not_linear == 0);
    HOLDS(netmem_virtio_tx_complete(driver.tx, driver.rx) == 2);
    netmem_virtio_rx_stats closed = close_driver(&driver);
    HOLDS(closed.multi_buffer == 1 && closed.in_flight == 0);
    IS(NETMEM_OK, netmem_virtio_device_close(device, NULL));
}

struct foreign {
    netmem_virtio_device *device;
    int released;
};

/* Runs within netmem_virtio_device_send, and uses its device. */
static void release(void *context) {
    struct foreign *foreign = (struct foreign *)context;
    netmem_virtio_device_stats stats;
    stats.size = sizeof stats;
    IS(NETMEM_OK, netmem_virtio_device_get_stats(foreign->device, &stats));
    HOLDS(stats.no_guest == 1);
    foreign->released++;
}

/* Sends the last page of foreign memory. */
static void send_foreign(netmem_virtio_device *device) {
    struct foreign foreign;
    netmem_region *region;
    netmem_page_pool *pool;
    netmem_pool_options options;
    netmem_frag frag;
    void *page;
    size_t n;
    foreign.device = device;
    foreign.released = 0;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    HOLDS(posix_memalign(&page, 4096, 4096) == 0);
    memset(page, 0x5a, 4096);
    IS(NETMEM_OK, netmem_region_from_memory(page, 4096, 0, release, &foreign, &region));
    IS(NETMEM_OK, netmem_page_pool_create(region, &options, &pool));
    HOLDS(netmem_page_pool_alloc(pool, &frag, 1) == 1);
    IS(NETMEM_OK, netmem_page_pool_close(pool, NULL));
    IS(NETMEM_OK, netmem_region_close(region));
    IS(NETMEM_OK, netmem_frag_truncate(&frag, 60));
    IS(NETMEM_OK, netmem_virtio_device_send(device, &frag, NULL, 1, &n));
    HOLDS(n == 1 && netmem_frag_length(&frag) == 0 && foreign.released == 1);
    free(page);
}

/* What is refused, what is dropped, and what is full. */
static void refusals(void) {
    netmem_virtio_device *device = new_device();
    netmem_frag frags[GROUP], other;
    uint8_t wrong[2] = {2, 0};
    size_t n;
    /* No guest is there: dropped. */
    netmem_region *region;
    netmem_page_pool *pool;
    netmem_pool_options pool_options;
    memset(&pool_options, 0, sizeof pool_options);
    pool_options.size = sizeof pool_options;
    send_foreign(device);

    struct driver driver = connected(device, driver_options(NULL));
    frags[0] = frame(driver.net, 13, 1);
    IS(NETMEM_ERR_UNSENDABLE, netmem_virtio_device_send(device, frags, NULL, 1, &n));
    HOLDS(n == 0 && netmem_frag_length(&frags[0]) == 13);
    IS(NETMEM_ERR_UNSENDABLE, netmem_virtio_tx_send(driver.tx, frags, NULL, 1, &n));
    HOLDS(n == 0 && netmem_frag_length(&frags[0]) == 13);
    netmem_frag_release(&frags[0]);
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_device_send(device, frags, NULL, 1, &n));
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_tx_send(driver.tx, frags, NULL, 1, &n));
    frags[0] = frame(driver.net, 60, 1);
    frags[1] = frame(driver.net, 60, 1);
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_device_send(device, frags, wrong, 2, &n));
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_tx_send(driver.tx, frags, wrong, 2, &n));
    IS(NETMEM_ERR_NULL, netmem_virtio_tx_send(driver.tx, NULL, NULL, 1, &n));
    IS(NETMEM_ERR_NULL, netmem_virtio_tx_send(driver.tx, frags, NULL, 1, NULL));
    IS(NETMEM_ERR_NULL, netmem_virtio_device_send(device, NULL, NULL, 1, &n));
    IS(NETMEM_OK, netmem_virtio_tx_send(driver.tx, NULL, NULL, 0, &n));
    netmem_frags_release(frags, 2);

    /* Memory that the device of the driver does not have: the frames before it are sent. */
    region = memory(4);
    IS(NETMEM_OK, netmem_page_pool_create(region, &pool_options, &pool));
    frags[0] = frame(driver.net, 60, 1);
    HOLDS(netmem_page_pool_alloc(pool, &frags[1], 1) == 1);
    IS(NETMEM_ERR_UNSENDABLE, netmem_virtio_tx_send(driver.tx, frags, NULL, 2, &n));
    HOLDS(n == 1 && netmem_frag_length(&frags[1]) == 4096);
    netmem_frag_release(&frags[1]);
    IS(NETMEM_OK, netmem_page_pool_close(pool, NULL));
    IS(NETMEM_OK, netmem_region_close(region));
    HOLDS(of_driver(device, frags, NULL) == 1);
    netmem_frags_release(frags, 1);
    HOLDS(netmem_virtio_tx_complete(driver.tx, NULL) == 1);
    /* The device copies other memory. */
    send_foreign(device);
    HOLDS(of_device(device, driver.rx, frags, NULL) == 1 && has(&frags[0], 60, 0x5a));
    netmem_virtio_rx_release(driver.rx, frags, 1);

    /* As many pages as were set aside. The ring has room for as many frames. */
    n = netmem_virtio_net_alloc(driver.net, frags, GROUP);
    HOLDS(n == TX_PAGES && netmem_virtio_net_alloc(driver.net, &other, 1) == 0);
    netmem_frags_release(frags, n);
    /* Each frame takes two entries of the ring at most: it is full before all holders are sent. */
    other = frame(driver.net, 60, 5);
    size_t queued = 0;
    for (n = 1; n == 1; queued += n) {
        IS(NETMEM_OK, netmem_frag_share(&other, 0, 60, &frags[0]));
        IS(NETMEM_OK, netmem_virtio_tx_send(driver.tx, frags, NULL, 1, &n));
    }
    HOLDS(queued >= RING / 2 && queued <= RING && has(&frags[0], 60, 5));
    netmem_frag_release(&frags[0]);
    netmem_frag_release(&other);
    netmem_virtio_tx_stats tx;
    tx.size = sizeof tx;
    IS(NETMEM_OK, netmem_virtio_tx_get_stats(driver.tx, &tx));
    HOLDS(tx.full >= 1 && tx.unreachable == 1 && tx.outstanding == queued && tx.frames == queued + 1);
    while (queued > 0) {
        n = of_driver(device, frags, NULL);
        netmem_frags_release(frags, n);
        queued -= n;
    }
    close_driver(&driver);

    /* A driver without pages to send from. */
    netmem_virtio_options options = driver_options(NULL);
    options.tx_pages = 0;
    driver = connected(device, options);
    HOLDS(netmem_virtio_net_alloc(driver.net, frags, 1) == 0 && strstr(netmem_error_text(), "tx_pages") != NULL);
    close_driver(&driver);
    IS(NETMEM_OK, netmem_virtio_device_close(device, NULL));
}

static bool readable(int fd) {
    struct pollfd event;
    event.fd = fd;
    event.events = POLLIN;
    return poll(&event, 1, 0) == 1;
}

/* Sleeps until the descriptor is readable. */
static void sleep_on(int fd) {
    struct pollfd event;
    event.fd = fd;
    event.events = POLLIN;
    while (poll(&event, 1, -1) != 1) {
    }
}

/* A guest that does not receive. No frame that the device has accepted is lost, and the first
 * buffer that the guest posts wakes the device. */
static void full(void) {
    netmem_virtio_device *device = new_device();
    struct driver driver = connected(device, driver_options(NULL));
    netmem_frag frags[GROUP], kept;
    bool waits;
    size_t n, accepted = 0, received = 0;
    kept = frame(driver.net, 60, 9);
    IS(NETMEM_OK, netmem_frag_share(&kept, 0, 60, &frags[0]));
    IS(NETMEM_OK, netmem_virtio_tx_send(driver.tx, frags, NULL, 1, &n));
    HOLDS(of_driver(device, frags, NULL) == 1);
    netmem_frag_release(&frags[0]);
    for (n = 1; n == 1; accepted += n) {
        IS(NETMEM_OK, netmem_frag_share(&kept, 0, 60, &frags[0]));
        IS(NETMEM_OK, netmem_virtio_device_send(device, frags, NULL, 1, &n));
        if (accepted < RING) {
            size_t others;
            IS(NETMEM_OK, netmem_virtio_device_receive(device, &frags[1], NULL, 1, &others));
        }
    }
    HOLDS(accepted >= 256 + RING && accepted <= 257 + RING && has(&frags[0], 60, 9));
    netmem_frag_release(&frags[0]);
    do {
        netmem_virtio_device_disarm(device);
        IS(NETMEM_OK, netmem_virtio_device_arm(device, &waits));
    } while (!waits);
    while (received < accepted) {
        IS(NETMEM_OK, netmem_virtio_rx_receive(driver.rx, frags, NULL, GROUP, &n));
        for (size_t i = 0; i < n; i++)
            HOLDS(has(&frags[i], 60, 9));
        netmem_virtio_rx_release(driver.rx, frags, n);
        received += n;
        if (n > 0)
            continue;
        sleep_on(netmem_virtio_device_fd(device));
        netmem_virtio_device_disarm(device);
        do
            IS(NETMEM_OK, netmem_virtio_device_arm(device, &waits));
        while (!waits);
    }
    netmem_frag_release(&kept);
    netmem_virtio_device_stats stats;
    stats.size = sizeof stats;
    IS(NETMEM_OK, netmem_virtio_device_get_stats(device, &stats));
    HOLDS(stats.sent == accepted && stats.out_of_buffers > 0);
    HOLDS(close_driver(&driver).in_flight == 0);
    IS(NETMEM_OK, netmem_virtio_device_close(device, NULL));
}

/* Each side is woken by the other. */
static void waiting(void) {
    netmem_virtio_device *device = new_device();
    struct driver driver = connected(device, driver_options(NULL));
    netmem_frag frags[GROUP];
    bool waits = false;
    size_t n;
    for (int turn = 0; turn < 100; turn++) {
        while (!waits || readable(netmem_virtio_device_fd(device))) {
            netmem_virtio_device_disarm(device);
            IS(NETMEM_OK, netmem_virtio_device_arm(device, &waits));
        }
        do {
            netmem_virtio_rx_disarm(driver.rx);
            IS(NETMEM_OK, netmem_virtio_rx_arm(driver.rx, &waits));
        } while (!waits);
        frags[0] = frame(driver.net, 60, 1);
        IS(NETMEM_OK, netmem_virtio_tx_send(driver.tx, frags, NULL, 1, &n));
        sleep_on(netmem_virtio_device_fd(device));
        netmem_virtio_device_disarm(device);
        HOLDS(of_driver(device, frags, NULL) == 1);
        /* Frames that wait for the caller are work. */
        IS(NETMEM_OK, netmem_virtio_device_send(device, frags, NULL, 1, &n));
        IS(NETMEM_OK, netmem_virtio_device_arm(device, &waits));
        HOLDS(!waits);
        sleep_on(netmem_virtio_rx_fd(driver.rx));
        netmem_virtio_rx_disarm(driver.rx);
        IS(NETMEM_OK, netmem_virtio_rx_receive(driver.rx, frags, NULL, GROUP, &n));
        HOLDS(n == 1 && has(frags, 60, 1));
        netmem_virtio_rx_release(driver.rx, frags, n);
        IS(NETMEM_OK, netmem_virtio_tx_arm(driver.tx, &waits));
        HOLDS(!waits && netmem_virtio_tx_complete(driver.tx, driver.rx) == 1);
        waits = false;
    }
    close_driver(&driver);
    IS(NETMEM_OK, netmem_virtio_device_close(device, NULL));
}

/* A device that goes, and the next to which the queues go on. A fragment outlives both. */
static void stopping(const char *socket, const char *other) {
    netmem_virtio_device *first = new_device(), *second = new_device();
    IS(NETMEM_OK, netmem_virtio_device_listen(first, socket));
    IS(NETMEM_OK, netmem_virtio_device_listen(second, other));
    struct driver driver = connected(first, driver_options(socket));
    netmem_frag frags[GROUP], kept;
    bool waits;
    size_t n;
    frags[0] = frame(driver.net, 60, 1);
    IS(NETMEM_OK, netmem_virtio_tx_send(driver.tx, frags, NULL, 1, &n));
    HOLDS(of_driver(first, frags, NULL) == 1);
    IS(NETMEM_OK, netmem_virtio_device_send(first, frags, NULL, 1, &n));
    HOLDS(of_device(first, driver.rx, &kept, NULL) == 1);
    /* Not confirmed, because the device makes no pass any more. */
    frags[0] = frame(driver.net, 60, 2);
    IS(NETMEM_OK, netmem_virtio_tx_send(driver.tx, frags, NULL, 1, &n));
    IS(NETMEM_OK, netmem_virtio_device_close(first, NULL));

    sleep_on(netmem_virtio_rx_fd(driver.rx));
    IS(NETMEM_ERR_STOPPED, netmem_virtio_rx_arm(driver.rx, &waits));
    IS(NETMEM_ERR_STOPPED, netmem_virtio_rx_receive(driver.rx, frags, NULL, GROUP, &n));
    frags[0] = frame(driver.net, 60, 3);
    IS(NETMEM_ERR_STOPPED, netmem_virtio_tx_send(driver.tx, frags, NULL, 1, &n));
    HOLDS(!netmem_virtio_net_is_connected(driver.net) && has(frags, 60, 3));
    IS(NETMEM_ERR_NOT_FOUND, netmem_virtio_net_reconnect(driver.net, socket));
    IS(NETMEM_OK, netmem_virtio_net_reconnect(driver.net, other));
    netmem_virtio_tx_complete(driver.tx, driver.rx);
    IS(NETMEM_OK, netmem_virtio_tx_send(driver.tx, frags, NULL, 1, &n));
    HOLDS(of_driver(second, frags, NULL) == 1 && has(frags, 60, 3));
    IS(NETMEM_OK, netmem_virtio_device_send(second, frags, NULL, 1, &n));
    HOLDS(of_device(second, driver.rx, frags, NULL) == 1 && has(frags, 60, 3));
    netmem_virtio_rx_release(driver.rx, frags, 1);
    netmem_virtio_tx_stats tx;
    tx.size = sizeof tx;
    IS(NETMEM_OK, netmem_virtio_tx_get_stats(driver.tx, &tx));
    HOLDS(tx.restarts == 1 && tx.completed + tx.unconfirmed + tx.outstanding == 3);
    netmem_virtio_rx_stats closed = close_driver(&driver);
    HOLDS(closed.restarts == 1 && closed.frames == 2 && closed.in_flight == 1);
    IS(NETMEM_OK, netmem_virtio_device_close(second, NULL));
    HOLDS(has(&kept, 60, 1));
    netmem_frag_release(&kept);
}

/* A guest with frames of 17 pages, and a caller that receives them one by one: the others wait in
 * the guest's ring, not in pages. */
static void large_frames(void) {
    enum { FRAMES = 60, PARTS = 17, PART = 3800 };
    netmem_virtio_device *device;
    netmem_region *region = memory(256 + 2 * NETMEM_FRAME_FRAGS);
    netmem_virtio_device_options options = device_options();
    IS(NETMEM_OK, netmem_virtio_device_create(region, &options, &device));
    IS(NETMEM_OK, netmem_region_close(region));
    netmem_virtio_options given = driver_options(NULL);
    given.mode = NETMEM_VIRTIO_MERGEABLE;
    given.max_frame = 65549;
    given.ring = 1024;
    struct driver driver = connected(device, given);
    netmem_frag page = frame(driver.net, PART, 7), frags[GROUP];
    uint8_t flags[GROUP];
    netmem_virtio_device_stats stats;
    stats.size = sizeof stats;
    size_t n, sent = 0, received = 0;
    do {
        for (n = 1; n > 0 && sent < FRAMES; sent += n > 0) {
            for (size_t i = 0; i < PARTS; i++) {
                IS(NETMEM_OK, netmem_frag_share(&page, 0, PART, &frags[i]));
                flags[i] = i + 1 < PARTS ? NETMEM_FRAG_MORE : 0;
            }
            IS(NETMEM_OK, netmem_virtio_tx_send(driver.tx, frags, flags, PARTS, &n));
            netmem_frags_release(frags, PARTS);
        }
        IS(NETMEM_OK, netmem_virtio_device_receive(device, frags, flags, NETMEM_FRAME_FRAGS, &n));
        if (n > 0)
            HOLDS(n == (PARTS * PART + 12 + 4095) / 4096 && flags[n - 1] == 0 && has(&frags[1], 4096, 7));
        received += n > 0;
        netmem_frags_release(frags, n);
        IS(NETMEM_OK, netmem_virtio_device_get_stats(device, &stats));
        HOLDS(stats.no_page == 0);
    } while (received < FRAMES);
    netmem_frag_release(&page);
    close_driver(&driver);
    IS(NETMEM_OK, netmem_virtio_device_close(device, &stats));
    HOLDS(stats.received == FRAMES && stats.received_bytes == (uint64_t)FRAMES * PARTS * PART && stats.no_page == 0);
}

/* Frames are lost in a few ways, each of which is counted, and none is lost otherwise. */
static void losses(void) {
    netmem_virtio_device *device;
    netmem_region *region = memory(4);
    netmem_virtio_device_options options = device_options();
    IS(NETMEM_OK, netmem_virtio_device_create(region, &options, &device));
    IS(NETMEM_OK, netmem_region_close(region));
    struct driver driver = connected(device, driver_options(NULL));
    netmem_frag frags[GROUP];
    netmem_virtio_device_stats stats;
    stats.size = sizeof stats;
    size_t n, held = 0;
    /* More frames than the region has pages: the caller holds all that come. */
    for (int i = 0; i < 10; i++)
        frags[i] = frame(driver.net, 60, (unsigned char)i);
    IS(NETMEM_OK, netmem_virtio_tx_send(driver.tx, frags, NULL, 10, &n));
    HOLDS(n == 10);
    do {
        IS(NETMEM_OK, netmem_virtio_device_receive(device, &frags[held], NULL, GROUP - held, &n));
        held += n;
        IS(NETMEM_OK, netmem_virtio_device_get_stats(device, &stats));
    } while (stats.received + stats.no_page < 10);
    HOLDS(held == 4 && stats.received == 4 && stats.received_bytes == 240 && stats.no_page == 6 && stats.refused == 0);
    /* The guest leaves before they are delivered. */
    IS(NETMEM_OK, netmem_virtio_device_send(device, frags, NULL, held, &n));
    HOLDS(n == 4);
    close_driver(&driver);
    do {
        IS(NETMEM_OK, netmem_virtio_device_receive(device, frags, NULL, GROUP, &n));
        IS(NETMEM_OK, netmem_virtio_device_get_stats(device, &stats));
    } while (stats.guest_left < 4);
    HOLDS(stats.guest_left == 4 && stats.sent == 0);
    /* Their pages are back. */
    driver = connected(device, driver_options(NULL));
    frags[0] = frame(driver.net, 60, 1);
    IS(NETMEM_OK, netmem_virtio_tx_send(driver.tx, frags, NULL, 1, &n));
    HOLDS(of_driver(device, frags, NULL) == 1);
    /* One is delivered, and the driver leaves before it receives it. */
    IS(NETMEM_OK, netmem_virtio_device_send(device, frags, NULL, 1, &n));
    HOLDS(n == 1);
    do {
        IS(NETMEM_OK, netmem_virtio_device_receive(device, frags, NULL, GROUP, &n));
        IS(NETMEM_OK, netmem_virtio_device_get_stats(device, &stats));
    } while (stats.sent + stats.guest_left == 4);
    netmem_virtio_rx_stats closed = close_driver(&driver);
    HOLDS(stats.sent == 1 && closed.frames == 0 && closed.unread == 1 && closed.in_flight == 0);
    driver = connected(device, driver_options(NULL));
    frags[0] = frame(driver.net, 60, 1);
    IS(NETMEM_OK, netmem_virtio_tx_send(driver.tx, frags, NULL, 1, &n));
    HOLDS(of_driver(device, frags, NULL) == 1);
    /* No pass is made before the end. */
    IS(NETMEM_OK, netmem_virtio_device_send(device, frags, NULL, 1, &n));
    close_driver(&driver);
    IS(NETMEM_OK, netmem_virtio_device_close(device, &stats));
    HOLDS(stats.received == 6 && stats.guest_left == 5 && stats.sent == 1 && stats.connection_errors == 0 && stats.faults == 0);
}

/* A front end that sends no message of the protocol. */
static void send_nonsense(int fd) {
    unsigned char nonsense[64];
    memset(nonsense, 0xff, sizeof nonsense);
    HOLDS(write(fd, nonsense, sizeof nonsense) == (ssize_t)sizeof nonsense);
}

/* Sleeps until the device has a reason why a front end was dropped. */
static void await_reason(netmem_virtio_device *device) {
    netmem_status found;
    do {
        bool waits;
        netmem_virtio_device_disarm(device);
        IS(NETMEM_OK, netmem_virtio_device_arm(device, &waits));
        found = netmem_virtio_device_check(device);
        if (found == NETMEM_OK && waits)
            sleep_on(netmem_virtio_device_fd(device));
    } while (found == NETMEM_OK);
    IS(NETMEM_ERR_SYSTEM, found);
    HOLDS(strstr(netmem_error_text(), "vhost-user") != NULL);
    IS(NETMEM_OK, netmem_virtio_device_check(device));
}

/* A program that sleeps on the descriptor, and checks after each sleep, is told each reason. The
 * next front end can be served then. One that has connected to the path meanwhile waits, and is no
 * error. */
static void reasons(const char *socket_path) {
    netmem_virtio_device *device = new_device();
    int ends[2], stranger = socket(AF_UNIX, SOCK_STREAM, 0);
    for (int turn = 0; turn < 200; turn++) {
        HOLDS(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
        IS(NETMEM_OK, netmem_virtio_device_serve(device, ends[1]));
        send_nonsense(ends[0]);
        await_reason(device);
        HOLDS(close(ends[0]) == 0 && close(ends[1]) == 0);
    }
    IS(NETMEM_OK, netmem_virtio_device_listen(device, socket_path));
    struct driver driver = connected(device, driver_options(NULL));
    struct sockaddr_un address;
    memset(&address, 0, sizeof address);
    address.sun_family = AF_UNIX;
    HOLDS(strlen(socket_path) < sizeof address.sun_path);
    strcpy(address.sun_path, socket_path);
    HOLDS(connect(stranger, (struct sockaddr *)&address, sizeof address) == 0);
    send_nonsense(stranger);
    netmem_frag frag;
    size_t n;
    for (int turn = 0; turn < 100; turn++) {
        frag = frame(driver.net, 60, 1);
        IS(NETMEM_OK, netmem_virtio_tx_send(driver.tx, &frag, NULL, 1, &n));
        HOLDS(of_driver(device, &frag, NULL) == 1);
        IS(NETMEM_OK, netmem_virtio_device_check(device));
        netmem_frag_release(&frag);
        HOLDS(netmem_virtio_tx_complete(driver.tx, driver.rx) == 1);
    }
    close_driver(&driver);
    await_reason(device);
    close(stranger);
    netmem_virtio_device_stats stats;
    stats.size = sizeof stats;
    IS(NETMEM_OK, netmem_virtio_device_close(device, &stats));
    HOLDS(stats.connection_errors == 201);
}

/* Two drivers with one memory: what the first has received goes out by the second as it is, also
 * after the first was closed. */
static void forwarding(void) {
    netmem_virtio_device *one = new_device(), *two = new_device();
    struct driver from = connected(one, driver_options(NULL)), to;
    netmem_virtio_options options = driver_options(NULL);
    options.share = from.net;
    options.pages = 1;
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_connect(&options, &to.net, &to.rx, &to.tx));
    options.pages = 0;
    options.lock = 1;
    IS(NETMEM_ERR_ARGUMENT, netmem_virtio_connect(&options, &to.net, &to.rx, &to.tx));
    options.lock = 0;
    options.tx_pages = 100000;
    int ends[2];
    HOLDS(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
    IS(NETMEM_OK, netmem_virtio_device_serve(two, ends[1]));
    options.fd = ends[0];
    IS(NETMEM_ERR_NO_PAGES, netmem_virtio_connect(&options, &to.net, &to.rx, &to.tx));
    close(ends[0]);
    close(ends[1]);
    options.tx_pages = 0;
    to = connected(two, options);
    netmem_frag frags[GROUP];
    size_t n;
    for (int turn = 0; turn < 200; turn++) {
        /* There and back, so that the first has received it. */
        frags[0] = frame(from.net, 100, (unsigned char)turn);
        IS(NETMEM_OK, netmem_virtio_tx_send(from.tx, frags, NULL, 1, &n));
        HOLDS(of_driver(one, frags, NULL) == 1);
        IS(NETMEM_OK, netmem_virtio_device_send(one, frags, NULL, 1, &n));
        HOLDS(of_device(one, from.rx, frags, NULL) == 1);
        netmem_virtio_tx_complete(from.tx, from.rx);
        if (turn == 199) {
            netmem_virtio_rx_stats closed = close_driver(&from);
            HOLDS(closed.in_flight == 1);
        }
        IS(NETMEM_OK, netmem_virtio_tx_send(to.tx, frags, NULL, 1, &n));
        HOLDS(n == 1 && of_driver(two, frags, NULL) == 1 && has(frags, 100, (unsigned char)turn));
        netmem_frag_release(frags);
        HOLDS(netmem_virtio_tx_complete(to.tx, to.rx) == 1);
    }
    HOLDS(close_driver(&to).in_flight == 0);
    IS(NETMEM_OK, netmem_virtio_device_close(one, NULL));
    IS(NETMEM_OK, netmem_virtio_device_close(two, NULL));
}

struct handles {
    struct driver driver;
    netmem_virtio_device *device;
};

static void *on_another_thread(void *context) {
    struct handles *handles = (struct handles *)context;
    netmem_frag frags[GROUP];
    size_t n = 1;
    bool waits;
    memset(frags, 0, sizeof frags);
    IS(NETMEM_ERR_THREAD, netmem_virtio_rx_receive(handles->driver.rx, frags, NULL, GROUP, &n));
    IS(NETMEM_ERR_THREAD, netmem_virtio_rx_arm(handles->driver.rx, &waits));
    IS(NETMEM_ERR_THREAD, netmem_virtio_rx_close(handles->driver.rx, NULL));
    HOLDS(netmem_virtio_rx_fd(handles->driver.rx) == -1);
    IS(NETMEM_ERR_THREAD, netmem_virtio_tx_send(handles->driver.tx, frags, NULL, 1, &n));
    HOLDS(n == 0 && netmem_virtio_tx_complete(handles->driver.tx, NULL) == 0);
    IS(NETMEM_ERR_THREAD, netmem_virtio_tx_close(handles->driver.tx));
    IS(NETMEM_ERR_THREAD, netmem_virtio_device_receive(handles->device, frags, NULL, GROUP, &n));
    IS(NETMEM_ERR_THREAD, netmem_virtio_device_send(handles->device, frags, NULL, 1, &n));
    IS(NETMEM_ERR_THREAD, netmem_virtio_device_arm(handles->device, &waits));
    IS(NETMEM_ERR_THREAD, netmem_virtio_device_check(handles->device));
    IS(NETMEM_ERR_THREAD, netmem_virtio_device_serve(handles->device, 0));
    IS(NETMEM_ERR_THREAD, netmem_virtio_device_close(handles->device, NULL));
    /* The device's handle of the driver has no thread. */
    HOLDS(netmem_virtio_net_is_connected(handles->driver.net) && netmem_virtio_net_alloc(handles->driver.net, frags, 1) == 1);
    netmem_frag_release(frags);
    return NULL;
}

/* Handles on a second thread, and of another kind. */
static void misuse(void) {
    struct handles handles;
    netmem_frag frag;
    size_t n;
    bool waits;
    handles.device = new_device();
    handles.driver = connected(handles.device, driver_options(NULL));
    IS(NETMEM_OK, netmem_virtio_rx_receive(handles.driver.rx, &frag, NULL, 1, &n));
    IS(NETMEM_OK, netmem_virtio_tx_send(handles.driver.tx, NULL, NULL, 0, &n));
    IS(NETMEM_OK, netmem_virtio_device_arm(handles.device, &waits));
    pthread_t thread;
    HOLDS(pthread_create(&thread, NULL, on_another_thread, &handles) == 0 && pthread_join(thread, NULL) == 0);
    IS(NETMEM_ERR_NULL, netmem_virtio_rx_receive(NULL, &frag, NULL, 1, &n));
    IS(NETMEM_ERR_NULL, netmem_virtio_rx_receive(handles.driver.rx, NULL, NULL, 1, &n));
    IS(NETMEM_ERR_NULL, netmem_virtio_rx_receive(handles.driver.rx, &frag, NULL, 1, NULL));
    IS(NETMEM_ERR_NULL, netmem_virtio_device_receive(handles.device, NULL, NULL, 1, &n));
    netmem_virtio_rx_release(handles.driver.rx, NULL, 1);
    HOLDS(strcmp(netmem_error_text(), "frags is null") == 0);
    IS(NETMEM_ERR_NULL, netmem_virtio_device_receive(handles.device, &frag, NULL, 1, NULL));
    IS(NETMEM_ERR_NULL, netmem_virtio_rx_arm(handles.driver.rx, NULL));
    IS(NETMEM_ERR_NULL, netmem_virtio_device_arm(handles.device, NULL));
    IS(NETMEM_ERR_NULL, netmem_virtio_net_reconnect(handles.driver.net, NULL));
    IS(NETMEM_ERR_HANDLE, netmem_virtio_net_close((netmem_virtio_net *)(void *)handles.device));
    IS(NETMEM_ERR_HANDLE, netmem_virtio_rx_receive((netmem_virtio_rx *)(void *)handles.driver.tx, &frag, NULL, 1, &n));
    IS(NETMEM_ERR_HANDLE, netmem_virtio_device_check((netmem_virtio_device *)(void *)handles.driver.net));
    HOLDS(netmem_virtio_rx_fd(NULL) == -1 && netmem_virtio_device_fd(NULL) == -1 && netmem_virtio_tx_fd(NULL) == -1);
    HOLDS(!netmem_virtio_net_is_connected(NULL) && netmem_virtio_net_alloc(NULL, &frag, 1) == 0);
    netmem_virtio_device_stats stats;
    stats.size = 0;
    IS(NETMEM_ERR_STRUCT_SIZE, netmem_virtio_device_get_stats(handles.device, &stats));
    close_driver(&handles.driver);
    IS(NETMEM_OK, netmem_virtio_device_close(handles.device, NULL));
    IS(NETMEM_ERR_HANDLE, netmem_virtio_device_receive(handles.device, &frag, NULL, 1, &n));
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    /* A wait that does not end is a failure, too. */
    opening(argv[1]);
    there_and_back();
    several_fragments();
    refusals();
    full();
    waiting();
    stopping(argv[1], argv[2]);
    large_frames();
    losses();
    reasons(argv[1]);
    forwarding();
    misuse();
    printf("the driver and the device did what the header says\n");
    return 0;
}
