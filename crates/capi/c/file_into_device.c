/* Files into device memory and back: what examples/loader.rs of the package netmem does, in C.
 *
 *   nc ── kernel ── tap ── netmem device ◄── vhost-user ──► netmem_devmem_stack
 *                            └─ payload ──► the memory         netmem_devmem_stream_receive ──► extents
 *                                                              netmem_devmem_stream_send(offset, length)
 *
 * No call of this program maps the memory. A file ends where its sender ends the stream (`nc -N`).
 * Its checksum is computed from bytes that are copied out, and it is sent back from where it is.
 * The pages are returned on a second thread, when standard input ends.
 *
 * Usage: file_into_device SOCKET ADDRESS/LENGTH MEGABYTES FILES [GPU]. SOCKET is that of
 * `netmem device --listen`. With the number of an NVIDIA GPU the memory is of that GPU, and the
 * device has the same number: `netmem device --cuda 0`. Without it, a file in memory takes its
 * place. */
#define _POSIX_C_SOURCE 200809L
#include <netmem.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PORT = 9000, MOST = 64, GROUP = 64, BATCH = 256 };

struct file {
    netmem_devmem_stream *stream;
    netmem_devmem_returner *returner;
    netmem_devmem_extent *extents;
    size_t n, room;  /* extents */
    bool received;   /* all of it */
    size_t sent;     /* extents that were sent back */
    size_t complete; /* of these, those that the peer has */
};

static void check(netmem_status status, const char *what) {
    if (status != NETMEM_OK) {
        fprintf(stderr, "%s: %s: %s\n", what, netmem_status_name(status), netmem_error_text());
        exit(1);
    }
}

/* Each byte times its position in the file, modulo 2^64. */
static uint64_t checksum(const netmem_devmem *memory, const struct file *file) {
    static unsigned char bytes[1 << 16];
    uint64_t sum = 0, position = 1;
    for (size_t i = 0; i < file->n; i++) {
        size_t length = file->extents[i].length;
        check(netmem_devmem_read(memory, file->extents[i].offset, bytes, length), "a copy of device memory");
        for (size_t at = 0; at < length; at++)
            sum += bytes[at] * position++;
    }
    return sum;
}

/* A complete file. Programs read where it is. */
static void report(const netmem_devmem *memory, const struct file *file) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < file->n; i++)
        bytes += file->extents[i].length;
    printf("file: %llu bytes in %zu extents\nextents:", (unsigned long long)bytes, file->n);
    for (size_t i = 0; i < file->n; i++)
        printf(" %llu+%lu", (unsigned long long)file->extents[i].offset, (unsigned long)file->extents[i].length);
    printf("\nchecksum: %llu\n", (unsigned long long)checksum(memory, file));
    fflush(stdout);
}

/* Receives as much as there is. */
static void receive(const netmem_devmem *memory, struct file *file) {
    size_t received = 1;
    while (!file->received && received > 0) {
        if (file->room - file->n < GROUP) {
            file->room = 2 * file->room + GROUP;
            file->extents = (netmem_devmem_extent *)realloc(file->extents, file->room * sizeof *file->extents);
            if (file->extents == NULL)
                abort();
        }
        netmem_devmem_extent *extents = file->extents + file->n;
        check(netmem_devmem_stream_receive(file->stream, extents, GROUP, &received, &file->received), "payload");
        for (size_t i = 0; i < received; i++) {
            if (extents[i].memory == 0) {
                fprintf(stderr, "payload came in host memory: the device does not split frames behind their headers\n");
                exit(1);
            }
        }
        file->n += received;
    }
    if (!file->received)
        return;
    report(memory, file);
    if (file->n == 0)
        check(netmem_devmem_stream_shutdown(file->stream), "the end of an empty file");
}

/* Sends as much as there is room for. True when the peer has all of the file. */
static bool send_back(const netmem_devmem *memory, struct file *file) {
    uint64_t ranges[GROUP];
    size_t done;
    bool accepted = true;
    do {
        check(netmem_devmem_stream_sent(file->stream, ranges, GROUP, &done), "ranges that were sent");
        file->complete += done;
    } while (done == GROUP);
    while (file->sent < file->n) {
        const netmem_devmem_extent *extent = &file->extents[file->sent];
        bool more = file->sent + 1 < file->n;
        check(netmem_devmem_stream_send(file->stream, memory, extent->offset, extent->length, more, &accepted), "a range");
        if (!accepted)
            return false;
        file->sent++;
        if (!more)
            check(netmem_devmem_stream_shutdown(file->stream), "the end of a file");
    }
    return file->complete == file->n;
}

struct kept {
    struct file files[MOST];
    size_t n;
    size_t returned;
};

/* Returns the pages of all files, in batches. */
static void *return_pages(void *context) {
    struct kept *kept = (struct kept *)context;
    for (size_t i = 0; i < kept->n; i++) {
        const struct file *file = &kept->files[i];
        for (size_t at = 0; at < file->n; at += BATCH) {
            size_t returned, n = file->n - at < BATCH ? file->n - at : (size_t)BATCH;
            check(netmem_devmem_return(file->returner, file->extents + at, n, &returned), "tokens");
            kept->returned += returned;
        }
        check(netmem_devmem_returner_close(file->returner), "the end of a returner");
    }
    return NULL;
}

/* Sleeps until there is work. Returns false when standard input has ended. */
static bool sleep_for_work(netmem_devmem_stack *stack, bool input) {
    int64_t left;
    check(netmem_devmem_stack_arm(stack, &left), "a wait for frames");
    int most = left < 0 || left > 3600000000000 ? 3600000 : (int)((left + 999999) / 1000000);
    struct pollfd fds[2];
    fds[0].fd = netmem_devmem_stack_fd(stack);
    fds[1].fd = input ? STDIN_FILENO : -1;
    fds[0].events = fds[1].events = POLLIN;
    fds[0].revents = fds[1].revents = 0;
    if (poll(fds, 2, most) > 0 && fds[1].revents != 0) {
        char byte;
        input = read(STDIN_FILENO, &byte, 1) > 0;
    }
    netmem_devmem_stack_disarm(stack);
    return input;
}

static void run(netmem_devmem_stack *stack, const netmem_devmem *memory, struct kept *kept, size_t files) {
    struct file incoming[MOST];
    size_t n = 0;
    bool input = true;
    netmem_devmem_listener *listener;
    check(netmem_devmem_listen(stack, PORT, &listener), "port 9000");
    while (input || kept->n < files) {
        size_t work;
        check(netmem_devmem_stack_poll(stack, &work), "a turn of the stack");
        while (n < MOST && n + kept->n < files) {
            struct file *file = &incoming[n];
            memset(file, 0, sizeof *file);
            check(netmem_devmem_accept(listener, &file->stream), "a connection");
            if (file->stream == NULL)
                break;
            check(netmem_devmem_returner_open(file->stream, &file->returner), "a returner");
            n++;
        }
        for (size_t i = 0; i < n;) {
            struct file *file = &incoming[i];
            if (!file->received)
                receive(memory, file);
            if (file->received && send_back(memory, file)) {
                kept->files[kept->n++] = *file;
                *file = incoming[--n];
                printf("%zu files are back\n", kept->n);
                fflush(stdout);
            } else {
                i++;
            }
        }
        if (work == 0)
            input = sleep_for_work(stack, input);
    }
    check(netmem_devmem_listener_close(listener), "the end of the port");
}

int main(int argc, char **argv) {
    if (argc < 5) {
        fprintf(stderr, "usage: file_into_device SOCKET ADDRESS/LENGTH MEGABYTES FILES [GPU]\n");
        return 2;
    }
    size_t bytes = (size_t)strtoul(argv[3], NULL, 10) << 20, files = (size_t)strtoul(argv[4], NULL, 10);
    if (files > MOST) {
        fprintf(stderr, "at most %d files\n", MOST);
        return 2;
    }
    netmem_devmem *memory;
    if (argc > 5) {
        check(netmem_devmem_create_cuda((uint32_t)strtoul(argv[5], NULL, 10), bytes, &memory), "memory of a GPU");
    } else {
        check(netmem_devmem_create(bytes, &memory), "memory");
        printf("memory: /proc/%ld/fd/%d\n", (long)getpid(), netmem_devmem_fd(memory));
    }
    netmem_devmem_stack_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.socket = argv[1];
    options.address = argv[2];
    netmem_devmem_stack *stack;
    check(netmem_devmem_stack_open(memory, &options, &stack), argv[1]);
    printf("%s: %zu files to port %d, into %zu MiB\n", argv[2], files, PORT, bytes >> 20);
    fflush(stdout);

    static struct kept kept;
    run(stack, memory, &kept, files);
    pthread_t thread;
    if (pthread_create(&thread, NULL, return_pages, &kept) != 0) {
        perror("pthread_create");
        return 1;
    }
    pthread_join(thread, NULL);
    for (size_t i = 0; i < kept.n; i++) {
        check(netmem_devmem_stream_close(kept.files[i].stream), "the end of a stream");
        free(kept.files[i].extents);
    }
    netmem_devmem_stack_stats stats;
    stats.size = sizeof stats;
    check(netmem_devmem_stack_get_stats(stack, &stats), "the stack's counts");
    printf("pages returned %zu, held %llu\n", kept.returned, (unsigned long long)stats.pages);
    check(netmem_devmem_stack_close(stack, 5000), "the end of the stack");
    check(netmem_devmem_close(memory), "the end of the memory");
    return stats.pages == 0 ? 0 : 1;
}
