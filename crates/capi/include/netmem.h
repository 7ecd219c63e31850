/* Netmem for C and C++: page pools, fragments, reference counts, AF_XDP queues and TCP.
 * MIT OR Apache-2.0.
 *
 * Written by cbindgen from the crate netmem-capi. `install.sh --header` writes it anew.
 *
 * A function that can fail returns a netmem_status. netmem_error_text() is the reason of the last
 * failure on the calling thread. Results are written through the last arguments, and only if the
 * status is NETMEM_OK; the functions that differ say so.
 *
 * Ownership: *_create, *_attach, *_open, *_listen, *_accept and *_connect write handles that the
 * caller owns, each of which ends with *_close, *_abort or *_destroy. A netmem_frag is owned by the
 * variable that holds it. Copying the structure does not make another holder: netmem_frag_share
 * does.
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
 *   netmem_stack           the thread that opened it, until it is closed
 *   netmem_tcp_listener,   the thread of the stack
 *   netmem_tcp
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
 *   writing to a fragment that was sent          undefined: the kernel reads it, and the page is of
 *   through a copy of the netmem_frag            another frame later
 *   a frame of several fragments without flags   copied into one page, or dropped and counted
 *   reading, writing or closing the descriptor   undefined
 *   of a queue or a stack
 *   a netmem_stack, netmem_tcp_listener or       library built with debug assertions:
 *   netmem_tcp on another thread                 NETMEM_ERR_THREAD; otherwise undefined
 *   a listener or a connection after its stack   accept, is_connected, receive, send and write:
 *   was closed                                   NETMEM_ERR_CLOSED; other calls are as always
 *   netmem_tcp_send of another stack's fragment  NETMEM_ERR_UNSENDABLE; it stays with the caller
 *   writing to a fragment that a connection has  undefined: the peer gets other bytes
 *   sent, through a copy of the netmem_frag
 *   foreign memory under a queue in zero-copy    undefined: see netmem_umem_create
 *   mode
 *   a callback that throws, or jumps out         the process aborts
 *
 * Callbacks: each type of callback states on which thread it runs, and what it may call. */


#ifndef NETMEM_H
#define NETMEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>


// In netmem_event.flags: receive again, or accept again. There is something, or the end.
#define NETMEM_EVENT_READ 1

// In netmem_event.flags: send or write again. There is room, or the connection has been made, or
// it has ended.
#define NETMEM_EVENT_WRITE 2

// In the flags of a fragment: the frame goes on in the next fragment of the array.
#define NETMEM_FRAG_MORE 1

// The most fragments that a frame has.
#define NETMEM_FRAME_FRAGS 18

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
  // The pool ended while the thread waited, or the stack of the listener or connection was
  // closed or shut down, or netmem_stack_open_xsk failed after it had closed the queues.
  NETMEM_ERR_CLOSED = 11,
  // The count is killed already, or not killed, or has reached zero.
  NETMEM_ERR_STATE = 12,
  // The library panicked. It is a defect of the library: report it with the text.
  NETMEM_ERR_PANIC = 13,
  // The queue or the stack has stopped, and neither receives nor sends any more: its interface or
  // tap is gone, or the kernel wrote a wrong value to a ring. Close it.
  NETMEM_ERR_STOPPED = 14,
  // The queue will never send this frame, or the connection this fragment.
  NETMEM_ERR_UNSENDABLE = 15,
  // A privilege is missing. The text names it.
  NETMEM_ERR_PRIVILEGE = 16,
  // The interface has an XDP program already, or its queue an AF_XDP socket, or another process
  // has the tap.
  NETMEM_ERR_BUSY = 17,
  // There is no such interface, queue or file.
  NETMEM_ERR_NOT_FOUND = 18,
  // The kernel or the interface's driver does not support what was asked for.
  NETMEM_ERR_UNSUPPORTED = 19,
  // The peer sends no more: the end of the stream.
  NETMEM_ERR_END = 30,
  // The peer's host refused the connection.
  NETMEM_ERR_REFUSED = 31,
  // The peer reset the connection.
  NETMEM_ERR_RESET = 32,
  // The peer did not answer in time.
  NETMEM_ERR_TIMED_OUT = 33,
  // No route leads to the peer, or a router or the peer's host reports that it cannot be
  // reached.
  NETMEM_ERR_UNREACHABLE = 34,
  // This direction of the connection was shut down by the program.
  NETMEM_ERR_SHUT_DOWN = 35,
  // Another listener or connection of the stack has the port, or no port is left.
  NETMEM_ERR_IN_USE = 36,
  // The stack has as many connections as its options allow.
  NETMEM_ERR_TOO_MANY = 37,
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

// A TCP/IP stack with addresses of its own, on a tap or on an AF_XDP queue.
typedef struct netmem_stack netmem_stack;

// A TCP connection.
typedef struct netmem_tcp netmem_tcp;

// A socket that accepts connections.
typedef struct netmem_tcp_listener netmem_tcp_listener;

// A region from whose pages AF_XDP queues receive and send.
typedef struct netmem_umem netmem_umem;

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

// An IP address and a port.
typedef struct netmem_endpoint {
  // The bytes of the address: 4, 16, or 0: no address, which means each address of the stack
  uint8_t address_length;
  // Zero.
  uint8_t reserved;
  // The port, in the CPU's byte order; 0: one that is free
  uint16_t port;
  // The address, in network byte order
  uint8_t address[16];
} netmem_endpoint;

// How a connection behaves: one that netmem_tcp_connect makes, or those that a listener accepts.
// Set `size` to sizeof(netmem_tcp_options), and the rest to zero where the default will do.
typedef struct netmem_tcp_options {
  // sizeof(netmem_tcp_options)
  size_t size;
  // netmem_tcp_connect: from which address and port. Null: the stack chooses both.
  const struct netmem_endpoint *local;
  // netmem_tcp_listen: connections that wait to be accepted, at most; 0: 1024. Further peers try
  // again.
  uint32_t backlog;
  // The largest receive window, in bytes; 0: 6 MiB.
  uint32_t receive_buffer;
  // Bytes that were sent and not acknowledged, at most; 0: 1 MiB. At most 1 GiB.
  uint32_t send_buffer;
  // Milliseconds that sent data may stay unacknowledged; 0: as long as it is sent again, which
  // is fifteen times.
  uint32_t user_timeout;
  // Seconds without traffic after which a peer is probed, and seconds between two probes; after
  // nine the connection ends. 0: an idle peer is not probed.
  uint32_t keep_alive;
  // netmem_tcp_connect: how often an unanswered SYN is sent again; 0: seven times, which takes
  // minutes.
  uint32_t syn_retries;
  // Not zero: small segments are sent at once, and do not wait for an acknowledgement (no
  // Nagle).
  uint8_t nodelay;
  // Zero.
  uint8_t reserved[7];
} netmem_tcp_options;

// How a stack is opened. Set `size` to sizeof(netmem_stack_options), and the rest to zero where
// the default will do.
typedef struct netmem_stack_options {
  // sizeof(netmem_stack_options)
  size_t size;
  // The name of the tap, which is made if there is none; null for netmem_stack_open_xsk.
  const char *tap;
  // The addresses of the stack, each with the length of its prefix, separated by spaces:
  // "192.0.2.2/24", or "192.0.2.2/24 2001:db8::2/64".
  const char *addresses;
  // The routers to other networks, at most one of each family, separated by spaces:
  // "192.0.2.1". Null: only stations of the networks of `addresses` can be reached.
  const char *gateways;
  // The most received pages that wait for the program; 0: 512. Payload beyond them is dropped,
  // and the peer sends it again. At most 2048 on a tap. On AF_XDP the UMEM has these, those that
  // the kernel has to receive into, and a quarter of its pages, 2048 at most, which the stack
  // takes for headers and copied payload. netmem_stack_alloc allocates as many from the rest.
  uint32_t pages;
  // The most connections, closing ones included; 0: 65536.
  uint32_t connections;
  // Bytes of an IP packet; 0: 1500, and for netmem_stack_open_xsk the interface's. The kernel's
  // end of a tap keeps its own, which is set by `ip link set`.
  uint16_t mtu;
  // Zero.
  uint8_t reserved[6];
} netmem_stack_options;

// A listener or a connection that can do again what it could not do before.
typedef struct netmem_event {
  // sizeof(netmem_event)
  size_t size;
  // the connection; null if it is a listener's event
  struct netmem_tcp *connection;
  // the listener; null if it is a connection's event
  struct netmem_tcp_listener *listener;
  // what the program has set as the context of the connection or the listener
  void *context;
  // NETMEM_EVENT_READ, NETMEM_EVENT_WRITE, or both
  uint32_t flags;
  // zero
  uint32_t reserved;
} netmem_event;

// What a stack received, sent and lost. Set `size` to sizeof(netmem_stack_stats).
typedef struct netmem_stack_stats {
  // sizeof(netmem_stack_stats)
  size_t size;
  // frames received; segments that were merged count as one
  uint64_t received;
  // frames posted to the device or the kernel
  uint64_t sent;
  // frames whose headers are wrong, or of unknown protocols
  uint64_t malformed;
  // frames for other stations
  uint64_t foreign;
  // packets whose transport checksum is wrong
  uint64_t wrong_checksum;
  // bytes that netmem_tcp_write copied into pages
  uint64_t copied_sent;
  // resets sent for segments of no connection
  uint64_t resets;
  // frames not sent because there was no page for their headers
  uint64_t no_page;
  // packets dropped because their next hop did not answer
  uint64_t unresolved;
  // payload dropped because the program holds too many received pages
  uint64_t short_of_pages;
  // acknowledgements dropped because the accept queue was full
  uint64_t accept_overflows;
  // connections that ended before they were accepted
  uint64_t ended_unaccepted;
  // connections now, those that are closing included
  uint64_t connections;
  // of these, connections in TIME-WAIT
  uint64_t time_wait;
  // received pages that wait for the program now
  uint64_t pages;
  // pages for sending that are held or sent now
  uint64_t send_pages;
} netmem_stack_stats;

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

// Begins to connect to `remote`, and returns at once. The connection has an event with
// NETMEM_EVENT_WRITE when it has been made, or has failed. What is sent before is sent then.
// `options` may be null. The connection belongs to the stack's thread.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD,
// NETMEM_ERR_ARGUMENT (also a local address that is none of the stack's, or a remote one of zeros,
// or port 0), NETMEM_ERR_UNREACHABLE (no route), NETMEM_ERR_IN_USE, NETMEM_ERR_TOO_MANY,
// NETMEM_ERR_CLOSED (the stack was shut down).
enum netmem_status netmem_tcp_connect(struct netmem_stack *stack,
                                      const struct netmem_endpoint *remote,
                                      const struct netmem_tcp_options *options,
                                      struct netmem_tcp **connection);

// Writes whether the connection has been made. False while the handshake is under way.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD; and why the connection was not
// made, or has ended: NETMEM_ERR_REFUSED, NETMEM_ERR_RESET, NETMEM_ERR_TIMED_OUT,
// NETMEM_ERR_UNREACHABLE, NETMEM_ERR_STOPPED, NETMEM_ERR_SHUT_DOWN (netmem_tcp_shutdown, before it
// was made), NETMEM_ERR_CLOSED (the stack).
enum netmem_status netmem_tcp_is_connected(struct netmem_tcp *connection, bool *connected);

// Both ends of the connection. Each may be null.
//
// Errors: NETMEM_ERR_NULL (the connection), NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_tcp_endpoints(struct netmem_tcp *connection,
                                        struct netmem_endpoint *local,
                                        struct netmem_endpoint *remote);

// Sets what the connection's events have as their context; null before. The program frees it.
//
// Errors: NETMEM_ERR_NULL (the connection), NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_tcp_set_context(struct netmem_tcp *connection, void *context);

// Receives up to `n` fragments of payload, in order, and does not wait. `received` gets how many;
// 0 if nothing has arrived. The caller owns the fragments, which are in the pages in which they
// arrived. The variables are not read: what they hold is to be released before. Fewer than `n`: an
// event follows when there is more.
//
// A program that does not receive closes the peer's window. Fragments that were received count in
// no window: a program that keeps them stops receiving when it has enough. If the program holds
// nearly all receive pages of the stack, payload of all connections is dropped, and sent again.
//
// No copy, no system call. An atomic or two for a fragment.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (`n` is 0), NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD,
// NETMEM_ERR_END (the peer sends no more), and why the connection has ended, after what was
// received before: NETMEM_ERR_REFUSED, NETMEM_ERR_RESET, NETMEM_ERR_TIMED_OUT,
// NETMEM_ERR_UNREACHABLE, NETMEM_ERR_STOPPED, NETMEM_ERR_CLOSED (the stack).
enum netmem_status netmem_tcp_receive(struct netmem_tcp *connection,
                                      struct netmem_frag *frags,
                                      size_t n,
                                      size_t *received);

// Sends `n` fragments without a copy. `sent`, which is always written, gets how many were
// accepted: their variables are empty. Their pages return when the peer has acknowledged them. The
// other fragments stay with the caller. With NETMEM_OK they are fewer than `n` if the send buffer
// is full: send the rest after the next event with NETMEM_EVENT_WRITE. Else the first of them
// caused the error.
//
// A fragment is one that a connection of the same stack has received, or one of
// netmem_stack_alloc, or a part of one. On AF_XDP it can be of any pool on the UMEM's region. Its
// bytes must not be written after this call. `more`: the program sends more soon, so a segment
// that is not full may wait for that.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (an empty
// fragment), NETMEM_ERR_UNSENDABLE (a page that the device does not reach), NETMEM_ERR_SHUT_DOWN,
// and those of netmem_tcp_is_connected.
enum netmem_status netmem_tcp_send(struct netmem_tcp *connection,
                                   struct netmem_frag *frags,
                                   size_t n,
                                   bool more,
                                   size_t *sent);

// Copies `n` bytes into pages of the stack and sends them. `written`, which is always written,
// gets how many were accepted: fewer than `n` if the send buffer is full, or if the connection has
// its share of the stack's pages. Write the rest after the next event with NETMEM_EVENT_WRITE.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_SHUT_DOWN, and those
// of netmem_tcp_is_connected.
enum netmem_status netmem_tcp_write(struct netmem_tcp *connection,
                                    const void *bytes,
                                    size_t n,
                                    size_t *written);

// Shuts down the sending direction: the peer sees the end of the stream after what was sent. What
// the peer sends is still received. Before the connection has been made, it ends the connection,
// and what was sent is lost.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_tcp_shutdown(struct netmem_tcp *connection);

// Closes the connection, and ends its handle. What was sent still arrives, and then the end of the
// stream, in later turns of the stack. If payload was received by the stack and not by the
// program, the peer gets a reset instead. Also a connection whose stack was closed is closed by
// this.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_tcp_close(struct netmem_tcp *connection);

// Resets the connection, and ends its handle. What was sent and not acknowledged is lost.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_tcp_abort(struct netmem_tcp *connection);

// Reads an endpoint from a text, such as "192.0.2.2:80", "[2001:db8::2]:80", or "[::]:80".
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT.
enum netmem_status netmem_endpoint_parse(const char *text, struct netmem_endpoint *endpoint);

// Listens on `local`, whose address is one of the stack's, or each (address_length of 0). Port 0
// is one that is free: netmem_tcp_listener_local. `options` may be null. The listener belongs to
// the stack's thread. It has an event when a connection waits after a netmem_tcp_accept that found
// none.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD,
// NETMEM_ERR_ARGUMENT (also an address that is none of the stack's), NETMEM_ERR_IN_USE,
// NETMEM_ERR_CLOSED (the stack was shut down).
enum netmem_status netmem_tcp_listen(struct netmem_stack *stack,
                                     const struct netmem_endpoint *local,
                                     const struct netmem_tcp_options *options,
                                     struct netmem_tcp_listener **listener);

// Accepts a connection, or writes null if none waits. The connection belongs to the same thread.
// Its peer may have reset it already: what was received before can be received, then the error.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_CLOSED (the stack was
// shut down or closed).
enum netmem_status netmem_tcp_accept(struct netmem_tcp_listener *listener,
                                     struct netmem_tcp **connection);

// The address and the port on which it listens.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_tcp_listener_local(struct netmem_tcp_listener *listener,
                                             struct netmem_endpoint *local);

// Sets what the listener's events have as their context; null before.
//
// Errors: NETMEM_ERR_NULL (the listener), NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_tcp_listener_set_context(struct netmem_tcp_listener *listener,
                                                   void *context);

// Closes the listener. Connections that wait to be accepted are reset. Those that were accepted go
// on.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_tcp_listener_close(struct netmem_tcp_listener *listener);

// Opens a stack with addresses of its own on a tap. The kernel is the peer on the other side, with
// an address that the caller assigns to the tap (ip addr add). The stack belongs to this thread. A
// thread of the library moves frames between the tap and the stack, until the stack is closed. It
// has the signal mask of this call: a program that has threads for its signals blocks them before.
// The tap goes with the stack, unless it was there before.
//
// The stack holds 8192 pages of 4096 bytes. Needs CAP_NET_ADMIN, unless the tap was made for this
// user. The strings of the options are not kept.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_ARGUMENT (an address, also one that
// the kernel has, a gateway that is not in the network of an address, the MTU, the tap's name),
// NETMEM_ERR_PRIVILEGE, NETMEM_ERR_BUSY (another process has the tap), NETMEM_ERR_UNSUPPORTED (no
// /dev/net/tun), NETMEM_ERR_NO_MEMORY, NETMEM_ERR_SYSTEM. Nothing is open then.
enum netmem_status netmem_stack_open_tap(const struct netmem_stack_options *options,
                                         struct netmem_stack **stack);

// Opens a stack with addresses of its own on the two queues of an AF_XDP socket, which become the
// stack's: `rx` and `tx` are closed handles then. Frames for the addresses are to be redirected to
// `rx` by an XDP program, with a rule for each address (netmem_xdp_rule.address), before or after
// this call. The thread is in the interface's network namespace. Connections arrive only by the
// queues of the interface that are redirected. The stack has the Ethernet address of the interface,
// and belongs to this thread. Frames that `rx` holds at this call are dropped. `umem` is that of the
// queues, and its handle may be closed afterwards.
//
// The interface is to have no segmentation offloads for received frames (ethtool -K NAME gro off
// lro off), and the peer of a veth no checksum and segmentation offloads.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD,
// NETMEM_ERR_ARGUMENT (as netmem_stack_open_tap; queues of another UMEM or of two sockets; an MTU
// above the interface's, or below 576, or 1280 for IPv6; a UMEM with too few pages for `pages`),
// NETMEM_ERR_NO_PAGES, NETMEM_ERR_NOT_FOUND (the interface is gone), NETMEM_ERR_NO_MEMORY,
// NETMEM_ERR_SYSTEM. The queues stay with the caller. NETMEM_ERR_CLOSED: the system has too few
// descriptors, and the queues were closed.
enum netmem_status netmem_stack_open_xsk(const struct netmem_stack_options *options,
                                         const struct netmem_umem *umem,
                                         struct netmem_xsk_rx *rx,
                                         struct netmem_xsk_tx *tx,
                                         struct netmem_stack **stack);

// Does all work that is due: receives frames, passes them to connections, fires timers, sends what
// is due. Never blocks. `work` gets how much there was, unless it is null: not 0 if the next call
// may find more. Call netmem_stack_next_event then.
//
// Calls for listeners and connections take effect in the next turn, which sends the segments.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STOPPED (the tap or
// the interface is gone; all connections have ended, and their events report it).
enum netmem_status netmem_stack_poll(struct netmem_stack *stack, size_t *work);

// Writes the next event to `event`, whose `size` is set, and returns whether there is one. Call it
// after netmem_stack_poll until it returns false. A handle is in at most one event at a time, and
// after its close in none.
//
// A call that does less than was asked requests the event, once: netmem_tcp_accept that finds no
// connection, netmem_tcp_receive that fills fewer than `n` fragments, netmem_tcp_send and
// netmem_tcp_write that accept less than `n`, and netmem_tcp_connect. So after an event, call
// again until a call does less than was asked. A connection that was accepted has no event before
// that: call receive at once.
//
// No system call, no allocation. Returns false with a text for misuse.
bool netmem_stack_next_event(struct netmem_stack *stack, struct netmem_event *event);

// The descriptor on which to wait, with poll, select or epoll, for POLLIN: readable after
// netmem_stack_arm when the stack has work. It is the stack's, and the same until it is closed.
// Never read, write or close it. -1 with a text for misuse.
int32_t netmem_stack_fd(const struct netmem_stack *stack);

// Asks for a wake-up, and writes to `nanoseconds` how long to sleep at most, until the next timer:
// 0 if there is work or an event already, -1 if there is no timer. A thread that was woken calls
// netmem_stack_disarm and netmem_stack_poll. A few system calls.
//
// A program that turns without a sleep for some microseconds after the last work is woken less
// often.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STOPPED.
enum netmem_status netmem_stack_arm(struct netmem_stack *stack, int64_t *nanoseconds);

// Ends the request for a wake-up: without it each frame wakes the descriptor. Misuse leaves a
// text.
void netmem_stack_disarm(struct netmem_stack *stack);

// Allocates up to `n` whole pages to send from, and returns how many: fewer only if the program
// holds, or sends, all pages that the stack has for this, which are 2048 on a tap. No event reports
// that one has returned: try again after each netmem_stack_poll that did work. The variables are
// not read. Write them before the first netmem_tcp_send. A page that was sent returns when the peer
// has acknowledged it.
//
// Returns 0 with a text for misuse.
size_t netmem_stack_alloc(struct netmem_stack *stack, struct netmem_frag *frags, size_t n);

// Counts of the stack. Linear in the connections.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_stack_get_stats(struct netmem_stack *stack,
                                          struct netmem_stack_stats *stats);

// Begins the stack's end: listeners and connections are closed, as if the program had closed each.
// What was sent still arrives, and then the end of the stream. Continue with the program's loop
// until netmem_stack_is_shut_down. netmem_tcp_listen and netmem_tcp_connect return
// NETMEM_ERR_CLOSED from now on. Handles of listeners and connections stay with the program:
// calls for them return NETMEM_ERR_CLOSED as soon as the connection has ended.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_stack_shutdown(struct netmem_stack *stack);

// Whether nothing is left to be sent after netmem_stack_shutdown: each peer has acknowledged all
// of it. A peer that does not answer can delay this for minutes. Linear in the connections. False
// for misuse.
bool netmem_stack_is_shut_down(struct netmem_stack *stack);

// Closes the stack. Its connections end without a segment to their peers: call
// netmem_stack_shutdown before, or abort them and poll once. Fragments that the program holds stay
// valid. Handles of listeners and connections stay with the program, which closes each; other
// calls for them return NETMEM_ERR_CLOSED. The stack's memory is freed with the last of them and
// the last fragment. `stats` gets the final counts, unless it is null. If it has a wrong size, the
// stack stays.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_stack_close(struct netmem_stack *stack, struct netmem_stack_stats *stats);

// The reason of the last failure on this thread, in one line without a newline; empty if there was
// none. Valid until the next failure on this thread. Never null.
const char *netmem_error_text(void);

// The name of a status, such as "NETMEM_ERR_NULL". `status` is an int, so that a value that this
// library does not know is answered, too. Static; never null.
const char *netmem_status_name(int32_t status);

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
