/* An HTTP server on the library's own TCP. Answers GET, keeps connections open, and serves many
 * connections on one thread.
 *
 *   poll ──► netmem_stack_poll ──► netmem_stack_next_event ──► accept, receive ──► a request
 *    ▲                                                                               │
 *    └── netmem_stack_arm ◄── events are served ◄── head: netmem_tcp_write, copied ◄─┤
 *                                                   body: netmem_tcp_send, shared ◄──┘
 *
 * GET /N is answered with N bytes, 100 for other paths. All bodies are parts of one page, which the
 * connections share: nothing is copied. A connection whose peer does not read is not read from, so
 * that a client cannot make the server collect requests. The server resets the connection of a
 * client that sends no whole request within the time limit, or acknowledges too little of its
 * answer: see `renew`.
 *
 * Usage: http_answer tap NAME ADDRESS/PREFIX [SECONDS]
 *        http_answer xsk INTERFACE ADDRESS/PREFIX [SECONDS]
 *
 * SECONDS is the time limit, 30 if it is missing. Listens on port 80. The first makes a tap, whose
 * kernel side gets its address by `ip addr add`, and needs CAP_NET_ADMIN. The second serves queue 0
 * of an interface, and also needs CAP_NET_RAW, CAP_BPF and CAP_PERFMON. The server ends with its
 * standard input, in order: what was answered still arrives. */
#define _POSIX_C_SOURCE 200809L
#include <arpa/inet.h>
#include <limits.h>
#include <netmem.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { PORT = 80, PAGE = 4096, GROUP = 16, REQUEST = 2048, PAGES = 8192, SECONDS = 30, LAST_SECONDS = 5 };
/* The most seconds of the time limit: a year. */
enum { MOST_SECONDS = 365 * 24 * 3600 };
/* Bytes of a connection that the stack keeps until they are acknowledged. */
enum { SEND_BUFFER = 64 * 1024 };

static void check(netmem_status status, const char *what) {
    if (status != NETMEM_OK) {
        fprintf(stderr, "%s: %s: %s\n", what, netmem_status_name(status), netmem_error_text());
        exit(1);
    }
}

/* A connection, and how far its request and its answer are. */
struct client {
    netmem_tcp *tcp;
    struct client *next, **place;
    /* When the connection is reset, in milliseconds. */
    int64_t deadline;
    /* Received and not answered yet. */
    char request[REQUEST];
    size_t length;
    /* The head of the answer, and the bytes of its body that are not sent yet. */
    char head[128];
    size_t head_length, head_sent, body;
    /* No further request is answered. */
    bool is_last;
};

struct server {
    netmem_stack *stack;
    netmem_tcp_listener *listener;
    /* In the order of their deadlines, and the place behind the last. */
    struct client *clients, **end;
    /* The time of this turn, and how long a client may take, in milliseconds. */
    int64_t now, limit;
    /* The page of all bodies. */
    netmem_frag page;
    unsigned long long answered, ended;
};

static int64_t milliseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

static void remove_client(struct server *server, struct client *client) {
    *client->place = client->next;
    *(client->next != NULL ? &client->next->place : &server->end) = client->place;
}

/* The time limit is the same for all clients, so the last deadline is that of the client that got
 * its deadline last. */
static void append_client(struct server *server, struct client *client) {
    client->deadline = server->now + server->limit;
    client->next = NULL;
    client->place = server->end;
    *server->end = client;
    server->end = &client->next;
}

/* Sets a new deadline: the client has sent a whole request, or a part of its answer has found room
 * in the send buffer. There is room once the client's TCP has acknowledged what was sent before: as
 * much as the buffer holds within the time limit is enough. The buffer is small for that reason. A
 * window that was closed may open much later than the client's program reads. */
static void renew(struct server *server, struct client *client) {
    remove_client(server, client);
    append_client(server, client);
}

static void close_client(struct server *server, struct client *client) {
    remove_client(server, client);
    check(netmem_tcp_close(client->tcp), "the end of a connection");
    free(client);
    server->ended++;
}

/* Resets the connections of clients whose deadline has passed. */
static void reset_slow(struct server *server) {
    struct client *client;
    while ((client = server->clients) != NULL && client->deadline <= server->now) {
        remove_client(server, client);
        check(netmem_tcp_abort(client->tcp), "the reset of a connection");
        free(client);
        server->ended++;
    }
}

/* Makes the answer to the first request, of `length` bytes, and removes the request. */
static void answer(struct server *server, struct client *client, size_t length) {
    const char *status = "200 OK";
    char line[64];
    size_t n = length < sizeof line ? length : sizeof line - 1;
    memcpy(line, client->request, n);
    line[n] = '\0';
    client->body = 100;
    if (length == REQUEST) {
        status = "431 Request Header Fields Too Large", client->is_last = true;
    } else if (strncmp(line, "GET /", 5) != 0) {
        status = "405 Method Not Allowed", client->is_last = true;
    } else if (line[5] >= '0' && line[5] <= '9') {
        client->body = (size_t)strtoul(line + 5, NULL, 10);
    }
    client->head_length = (size_t)snprintf(client->head, sizeof client->head, "HTTP/1.1 %s\r\nContent-Length: %zu\r\n%s\r\n", status, client->body, client->is_last ? "Connection: close\r\n" : "");
    client->head_sent = 0;
    client->length -= length;
    memmove(client->request, client->request + length, client->length);
    renew(server, client);
    server->answered++;
}

/* The bytes of the first request, up to its empty line; 0 if it is not complete. */
static size_t request_length(const struct client *client) {
    for (size_t i = 3; i < client->length; i++)
        if (memcmp(client->request + i - 3, "\r\n\r\n", 4) == 0)
            return i + 1;
    return client->length == REQUEST ? client->length : 0;
}

/* Sends the answer, as much as there is room for. A status of an ended connection is not an error
 * here: receiving returns it, too. */
static netmem_status send_answer(struct server *server, struct client *client) {
    size_t n = client->head_length - client->head_sent, done = n;
    if (n > 0) {
        netmem_status status = netmem_tcp_write(client->tcp, client->head + client->head_sent, n, &done);
        client->head_sent += done;
        if (status != NETMEM_OK)
            return status;
    }
    while (done == n && client->body > 0) {
        netmem_frag frags[GROUP];
        size_t lengths[GROUP], left = client->body;
        for (n = 0; n < GROUP && left > 0; n++) {
            lengths[n] = left < PAGE ? left : (size_t)PAGE;
            left -= lengths[n];
            check(netmem_frag_share(&server->page, 0, lengths[n], &frags[n]), "a part of the page");
        }
        netmem_status status = netmem_tcp_send(client->tcp, frags, n, left > 0, &done);
        for (size_t i = 0; i < done; i++)
            client->body -= lengths[i];
        if (done > 0)
            renew(server, client);
        /* What was sent is empty, and ignored. */
        netmem_frags_release(frags, n);
        if (status != NETMEM_OK)
            return status;
    }
    return NETMEM_OK;
}

/* Receives a part of a request. `received` gets whether there was any. */
static netmem_status receive(struct client *client, bool *received) {
    netmem_frag frag;
    size_t n = 0;
    netmem_status status = netmem_tcp_receive(client->tcp, &frag, 1, &n);
    *received = n > 0;
    if (n == 0)
        return status;
    size_t room = REQUEST - client->length, length = netmem_frag_length(&frag);
    /* After the last answer, the rest is received only so that the peer gets no reset. */
    if (!client->is_last) {
        if (length > room)
            length = room;
        memcpy(client->request + client->length, netmem_frag_data(&frag), length);
        client->length += length;
    }
    netmem_frag_release(&frag);
    return status;
}

/* Continues with a connection until a call does less than was asked, so that an event follows, or
 * until it has ended. */
static void serve(struct server *server, struct client *client) {
    for (;;) {
        netmem_status status = send_answer(server, client);
        bool received = false;
        if (status == NETMEM_OK && (client->head_sent < client->head_length || client->body > 0))
            return;
        if (status == NETMEM_OK && client->head_length > 0) {
            client->head_length = client->head_sent = 0;
            if (client->is_last)
                status = netmem_tcp_shutdown(client->tcp);
        }
        size_t length = client->is_last ? 0 : request_length(client);
        if (status == NETMEM_OK && length > 0) {
            answer(server, client, length);
            continue;
        }
        if (status == NETMEM_OK)
            status = receive(client, &received);
        if (status != NETMEM_OK) {
            /* The peer sends no more, or has reset the connection. */
            close_client(server, client);
            return;
        }
        if (!received)
            return;
    }
}

static void accept_all(struct server *server) {
    for (;;) {
        netmem_tcp *tcp = NULL;
        netmem_status status = netmem_tcp_accept(server->listener, &tcp);
        if (status == NETMEM_OK && tcp == NULL)
            return;
        /* The stack is shut down. */
        if (status == NETMEM_ERR_CLOSED)
            return;
        check(status, "a connection");
        struct client *client = (struct client *)calloc(1, sizeof *client);
        if (client == NULL) {
            netmem_tcp_abort(tcp);
            continue;
        }
        client->tcp = tcp;
        append_client(server, client);
        check(netmem_tcp_set_context(tcp, client), "the context of a connection");
        serve(server, client);
    }
}

/* Polls the stack, serves its events, and resets the connections of slow clients. Returns how much
 * the stack did. */
static size_t turn(struct server *server) {
    size_t work = 0;
    netmem_event event;
    event.size = sizeof event;
    server->now = milliseconds();
    check(netmem_stack_poll(server->stack, &work), "a turn of the stack");
    while (netmem_stack_next_event(server->stack, &event))
        if (event.listener != NULL)
            accept_all(server);
        else
            serve(server, (struct client *)event.context);
    reset_slow(server);
    return work;
}

/* Sleeps until the stack or standard input is readable or a deadline has passed, for `most`
 * milliseconds at most. Returns false at the end of standard input. */
static bool pause_for(struct server *server, size_t work, int input, int64_t most) {
    int64_t left = 0;
    if (work == 0)
        check(netmem_stack_arm(server->stack, &left), "a wait for frames");
    if (server->clients != NULL && server->clients->deadline - server->now < most)
        most = server->clients->deadline - server->now;
    if (left >= 0 && (left + 999999) / 1000000 < most)
        most = (left + 999999) / 1000000;
    struct pollfd events[2];
    memset(events, 0, sizeof events);
    events[0].fd = netmem_stack_fd(server->stack);
    events[1].fd = input;
    events[0].events = events[1].events = POLLIN;
    int ready = poll(events, 2, (int)most);
    if (work == 0)
        netmem_stack_disarm(server->stack);
    char byte;
    return ready <= 0 || events[1].revents == 0 || read(input, &byte, 1) > 0;
}

static netmem_stack_options stack_options(const char *address) {
    netmem_stack_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.addresses = address;
    return options;
}

static void open_tap(struct server *server, const char *name, const char *address) {
    netmem_stack_options options = stack_options(address);
    options.tap = name;
    check(netmem_stack_open_tap(&options, &server->stack), "a stack on the tap");
}

/* The frames for the address go to the stack. The kernel has all others. */
static void open_xsk(struct server *server, const char *interface, const char *address) {
    netmem_region_options region_options;
    memset(&region_options, 0, sizeof region_options);
    region_options.size = sizeof region_options;
    region_options.pages = PAGES;
    netmem_region *region;
    check(netmem_region_create(&region_options, &region), "a region");
    netmem_umem_options umem_options;
    memset(&umem_options, 0, sizeof umem_options);
    umem_options.size = sizeof umem_options;
    netmem_umem *umem;
    check(netmem_umem_create(region, &umem_options, &umem), "a UMEM");

    char text[64];
    snprintf(text, sizeof text, "%.*s", (int)strcspn(address, "/"), address);
    netmem_xdp_rule rule;
    memset(&rule, 0, sizeof rule);
    rule.address_length = strchr(text, ':') != NULL ? 16 : 4;
    if (inet_pton(rule.address_length == 16 ? AF_INET6 : AF_INET, text, rule.address) != 1) {
        fprintf(stderr, "%s is not an address\n", text);
        exit(2);
    }
    netmem_xdp_options program_options;
    memset(&program_options, 0, sizeof program_options);
    program_options.size = sizeof program_options;
    program_options.rules = &rule;
    program_options.rule_count = 1;
    netmem_xdp_program *program;
    check(netmem_xdp_program_attach(interface, &program_options, &program), "the XDP program");

    netmem_xsk_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.interface = interface;
    netmem_xsk_rx *rx;
    netmem_xsk_tx *tx;
    check(netmem_xsk_open(umem, &options, &rx, &tx), "a queue");
    check(netmem_xdp_program_insert(program, rx), "the queue's place in the program");
    netmem_stack_options of_stack = stack_options(address);
    check(netmem_stack_open_xsk(&of_stack, umem, rx, tx, &server->stack), "a stack on the queue");
    check(netmem_umem_close(umem), "the UMEM's handle");
    check(netmem_region_close(region), "the region's handle");
    /* The program is detached when the process ends: its handle stays open. */
}

/* The milliseconds of a time limit in seconds; 0 if the text is none. */
static int64_t time_limit(const char *text) {
    char *end;
    long seconds = strtol(text, &end, 10);
    if (end == text || *end != '\0' || seconds < 1 || seconds > MOST_SECONDS)
        return 0;
    return seconds * (int64_t)1000;
}

int main(int argc, char **argv) {
    struct server server;
    memset(&server, 0, sizeof server);
    server.end = &server.clients;
    server.limit = argc == 5 ? time_limit(argv[4]) : SECONDS * (int64_t)1000;
    if ((argc != 4 && argc != 5) || server.limit == 0 || (strcmp(argv[1], "tap") != 0 && strcmp(argv[1], "xsk") != 0)) {
        fprintf(stderr, "usage: http_answer tap NAME ADDRESS/PREFIX [SECONDS]\n       http_answer xsk INTERFACE ADDRESS/PREFIX [SECONDS]\n");
        return 2;
    }
    if (strcmp(argv[1], "tap") == 0)
        open_tap(&server, argv[2], argv[3]);
    else
        open_xsk(&server, argv[2], argv[3]);
    if (netmem_stack_alloc(server.stack, &server.page, 1) == 0) {
        fprintf(stderr, "no page\n");
        return 1;
    }
    memset(netmem_frag_data_mut(&server.page), '.', PAGE);
    check(netmem_frag_write(&server.page, 0, "on netmem\n", 10), "the page");
    netmem_endpoint local;
    memset(&local, 0, sizeof local);
    local.port = PORT;
    netmem_tcp_options options;
    memset(&options, 0, sizeof options);
    options.size = sizeof options;
    options.send_buffer = SEND_BUFFER;
    check(netmem_tcp_listen(server.stack, &local, &options, &server.listener), "a listener");
    server.now = milliseconds();
    accept_all(&server);
    printf("ready\n");
    fflush(stdout);

    while (pause_for(&server, turn(&server), STDIN_FILENO, INT_MAX)) {
    }

    /* The end in order. The server waits some seconds for peers to acknowledge it. */
    unsigned long long ended = server.ended;
    check(netmem_stack_shutdown(server.stack), "the end of the stack");
    time_t last = time(NULL) + LAST_SECONDS;
    netmem_stack_stats stats;
    stats.size = sizeof stats;
    for (;;) {
        size_t work = turn(&server);
        check(netmem_stack_get_stats(server.stack, &stats), "the counts");
        /* The page of the bodies is still allocated. The device returns the pages of the last frame
         * without a wake-up. */
        if ((work == 0 && netmem_stack_is_shut_down(server.stack) && stats.send_pages == 1) || time(NULL) > last)
            break;
        pause_for(&server, work, -1, 20);
    }
    while (server.clients != NULL)
        close_client(&server, server.clients);
    check(netmem_tcp_listener_close(server.listener), "the end of the listener");
    netmem_frag_release(&server.page);
    check(netmem_stack_close(server.stack, &stats), "the end of the stack");
    printf("answered %llu on %llu connections that ended; pages: received %llu, to send %llu\n", server.answered, ended, (unsigned long long)stats.pages,
           (unsigned long long)stats.send_pages);
    return 0;
}
