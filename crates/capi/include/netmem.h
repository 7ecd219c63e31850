/* Netmem for C and C++: page pools, fragments and reference counts. MIT OR Apache-2.0.
 *
 * Written by cbindgen from the crate netmem-capi. `install.sh --header` writes it anew.
 *
 * A function that can fail returns a netmem_status. netmem_error_text() is the reason of the last
 * failure on the calling thread. Results are written through the last arguments, and only if the
 * status is NETMEM_OK.
 *
 * Ownership: *_create writes a handle that the caller owns, and ends with *_close or *_destroy. A
 * netmem_frag is owned by the variable that holds it. Copying the structure does not make another
 * holder: netmem_frag_share does.
 *
 * Threads:
 *
 *   handle                 may be used by
 *   ---------------------  ---------------------------------------------------------------------
 *   netmem_region          any thread, several at a time; closed once
 *   netmem_page_pool       one thread, the first that allocates from it, until it is closed
 *   netmem_shared_pool     any thread, several at a time; closed once
 *   netmem_frag            one thread at a time; its bytes can be read by several while none writes
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
 *   a page pool on a second thread               library built with debug assertions:
 *                                                NETMEM_ERR_THREAD; otherwise undefined
 *   release of an empty fragment                 nothing happens: release empties the variable
 *   release of a copied netmem_frag              undefined, as free() twice is
 *   writing to a fragment that is shared         netmem_frag_write: NETMEM_ERR_SHARED
 *   a callback that throws, or jumps out         the process aborts
 *
 * Callbacks: each type of callback states on which thread it runs, and what it may call. */


#ifndef NETMEM_H
#define NETMEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>


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
  // The count is killed already, or not killed, or has reached zero.
  NETMEM_ERR_STATE = 12,
  // The library panicked. It is a defect of the library: report it with the text.
  NETMEM_ERR_PANIC = 13,
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

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* NETMEM_H */
