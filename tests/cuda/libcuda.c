/* A library that stands in for the driver of a GPU, for tests on machines without one. It has those calls of libcuda.so.1 that Netmem
 * makes, over memory files. It proves the order of the calls, their offsets and lengths, what is released, and what happens when a
 * call fails. It proves nothing about a GPU.
 *
 * As with the driver:
 *   - an exported handle is a file without a size, which cannot be mapped: a socket that carries the memory file in its one message;
 *   - a mapping has the length of its memory, and the CPU cannot access its addresses;
 *   - cuMemcpyHtoD may return early: the bytes arrive when the stream is synchronised;
 *   - a call needs a context in its thread.
 *
 * NETMEM_FAKE_CUDA_FAIL=CALL:FIRST:LAST lets these calls fail, counted from 1; a copy that fails has copied half of its bytes.
 * NETMEM_FAKE_CUDA_LOG=FILE gets a line when the process ends: what was not released, and how many copies there were.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, ILLEGAL_ADDRESS = 700, UNKNOWN = 999 };
enum { MOST = 64, GRANULARITY = 2 << 20 };
typedef unsigned long long u64;

/* Memory: a handle is its number and 1. A range of addresses: reserved, then with memory, then accessible. */
static struct { int fd; size_t len; char *bytes; int holders; } memory[MOST];
static struct { char *at; size_t len; u64 handle; int accessible; } range[MOST];
static struct { char *to; char bytes[65536 + 4096]; size_t len; } pending;
static int used, contexts, copies_in, copies_out, launches;
static __thread int current;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int fails(const char *call) {
    static const char *spec;
    static int first, last, count;
    static char name[64];
    if (!spec) {
        spec = getenv("NETMEM_FAKE_CUDA_FAIL");
        if (!spec || sscanf(spec, "%63[^:]:%d:%d", name, &first, &last) != 3) spec = "";
    }
    return *spec && !strcmp(name, call) && (++count, count >= first && count <= last);
}
#define CALL(name, result) { int answer; pthread_mutex_lock(&lock); answer = fails(name) ? UNKNOWN : (result); pthread_mutex_unlock(&lock); return answer; }

__attribute__((destructor)) static void report(void) {
    const char *path = getenv("NETMEM_FAKE_CUDA_LOG");
    FILE *log = path ? fopen(path, "a") : NULL;
    int handles = 0, ranges = 0;
    for (int i = 0; i < MOST; i++) handles += memory[i].holders > 0, ranges += range[i].at != NULL;
    /* Not if the library was only looked for. */
    if (log && used) {
        fprintf(log, "unreleased: %d contexts, %d handles, %d ranges; %d copies in, %d copies out, %d launches\n", contexts, handles, ranges,
                copies_in, copies_out, launches);
    }
    if (log) fclose(log);
}

int cuInit(unsigned flags) { CALL("cuInit", flags ? INVALID_VALUE : OK) }
int cuDeviceGetCount(int *count) { *count = 1; return OK; }
int cuDeviceGet(int *device, int number) { *device = 0; CALL("cuDeviceGet", number ? 101 : OK) }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &contexts; CALL("cuDevicePrimaryCtxRetain", (used = 1, contexts++, OK)) }
int cuDevicePrimaryCtxRelease_v2(int device) { CALL("cuDevicePrimaryCtxRelease", (contexts--, OK)) }
int cuCtxSetCurrent(void *context) { current = context == &contexts && contexts > 0; return current ? OK : INVALID_CONTEXT; }
int cuGetErrorName(int error, const char **name) { *name = "A_FAKE_ERROR"; return OK; }
int cuGetErrorString(int error, const char **text) { *text = "an error of the stand-in for a GPU"; return OK; }

static int hold(u64 *handle, int fd, size_t len) {
    for (int i = 0; i < MOST; i++)
        if (!memory[i].holders) {
            char *bytes = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            if (bytes == MAP_FAILED) return INVALID_HANDLE;
            memory[i].fd = fd, memory[i].len = len, memory[i].bytes = bytes, memory[i].holders = 1;
            *handle = i + 1;
            return OK;
        }
    return UNKNOWN;
}
static int known(u64 handle) { return handle >= 1 && handle <= MOST && memory[handle - 1].holders > 0; }
static void let_go(u64 handle) {
    if (--memory[handle - 1].holders == 0) munmap(memory[handle - 1].bytes, memory[handle - 1].len), close(memory[handle - 1].fd);
}

int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) { *bytes = GRANULARITY; return OK; }
static int create(u64 *handle, size_t len, const int *properties) {
    int fd = memfd_create("fake-gpu", MFD_CLOEXEC);
    /* Pinned, exportable as a file, on device 0. */
    if (!current) return INVALID_CONTEXT;
    if (!len || len % GRANULARITY || properties[0] != 1 || properties[1] != 1 || properties[2] != 1 || properties[3] != 0) return INVALID_VALUE;
    return fd < 0 || ftruncate(fd, len) ? UNKNOWN : hold(handle, fd, len);
}
int cuMemCreate(u64 *handle, size_t len, const void *properties, u64 flags) { CALL("cuMemCreate", create(handle, len, properties)) }
static int release(u64 handle) {
    if (!known(handle)) return INVALID_VALUE;
    let_go(handle);
    return OK;
}
int cuMemRelease(u64 handle) { CALL("cuMemRelease", release(handle)) }

static int export(int *file, u64 handle, int type) {
    int pair[2];
    char byte = 0, control[CMSG_SPACE(sizeof(int))] = { 0 };
    struct iovec part = { &byte, 1 };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (!known(handle) || type != 1 || socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, pair)) return INVALID_VALUE;
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_RIGHTS, header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &memory[handle - 1].fd, sizeof(int));
    if (sendmsg(pair[0], &message, 0) != 1) return UNKNOWN;
    close(pair[0]);
    *file = pair[1];
    return OK;
}
int cuMemExportToShareableHandle(void *file, u64 handle, int type, u64 flags) { CALL("cuMemExportToShareableHandle", export(file, handle, type)) }
static int import(u64 *handle, int file, int type) {
    int fd;
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec part = { &byte, 1 };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control };
    struct stat stat;
    if (!current) return INVALID_CONTEXT;
    /* The message stays, for the next import. */
    if (type != 1 || recvmsg(file, &message, MSG_PEEK | MSG_DONTWAIT | MSG_CMSG_CLOEXEC) != 1 || !CMSG_FIRSTHDR(&message)) return INVALID_HANDLE;
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fd);
    return fstat(fd, &stat) ? INVALID_HANDLE : hold(handle, fd, stat.st_size);
}
int cuMemImportFromShareableHandle(u64 *handle, void *file, int type) { CALL("cuMemImportFromShareableHandle", import(handle, (int)(intptr_t)file, type)) }

static int reserve(u64 *at, size_t len) {
    for (int i = 0; i < MOST; i++)
        if (!range[i].at) {
            char *place = len && len % GRANULARITY == 0 ? mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : MAP_FAILED;
            if (place == MAP_FAILED) return INVALID_VALUE;
            range[i].at = place, range[i].len = len, *at = (u64)place;
            return OK;
        }
    return UNKNOWN;
}
int cuMemAddressReserve(u64 *at, size_t len, size_t alignment, u64 hint, u64 flags) { CALL("cuMemAddressReserve", reserve(at, len)) }
/* The number of the range that is reserved at `at` with this length, or -1. */
static int reserved(u64 at, size_t len) {
    for (int i = 0; i < MOST; i++)
        if (range[i].at && range[i].at == (char *)at && range[i].len == len) return i;
    return -1;
}
static int map(u64 at, size_t len, u64 handle) {
    int i = reserved(at, len);
    if (i < 0 || range[i].handle || !known(handle) || memory[handle - 1].len != len) return INVALID_VALUE;
    range[i].handle = handle, memory[handle - 1].holders++;
    return OK;
}
int cuMemMap(u64 at, size_t len, size_t offset, u64 handle, u64 flags) { CALL("cuMemMap", offset ? INVALID_VALUE : map(at, len, handle)) }
static int set_access(u64 at, size_t len, const int *access, size_t count) {
    int i = reserved(at, len);
    /* Device 0, for reading and writing. */
    if (i < 0 || !range[i].handle || count != 1 || access[0] != 1 || access[1] != 0 || access[2] != 3) return INVALID_VALUE;
    range[i].accessible = 1;
    return OK;
}
int cuMemSetAccess(u64 at, size_t len, const void *access, size_t count) { CALL("cuMemSetAccess", set_access(at, len, access, count)) }
static int unmap(u64 at, size_t len) {
    int i = reserved(at, len);
    if (i < 0 || !range[i].handle) return INVALID_VALUE;
    let_go(range[i].handle);
    range[i].handle = 0, range[i].accessible = 0;
    return OK;
}
int cuMemUnmap(u64 at, size_t len) { CALL("cuMemUnmap", unmap(at, len)) }
static int unreserve(u64 at, size_t len) {
    int i = reserved(at, len);
    if (i < 0 || range[i].handle) return INVALID_VALUE;
    munmap(range[i].at, len);
    range[i].at = NULL;
    return OK;
}
int cuMemAddressFree(u64 at, size_t len) { CALL("cuMemAddressFree", unreserve(at, len)) }

/* Where this process has the bytes of a range of accessible addresses. */
static char *bytes_at(u64 at, size_t len) {
    for (int i = 0; i < MOST; i++)
        if (range[i].accessible && at >= (u64)range[i].at && at - (u64)range[i].at <= range[i].len && len <= range[i].len - (at - (u64)range[i].at))
            return memory[range[i].handle - 1].bytes + (at - (u64)range[i].at);
    return NULL;
}
static void arrive(void) { memcpy(pending.to, pending.bytes, pending.len), pending.len = 0; }
static int copy_in(u64 to, const char *from, size_t len) {
    char *place = bytes_at(to, len);
    if (!current) return INVALID_CONTEXT;
    if (!place) return ILLEGAL_ADDRESS;
    copies_in++;
    arrive();
    if (fails("cuMemcpyHtoD")) {
        memcpy(place, from, len / 2);
        return UNKNOWN;
    }
    if (len > sizeof pending.bytes) memcpy(place, from, len);
    else pending.to = place, pending.len = len, memcpy(pending.bytes, from, len);
    return OK;
}
int cuMemcpyHtoD_v2(u64 to, const void *from, size_t len) { CALL("", copy_in(to, from, len)) }
static int copy_out(char *to, u64 from, size_t len) {
    char *place = bytes_at(from, len);
    if (!current) return INVALID_CONTEXT;
    if (!place) return ILLEGAL_ADDRESS;
    copies_out++;
    arrive();
    if (fails("cuMemcpyDtoH")) {
        memcpy(to, place, len / 2);
        return UNKNOWN;
    }
    memcpy(to, place, len);
    return OK;
}
int cuMemcpyDtoH_v2(void *to, u64 from, size_t len) { CALL("", copy_out(to, from, len)) }
int cuStreamSynchronize(void *stream) { CALL("cuStreamSynchronize", (arrive(), current && !stream ? OK : INVALID_CONTEXT)) }
int cuCtxSynchronize(void) { CALL("cuCtxSynchronize", (arrive(), current ? OK : INVALID_CONTEXT)) }

/* The kernel of the loader, on the CPU: the sum of bytes times their positions. Its text is not looked at. */
int cuModuleLoadData(void **module, const void *text) { *module = range; CALL("cuModuleLoadData", strstr(text, ".entry checksum(") ? OK : INVALID_VALUE) }
int cuModuleUnload(void *module) { return module == range ? OK : INVALID_VALUE; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = memory; return strcmp(name, "checksum") ? 500 : OK; }
static int launch(void **arguments) {
    u64 at = *(u64 *)arguments[0], len = *(u64 *)arguments[1], position = *(u64 *)arguments[2], sum = 0;
    char *bytes = bytes_at(at, len), *out = bytes_at(*(u64 *)arguments[3], 8);
    if (!current) return INVALID_CONTEXT;
    if (!bytes || !out) return ILLEGAL_ADDRESS;
    launches++;
    for (u64 i = 0; i < len; i++) sum += (unsigned char)bytes[i] * (position + i);
    *(u64 *)out += sum;
    return OK;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
                   void **arguments, void **extra) { CALL("cuLaunchKernel", x && bx && function == memory ? launch(arguments) : INVALID_VALUE) }
