/* Netmem for C and C++: page pools, fragments, counts, AF_XDP, virtio, TCP and device memory.
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
 *   netmem_xsk_grant       any thread, several at a time; closed once
 *   netmem_xsk_rx          one thread, the first that uses it, until it is closed
 *   netmem_xsk_tx          one thread, the first that uses it, until it is closed; it may be
 *                          another than that of its netmem_xsk_rx
 *   netmem_stack           the thread that opened it, until it is closed
 *   netmem_tcp_listener,   the thread of the stack
 *   netmem_tcp
 *   netmem_devmem          any thread, several at a time; closed once
 *   netmem_devmem_stack    the thread that opened it, with its listeners and streams
 *   netmem_devmem_returner any thread, several at a time; closed once
 *   netmem_virtio_net      any thread, several at a time; closed once
 *   netmem_virtio_rx       one thread, the first that uses it, until it is closed
 *   netmem_virtio_tx       one thread, the first that uses it, until it is closed; it may be
 *                          another than that of its netmem_virtio_rx
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
 *   a netmem_devmem_stack, its listeners and     the same
 *   streams on a second thread
 *   tokens of another stream                     ignored, and counted by the stream that they were
 *                                                returned to
 *   tokens that were returned before             the same, if the stream has not received into
 *                                                their pages again; otherwise those later pages are
 *                                                returned, and the device writes to them
 *   reading or writing bytes of device memory    undefined: the device writes a page after its
 *   whose tokens were returned, or that are      token was returned, and reads a range until it is
 *   being sent                                   reported
 *   closing device memory under a stack          the stack receives into the pages that are posted,
 *                                                and then no more payload
 *   release of an empty fragment                 nothing happens: release empties the variable
 *   release of a copied netmem_frag              undefined, as free() twice is
 *   writing to a fragment that is shared         netmem_frag_write: NETMEM_ERR_SHARED
 *   sending a fragment of another region         NETMEM_ERR_UNSENDABLE; it stays with the caller
 *   sending an empty fragment                    NETMEM_ERR_ARGUMENT
 *   writing to a fragment that was sent          undefined: the kernel or the device reads it, and
 *   through a copy of the netmem_frag            the page is of another frame later
 *   a frame of several fragments without flags   copied into one page, or dropped and counted
 *   metadata of a fragment of another region     NETMEM_ERR_ARGUMENT; bytes of other chunks:
 *                                                NETMEM_ERR_RANGE
 *   a request to the device without 24 free      NETMEM_ERR_UNSENDABLE; the frame stays with the
 *   bytes in front of the frame, or for a        caller, and the queue goes on
 *   checksum outside of it
 *   fewer requests than fragments                undefined
 *   a grant's socket that was used               NETMEM_ERR_NOT_FOUND
 *   reading, writing or closing a queue's or a   undefined
 *   stack's descriptor
 *   a netmem_stack, netmem_tcp_listener or       library built with debug assertions:
 *   netmem_tcp on another thread                 NETMEM_ERR_THREAD; otherwise undefined
 *   a listener or a connection after its stack   accept, is_connected, receive, send and write:
 *   was closed                                   NETMEM_ERR_CLOSED; other calls are as always
 *   netmem_tcp_send of another stack's fragment  NETMEM_ERR_UNSENDABLE; it stays with the caller
 *   writing to a fragment that a connection has  undefined: the peer gets other bytes
 *   sent, through a copy of the netmem_frag
 *   foreign memory under a queue in zero-copy    undefined: see netmem_umem_create
 *   mode
 *   netmem_virtio_rx, netmem_virtio_tx or        library built with debug assertions:
 *   netmem_virtio_device on a second thread      NETMEM_ERR_THREAD; otherwise undefined
 *   sending a fragment of other memory to a      NETMEM_ERR_UNSENDABLE; it stays with the caller
 *   netmem_virtio_tx
 *   reading a fragment of a netmem_virtio_rx     its bytes can change between two reads: the device
 *   twice                                        has the page. Copy what is checked and then used
 *   a front end without kick descriptors         netmem_virtio_device_arm: no sleep while it is
 *                                                served
 *   a callback that throws                       the process aborts
 *   a callback that jumps out (longjmp)          undefined
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

// In netmem_event.flags: receive again, or accept again. There is something, or the end.
#define NETMEM_EVENT_READ 1

// In netmem_event.flags: send or write again. There is room, or the connection has been made, or
// it has ended.
#define NETMEM_EVENT_WRITE 2

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

// In netmem_xsk_request.flags: the device computes a checksum.
#define NETMEM_XSK_CHECKSUM 1

// In netmem_xsk_request.flags: the device sends the frame at `launch_time`, and not before.
#define NETMEM_XSK_LAUNCH_TIME 2

// In netmem_xsk_request.flags: the time at which the frame was sent is asked for.
#define NETMEM_XSK_TIMESTAMP 4

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
  // Bytes beyond the end of a fragment, or of device memory.
  NETMEM_ERR_RANGE = 9,
  // A system call failed.
  NETMEM_ERR_SYSTEM = 10,
  // The pool ended while the thread waited, or the stack of the listener or connection was
  // closed or shut down, or netmem_stack_open_xsk failed after it had closed the queues.
  NETMEM_ERR_CLOSED = 11,
  // The handle is in another state: the count is killed already, or not killed, or has reached
  // zero; the device listens already; the memory was unbound.
  NETMEM_ERR_STATE = 12,
  // The library panicked. It is a defect of the library: report it with the text.
  NETMEM_ERR_PANIC = 13,
  // The queue or the stack has stopped, and neither receives nor sends any more: its interface,
  // device or tap is gone, or a wrong value was written to a ring. Close it; a virtio queue can
  // be reconnected.
  NETMEM_ERR_STOPPED = 14,
  // The queue will never send this frame, or the connection this fragment.
  NETMEM_ERR_UNSENDABLE = 15,
  // A privilege is missing. The text names it.
  NETMEM_ERR_PRIVILEGE = 16,
  // In use: the interface has an XDP program already, or its queue an AF_XDP socket; another
  // process has the tap; the device has another front end, or the path another socket.
  NETMEM_ERR_BUSY = 17,
  // There is no such interface, queue or file, or no process listens on the socket.
  NETMEM_ERR_NOT_FOUND = 18,
  // The kernel, the interface's driver or the device does not support what was asked for.
  NETMEM_ERR_UNSUPPORTED = 19,
  // The peer sends no more: the end of the stream.
  NETMEM_ERR_END = 20,
  // The peer's host refused the connection.
  NETMEM_ERR_REFUSED = 21,
  // The peer reset the connection.
  NETMEM_ERR_RESET = 22,
  // The peer did not answer in time.
  NETMEM_ERR_TIMED_OUT = 23,
  // No route leads to the peer, or a router or the peer's host reports that it cannot be
  // reached.
  NETMEM_ERR_UNREACHABLE = 24,
  // This direction of the connection was shut down by the program.
  NETMEM_ERR_SHUT_DOWN = 25,
  // Another listener or connection of the stack has the port, or no port is left.
  NETMEM_ERR_IN_USE = 26,
  // The stack has as many connections as its options allow.
  NETMEM_ERR_TOO_MANY = 27,
  // The device verifies no checksums of the peer's segments, so their payload is dropped.
  NETMEM_ERR_UNVERIFIED = 28,
} netmem_status;

// Memory that this process does not map, into which the queue of a network device receives.
typedef struct netmem_devmem netmem_devmem;

// A port on which a stack listens.
typedef struct netmem_devmem_listener netmem_devmem_listener;

// Returns the tokens of a stream.
typedef struct netmem_devmem_returner netmem_devmem_returner;

// A host on a virtio-net device: TCP, IP and Ethernet, with the payload that it receives in device
// memory.
typedef struct netmem_devmem_stack netmem_devmem_stack;

// A TCP connection whose received payload is in device memory.
typedef struct netmem_devmem_stream netmem_devmem_stream;

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

// Sockets of an interface, and the program that redirects frames to them, which a helper with
// privileges has opened for this process.
typedef struct netmem_xsk_grant netmem_xsk_grant;

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

// What device memory is used for. Set `size` to sizeof(netmem_devmem_stats).
typedef struct netmem_devmem_stats {
  // sizeof(netmem_devmem_stats)
  size_t size;
  // the number by which extents name it, which no other memory of the process ever has; not 0
  uint64_t id;
  // bytes of memory
  uint64_t bytes;
  // bytes of a page
  uint64_t page_size;
  // pages posted to a device, free in a pool, or held by streams and their users
  uint64_t in_use;
  // queues that receive into it
  uint64_t queues;
} netmem_devmem_stats;

// Received payload: consecutive bytes in consecutive pages of device memory, or bytes in host
// memory.
typedef struct netmem_devmem_extent {
  // `id` of the memory (netmem_devmem_get_stats); 0: the bytes are in host memory, and
  // netmem_devmem_stream_read copies them.
  uint64_t memory;
  // The first byte's offset in the memory.
  uint64_t offset;
  // Bytes, at most 64 KiB.
  uint32_t length;
  // The token of its first page. The pages behind it have the next ones.
  uint32_t token;
  // Its tokens, one for each page. Pass the extent to netmem_devmem_return once: the token of a
  // page is the same each time that the page is received into.
  uint32_t tokens;
  // Zero.
  uint32_t reserved;
} netmem_devmem_extent;

// How a stack is opened. Set `size` to sizeof(netmem_devmem_stack_options), and the rest to zero
// where the default will do.
typedef struct netmem_devmem_stack_options {
  // sizeof(netmem_devmem_stack_options)
  size_t size;
  // The path of the device's vhost-user socket, at which it listens, such as that of
  // `netmem device --listen`.
  const char *socket;
  // This host's address and the length of its network's prefix: "192.0.2.2/24".
  const char *address;
  // The interface's Ethernet address; zeros: one that is made of `address`.
  uint8_t mac[6];
  // The largest IP packet, in bytes: 576 to 1500, and 1280 at least with an address of IPv6; 0:
  // 1500.
  uint16_t mtu;
  // Pages of the memory that received payload may occupy, with what the program holds: at most
  // all less 1024, which is what 0 means.
  uint32_t pages;
  // 1 if the device is not Netmem's own: then the socket's device serves no control queue.
  uint8_t foreign;
  // Zero.
  uint8_t reserved[3];
} netmem_devmem_stack_options;

// What a stack received, sent and lost. Set `size` to sizeof(netmem_devmem_stack_stats).
typedef struct netmem_devmem_stack_stats {
  // sizeof(netmem_devmem_stack_stats)
  size_t size;
  // frames received
  uint64_t received;
  // frames sent
  uint64_t sent;
  // frames dropped: wrong headers, or of protocols that are not known
  uint64_t malformed;
  // segments dropped: a wrong checksum
  uint64_t wrong_checksum;
  // segments dropped: in device memory, and the device has verified no checksum
  uint64_t unverified;
  // frames dropped: headers in device memory
  uint64_t unreadable;
  // frames dropped: payload in pages of other memory
  uint64_t other_memory;
  // frames not sent because there was no page for headers
  uint64_t no_page;
  // connections now, with those that are closing
  uint64_t connections;
  // pages now of payload that waits, and of payload that the program holds
  uint64_t pages;
} netmem_devmem_stack_stats;

// What a stream received and holds. Set `size` to sizeof(netmem_devmem_stream_stats).
typedef struct netmem_devmem_stream_stats {
  // sizeof(netmem_devmem_stream_stats)
  size_t size;
  // pieces of payload received in device memory, each in one page
  uint64_t pages;
  // bytes received in device memory
  uint64_t device_bytes;
  // bytes received in host memory
  uint64_t host_bytes;
  // tokens that the program holds
  uint64_t held;
  // tokens returned that are in no memory of the stack's streams: ignored
  uint64_t unknown_tokens;
  // tokens returned that the stream does not hold, such as one that was returned twice before
  // its page was received into again: ignored
  uint64_t excess_tokens;
  // segments dropped since the last that was received, because the device verified no checksum
  uint64_t unverified;
} netmem_devmem_stream_stats;

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
// library but those that wait. If it throws, the process aborts; it must not jump out.
typedef void (*netmem_rcu_read_fn)(const struct netmem_rcu_guard *guard, void *context);

// A call after a grace period. Runs on any thread that uses the library, outside of sections. It
// may call every function of the library. If it throws, the process aborts; it must not jump out.
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
// pool. It may call every function of the library. If it throws, the process aborts; it must not
// jump out.
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
  // copy. Its `pages` are for the queues of both, and `pages` and `lock` are 0 here. Null:
  // memory of its own. Warning: both devices then have the memory of both drivers. Each can read
  // and change the frames of the other.
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
  // Busy polling, in microseconds; 0: none. The driver's work for the queue is done in the calls
  // of the threads that use it, instead of in interrupts. A call that waits polls for so long.
  // The interface must also defer its interrupts: `napi_defer_hard_irqs` and `gro_flush_timeout`
  // in /sys/class/net. Needs CAP_NET_ADMIN.
  uint32_t busy_poll;
  // The most frames that a call polls, with `busy_poll`; 0: 64.
  uint16_t busy_poll_budget;
  // Zero.
  uint16_t reserved_2;
  // The grant whose socket of `queue` is used, which is of the grant's interface: `interface` is
  // null. Null: a new socket is opened.
  const struct netmem_xsk_grant *grant;
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

// What the device is asked to do with a frame. All zeros: nothing.
typedef struct netmem_xsk_request {
  // NETMEM_XSK_CHECKSUM, NETMEM_XSK_LAUNCH_TIME and NETMEM_XSK_TIMESTAMP
  uint32_t flags;
  // The checksum is of the bytes from here to the end of the frame.
  uint16_t checksum_start;
  // It is stored so many bytes behind `checksum_start`, where the sum of the pseudo-header is.
  uint16_t checksum_offset;
  // Nanoseconds of the device's clock or of CLOCK_TAI, which depends on the driver.
  uint64_t launch_time;
  // The number under which netmem_xsk_tx_timestamps returns the time.
  uint64_t timestamp;
} netmem_xsk_request;

// The time at which a frame was sent.
typedef struct netmem_xsk_timestamp {
  // The number in the frame's request.
  uint64_t timestamp;
  // Nanoseconds of the device's clock; 0 if the driver has stored no time.
  uint64_t time;
} netmem_xsk_timestamp;

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
  // frames refused because their request could not be written in front of them
  uint64_t no_offload;
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
  // Not zero: frames are sent with requests to the device, netmem_xsk_tx_send_with (Linux 6.11).
  uint8_t tx_metadata;
  // Not zero: in copy mode the kernel computes requested checksums on the CPU. For tests.
  uint8_t software_checksums;
  // Zero.
  uint8_t reserved[6];
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

// Allocates `bytes` bytes of host memory in the place of a device's, a multiple of 4096: for
// tests, and for machines without such a device. It is a file in memory, whose pages the kernel
// allocates when the device writes to them, and this process does not map it.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (bytes), NETMEM_ERR_NO_MEMORY, NETMEM_ERR_SYSTEM.
enum netmem_status netmem_devmem_create(size_t bytes, struct netmem_devmem **memory);

// Allocates at least `bytes` bytes of the memory of an NVIDIA GPU, as CUDA counts them from 0 on.
// They are rounded up to what the driver allocates, as a rule 2 MiB. The driver, libcuda.so.1, is
// loaded by this call, and the GPU's primary context is retained until the handle is closed: the
// program's own kernels read the memory in that context, at netmem_devmem_device_address.
//
// The network device must be able to import it: `netmem device --cuda NUMBER` is.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_NOT_FOUND (no driver), NETMEM_ERR_UNSUPPORTED (a library
// that was built without CUDA), NETMEM_ERR_SYSTEM (the driver's, with its text).
enum netmem_status netmem_devmem_create_cuda(uint32_t gpu,
                                             size_t bytes,
                                             struct netmem_devmem **memory);

// Binds memory that the program has: all of a dma-buf, or of a memfd, whose size is a multiple of
// 4096. The library has a descriptor of its own; `fd` may be closed. A memfd is sealed against
// shrinking, so it must have been made with MFD_ALLOW_SEALING.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (no such descriptor, no memory, its size),
// NETMEM_ERR_SYSTEM.
enum netmem_status netmem_devmem_bind(int32_t fd, struct netmem_devmem **memory);

// Copies bytes of device memory to the host: a system call, or a copy of the GPU's driver. For
// checks, and for what the CPU has to see; a device reads payload where it is.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_RANGE, NETMEM_ERR_UNSUPPORTED (a dma-buf,
// which only a mapping reads), NETMEM_ERR_SYSTEM.
enum netmem_status netmem_devmem_read(const struct netmem_devmem *memory,
                                      uint64_t offset,
                                      void *to,
                                      size_t length);

// Copies bytes of the host to device memory, as netmem_devmem_read does the other way.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_RANGE, NETMEM_ERR_UNSUPPORTED (a
// dma-buf), NETMEM_ERR_SYSTEM.
enum netmem_status netmem_devmem_write(const struct netmem_devmem *memory,
                                       uint64_t offset,
                                       const void *from,
                                       size_t length);

// The address of the first byte for the GPU, in its primary context.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_UNSUPPORTED (not of
// netmem_devmem_create_cuda: such memory has a descriptor).
enum netmem_status netmem_devmem_device_address(const struct netmem_devmem *memory,
                                                uint64_t *address);

// The descriptor of the memory, which is the library's and lives as long as the handle. -1 with a
// text for misuse, and for the memory of a GPU.
int32_t netmem_devmem_fd(const struct netmem_devmem *memory);

// Counts of device memory.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE.
enum netmem_status netmem_devmem_get_stats(const struct netmem_devmem *memory,
                                           struct netmem_devmem_stats *stats);

// Gives up the handle, and unbinds the memory: no more pages of it are posted to a device, and no
// new range is sent. Pages that streams hold stay valid until their tokens are returned, and
// ranges in flight are sent. The memory is released after the last of them, on a thread of the
// library. Close the stacks first: a stack whose memory was closed receives into the pages that
// are posted, and then no more payload.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE.
enum netmem_status netmem_devmem_close(struct netmem_devmem *memory);

// Returns the pages of `n` extents, of one stream. On any thread, also while the stream receives
// and while other threads return. `returned` gets how many pages were; it may be null. Extents in
// host memory are left out. Tokens that the stream does not hold are ignored, and counted by
// netmem_devmem_stream_get_stats: those of another stream, and those that were returned before.
//
// The variables stay as they are: do not pass an extent twice. If the stream has received into its
// pages again in between, the second call returns these later pages, and the device writes to them
// while the program reads them.
//
// If the peer's window was closed for want of pages, the stack is woken to open it. A lock of the
// stack's returning threads for each 16 pages: return many at once.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_ARGUMENT (an extent with more tokens than
// 64 KiB have pages). Then none was returned.
enum netmem_status netmem_devmem_return(const struct netmem_devmem_returner *returner,
                                        const struct netmem_devmem_extent *extents,
                                        size_t n,
                                        size_t *returned);

// Closes the handle. With the last handle of a stream, its own and those that return, the tokens
// that it still holds are returned. Any thread.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE.
enum netmem_status netmem_devmem_returner_close(struct netmem_devmem_returner *returner);

// Connects to a virtio-net device, lets its receive queue receive into the memory, and opens a
// stack on it. The stack belongs to the calling thread, with all its listeners and streams. Its
// first 1024 pages are for the ring, so the memory has more than 4 MiB.
//
// The program drives it: netmem_devmem_stack_poll does all that is due. It is to be called again
// when netmem_devmem_stack_fd is readable, after the time of netmem_devmem_stack_arm, and after
// calls that send.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_ARGUMENT
// (address, MTU, pages, too little memory), NETMEM_ERR_NOT_FOUND (no device listens there),
// NETMEM_ERR_PRIVILEGE (the socket's file), NETMEM_ERR_UNSUPPORTED (a device that cannot receive
// into device memory), NETMEM_ERR_NO_MEMORY, NETMEM_ERR_SYSTEM (also: the device has refused the
// memory).
enum netmem_status netmem_devmem_stack_open(const struct netmem_devmem *memory,
                                            const struct netmem_devmem_stack_options *options,
                                            struct netmem_devmem_stack **stack);

// Does all work that is due: receives, fires timers, sends, and collects what the device has
// completed. Never blocks. `work` gets how much there was, unless it is null: not 0 if the next
// call may find more. A poll without work asks whether the device is there, at most once a
// millisecond, by a system call.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STOPPED (the device is
// gone; all connections have ended).
enum netmem_status netmem_devmem_stack_poll(struct netmem_devmem_stack *stack, size_t *work);

// The descriptor on which to wait for work, with poll, select or epoll, for POLLIN: readable after
// netmem_devmem_stack_arm when frames have arrived, the device is gone, or tokens were returned
// for which a peer waits. It is the stack's, and the same until it is closed. Never read, write or
// close it. -1 with a text for misuse.
int32_t netmem_devmem_stack_fd(const struct netmem_devmem_stack *stack);

// Asks for a wake-up, and writes to `nanoseconds` how long to sleep at most, until the next timer:
// 0 if there is work already, -1 if there is no timer. A thread that was woken calls
// netmem_devmem_stack_disarm and netmem_devmem_stack_poll. A few system calls.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_STOPPED (the device is
// gone; all connections have ended).
enum netmem_status netmem_devmem_stack_arm(struct netmem_devmem_stack *stack, int64_t *nanoseconds);

// Ends the request for a wake-up. Misuse leaves a text.
void netmem_devmem_stack_disarm(struct netmem_devmem_stack *stack);

// Listens on a port of the stack's address.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (port 0),
// NETMEM_ERR_IN_USE (the port).
enum netmem_status netmem_devmem_listen(struct netmem_devmem_stack *stack,
                                        uint16_t port,
                                        struct netmem_devmem_listener **made);

// Begins to connect to a peer on the stack's network: `192.0.2.1:9000`, `[fd00::1]:9000`. The
// stream can be used at once: it receives nothing, and what it sends leaves when the peer has
// answered.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (address),
// NETMEM_ERR_UNREACHABLE (no route), NETMEM_ERR_IN_USE (no port is free), NETMEM_ERR_TOO_MANY.
enum netmem_status netmem_devmem_connect(struct netmem_devmem_stack *stack,
                                         const char *peer,
                                         struct netmem_devmem_stream **made);

// Counts of the stack.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_devmem_stack_get_stats(struct netmem_devmem_stack *stack,
                                                 struct netmem_devmem_stack_stats *stats);

// Closes the stack. What its streams have sent is delivered first, for at most `milliseconds`, in
// which the call drives the stack; connections that are left then are reset. Streams and listeners
// that are still open have NETMEM_ERR_CLOSED from now on, and are closed as before. The memory
// can be given to another stack.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD. NETMEM_ERR_STOPPED: the device
// was gone before all was sent; the stack is closed.
enum netmem_status netmem_devmem_stack_close(struct netmem_devmem_stack *stack,
                                             uint32_t milliseconds);

// Accepts a connection; `stream` gets null if none waits.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_CLOSED (the stack was
// closed).
enum netmem_status netmem_devmem_accept(struct netmem_devmem_listener *from,
                                        struct netmem_devmem_stream **made);

// Closes the listener. Connections that were not accepted are reset.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_devmem_listener_close(struct netmem_devmem_listener *listener);

// Receives up to `n` extents, in order, and writes how many to `received`: 0 if nothing waits.
// `ended` gets whether the peer sends no more, and all was received. It may be null.
//
// The pages are the program's until it returns the tokens, and count against what the stack may
// hold: the peer's window closes when it holds too many. A store for each page.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD; after all that was received
// NETMEM_ERR_REFUSED, NETMEM_ERR_RESET, NETMEM_ERR_TIMED_OUT, NETMEM_ERR_UNREACHABLE,
// NETMEM_ERR_STOPPED (the device is gone), NETMEM_ERR_CLOSED; NETMEM_ERR_UNVERIFIED (once; the
// connection goes on), NETMEM_ERR_NO_MEMORY, NETMEM_ERR_BUSY (another stream holds the page:
// return its tokens). No payload is lost.
enum netmem_status netmem_devmem_stream_receive(struct netmem_devmem_stream *stream,
                                                struct netmem_devmem_extent *extents,
                                                size_t n,
                                                size_t *received,
                                                bool *ended);

// Copies bytes of received extents that are in host memory, in their order, and releases them.
// They are there if the device does not split frames behind the headers exactly. `done` gets how
// many were copied, less than `length` if there are no more.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_devmem_stream_read(struct netmem_devmem_stream *stream,
                                             void *to,
                                             size_t length,
                                             size_t *done);

// Sends `length` bytes of device memory from `offset` on, of any length below 1 GiB, without a
// copy in this process. They must not change until netmem_devmem_stream_sent reports the range.
// `more`: the next range follows soon, and a segment may wait for it. `accepted` gets false if the
// send buffer is full; poll the stack, and try again.
//
// Ranges are numbered from 0 on, in the order in which the stream has accepted them.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_RANGE (also a length
// of 0), NETMEM_ERR_SHUT_DOWN, those of a connection that has ended
// (netmem_devmem_stream_receive), NETMEM_ERR_UNSUPPORTED (the device does not have this memory, or
// the peer is this host).
enum netmem_status netmem_devmem_stream_send(struct netmem_devmem_stream *stream,
                                             const struct netmem_devmem *memory,
                                             uint64_t offset,
                                             uint32_t length,
                                             bool more,
                                             bool *accepted);

// How many ranges of netmem_devmem_stream_send may be used again, of those that no call has
// reported: the peer has acknowledged them or the connection has ended, and the device reads them
// no more. Up to `n` of their numbers are written to `ranges`, and their number to `done`.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_devmem_stream_sent(struct netmem_devmem_stream *stream,
                                             uint64_t *ranges,
                                             size_t n,
                                             size_t *done);

// Copies bytes of the host and sends them, between ranges of device memory: headers of the
// application's own. `done` gets how many were taken, 0 if the send buffer is full.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_SHUT_DOWN, those of a
// connection that has ended (netmem_devmem_stream_receive).
enum netmem_status netmem_devmem_stream_write(struct netmem_devmem_stream *stream,
                                              const void *from,
                                              size_t length,
                                              size_t *done);

// Sends no more: the peer learns it after what was sent. The stream still receives.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_devmem_stream_shutdown(struct netmem_devmem_stream *stream);

// Makes a handle that returns the stream's tokens on any thread. It can outlive the stream. Close
// it.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_devmem_returner_open(struct netmem_devmem_stream *stream,
                                               struct netmem_devmem_returner **made);

// Counts of the stream.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_devmem_stream_get_stats(struct netmem_devmem_stream *stream,
                                                  struct netmem_devmem_stream_stats *stats);

// Closes the connection: what was sent is still delivered while the stack is polled. Payload that
// was not received is dropped, and the peer learns it by a reset. Tokens that were not returned
// are returned when the last returner is closed, too.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_devmem_stream_close(struct netmem_devmem_stream *stream);

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

// Reads an endpoint from a text, such as `192.0.2.2:80`, `[2001:db8::2]:80`, or `[::]:80`.
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
// queues of the interface that are redirected. The stack has the Ethernet address of the
// interface, and belongs to this thread. Frames that `rx` holds at this call are dropped. `umem`
// is that of the queues, and its handle may be closed afterwards.
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
// holds, or sends, all pages that the stack has for this, which are 2048 on a tap. No event
// reports that one has returned: try again after each netmem_stack_poll that did work. The
// variables are not read. Write them before the first netmem_tcp_send. A page that was sent
// returns when the peer has acknowledged it.
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

// Makes a device. Frames of the guest are received into pages of `region`, whose handle may be
// closed. It serves no guest yet: see netmem_virtio_device_listen.
//
// The region needs the pages that the caller holds, and in each direction those of frames that
// wait. Frames of the guest hold up to 256 pages, and those of one frame more: at most 256 parts,
// if it is cut, or 17 pages of 4 KiB. The rest waits in the guest's ring. Up to 256 frames wait
// for the guest, each in one page of the region at most.
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
// stream socket), NETMEM_ERR_BUSY (another front end is connected, or has hung up a moment ago:
// the device's descriptor is readable when the next can be served), NETMEM_ERR_SYSTEM.
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
// page of the region is dropped without flags, and counted. Frames have whole checksums, and are
// no segments. Those that are longer than a page are rare: a guest with an MTU of more.
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

// Queues `n` fragments, of any memory, as frames for the guest, of 14 to 65553 bytes each. The
// next netmem_virtio_device_receive delivers them. `sent`, which is always written, gets how many
// were queued: whole frames, in order. Their variables are empty. The other fragments stay with
// the caller. With NETMEM_OK they are fewer than `n` if 256 frames wait:
// netmem_virtio_device_receive delivers them, then send the rest. If the guest posts no buffers,
// send it later or release it. With an error, the first of them is of the frame that caused it.
//
// Without `flags` (null) each fragment is a frame. With `flags`, NETMEM_FRAG_MORE in the flags of
// a fragment says that the frame goes on in the next one. Frames have whole checksums.
//
// While no guest is there whose receive ring is served, frames are dropped and counted, as on a
// link without a partner.
//
// A frame of one fragment of the device's region, with 12 bytes in front of it and no other
// holder, is copied once, into the guest's buffers; another one twice. Fragments that
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
// stops its rings; without the handler, or netmem_virtio_device_options.require_sealed, the
// process ends. Other faults get the action that was there before. A program that sets its own
// handler later calls, for other faults, the one that sigaction returned to it.
//
// Errors: NETMEM_ERR_SYSTEM.
enum netmem_status netmem_sigbus_install(void);

// Connects the driver to a virtio-net device behind a vhost-user socket: netmem_virtio_device, the
// command `netmem device`, DPDK, Open vSwitch. Writes as many receive and transmit queues to `rx`
// and `tx` as `pairs` says, all of which are in use. Each may be used by a thread of its own.
// Close `net` and all queues, in any order.
//
// The device is another process, and has the memory of all fragments mapped as long as a queue is
// open. Warning: it can change bytes of a received frame at any time. Copy what is checked and
// then used, such as lengths of headers. What the device writes to its rings is checked by the
// library.
//
// No offload is negotiated: received frames have whole checksums and are no segments, and frames
// that are sent need to be so.
//
// Waits for the device, for 3 s at each message. If the device is of the same process, another
// thread runs it.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE (share), NETMEM_ERR_ARGUMENT
// (mode, ring, pairs, max_frame, fd, pages, lock), NETMEM_ERR_NOT_FOUND (no process listens, or
// the device has fewer queue pairs), NETMEM_ERR_BUSY (the device refuses another front end),
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
// while another thread reconnects or closes a queue: for a device that does not answer, 3 s at
// each message.
bool netmem_virtio_net_is_connected(const struct netmem_virtio_net *net);

// Connects the queues to another device, which listens on `socket`, when the first has gone:
// NETMEM_ERR_STOPPED. The queues stay on their threads, and go on with their next call. Frames
// that were not received, or not confirmed as sent, are lost, and counted. End the process of the
// first device before: it may still write to pages that it had. Waits as netmem_virtio_connect
// does. Any thread.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, and those of netmem_virtio_connect. The queues are
// as they were then.
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
// small for `flags`, or a frame waits and there are no `flags`), NETMEM_ERR_STOPPED (the device
// has closed the connection, or has broken a rule of the ring, and no frame is left).
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
// connection that has ended, and then it waits for netmem_virtio_net_reconnect; after a broken
// rule of the ring, each time until then).
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
// connection that has ended, and then it waits for netmem_virtio_net_reconnect; after a broken
// rule of the ring, each time until then).
enum netmem_status netmem_virtio_tx_arm(struct netmem_virtio_tx *tx, bool *waits);

// Ends the request for a wake-up. Misuse leaves a text.
void netmem_virtio_tx_disarm(struct netmem_virtio_tx *tx);

// Counts of the queue.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_virtio_tx_get_stats(struct netmem_virtio_tx *tx,
                                              struct netmem_virtio_tx_stats *stats);

// Closes the queue: its ring is stopped, and the pages of frames that the device has return. It
// may have sent these frames, or not: to know, complete until nothing is outstanding. Waits for
// the device, for 3 s at most.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD.
enum netmem_status netmem_virtio_tx_close(struct netmem_virtio_tx *tx);

// Asks the helper that listens on the path `socket` for its sockets (`netmem grant` is such a
// helper). `interface` is the name of the interface that it must have; null: any. Needs no
// privilege. The interface can be of another network namespace.
//
// Then open the queues, with the grant in netmem_xsk_options, and call netmem_xsk_grant_bound. The
// helper opens its sockets with busy polling or without: `busy_poll` in the options is only needed
// if the helper has not set it.
//
// Waits for the helper, for 5 s at each message.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_NOT_FOUND (no helper, or one of another interface),
// NETMEM_ERR_PRIVILEGE (not for this user), NETMEM_ERR_BUSY (other processes have the queues),
// NETMEM_ERR_UNSUPPORTED (a helper of another version), NETMEM_ERR_SYSTEM.
enum netmem_status netmem_xsk_grant_receive(const char *socket,
                                            const char *interface,
                                            struct netmem_xsk_grant **grant);

// Writes the numbers of up to `n` queues for which the grant has a socket that was not used, and
// returns how many these are, also if there is no room for them. Misuse returns 0, with a text.
size_t netmem_xsk_grant_queues(const struct netmem_xsk_grant *grant, uint32_t *queues, size_t n);

// Reports to the helper that the queues are open, and waits until it has put them into the map of
// its program: then frames arrive. The helper waits for this for a limited time, and detaches the
// program otherwise. Call it once, when all queues are open, on any thread; later calls do
// nothing. Sockets that were not used are closed: frames of their queues go to the kernel.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_SYSTEM (the helper has waited too long,
// or has ended), NETMEM_ERR_BUSY.
enum netmem_status netmem_xsk_grant_bound(const struct netmem_xsk_grant *grant);

// Ends the grant: its program is detached, and all frames of the interface go to the kernel.
// Queues that were opened with it stay open. Keep it as long as they receive.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE.
enum netmem_status netmem_xsk_grant_close(struct netmem_xsk_grant *grant);

// Opens a queue of an interface: a socket with a receive queue and a transmit queue, which may be
// used by two threads. Frames arrive when netmem_xdp_program_insert has put `rx` into a program on
// the interface. Close both. The UMEM's handle may be closed before.
//
// Needs CAP_NET_RAW, and locked memory: see netmem_umem_create. An AF_XDP socket of this queue
// that was just closed is waited for, for half a second at most.
//
// With a grant no privilege is needed. Its socket of the queue is used up, also if this fails
// after the options were found valid; frames arrive after netmem_xsk_grant_bound.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_ARGUMENT (mode,
// size of a ring, budget), NETMEM_ERR_NOT_FOUND (interface, queue, no socket in the grant),
// NETMEM_ERR_NO_PAGES (fewer than `fill`), NETMEM_ERR_NO_MEMORY (RLIMIT_MEMLOCK),
// NETMEM_ERR_PRIVILEGE, NETMEM_ERR_BUSY (another socket), NETMEM_ERR_UNSUPPORTED,
// NETMEM_ERR_SYSTEM. Nothing is open then.
enum netmem_status netmem_xsk_open(const struct netmem_umem *umem,
                                   const struct netmem_xsk_options *options,
                                   struct netmem_xsk_rx **rx,
                                   struct netmem_xsk_tx **tx);

// Opens a queue of an interface to send only: frames that the interface receives go to the kernel,
// and no program is needed. In copy mode the UMEM needs pages only for what is sent, and `rx_ring`
// and `fill` have no effect. A driver in zero-copy mode receives into the UMEM also what is for
// the kernel, so that its queue needs pages as one of netmem_xsk_open does: NETMEM_XSK_COPY
// prevents that. A grant is of a helper without a program.
//
// Errors: those of netmem_xsk_open; NETMEM_ERR_ARGUMENT (a grant with a program),
// NETMEM_ERR_SYSTEM (another socket of the UMEM is in zero-copy mode, and this one cannot be).
enum netmem_status netmem_xsk_open_tx(const struct netmem_umem *umem,
                                      const struct netmem_xsk_options *options,
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

// Sends fragments as netmem_xsk_tx_send does, with requests to the device: `requests` has `n`, and
// that of a frame's first fragment is the frame's. A request is written into the 24 bytes in front
// of the frame, which must be free, in the chunk of its first byte: advance the fragment by 24 or
// more before the frame is written. The first fragment has no other holder.
//
// The UMEM was created with `tx_metadata` (Linux 6.11). A launch time needs Linux 6.15, and a
// driver that has them. `netmem info` lists what a driver has. Warning: in zero-copy mode, a
// driver without checksums sends the frame as it is. A driver without times reports none.
//
// Errors: those of netmem_xsk_tx_send; NETMEM_ERR_ARGUMENT (unknown flags, a UMEM without
// `tx_metadata`), NETMEM_ERR_UNSUPPORTED (no launch times), NETMEM_ERR_UNSENDABLE (no 24 bytes,
// another holder, a checksum that is not in the first fragment and its first chunk).
enum netmem_status netmem_xsk_tx_send_with(struct netmem_xsk_tx *tx,
                                           struct netmem_frag *frags,
                                           const uint8_t *flags,
                                           const struct netmem_xsk_request *requests,
                                           size_t n,
                                           size_t *sent);

// Writes up to `n` times at which frames with NETMEM_XSK_TIMESTAMP were sent, in the order of
// their completion, each once, and returns how many. Call it after netmem_xsk_tx_complete. The
// queue keeps 65536, and drops the oldest of more. Misuse returns 0, with a text.
size_t netmem_xsk_tx_timestamps(struct netmem_xsk_tx *tx,
                                struct netmem_xsk_timestamp *times,
                                size_t n);

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
// program wrote there (bpf_xdp_adjust_meta). `frag` is the first fragment of a frame of this
// queue, as it was received: the others have no metadata, and no other holder writes to its page.
// A frame that was copied into one page has its metadata.
//
// The number and the meaning of the bytes are an agreement with that program. Without metadata
// they are old bytes. All are in the frame's chunk: where several chunks share a page, no bytes of
// another frame are read.
//
// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD, NETMEM_ERR_ARGUMENT (empty, or of
// another region), NETMEM_ERR_RANGE (more than 256, or than there are in front of it in its
// chunk).
enum netmem_status netmem_xsk_rx_metadata(const struct netmem_xsk_rx *rx,
                                          const struct netmem_frag *frag,
                                          void *to,
                                          size_t n);

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
// The kernel adds no checksum: netmem_xsk_tx_send_with asks the device for one. A system call,
// unless a driver in zero-copy mode is working.
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
// headroom, reserved).
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
