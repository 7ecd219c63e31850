/* Frames behind metadata that a pinned program of the caller's own wrote: a mark, and the four
 * bytes behind the Ethernet header. Usage: metadata OURS THEIRS PROGRAM MAP. */
#include <netmem.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void check(netmem_status status, const char *what) {
    if (status != NETMEM_OK) {
        printf("%s: %s: %s\n", what, netmem_status_name(status), netmem_error_text());
        exit(1);
    }
}

static void open_queue(netmem_umem *umem, const char *interface, netmem_xdp_program *program, netmem_xsk_rx **rx, netmem_xsk_tx **tx) {
    netmem_xsk_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.interface = interface;
    options.fill = 256;
    check(netmem_xsk_open(umem, &options, rx, tx), "a queue");
    if (program != NULL)
        check(netmem_xdp_program_insert(program, *rx), "the queue's place in the map");
}

int main(int argc, char **argv) {
    if (argc != 5)
        return 2;
    netmem_region_options region_options;
    memset(&region_options, 0, sizeof region_options);
    region_options.size = sizeof region_options;
    region_options.pages = 1024;
    netmem_umem_options umem_options;
    memset(&umem_options, 0, sizeof umem_options);
    umem_options.size = sizeof umem_options;
    umem_options.chunk = 2048;
    umem_options.headroom = 64;
    netmem_pool_options pool_options;
    memset(&pool_options, 0, sizeof pool_options);
    pool_options.size = sizeof pool_options;
    netmem_xdp_options program_options;
    memset(&program_options, 0, sizeof program_options);
    program_options.size = sizeof program_options;
    program_options.pinned_program = argv[3];
    netmem_region *region;
    netmem_umem *umem;
    netmem_page_pool *pool;
    netmem_xdp_program *program;
    netmem_xsk_rx *rx, *far_rx;
    netmem_xsk_tx *tx, *far_tx;
    check(netmem_region_create(&region_options, &region), "a region");
    check(netmem_umem_create(region, &umem_options, &umem), "a UMEM");
    check(netmem_page_pool_create(region, &pool_options, &pool), "a pool");
    if (netmem_xdp_program_attach(argv[1], &program_options, &program) != NETMEM_ERR_NULL)
        return puts("a program without a map"), 1;
    program_options.pinned_map = argv[4];
    check(netmem_xdp_program_attach(argv[1], &program_options, &program), "the user's own program");
    open_queue(umem, argv[1], program, &rx, &tx);
    program_options.pinned_program = NULL;
    netmem_xdp_program *other;
    if (netmem_xdp_program_attach(argv[2], &program_options, &other) != NETMEM_ERR_ARGUMENT)
        return puts("the map of another interface's program"), 1;
    check(netmem_xdp_program_attach(argv[1], &program_options, &other), "the map of the attached program");
    check(netmem_xdp_program_close(other), "the end of the second handle");
    open_queue(umem, argv[2], NULL, &far_rx, &far_tx);

    int frames = 0;
    for (int i = 0; i < 100; i++) {
        netmem_frag frag;
        unsigned char metadata[8], expected[8] = {0x61, 0x74, 0x65, 0x6d};
        size_t n;
        if (netmem_page_pool_alloc(pool, &frag, 1) != 1)
            return puts("no page"), 1;
        unsigned char *data = (unsigned char *)netmem_frag_data_mut(&frag);
        memset(data, 1 + i, 60);
        memset(data, 0xff, 6);
        memset(expected + 4, 1 + i, 4);
        check(netmem_frag_truncate(&frag, 60), "a frame");
        check(netmem_xsk_tx_send(far_tx, &frag, NULL, 1, &n), "a frame");
        for (n = 0; n == 0;) {
            bool waits;
            check(netmem_xsk_rx_arm(rx, &waits), "a wait");
            if (waits) {
                struct pollfd event;
                event.fd = netmem_xsk_rx_fd(rx);
                event.events = POLLIN;
                poll(&event, 1, -1);
            }
            netmem_xsk_rx_disarm(rx);
            check(netmem_xsk_rx_receive(rx, &frag, NULL, 1, &n), "a frame");
        }
        check(netmem_xsk_rx_metadata(rx, &frag, metadata, sizeof metadata), "metadata");
        frames += memcmp(metadata, expected, sizeof metadata) == 0 && netmem_frag_length(&frag) == 60;
        /* In front of a frame are the 256 bytes of the kernel and the 64 of the UMEM. */
        unsigned char all[320];
        check(netmem_xsk_rx_metadata(rx, &frag, all, 256), "256 bytes");
        if (netmem_xsk_rx_metadata(rx, &frag, all, 257) != NETMEM_ERR_RANGE)
            return puts("more bytes than a program can write"), 1;
        netmem_xsk_rx_release(rx, &frag, 1);
        netmem_xsk_tx_complete(far_tx, NULL);
    }
    check(netmem_xdp_program_close(program), "the end of the program");
    check(netmem_xsk_tx_close(tx), "the end of a queue");
    check(netmem_xsk_tx_close(far_tx), "the end of a queue");
    check(netmem_xsk_rx_close(rx, NULL), "the end of a queue");
    check(netmem_xsk_rx_close(far_rx, NULL), "the end of a queue");
    check(netmem_umem_close(umem), "the UMEM's handle");
    check(netmem_page_pool_close(pool, NULL), "the end of the pool");
    check(netmem_region_close(region), "the region's handle");
    printf("%d frames, each with its metadata\n", frames);
    return 0;
}
