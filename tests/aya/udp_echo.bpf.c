/*
 * The XDP program of the example xsk_aya: UDP over IPv4 to port 7 goes to the AF_XDP socket of the
 * queue that the frame came in by. All other frames, fragments of IP, and those of queues without a
 * socket, go to the kernel.
 *
 *     clang --target=bpf -O2 -g -c udp_echo.bpf.c -o udp_echo.o
 */

/* Types and numbers of the kernel's interface, so that no header is needed. */
struct xdp_md {
    unsigned int data, data_end, data_meta, ingress_ifindex, rx_queue_index, egress_ifindex;
};
#define XDP_PASS 2
static long (*const bpf_redirect_map)(void *map, unsigned long long key, unsigned long long flags) = (void *)51;

#define SECTION(name) __attribute__((section(name), used))

/* BPF_MAP_TYPE_XSKMAP, with a place for each of 64 queues. */
struct {
    int (*type)[17];
    unsigned int *key;
    int *value;
    int (*max_entries)[64];
} sockets SECTION(".maps");

SECTION("xdp") int udp_echo(struct xdp_md *frame)
{
    const unsigned char *at = (void *)(long)frame->data, *end = (void *)(long)frame->data_end;

    /* Ethernet, an IPv4 header without options, and the ports of UDP. */
    if (at + 14 + 20 + 4 > end || at[12] != 0x08 || at[13] != 0x00 || at[14] != 0x45 || at[23] != 17)
        return XDP_PASS;
    /* More fragments follow, or it is not the first: the kernel joins them. */
    if ((at[20] & 0x3f) != 0 || at[21] != 0)
        return XDP_PASS;
    if (at[36] != 0 || at[37] != 7)
        return XDP_PASS;
    return bpf_redirect_map(&sockets, frame->rx_queue_index, XDP_PASS);
}

char dual_license[] SECTION("license") = "Dual MIT/GPL";
