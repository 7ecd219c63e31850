/* A process without privileges, in another network namespace than the interface, gets a socket from
 * a helper, and sends each frame back until one whose byte 14 is '!'. Usage: granted SOCKET. */
#include "check.h"
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void echo(netmem_xsk_rx *rx, netmem_xsk_tx *tx) {
    for (bool last = false; !last;) {
        netmem_frag frags[16];
        size_t n, sent = 0;
        bool waits;
        netmem_xsk_tx_complete(tx, rx);
        IS(NETMEM_OK, netmem_xsk_rx_receive(rx, frags, NULL, 16, &n));
        for (size_t i = 0; i < n; i++)
            last |= ((const unsigned char *)netmem_frag_data(&frags[i]))[14] == '!';
        IS(NETMEM_OK, netmem_xsk_tx_send(tx, frags, NULL, n, &sent));
        HOLDS(sent == n);
        IS(NETMEM_OK, netmem_xsk_rx_arm(rx, &waits));
        if (waits && !last) {
            struct pollfd event;
            event.fd = netmem_xsk_rx_fd(rx);
            event.events = POLLIN;
            HOLDS(poll(&event, 1, -1) == 1);
        }
        netmem_xsk_rx_disarm(rx);
    }
}

int main(int argc, char **argv) {
    if (argc != 2)
        return 2;
    netmem_region *region;
    netmem_region_options region_options;
    memset(&region_options, 0, sizeof region_options);
    region_options.size = sizeof region_options;
    region_options.pages = 1024;
    region_options.no_huge_pages = 1;
    netmem_umem *umem;
    netmem_umem_options umem_options;
    memset(&umem_options, 0, sizeof umem_options);
    umem_options.size = sizeof umem_options;
    IS(NETMEM_OK, netmem_region_create(&region_options, &region));
    IS(NETMEM_OK, netmem_umem_create(region, &umem_options, &umem));

    netmem_xsk_grant *grant;
    uint32_t queues[4] = {9, 9, 9, 9};
    IS(NETMEM_ERR_NULL, netmem_xsk_grant_receive(NULL, NULL, &grant));
    IS(NETMEM_ERR_NULL, netmem_xsk_grant_receive(argv[1], NULL, NULL));
    IS(NETMEM_ERR_NOT_FOUND, netmem_xsk_grant_receive("/none", NULL, &grant));
    IS(NETMEM_ERR_NOT_FOUND, netmem_xsk_grant_receive(argv[1], "other", &grant));
    IS(NETMEM_OK, netmem_xsk_grant_receive(argv[1], "v0", &grant));
    HOLDS(netmem_xsk_grant_queues(grant, queues, 4) == 2 && queues[0] == 0 && queues[1] == 1 && queues[2] == 9);
    HOLDS(netmem_xsk_grant_queues(grant, NULL, 0) == 2 && netmem_xsk_grant_queues(grant, NULL, 1) == 0);
    HOLDS(netmem_xsk_grant_queues(NULL, queues, 4) == 0);

    netmem_xsk_rx *rx;
    netmem_xsk_tx *tx, *second;
    netmem_xsk_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.fill = 256;
    options.rx_ring = options.tx_ring = 256;
    /* Without the grant there is no such interface here. */
    options.interface = "v0";
    IS(NETMEM_ERR_NOT_FOUND, netmem_xsk_open(umem, &options, &rx, &tx));
    options.grant = grant;
    IS(NETMEM_ERR_ARGUMENT, netmem_xsk_open(umem, &options, &rx, &tx));
    options.interface = NULL;
    options.queue = 2;
    IS(NETMEM_ERR_NOT_FOUND, netmem_xsk_open(umem, &options, &rx, &tx));
    options.grant = (const netmem_xsk_grant *)umem;
    IS(NETMEM_ERR_HANDLE, netmem_xsk_open(umem, &options, &rx, &tx));
    options.grant = grant;
    options.queue = 0;
    IS(NETMEM_OK, netmem_xsk_open(umem, &options, &rx, &tx));
    IS(NETMEM_ERR_NOT_FOUND, netmem_xsk_open(umem, &options, &rx, &tx));
    HOLDS(netmem_xsk_grant_queues(grant, queues, 4) == 1 && queues[0] == 1);
    options.queue = 1;
    options.mode = NETMEM_XSK_COPY;
    IS(NETMEM_ERR_ARGUMENT, netmem_xsk_open_tx(umem, &options, &second));
    HOLDS(netmem_xsk_grant_queues(grant, NULL, 0) == 1);
    IS(NETMEM_OK, netmem_xsk_grant_bound(grant));
    HOLDS(netmem_xsk_grant_queues(grant, NULL, 0) == 0);
    IS(NETMEM_OK, netmem_xsk_grant_bound(grant));
    echo(rx, tx);

    /* A second helper has no program. */
    netmem_xsk_grant *sends;
    IS(NETMEM_OK, netmem_xsk_grant_receive(argv[1], NULL, &sends));
    options.grant = sends;
    IS(NETMEM_OK, netmem_xsk_open_tx(umem, &options, &second));
    IS(NETMEM_OK, netmem_xsk_grant_bound(sends));
    IS(NETMEM_OK, netmem_xsk_grant_close(sends));
    netmem_page_pool *pool;
    netmem_pool_options pool_options;
    memset(&pool_options, 0, sizeof pool_options);
    pool_options.size = sizeof pool_options;
    IS(NETMEM_OK, netmem_page_pool_create(region, &pool_options, &pool));
    netmem_frag frag;
    size_t n;
    HOLDS(netmem_page_pool_alloc(pool, &frag, 1) == 1);
    unsigned char *data = (unsigned char *)netmem_frag_data_mut(&frag);
    memset(data, 0xff, 60);
    data[12] = 0x88, data[13] = 0xb5;
    IS(NETMEM_OK, netmem_frag_truncate(&frag, 60));
    IS(NETMEM_OK, netmem_xsk_tx_send(second, &frag, NULL, 1, &n));
    IS(NETMEM_OK, netmem_page_pool_close(pool, NULL));

    IS(NETMEM_OK, netmem_xsk_grant_close(grant));
    IS(NETMEM_ERR_HANDLE, netmem_xsk_grant_close(grant));
    IS(NETMEM_OK, netmem_xsk_tx_close(tx));
    IS(NETMEM_OK, netmem_xsk_tx_close(second));
    IS(NETMEM_OK, netmem_xsk_rx_close(rx, NULL));
    IS(NETMEM_OK, netmem_umem_close(umem));
    IS(NETMEM_OK, netmem_region_close(region));
    puts("the frames went back");
    return 0;
}
