/* Netmem for C and C++: page pools, fragments, reference counts, AF_XDP and virtio
 * queues. MIT OR Apache-2.0.
 *
 * Written by cbindgen from the crate netmem-capi. `install.sh --header` writes it anew.
 *
 * A function that can fail returns a netmem_status. netmem_error_text() is the reason of the last
 * failure on the calling thread. Results are written through the last arguments, and only if the
 * status is NETMEM_OK; the functions that differ say so.
 *
 * Ownership: *_create, *_attach, *_open and *_connect write handles that the caller owns, each of
 * which ends with *_close or *_destroy. A netmem_frag is owned by the variable that holds it.
 * Copying the structure does not make another holder: netmem_frag_share does.
 *
 * Threads:
 *
 *   handle                 may be used by
 *   ---------------------  ---------------------------------------------------------------------
 *   netmem_region          any thread, several at a time; closed once
 *   netmem_page_pool       one thread, the first that allocates from it, until it is closed
 *   netmem_shared_pool     any thread, several at a time; closed once
 *   netmem_frag            one thread at a time; its bytes can be read by several while none writes
 *   netmem_umem            any thread, several at a time; closed once
 *   netmem_xdp_program     any thread, several at a time; closed once
 *   netmem_xsk_rx          one thread, the first that uses it, until it is closed
 *   netmem_xsk_tx          one thread, the first that uses it, until it is closed; it may be another
 *                          than that of its netmem_xsk_rx
 *   netmem_virtio_net      any thread, several at a time; closed once
 *   netmem_virtio_rx       one thread, the first that uses it, until it is closed
 *   netmem_virtio_tx       one thread, the first that uses it, until it is closed; it may be another
 *                          than that of its netmem_virtio_rx
 *   netmem_virtio_device   one thread, the first that moves frames or arms, until it is closed;
 *                          before that, and not at the same time, any thread makes it listen or
 *                          serve
 *   netmem_refcount        any thread, several at a time
 *   netmem_rcuref          any thread, several at a time
 *   netmem_rcu_guard       the thread whose callback got it, until the callback returns
 *   netmem_percpu_ref      any thread, several at a time; destroyed once
 *
 * Misuse:
 *
 *   a null pointer where a value is needed       NETMEM_ERR_NULL; a function that returns no status
 *                                                ignores the call
 *   a structure of a wrong size                  NETMEM_ERR_STRUCT_SIZE
 *   a handle that was closed, or another kind    library built with debug assertions:
 *   of handle                                    NETMEM_ERR_HANDLE; otherwise undefined
 *   a page pool, netmem_xsk_rx or netmem_xsk_tx  library built with debug assertions:
 *   on a second thread                           NETMEM_ERR_THREAD; otherwise undefined
 *   release of an empty fragment                 nothing happens: release empties the variable
 *   release of a copied netmem_frag              undefined, as free() twice is
 *   writing to a fragment that is shared         netmem_frag_write: NETMEM_ERR_SHARED
 *   sending a fragment of another region         NETMEM_ERR_UNSENDABLE; it stays with the caller
 *   sending an empty fragment                    NETMEM_ERR_ARGUMENT
 *   writing to a fragment that was sent          undefined: the kernel or the device reads it, and
 *   through a copy of the netmem_frag            the page is of another frame later
 *   a frame of several fragments without flags   copied into one page, or dropped and counted
 *   reading, writing or closing a queue's        undefined
 *   descriptor
 *   foreign memory under a queue in zero-copy    undefined: see netmem_umem_create
 *   mode
 *   netmem_virtio_rx, netmem_virtio_tx or        library built with debug assertions:
 *   netmem_virtio_device on a second thread      NETMEM_ERR_THREAD; otherwise undefined
 *   sending a fragment of other memory to a      NETMEM_ERR_UNSENDABLE; it stays with the caller
 *   netmem_virtio_tx
 *   reading a fragment of a netmem_virtio_rx     its bytes can change between two reads: the device
 *   twice                                        has the page. Copy what is checked and then used
 *   a front end without kick descriptors         netmem_virtio_device_arm: no sleep while it is served
 *   a callback that throws, or jumps out         the process aborts
 *
 * Callbacks: each type of callback states on which thread it runs, and what it may call. */


#ifndef NETMEM_H
#define NETMEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>


// In the flags of a fragment: the frame goes on in the next fragment of the array.
#define NETMEM_FRAG_MORE 1

// The most fragments that a frame has.
#define NETMEM_FRAME_FRAGS 18

// In netmem_virtio_options.mode: a frame in one fragment, up to 1518 bytes.
#define NETMEM_VIRTIO_SMALL 1

// In netmem_virtio_options.mode: a frame in as many fragments as it needs. For frames of more than
// 1518 bytes.
#define NETMEM_VIRTIO_MERGEABLE 2

// In netmem_xsk_options.mode: the kernel copies each frame. Works on every interface.
#define NETMEM_XSK_COPY 1

// In netmem_xsk_options.mode: the device reads and writes the pages.
#define NETMEM_XSK_ZERO_COPY 2

// In netmem_xdp_options.mode: the kernel runs the program after it has made a socket buffer. Works
// on every interface.
#define NETMEM_XDP_GENERIC 1

// In netmem_xdp_options.mode: the driver runs the program.
#define NETMEM_XDP_DRIVER 2

// What a call ended with.
typedef enum netmem_status {
  // It did what it says.
  NETMEM_OK = 0,
  // A pointer is null that must not be.
  NETMEM_ERR_NULL = 1,
  // The `size` of a structure is not that of any version of it, or a field that this library does
  // not know is not zero.
  NETMEM_ERR_STRUCT_SIZE = 2,
  // An argument has a value that is not valid.
  NETMEM_ERR_ARGUMENT = 3,
  // The handle was closed, or is of another kind. Found by builds with debug assertions.
  NETMEM_ERR_HANDLE = 4,
  // The handle belongs to another thread. Found by builds with debug assertions.
  NETMEM_ERR_THREAD = 5,
  // The system has no memory, or refuses to lock or to map it.
  NETMEM_ERR_NO_MEMORY = 6,
  // The region has fewer pages than were asked for.
  NETMEM_ERR_NO_PAGES = 7,
  // The fragment has another holder, so it cannot be written.
  NETMEM_ERR_SHARED = 8,
  // Bytes beyond the end of a fragment.
  NETMEM_ERR_RANGE = 9,
  // A system call failed.
  NETMEM_ERR_SYSTEM = 10,
  // The pool ended while the thread waited.
  NETMEM_ERR_CLOSED = 11,
  // The handle is in another state: the count is killed already, or not killed, or has reached
  // zero; the device listens already.
  NETMEM_ERR_STATE = 12,
  // The library panicked. It is a defect of the library: report it with the text.
  NETMEM_ERR_PANIC = 13,
  // The queue has stopped, and neither receives nor sends any more: its interface or device is
  // gone, or a wrong value was written to a ring. Close it; a virtio queue can be reconnected.
  NETMEM_ERR_STOPPED = 14,
  // The queue will never send this frame.
  NETMEM_ERR_UNSENDABLE = 15,
  // A privilege is missing. The text names it.
  NETMEM_ERR_PRIVILEGE = 16,
  // In use: the interface has an XDP program already, or its queue an AF_XDP socket; the device
  // has another front end, or the path another socket.
  NETMEM_ERR_BUSY = 17,
  // There is no such interface, queue or file, or no process listens on the socket.
  NETMEM_ERR_NOT_FOUND = 18,
  // The kernel, the interface's driver or the device does not support what was asked for.
  NETMEM_ERR_UNSUPPORTED = 19,
} netmem_status;

// A page pool: one thread allocates, in bulk and without a lock; pages are released on any thread.
typedef struct netmem_page_pool netmem_page_pool;

// A reference count of each CPU: get and put touch no shared line until it is killed.
typedef struct netmem_percpu_ref netmem_percpu_ref;

// A read-side section. It exists while the callback of netmem_rcu_read runs.
typedef struct netmem_rcu_guard netmem_rcu_guard;

// Memory that is cut into pages. Pools allocate from it.
typedef struct netmem_region netmem_region;

// A pool from which each thread allocates: magazines of each CPU, no lock while they have pages.
typedef struct netmem_shared_pool netmem_shared_pool;

// A region from whose pages AF_XDP queues receive and send.
typedef struct netmem_umem netmem_umem;

// A virtio-net device of one queue pair, for one guest at a time.
typedef struct netmem_virtio_device netmem_virtio_device;

// A virtio-net device that the driver is connected to.
typedef struct netmem_virtio_net netmem_virtio_net;

// A receive queue of a virtio-net device, with the page pool of its frames.
typedef struct netmem_virtio_rx netmem_virtio_rx;

// A transmit queue of a virtio-net device.
typedef struct netmem_virtio_tx netmem_virtio_tx;

// An XDP program on an interface.
typedef struct netmem_xdp_program netmem_xdp_program;

// The receive queue of an AF_XDP socket, with the page pool of its frames.
typedef struct netmem_xsk_rx netmem_xsk_rx;

// The transmit queue of an AF_XDP socket.
typedef struct netmem_xsk_tx netmem_xsk_tx;

// A reference count in the user's object, changed by compare-and-swap: for objects that few
// threads hold. It saturates instead of overflowing. Initialise it by netmem_refcount_init.
typedef struct netmem_refcount {
  // of the library
  uint32_t private_count;
} netmem_refcount;

// A reference count in the user's object whose operations are one atomic addition each, also
// netmem_rcuref_try_get: for objects that are looked up under RCU by many threads. Initialise it by
// netmem_rcuref_init.
typedef struct netmem_rcuref {
  // of the library
  uint32_t private_count;
} netmem_rcuref;

// A holder of some bytes of a page, 16 bytes large. The variable owns it: move it by copying and
// forgetting the source. All zeros is an empty one. Its fields belong to the library.
typedef struct netmem_frag {
  // null if there is nothing
  void *private_page;
  // of the library
  uint64_t private_span;
} netmem_frag;

// How a pool is made, of both kinds. Set `size` to sizeof(netmem_pool_options), and the rest to
// zero where the default will do.
typedef struct netmem_pool_options {
  // sizeof(netmem_pool_options)
  size_t size;
  // The pool's name in reports of pages that linger; null: "c". Copied.
  const char *name;
  // The most pages that it has from the region at a time; 0: as many as there are.
  size_t limit;
  // How many pages it has from the region at once; 0: none before they are asked for.
  size_t prefill;
} netmem_pool_options;

// Where a page pool's pages came from and went. Set `size` to sizeof(netmem_page_pool_stats). Once
// all pages are released: allocated = returned.
typedef struct netmem_page_pool_stats {
  // sizeof(netmem_page_pool_stats)
  size_t size;
  // pages allocated
  uint64_t allocated;
  // pages returned
  uint64_t returned;
  // pages allocated and not returned
  uint64_t in_flight;
  // allocations that found no page
  uint64_t failed;
  // of the allocations: from the pool's cache
  uint64_t from_cache;
  // of the allocations: from the region
  uint64_t from_region;
} netmem_page_pool_stats;

// A read-side section. Runs on the calling thread, at once. It may call every function of the
// library but those that wait. It must not throw or jump out: that aborts.
typedef void (*netmem_rcu_read_fn)(const struct netmem_rcu_guard *guard, void *context);

// A call after a grace period. Runs on any thread that uses the library, outside of sections. It
// may call every function of the library. It must not throw or jump out: that aborts.
typedef void (*netmem_rcu_call_fn)(void *context);

// How a region is made. Set `size` to sizeof(netmem_region_options), and the rest to zero where
// the default will do.
typedef struct netmem_region_options {
  // sizeof(netmem_region_options)
  size_t size;
  // How many pages; at least 1.
  size_t pages;
  // A page is 4096 << order bytes; at most 9.
  uint8_t order;
  // Not zero: no transparent huge pages are asked for.
  uint8_t no_huge_pages;
  // Not zero: from the system's reserved huge pages, where it has as many.
  uint8_t reserved_huge_pages;
  // Not zero: memory is touched now, and not when it is first used.
  uint8_t populate;
  // Not zero: memory is locked (mlock).
  uint8_t lock;
  // Zero.
  uint8_t reserved[3];
} netmem_region_options;

// Called once, when the last page of a region of foreign memory is back and the region is closed:
// the memory may be freed. Runs on the thread that released the last page or closed the region or
// pool. It may call every function of the library. It must not throw or jump out: that aborts.
typedef void (*netmem_release_fn)(void *context);

// Where a shared pool's pages are. Set `size` to sizeof(netmem_shared_pool_stats).
typedef struct netmem_shared_pool_stats {
  // sizeof(netmem_shared_pool_stats)
  size_t size;
  // pages that are held, or returned and not yet seen by the pool
  uint64_t in_flight;
  // pages in the magazines of the CPUs and in the depot
  uint64_t idle;
  // allocations that found no page
  uint64_t failed;
} netmem_shared_pool_stats;

// What a device offers. Set `size` to sizeof(netmem_virtio_device_options), and the rest to zero
// where the default will do.
typedef struct netmem_virtio_device_options {
  // sizeof(netmem_virtio_device_options)
  size_t size;
  // The most bytes of memory that a front end may have mapped here; 0: 16 TiB.
  uint64_t max_memory;
  // The MAC address to offer; all zeros: none.
  uint8_t mac[6];
  // The MTU to offer; 0: none.
  uint16_t mtu;
  // Not zero: no offloads are offered, so that guests compute checksums and cut segments
  // themselves. By default the device does both.
  uint8_t no_offloads;
  // Not zero: memory that the front end can shorten is refused (files without F_SEAL_SHRINK).
  // See netmem_sigbus_install.
  uint8_t require_sealed;
  // Not zero: memory in files of any kind is accepted. Warning: if the front end serves the file
  // system of such a file, it can block the device.
  uint8_t any_memory_file;
  // Zero.
  uint8_t reserved[5];
} netmem_virtio_device_options;

// What a device moved and lost. Set `size` to sizeof(netmem_virtio_device_stats). "Sent" and
// "received" are meant from this side: a received frame is from the guest.
typedef struct netmem_virtio_device_stats {
  // sizeof(netmem_virtio_device_stats)
  size_t size;
  // frames received, also those that wait for the caller; large ones after they were cut
  uint64_t received;
  // bytes in them
  uint64_t received_bytes;
  // frames delivered to the guest
  uint64_t sent;
  // bytes in them
  uint64_t sent_bytes;
  // frames from the guest dropped because the region had no page; large ones after they were cut
  uint64_t no_page;
  // frames from the guest dropped because they have several fragments, and the caller no flags
  uint64_t not_linear;
  // frames from the guest dropped because they are shorter than an Ethernet header
  uint64_t runts;
  // frames from the guest dropped because they are longer than any
  uint64_t too_long;
  // frames from the guest dropped because their header is invalid
  uint64_t bad_header;
  // frames from the guest dropped because their header has an offload that was not negotiated
  uint64_t not_negotiated;
  // frames from the guest dropped for another reason: on a ring that was disabled, or of a kind
  // that the device cannot cut
  uint64_t refused;
  // frames for the guest dropped because its receive ring was not served
  uint64_t no_guest;
  // frames for the guest dropped because it left
  uint64_t guest_left;
  // frames for the guest dropped because they do not fit its buffers
  uint64_t too_big;
  // times that there was a frame for the guest, and it had no buffer
  uint64_t out_of_buffers;
  // rings that were stopped because the guest has broken a rule
  uint64_t faults;
  // connections that ended in an error
  uint64_t connection_errors;
  // accesses that found that a page of the guest's memory was gone; with netmem_sigbus_install
  uint64_t memory_lost;
} netmem_virtio_device_stats;

// How the driver uses a device. Set `size` to sizeof(netmem_virtio_options), and the rest to zero
// where the default will do.
typedef struct netmem_virtio_options {
  // sizeof(netmem_virtio_options)
  size_t size;
  // The path of the vhost-user socket on which the device listens. Null if there is an `fd`.
  const char *socket;
  // Pages to receive into, for all queues together; 0: for each queue pair, four times the ring
  // and 512 more.
  size_t pages;
  // Pages for netmem_virtio_net_alloc besides; 0: none.
  size_t tx_pages;
  // A socket that is connected to the device, for a device that connects to the driver. It is
  // duplicated: the caller closes it. Zero if there is a `socket`: descriptor 0 cannot be used.
  int32_t fd;
  // The longest frame in bytes, of at most 65549; 0: 1518. More than 1518 needs
  // NETMEM_VIRTIO_MERGEABLE.
  uint32_t max_frame;
  // Queue pairs, of at most 127; 0: 1.
  uint16_t pairs;
  // Entries of each ring: a power of two; 0: 256.
  uint16_t ring;
  // NETMEM_VIRTIO_SMALL, NETMEM_VIRTIO_MERGEABLE, or 0: small.
  uint8_t mode;
  // Not zero: the memory is locked (mlock).
  uint8_t lock;
  // Zero.
  uint8_t reserved[2];
  // A driver whose memory this one uses, too: each sends what the other has received, without a
  // copy. Its `pages` are for the queues of both, and `pages` and `lock` are 0 here. Null: memory
  // of its own. Warning: both devices then have the memory of both drivers. Each can read and
  // change the frames of the other.
  const struct netmem_virtio_net *share;
} netmem_virtio_options;

// What a receive queue received and lost. Set `size` to sizeof(netmem_virtio_rx_stats).
typedef struct netmem_virtio_rx_stats {
  // sizeof(netmem_virtio_rx_stats)
  size_t size;
  // frames received, also one that waits for a call with more room
  uint64_t frames;
  // bytes in them
  uint64_t bytes;
  // of the frames received: those of several buffers
  uint64_t multi_buffer;
  // frames dropped because they are in several buffers, the caller has no flags, and no page has
  // room for them
  uint64_t not_linear;
  // frames dropped because they are shorter than an Ethernet header
  uint64_t runts;
  // frames dropped because the device's header is invalid
  uint64_t bad_header;
  // frames dropped because the device's header has an offload that was not negotiated
  uint64_t not_negotiated;
  // frames that had arrived and were lost by a reconnect, or by the close of the queue
  uint64_t unread;
  // times that the device had fewer buffers than it should, because there was no page
  uint64_t out_of_pages;
  // times that the queue went on with another device
  uint64_t restarts;
  // buffers that the device has now
  uint64_t posted;
  // pages of the queue that are posted or held
  uint64_t in_flight;
  // pages that are never used again, because the device did not stop
  uint64_t quarantined;
} netmem_virtio_rx_stats;

// What a transmit queue sent and refused. Set `size` to sizeof(netmem_virtio_tx_stats). frames =
// completed + outstanding + unconfirmed.
typedef struct netmem_virtio_tx_stats {
  // sizeof(netmem_virtio_tx_stats)
  size_t size;
  // frames posted to the device
  uint64_t frames;
  // bytes in them
  uint64_t bytes;
  // frames that the device is done with
  uint64_t completed;
  // frames that the device has now
  uint64_t outstanding;
  // times that the queue was full when a frame was to be sent
  uint64_t full;
  // frames refused because a fragment is not of the device's memory
  uint64_t unreachable;
  // times that the queue went on with another device
  uint64_t restarts;
  // frames that the device had not confirmed before that: it may have sent them, or not
  uint64_t unconfirmed;
} netmem_virtio_tx_stats;

// How a queue of an interface is opened. Set `size` to sizeof(netmem_xsk_options), and the rest to
// zero where the default will do.
typedef struct netmem_xsk_options {
  // sizeof(netmem_xsk_options)
  size_t size;
  // The interface's name, in this thread's network namespace.
  const char *interface;
  // The number of its queue.
  uint32_t queue;
  // Entries of the RX ring, which holds frames until they are received: a power of two; 0: 2048.
  uint32_t rx_ring;
  // Entries of the TX ring: a power of two; 0: 2048.
  uint32_t tx_ring;
  // Chunks that the kernel has to receive into, if there are pages; 0: 1024. At least the
  // device's receive ring and a quarter more.
  uint32_t fill;
  // NETMEM_XSK_COPY, NETMEM_XSK_ZERO_COPY, or 0: the best mode of the driver.
  uint8_t mode;
  // Zero.
  uint8_t reserved[7];
} netmem_xsk_options;

// A kind of frames: those in which each field that is not zero matches. Behind up to two VLAN
// tags. Fragments of IP packets have no port.
typedef struct netmem_xdp_rule {
  // The transport protocol's number: 6 for TCP, 17 for UDP; 0: any
  uint8_t protocol;
  // The bytes of the destination address: 4, 16, or 0: any. A rule with only an address also
  // matches ARP requests and neighbour solicitations for it.
  uint8_t address_length;
  // The destination port, in the CPU's byte order; 0: any
  uint16_t port;
  // The destination address, in network byte order
  uint8_t address[16];
} netmem_xdp_rule;

// Which program is attached. Set `size` to sizeof(netmem_xdp_options), and the rest to zero where
// the default will do.
typedef struct netmem_xdp_options {
  // sizeof(netmem_xdp_options)
  size_t size;
  // The frames that are redirected; other frames go to the kernel. Null: all are redirected.
  const struct netmem_xdp_rule *rules;
  // How many rules: 1 to 64, and 0 if `rules` is null.
  size_t rule_count;
  // The path of a program of the caller's own, which is pinned; null: this library's program.
  const char *pinned_program;
  // The path of the map of sockets to which that program redirects, which is pinned, too.
  // Without `pinned_program`: of a program that the caller has attached to the interface, so
  // that `mode` is not used.
  const char *pinned_map;
  // NETMEM_XDP_GENERIC, NETMEM_XDP_DRIVER, or 0: driver mode if the driver has it.
  uint8_t mode;
  // Zero.
  uint8_t reserved[7];
} netmem_xdp_options;

// What a receive queue received and lost. Set `size` to sizeof(netmem_xsk_rx_stats).
//
// In copy mode, each frame for the socket is either received, or counted once as ring_full,
// no_buffer, bad_shape or unpolled. In zero-copy mode the device drops frames for which it has no
// chunk, and only the driver counts them (ethtool -S).
typedef struct netmem_xsk_rx_stats {
  // sizeof(netmem_xsk_rx_stats)
  size_t size;
  // frames received, also one that waits for a call with more room
  uint64_t frames;
  // bytes in them
  uint64_t bytes;
  // of the frames received: those of several fragments
  uint64_t multi_buffer;
  // frames that the kernel dropped because the RX ring was full: it is polled too rarely
  uint64_t ring_full;
  // frames that the kernel dropped because it had no chunk: the program holds too many pages. In
  // copy mode also frames longer than a chunk, if the socket has no frames of several chunks.
  uint64_t no_buffer;
  // frames that the queue dropped: shorter than an Ethernet header, in more than 18 fragments,
  // or in several when the caller has no flags and no page has room for them
  uint64_t bad_shape;
  // chunks that the kernel refused: not frames
  uint64_t invalid_descriptor;
  // times that the kernel had fewer chunks than it should, because there was no page
  uint64_t out_of_pages;
  // system calls that told the driver of new chunks
  uint64_t wakeups;
  // chunks that the kernel has now
  uint64_t posted;
  // pages of the queue that are posted or held
  uint64_t in_flight;
  // frames that had arrived and were not received when the queue was closed; 0 before
  uint64_t unpolled;
} netmem_xsk_rx_stats;

// What a transmit queue sent and refused. Set `size` to sizeof(netmem_xsk_tx_stats). A descriptor
// is a part of a frame in one chunk; most frames have one. descriptors = completed + outstanding.
typedef struct netmem_xsk_tx_stats {
  // sizeof(netmem_xsk_tx_stats)
  size_t size;
  // frames posted to the kernel
  uint64_t frames;
  // bytes in them
  uint64_t bytes;
  // descriptors posted to the kernel
  uint64_t descriptors;
  // descriptors that the kernel is done with
  uint64_t completed;
  // descriptors that the kernel has now
  uint64_t outstanding;
  // times that the queue was full when a frame was to be sent
  uint64_t full;
  // frames refused because a fragment is not of the UMEM's region
  uint64_t unreachable;
  // frames refused because they have no bytes, or too many fragments
  uint64_t bad_shape;
  // frames copied into fewer fragments, because the driver does not send as many
  uint64_t copied;
  // system calls that told the kernel of frames
  uint64_t kicks;
  // times that the kernel sent nothing because memory, the send buffer or the device was full;
  // the frames stay in the ring
  uint64_t busy;
  // times that the kernel sent nothing because the interface is down; the frames stay in the
  // ring
  uint64_t down;
  // descriptors that were out for a second without any completion
  uint64_t late;
} netmem_xsk_tx_stats;

// How a UMEM is made. Set `size` to sizeof(netmem_umem_options), and the rest to zero where the
// default will do.
typedef struct netmem_umem_options {
  // sizeof(netmem_umem_options)
  size_t size;
  // Bytes in a chunk, into which the kernel writes one frame or a part of one: 2048 or 4096; 0:
  // 4096. Several chunks can share a page.
  uint32_t chunk;
  // Bytes that are left free in front of each received frame, besides the kernel's 256.
  uint32_t headroom;
} netmem_umem_options;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Initialises a count to `n` holders. No other thread uses it yet. Null is ignored.
void netmem_refcount_init(struct netmem_refcount *count, uint32_t n);

// Adds a holder. The caller is one already.
void netmem_refcount_get(const struct netmem_refcount *count);

// Adds a holder, unless there is none any more: then false.
bool netmem_refcount_try_get(const struct netmem_refcount *count);

// Removes a holder. True if it was the last: the caller destroys the object.
bool netmem_refcount_put(const struct netmem_refcount *count);

// How many holders there are now.
uint32_t netmem_refcount_read(const struct netmem_refcount *count);

// Initialises a count to `n` holders. No other thread uses it yet. Null is ignored.
void netmem_rcuref_init(struct netmem_rcuref *count, uint32_t n);

// Adds a holder. The caller is one already. One atomic addition.
void netmem_rcuref_get(const struct netmem_rcuref *count);

// Adds a holder, unless the object is dead: then false. One atomic addition. In the read-side
// section in which the object was found; `guard` is that section's.
bool netmem_rcuref_try_get(const struct netmem_rcuref *count, const struct netmem_rcu_guard *guard);

// Removes a holder. True if it was the last: the caller destroys the object after a grace period,
// by netmem_rcu_call. One atomic addition.
bool netmem_rcuref_put(const struct netmem_rcuref *count);

// How many holders there are now.
uint32_t netmem_rcuref_read(const struct netmem_rcuref *count);

// Makes a count with one holder: the caller.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_NO_MEMORY.
enum netmem_status netmem_percpu_ref_create(struct netmem_percpu_ref **count);

// Adds a holder. The caller is one already. An addition on memory of this CPU until the kill.
void netmem_percpu_ref_get(const struct netmem_percpu_ref *count);

// Adds a holder, unless there is none any more: then false.
bool netmem_percpu_ref_try_get(const struct netmem_percpu_ref *count);

// Adds a holder, unless the count was killed: then false.
bool netmem_percpu_ref_try_get_live(const struct netmem_percpu_ref *count);

// Removes a holder. True if it was the last, which is possible after the kill only: the caller
// destroys the object.
bool netmem_percpu_ref_put(const struct netmem_percpu_ref *count);

// Ends the counting on each CPU, and removes the first holder. `last` gets whether no holder is
// left: the caller destroys the object then. A barrier on all CPUs of the process, some
// microseconds.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_STATE (killed already),
// NETMEM_ERR_SYSTEM (no membarrier: nothing happened).
enum netmem_status netmem_percpu_ref_kill(const struct netmem_percpu_ref *count, bool *last);

// Whether it was killed.
bool netmem_percpu_ref_is_dying(const struct netmem_percpu_ref *count);

// Frees the count, after its last holder is gone.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_STATE (it has holders; it stays).
enum netmem_status netmem_percpu_ref_destroy(struct netmem_percpu_ref *count);

// Where the bytes are; null if the fragment is empty. Valid until it is released.
const void *netmem_frag_data(const struct netmem_frag *frag);

// Where the bytes are, for writing; null if the fragment is empty, or has another holder. Nothing
// may share the fragment, or split it, while the bytes are written.
void *netmem_frag_data_mut(struct netmem_frag *frag);

// Its bytes; 0 if it is empty.
size_t netmem_frag_length(const struct netmem_frag *frag);

// Whether this variable is the page's only holder, so that its bytes can be written.
bool netmem_frag_is_writable(const struct netmem_frag *frag);

// The page's number in its region; -1 if the fragment is empty.
int64_t netmem_frag_page_index(const struct netmem_frag *frag);

// Copies `length` bytes to `offset` of the fragment. The bytes must not be the fragment's own:
// move those with memmove and netmem_frag_data_mut.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (empty), NETMEM_ERR_RANGE, NETMEM_ERR_SHARED.
// Nothing is written then.
enum netmem_status netmem_frag_write(struct netmem_frag *frag,
                                     size_t offset,
                                     const void *from,
                                     size_t length);

// Makes another holder of `length` bytes at `offset`. One atomic addition. `out` is not read, and
// must not be `frag`.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (empty, or `out` is `frag`), NETMEM_ERR_RANGE.
enum netmem_status netmem_frag_share(const struct netmem_frag *frag,
                                     size_t offset,
                                     size_t length,
                                     struct netmem_frag *out);

// Cuts a fragment in two: `frag` keeps the first `at` bytes, `out` gets the rest. One atomic
// addition. `out` is not read, and must not be `frag`.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (empty, or `out` is `frag`), NETMEM_ERR_RANGE.
enum netmem_status netmem_frag_split(struct netmem_frag *frag, size_t at, struct netmem_frag *out);

// Removes `n` bytes from the front. No atomic.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (empty), NETMEM_ERR_RANGE.
enum netmem_status netmem_frag_advance(struct netmem_frag *frag, size_t n);

// Shortens the fragment to its first `length` bytes. No atomic.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (empty), NETMEM_ERR_RANGE.
enum netmem_status netmem_frag_truncate(struct netmem_frag *frag, size_t length);

// Releases a fragment, on any thread, and empties the variable. The last holder's release returns
// the page to its pool. An empty one is ignored, and so is null.
void netmem_frag_release(struct netmem_frag *frag);

// Releases `n` fragments, on any thread, and empties the variables. Pages of one pool return
// together: cheaper than one by one. Empty ones are ignored.
void netmem_frags_release(struct netmem_frag *frags, size_t n);

// Makes a page pool on a region. Any thread may; the first that allocates from it owns it.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_NO_PAGES (fewer than `prefill`),
// NETMEM_ERR_NO_MEMORY.
enum netmem_status netmem_page_pool_create(const struct netmem_region *region,
                                           const struct netmem_pool_options *options,
                                           struct netmem_page_pool **pool);

// Allocates up to `n` whole pages, and returns how many: fewer only if the pool has no more. Their
// bytes are what the last user left. No lock, and for pages of the cache no atomic.
//
// Returns 0 with a text for misuse (null, another thread).
size_t netmem_page_pool_alloc(struct netmem_page_pool *pool, struct netmem_frag *frags, size_t n);

// Releases `n` fragments on the thread that owns `pool`, and empties the variables. Pages of this
// pool go to its cache, the cheapest way. Others go where they belong. Empty ones are ignored.
//
// Misuse (null, another thread) releases nothing, and leaves a text.
void netmem_page_pool_release(struct netmem_page_pool *pool, struct netmem_frag *frags, size_t n);

// Counts of the pool. Its thread only.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_page_pool_get_stats(struct netmem_page_pool *pool,
                                              struct netmem_page_pool_stats *stats);

// Ends the pool. Its pages may still be held: they return to the region when they are released.
// `stats` gets the final counts, unless it is null. If it has a wrong size, the pool stays.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_page_pool_close(struct netmem_page_pool *pool,
                                          struct netmem_page_pool_stats *stats);

// Runs `section` in a read-side section: objects that are passed to netmem_rcu_call meanwhile, on
// any thread, stay until it has returned. Sections may be nested. About 5 ns.
//
// Errors: NETMEM_ERR_NULL.
enum netmem_status netmem_rcu_read(netmem_rcu_read_fn section, void *context);

// Runs `call` once, after each section that runs now has returned: it may free what they can see.
// One allocation.
//
// Errors: NETMEM_ERR_NULL.
enum netmem_status netmem_rcu_call(netmem_rcu_call_fn call, void *context);

// Allocates a region. One memfd and one mapping.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_ARGUMENT (no pages, or a wrong
// order), NETMEM_ERR_NO_MEMORY, NETMEM_ERR_SYSTEM.
enum netmem_status netmem_region_create(const struct netmem_region_options *options,
                                        struct netmem_region **region);

// Makes a region of memory that the caller has: `length` bytes at `address`, which are initialised,
// readable and writable, and accessed through the library only, until `release` is called. The
// address is a multiple of the page's size. `release` may be null.
//
// On failure `release` is not called, and the memory stays with the caller.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (alignment, less than a page, order),
// NETMEM_ERR_NO_MEMORY (for descriptors).
enum netmem_status netmem_region_from_memory(void *address,
                                             size_t length,
                                             uint8_t order,
                                             netmem_release_fn release,
                                             void *context,
                                             struct netmem_region **region);

// The address of the region's first page; null for a region that is null.
void *netmem_region_address(const struct netmem_region *region);

// The region's bytes, which can be more than the pages take: whole huge pages. 0 for a region that
// is null.
size_t netmem_region_length(const struct netmem_region *region);

// The bytes of each of its pages; 0 for a region that is null.
size_t netmem_region_page_size(const struct netmem_region *region);

// Gives up the handle. The memory stays until the last pool on it is closed and the last page is
// back.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE.
enum netmem_status netmem_region_close(struct netmem_region *region);

// Makes a pool for every thread on a region.
//
// Errors: as netmem_page_pool_create.
enum netmem_status netmem_shared_pool_create(const struct netmem_region *region,
                                             const struct netmem_pool_options *options,
                                             struct netmem_shared_pool **pool);

// Allocates up to `n` whole pages, and returns how many: fewer only if the pool has no more.
//
// Returns 0 with a text for misuse (null).
size_t netmem_shared_pool_alloc(const struct netmem_shared_pool *pool,
                                struct netmem_frag *frags,
                                size_t n);

// Allocates a page, and sleeps until there is one. Threads that wait are served in their order.
//
// The page comes from this pool or from the region. Pages that another pool on the region keeps in
// its cache are not found: give pools that wait a region of their own.
//
// The pool must not be closed while a thread waits: release pages, so that all waiting threads
// return, and close it then.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_SYSTEM (the kernel has no membarrier).
enum netmem_status netmem_shared_pool_wait(const struct netmem_shared_pool *pool,
                                           struct netmem_frag *frag);

// Counts of the pool. While other threads use it, each is of a moment of its own.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE.
enum netmem_status netmem_shared_pool_get_stats(const struct netmem_shared_pool *pool,
                                                struct netmem_shared_pool_stats *stats);

// Ends the pool. Its pages may still be held: they return to the region when they are released.
// `held` gets how many, unless it is null.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE.
enum netmem_status netmem_shared_pool_close(struct netmem_shared_pool *pool, uint64_t *held);

// The reason of the last failure on this thread, in one line without a newline; empty if there was
// none. Valid until the next failure on this thread. Never null.
const char *netmem_error_text(void);

// The name of a status, such as "NETMEM_ERR_NULL". `status` is an int, so that a value that this
// library does not know is answered, too. Static; never null.
const char *netmem_status_name(int32_t status);

// Makes a device. Frames of the guest are received into pages of `region`, whose handle may be
// closed. It serves no guest yet: see netmem_virtio_device_listen.
//
// The region needs the pages that the caller holds, and in each direction those of frames that
// wait. Frames of the guest hold up to 256 pages, and those of one frame more: at most 256 parts,
// if it is cut, or 17 pages of 4 KiB. The rest waits in the guest's ring. Up to 256 frames wait for
// the guest, each in one page of the region at most.
//
// The guest and its front end (the virtual machine monitor) are not trusted. What they write to
// rings and headers is checked, a guest that breaks a rule stops its ring alone, and frames are
// copied before anything reads them.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_ARGUMENT (mtu),
// NETMEM_ERR_NO_MEMORY, NETMEM_ERR_SYSTEM (too few descriptors).
enum netmem_status netmem_virtio_device_create(const struct netmem_region *region,
                                               const struct netmem_virtio_device_options *options,
                                               struct netmem_virtio_device **device);

// Listens on a vhost-user socket, and serves one front end after another, by a thread of the
// library, until the device is closed. That thread carries out their messages; frames are moved by
// the calls of the caller's thread. A socket that no process listens on is replaced. Once for a
// device.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STATE (it listens
// already), NETMEM_ERR_BUSY (another process listens there, or a file that is no socket has the
// path), NETMEM_ERR_NOT_FOUND, NETMEM_ERR_PRIVILEGE, NETMEM_ERR_SYSTEM.
enum netmem_status netmem_virtio_device_listen(const struct netmem_virtio_device *device,
                                               const char *socket);

// Serves the front end at the other end of `fd`, a connected socket, by a thread of the library,
// until it hangs up. For a front end that listens, and for sockets that the caller has accepted.
// `fd` is duplicated: the caller closes it. If the device listens, too, those that connect to its
// socket meanwhile wait.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (`fd` is no
// stream socket), NETMEM_ERR_BUSY (another front end is connected, or has hung up a moment ago: the
// device's descriptor is readable when the next can be served), NETMEM_ERR_SYSTEM.
enum netmem_status netmem_virtio_device_serve(const struct netmem_virtio_device *device,
                                              int32_t fd);

// Why a front end was dropped, if one was since the last call: NETMEM_ERR_SYSTEM, with the reason
// as the text; else NETMEM_OK. Each reason is told once; of several, the last. It is no error if a
// front end hangs up. The device's descriptor is readable after a reason was stored, so that a
// thread which calls this after each sleep is told each.
//
// Errors besides: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_PANIC.
enum netmem_status netmem_virtio_device_check(const struct netmem_virtio_device *device);

// A pass over the device's rings: delivers frames of netmem_virtio_device_send to the guest, and
// receives up to `n` fragments of frames of the guest. It does not wait. `received` gets how many
// fragments; 0 if there is no frame. The caller owns them. The variables are not read: what they
// hold is to be released before.
//
// The rules of `flags` are those of netmem_xsk_rx_receive, but that a frame which does not fit one
// page of the region is dropped without flags, and counted. Frames have whole checksums, and are no
// segments. Those that are longer than a page are rare: a guest with an MTU of more.
//
// Two copies of each frame: out of the guest's memory, and into the page. No system call, unless
// the guest waits for an interrupt.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (`n` is too
// small for `flags`).
enum netmem_status netmem_virtio_device_receive(struct netmem_virtio_device *device,
                                                struct netmem_frag *frags,
                                                uint8_t *flags,
                                                size_t n,
                                                size_t *received);

// Queues `n` fragments, of any memory, as frames for the guest, of 14 to 65553 bytes each. The next
// netmem_virtio_device_receive delivers them. `sent`, which is always written, gets how many were
// queued: whole frames, in order. Their variables are empty. The other fragments stay with the
// caller. With NETMEM_OK they are fewer than `n` if 256 frames wait: netmem_virtio_device_receive
// delivers them, then send the rest. If the guest posts no buffers, send it later or release it.
// With an error, the first of them is of the frame that caused it.
//
// Without `flags` (null) each fragment is a frame. With `flags`, NETMEM_FRAG_MORE in the flags of
// a fragment says that the frame goes on in the next one. Frames have whole checksums.
//
// While no guest is there whose receive ring is served, frames are dropped and counted, as on a
// link without a partner.
//
// A frame of one fragment of the device's region, with 12 bytes in front of it and no other holder,
// is copied once, into the guest's buffers; another one twice. Fragments that
// netmem_virtio_device_receive returned are so.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (an empty
// fragment, wrong flags), NETMEM_ERR_UNSENDABLE (length).
enum netmem_status netmem_virtio_device_send(struct netmem_virtio_device *device,
                                             struct netmem_frag *frags,
                                             const uint8_t *flags,
                                             size_t n,
                                             size_t *sent);

// The descriptor on which to wait for work, with poll, select or epoll, for POLLIN: readable after
// netmem_virtio_device_arm when the guest has sent frames, or has posted buffers for those that
// wait, and when a front end comes, goes, or changes something. It is the device's, and the same
// until it is closed. Never read, write or close it. -1 with a text for misuse.
int32_t netmem_virtio_device_fd(const struct netmem_virtio_device *device);

// Makes a pass over the rings, asks the guest for notifications, and writes to `waits` whether to
// sleep: false if there is work already. A thread that was woken calls
// netmem_virtio_device_disarm and netmem_virtio_device_receive.
//
// Note: a front end that shares no kick descriptor for a ring sends no notifications. While it is
// served, `waits` is false. A program that must not spin for such a guest sleeps for a time.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_virtio_device_arm(struct netmem_virtio_device *device, bool *waits);

// Forgets the events until now, so that the descriptor is readable again with the next. Two system
// calls. Misuse leaves a text.
void netmem_virtio_device_disarm(struct netmem_virtio_device *device);

// Counts of the device, for all its guests together.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_virtio_device_get_stats(struct netmem_virtio_device *device,
                                                  struct netmem_virtio_device_stats *stats);

// Closes the device: hangs up, and waits for the library's threads of it. Frames that wait in
// either direction are dropped. The socket's path is removed. Fragments that the caller holds stay
// valid. `stats` gets the final counts, unless it is null. If it has a wrong size, the device
// stays.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_virtio_device_close(struct netmem_virtio_device *device,
                                              struct netmem_virtio_device_stats *stats);

// Installs a handler of SIGBUS for the process, once. A front end that shortens its memory then
// stops its rings; without the handler, or netmem_virtio_device_options.require_sealed, the process
// ends. Other faults get the action that was there before. A program that sets its own handler
// later calls, for other faults, the one that sigaction returned to it.
//
// Errors: NETMEM_ERR_SYSTEM.
enum netmem_status netmem_sigbus_install(void);

// Connects the driver to a virtio-net device behind a vhost-user socket: netmem_virtio_device, the
// command `netmem device`, DPDK, Open vSwitch. Writes as many receive and transmit queues to `rx`
// and `tx` as `pairs` says, all of which are in use. Each may be used by a thread of its own. Close
// `net` and all queues, in any order.
//
// The device is another process, and has the memory of all fragments mapped as long as a queue is
// open. Warning: it can change bytes of a received frame at any time. Copy what is checked and then
// used, such as lengths of headers. What the device writes to its rings is checked by the library.
//
// No offload is negotiated: received frames have whole checksums and are no segments, and frames
// that are sent need to be so.
//
// Waits for the device, for 3 s at each message. If the device is of the same process, another
// thread runs it.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE (share), NETMEM_ERR_ARGUMENT
// (mode, ring, pairs, max_frame, fd, pages, lock), NETMEM_ERR_NOT_FOUND (no process listens, or the
// device has fewer queue pairs), NETMEM_ERR_BUSY (the device refuses another front end),
// NETMEM_ERR_UNSUPPORTED (the device lacks a feature), NETMEM_ERR_NO_MEMORY, NETMEM_ERR_NO_PAGES
// (`tx_pages`), NETMEM_ERR_PRIVILEGE, NETMEM_ERR_SYSTEM (the device does not answer, or not as a
// device does; also after 3 s if it serves one front end after another, as
// netmem_virtio_device_listen does, and has one). Nothing is open then.
enum netmem_status netmem_virtio_connect(const struct netmem_virtio_options *options,
                                         struct netmem_virtio_net **net,
                                         struct netmem_virtio_rx **rx,
                                         struct netmem_virtio_tx **tx);

// Allocates up to `n` pages to send from, of `tx_pages`, and returns how many: fewer only if there
// are no more. A fragment is a page but its first 64 bytes, where the header for the device will
// be: truncate it to the frame. Its bytes are what the last user left. Any thread, several at a
// time. Returns 0 with a text for misuse, and if there are no `tx_pages`.
size_t netmem_virtio_net_alloc(const struct netmem_virtio_net *net,
                               struct netmem_frag *frags,
                               size_t n);

// Whether the device still has its end of the connection. False for misuse. A system call. Waits
// while another thread reconnects or closes a queue: for a device that does not answer, 3 s at each
// message.
bool netmem_virtio_net_is_connected(const struct netmem_virtio_net *net);

// Connects the queues to another device, which listens on `socket`, when the first has gone:
// NETMEM_ERR_STOPPED. The queues stay on their threads, and go on with their next call. Frames that
// were not received, or not confirmed as sent, are lost, and counted. End the process of the first
// device before: it may still write to pages that it had. Waits as netmem_virtio_connect does. Any
// thread.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, and those of netmem_virtio_connect. The queues are as
// they were then.
enum netmem_status netmem_virtio_net_reconnect(const struct netmem_virtio_net *net,
                                               const char *socket);

// Gives up the handle. The queues stay open, and the connection is closed with the last of them.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE.
enum netmem_status netmem_virtio_net_close(struct netmem_virtio_net *net);

// Receives up to `n` fragments of frames that have arrived, posts new buffers, and does not wait.
// `received` gets how many; 0 if no frame has arrived. The caller owns the fragments. The
// variables are not read: what they hold is to be released before.
//
// The rules of `flags` are those of netmem_xsk_rx_receive: without them (null) each fragment is a
// frame; with them, NETMEM_FRAG_MORE says that the frame goes on in the next fragment. In
// NETMEM_VIRTIO_SMALL each frame is one fragment.
//
// No lock for a frame. A system call if the device waits for buffers.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (`n` is too
// small for `flags`, or a frame waits and there are no `flags`), NETMEM_ERR_STOPPED (the device has
// closed the connection, or has broken a rule of the ring, and no frame is left).
enum netmem_status netmem_virtio_rx_receive(struct netmem_virtio_rx *rx,
                                            struct netmem_frag *frags,
                                            uint8_t *flags,
                                            size_t n,
                                            size_t *received);

// Releases `n` fragments on the thread of the queue, and empties the variables. Pages of this
// queue go to its cache, the cheapest way. Others go where they belong. Empty ones are ignored.
// netmem_frags_release does it on any thread.
//
// Misuse (null, another thread) releases nothing, and leaves a text.
void netmem_virtio_rx_release(struct netmem_virtio_rx *rx, struct netmem_frag *frags, size_t n);

// The descriptor on which to wait for frames, with poll, select or epoll, for POLLIN: readable
// after netmem_virtio_rx_arm when frames have arrived, or the device has gone. It is the queue's,
// and the same until it is closed. Never read, write or close it. -1 with a text for misuse.
int32_t netmem_virtio_rx_fd(const struct netmem_virtio_rx *rx);

// Asks for a wake-up, and writes to `waits` whether to sleep: false if there are frames already,
// and if the device has too few buffers, because the caller holds the pages. A thread that was
// woken calls netmem_virtio_rx_disarm and receives. A few system calls.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STOPPED (once for each
// connection that has ended, and then it waits for netmem_virtio_net_reconnect; after a broken rule
// of the ring, each time until then).
enum netmem_status netmem_virtio_rx_arm(struct netmem_virtio_rx *rx, bool *waits);

// Ends the request for a wake-up: without it the device wakes the descriptor for each group of
// frames. Misuse leaves a text.
void netmem_virtio_rx_disarm(struct netmem_virtio_rx *rx);

// Counts of the queue.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_virtio_rx_get_stats(struct netmem_virtio_rx *rx,
                                              struct netmem_virtio_rx_stats *stats);

// Closes the queue: its ring is stopped, and frames that wait are dropped. Its pages return to the
// memory of the device's handles; those that the caller holds, when they are released. If the
// device does not confirm within 3 s that it has stopped, the pages that it had are never used
// again. `stats` gets the final counts, unless it is null: `in_flight` are the pages that the
// caller holds, `unread` has the frames that were in the ring. If it has a wrong size, the queue
// stays.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_virtio_rx_close(struct netmem_virtio_rx *rx,
                                          struct netmem_virtio_rx_stats *stats);

// Sends `n` fragments of the device's memory: those that its queues have received, or those of a
// driver that shares the memory, and those of netmem_virtio_net_alloc. `sent`, which is always
// written, gets how many were sent: whole frames, in order. Their variables are empty. The pages
// return when the device is done with them, and netmem_virtio_tx_complete was called. The other
// fragments stay with the caller. With NETMEM_OK they are fewer than `n` if the queue is full:
// send the rest later. Else the first of them is of the frame that caused the error.
//
// Without `flags` (null) each fragment is a frame. With `flags`, NETMEM_FRAG_MORE in the flags of
// a fragment says that the frame goes on in the next one.
//
// A fragment with 12 bytes in front of it and no other holder is sent as it is; to another one the
// header is sent from elsewhere. A system call if the device waits for frames.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (an empty
// fragment, wrong flags), NETMEM_ERR_UNSENDABLE (other memory, too many fragments, or not 14 to
// 65553 bytes), NETMEM_ERR_STOPPED (the device has closed the connection, or has broken a rule of
// the ring).
enum netmem_status netmem_virtio_tx_send(struct netmem_virtio_tx *tx,
                                         struct netmem_frag *frags,
                                         const uint8_t *flags,
                                         size_t n,
                                         size_t *sent);

// Returns the pages of frames that the device is done with, and how many frames these are. With
// `rx`, a queue of the same device and thread, its pages return to its cache, the cheapest way;
// without (null) they return as on any thread. Call it in each turn of a loop. Misuse returns 0,
// with a text.
size_t netmem_virtio_tx_complete(struct netmem_virtio_tx *tx, struct netmem_virtio_rx *rx);

// The descriptor on which to wait for completions, with poll, select or epoll, for POLLIN:
// readable after netmem_virtio_tx_arm when the device is done with frames, or has gone. It is the
// queue's, and the same until it is closed. Never read, write or close it. -1 with a text for
// misuse.
int32_t netmem_virtio_tx_fd(const struct netmem_virtio_tx *tx);

// Asks for a wake-up, and writes to `waits` whether to sleep: false if there are completions
// already. A thread that was woken calls netmem_virtio_tx_disarm and netmem_virtio_tx_complete. A
// few system calls.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STOPPED (once for each
// connection that has ended, and then it waits for netmem_virtio_net_reconnect; after a broken rule
// of the ring, each time until then).
enum netmem_status netmem_virtio_tx_arm(struct netmem_virtio_tx *tx, bool *waits);

// Ends the request for a wake-up. Misuse leaves a text.
void netmem_virtio_tx_disarm(struct netmem_virtio_tx *tx);

// Counts of the queue.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_virtio_tx_get_stats(struct netmem_virtio_tx *tx,
                                              struct netmem_virtio_tx_stats *stats);

// Closes the queue: its ring is stopped, and the pages of frames that the device has return. It may
// have sent these frames, or not: to know, complete until nothing is outstanding. Waits for the
// device, for 3 s at most.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_virtio_tx_close(struct netmem_virtio_tx *tx);

// Opens a queue of an interface: a socket with a receive queue and a transmit queue, which may be
// used by two threads. Frames arrive when netmem_xdp_program_insert has put `rx` into a program on
// the interface. Close both. The UMEM's handle may be closed before.
//
// Needs CAP_NET_RAW, and locked memory: see netmem_umem_create. An AF_XDP socket of this queue
// that was just closed is waited for, for half a second at most.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_ARGUMENT (mode,
// size of a ring), NETMEM_ERR_NOT_FOUND (interface, queue), NETMEM_ERR_NO_PAGES (fewer than
// `fill`), NETMEM_ERR_NO_MEMORY (RLIMIT_MEMLOCK), NETMEM_ERR_PRIVILEGE, NETMEM_ERR_BUSY (another
// socket), NETMEM_ERR_UNSUPPORTED, NETMEM_ERR_SYSTEM. Nothing is open then.
enum netmem_status netmem_xsk_open(const struct netmem_umem *umem,
                                   const struct netmem_xsk_options *options,
                                   struct netmem_xsk_rx **rx,
                                   struct netmem_xsk_tx **tx);

// Attaches a program to an interface of this thread's network namespace. It is detached when the
// handle is closed, or the process ends. Frames of queues that no netmem_xsk_rx was put into go to
// the kernel.
//
// With `pinned_map` alone nothing is attached: the handle puts queues into the map of a program
// that is attached to the interface, or will be. It is an error if a program on another interface
// uses the map, and none on this one; that is not found without CAP_SYS_ADMIN.
//
// Needs CAP_BPF and CAP_NET_ADMIN; with rules also CAP_PERFMON.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_ARGUMENT (rules, mode, pinned
// objects, a map of another interface), NETMEM_ERR_NOT_FOUND, NETMEM_ERR_PRIVILEGE,
// NETMEM_ERR_BUSY (another program is attached), NETMEM_ERR_UNSUPPORTED, NETMEM_ERR_SYSTEM.
enum netmem_status netmem_xdp_program_attach(const char *interface,
                                             const struct netmem_xdp_options *options,
                                             struct netmem_xdp_program **program);

// Redirects the frames of a receive queue to `rx`, which is a queue of the program's interface:
// the kernel drops frames that are redirected to a queue of another one. The queue before it gets
// no more frames. When `rx` is closed, its frames go to the kernel again, also if the program's
// handle was closed before. Call it on the thread that uses `rx`, or before any thread does.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_NOT_FOUND (the
// program's map has no such queue), NETMEM_ERR_SYSTEM.
enum netmem_status netmem_xdp_program_insert(const struct netmem_xdp_program *program,
                                             const struct netmem_xsk_rx *rx);

// Ends the handle: the program is detached, if the handle has attached it, and all frames of the
// interface go to the kernel. A queue that was put into a map of the caller's own stays in it
// until its `rx` is closed. The queues stay open.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE.
enum netmem_status netmem_xdp_program_close(struct netmem_xdp_program *program);

// Receives up to `n` fragments of frames that have arrived, posts new chunks, and does not wait.
// `received` gets how many; 0 if no frame has arrived. The caller owns the fragments. The
// variables are not read: what they hold is to be released before.
//
// Without `flags` (null) each fragment is a frame: a frame of several chunks is copied into one
// page, or dropped and counted if none has room for it. With `flags`, which has room for `n`, too,
// a frame is not copied: NETMEM_FRAG_MORE in the flags of a fragment says that the frame goes on
// in the next one. `n` is at least NETMEM_FRAME_FRAGS then. A frame is never in two groups.
//
// A frame for which a call with `flags` had no room waits for the next call. While it waits, a
// call without `flags` is an error, and receives nothing: call with `flags` again until at most
// `n` - NETMEM_FRAME_FRAGS fragments come.
//
// No atomic and no lock for a frame. No system call, unless the driver asks for a wake-up.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (`n` is too
// small for `flags`, or a frame waits and there are no `flags`), NETMEM_ERR_STOPPED.
enum netmem_status netmem_xsk_rx_receive(struct netmem_xsk_rx *rx,
                                         struct netmem_frag *frags,
                                         uint8_t *flags,
                                         size_t n,
                                         size_t *received);

// Releases `n` fragments on the thread of the queue, and empties the variables. Pages of this
// queue go to its cache, the cheapest way. Others go where they belong. Empty ones are ignored.
// netmem_frags_release does it on any thread.
//
// Misuse (null, another thread) releases nothing, and leaves a text.
void netmem_xsk_rx_release(struct netmem_xsk_rx *rx, struct netmem_frag *frags, size_t n);

// Copies the `n` bytes in front of a received frame: the metadata that the caller's own XDP
// program wrote there (bpf_xdp_adjust_meta). `frag` is the first fragment of the frame, as it was
// received: the others have no metadata, and no other holder writes to its page. A frame that was
// copied into one page has its metadata.
//
// The number and the meaning of the bytes are an agreement with that program. Without metadata
// they are old bytes. What the program wrote is in the frame's chunk. Where several chunks share a
// page, bytes farther in front can be of another frame, into which the kernel may be writing.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (empty), NETMEM_ERR_RANGE (more than 256, or than
// there are in front of it in its page).
enum netmem_status netmem_xsk_metadata(const struct netmem_frag *frag, void *to, size_t n);

// The descriptor on which to wait for frames, with poll, select or epoll, for POLLIN: readable
// after netmem_xsk_rx_arm when frames have arrived, or the interface is gone. It is the queue's,
// and the same until it is closed. Never read, write or close it. -1 with a text for misuse.
int32_t netmem_xsk_rx_fd(const struct netmem_xsk_rx *rx);

// Asks for a wake-up, and writes to `waits` whether to sleep: false if there are frames already,
// and if the kernel has no chunk to receive into, because the caller holds all pages. A thread
// that was woken calls netmem_xsk_rx_disarm and receives. A thread that holds all pages releases
// fragments before it asks, or it turns without a sleep. A few system calls.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STOPPED,
// NETMEM_ERR_SYSTEM.
enum netmem_status netmem_xsk_rx_arm(struct netmem_xsk_rx *rx, bool *waits);

// Ends the request for a wake-up: without it the kernel wakes the descriptor for each group of
// frames. One system call if it was armed. Misuse leaves a text.
void netmem_xsk_rx_disarm(struct netmem_xsk_rx *rx);

// Whether the device writes frames into the pages itself (zero-copy mode). False for misuse.
bool netmem_xsk_rx_is_zero_copy(const struct netmem_xsk_rx *rx);

// Counts of the queue. A system call.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD,
// NETMEM_ERR_SYSTEM.
enum netmem_status netmem_xsk_rx_get_stats(struct netmem_xsk_rx *rx,
                                           struct netmem_xsk_rx_stats *stats);

// Closes the queue: its frames go to the kernel again, and frames that wait are dropped. Its pages
// return to the region. Those that the caller holds return when they are released. Chunks that the
// kernel has return when it lets the queue be opened again, or when the interface is gone. The
// socket is closed with the second of its two queues. `stats` gets the final counts, unless it is
// null: `in_flight` are the pages that the caller holds, `unpolled` the frames that were in the
// ring. If it has a wrong size, the queue stays.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_xsk_rx_close(struct netmem_xsk_rx *rx, struct netmem_xsk_rx_stats *stats);

// Sends `n` fragments, of any pool on the UMEM's region, and tells the kernel. `sent`, which is
// always written, gets how many were sent: whole frames, in order. Their variables are empty. The
// pages return to their pools when the kernel is done with them, and netmem_xsk_tx_complete was
// called. The other fragments stay with the caller. With NETMEM_OK they are fewer than `n` if the
// queue is full: send the rest later. Else the first of them is of the frame that caused the
// error.
//
// Without `flags` (null) each fragment is a frame. With `flags`, NETMEM_FRAG_MORE in the flags of
// a fragment says that the frame goes on in the next one.
//
// The kernel adds no checksum. A system call, unless a driver in zero-copy mode is working.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (an empty
// fragment, wrong flags), NETMEM_ERR_UNSENDABLE (another region, no bytes, too many fragments),
// NETMEM_ERR_STOPPED.
enum netmem_status netmem_xsk_tx_send(struct netmem_xsk_tx *tx,
                                      struct netmem_frag *frags,
                                      const uint8_t *flags,
                                      size_t n,
                                      size_t *sent);

// Returns the pages of frames that the kernel has sent, and how many descriptors these are. With
// `rx`, a queue of the same thread, its pages return to its cache, the cheapest way; without
// (null) they return as on any thread. Call it in each turn of a loop. Misuse returns 0, with a
// text.
size_t netmem_xsk_tx_complete(struct netmem_xsk_tx *tx, struct netmem_xsk_rx *rx);

// The descriptor on which to wait for completions, with poll, select or epoll, for POLLIN:
// readable after netmem_xsk_tx_arm when the kernel is done with frames, or the interface is gone.
// It is the queue's, and the same until it is closed. Never read, write or close it. -1 with a
// text for misuse.
int32_t netmem_xsk_tx_fd(const struct netmem_xsk_tx *tx);

// Asks for a wake-up, and writes to `waits` whether to sleep: false if there are completions
// already, or frames that the kernel does not send now. A thread that was woken calls
// netmem_xsk_tx_disarm and netmem_xsk_tx_complete. A few system calls.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STOPPED,
// NETMEM_ERR_SYSTEM.
enum netmem_status netmem_xsk_tx_arm(struct netmem_xsk_tx *tx, bool *waits);

// Ends the request for a wake-up. One system call if it was armed. Misuse leaves a text.
void netmem_xsk_tx_disarm(struct netmem_xsk_tx *tx);

// Counts of the queue.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_xsk_tx_get_stats(struct netmem_xsk_tx *tx,
                                           struct netmem_xsk_tx_stats *stats);

// Closes the queue. It waits for frames that the kernel has not sent, for a tenth of a second at
// most. Pages that the kernel still has return when it lets the queue be opened again, when the
// UMEM ends, or in netmem_xsk_reclaim. The socket is closed with the second of its two queues. If
// the UMEM's handle is closed, the last queue of the UMEM waits as netmem_umem_close does.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_xsk_tx_close(struct netmem_xsk_tx *tx);

// Makes a UMEM of all pages of a region. The kernel pins them when the first queue is opened:
// without CAP_IPC_LOCK they count towards RLIMIT_MEMLOCK. The region's handle may be closed.
//
// Queues of one UMEM share its registration, and have the mode of the first one.
//
// Warning: in zero-copy mode the device may write to its chunks for a moment after the queue was
// closed. Memory of netmem_region_create stays with the kernel until then. Foreign memory
// (netmem_region_from_memory) does not: its `release` can be called before, so that it must not be
// used for anything else. Open queues on foreign memory with NETMEM_XSK_COPY.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_ARGUMENT (chunk,
// headroom).
enum netmem_status netmem_umem_create(const struct netmem_region *region,
                                      const struct netmem_umem_options *options,
                                      struct netmem_umem **umem);

// Gives up the handle. The memory stays registered until the last queue is closed. If no queue is
// left, and pages of sent frames are not back, it waits for the kernel to release them, for half a
// second at most.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE.
enum netmem_status netmem_umem_close(struct netmem_umem *umem);

// Returns sent pages of queues and UMEMs that were closed, if the kernel has released them
// meanwhile: the receiver of a frame can hold it for long. Returns how many are still kept. Needs
// CAP_NET_RAW, and the network namespace of the interface. Any thread.
size_t netmem_xsk_reclaim(void);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* NETMEM_H */
