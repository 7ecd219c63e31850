/* The three counts: an object that threads hold, one that they look up under RCU, and one whose
 * count is of each CPU. Prints how each ended. */
#include <netmem.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum { THREADS = 4, TURNS = 20000 };

static void check(bool holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "%s: %s\n", what, netmem_error_text());
        exit(1);
    }
}

/* ---- looked up under RCU: a route that is replaced while threads use it */

struct route {
    netmem_rcuref refs;
    int metric;
};

static _Atomic(struct route *) current;
static atomic_uint freed;

static void free_route(void *context) {
    free(context);
    atomic_fetch_add(&freed, 1);
}

static void put_route(struct route *route) {
    if (netmem_rcuref_put(&route->refs))
        check(netmem_rcu_call(free_route, route) == NETMEM_OK, "a call after a grace period");
}

static struct route *new_route(int metric) {
    struct route *route = (struct route *)malloc(sizeof *route);
    check(route != NULL, "a route");
    netmem_rcuref_init(&route->refs, 1);
    route->metric = metric;
    return route;
}

static void look_up(const netmem_rcu_guard *guard, void *context) {
    struct route *route = atomic_load(&current);
    if (netmem_rcuref_try_get(&route->refs, guard))
        *(struct route **)context = route;
}

static void *use_routes(void *unused) {
    (void)unused;
    for (int i = 0; i < TURNS; i++) {
        struct route *route = NULL;
        check(netmem_rcu_read(look_up, &route) == NETMEM_OK, "a section");
        if (route != NULL) {
            check(route->metric > 0, "the metric of a route that is held");
            put_route(route);
        }
    }
    return NULL;
}

/* ---- of each CPU: a binding that threads use until it is killed */

static netmem_percpu_ref *binding;

static void *use_binding(void *ended) {
    while (netmem_percpu_ref_try_get_live(binding))
        if (netmem_percpu_ref_put(binding))
            atomic_fetch_add((atomic_uint *)ended, 1);
    return NULL;
}

static void start(pthread_t *threads, void *(*run)(void *), void *context) {
    for (int i = 0; i < THREADS; i++)
        check(pthread_create(&threads[i], NULL, run, context) == 0, "a thread");
}

static void join(pthread_t *threads) {
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
}

int main(void) {
    netmem_refcount count;
    netmem_refcount_init(&count, 1);
    netmem_refcount_get(&count);
    check(!netmem_refcount_put(&count) && netmem_refcount_put(&count), "the second put is the last");
    check(!netmem_refcount_try_get(&count) && netmem_refcount_read(&count) == 0, "the dead are not revived");
    puts("refcount: the last put was found");

    pthread_t threads[THREADS];
    unsigned routes = 1;
    atomic_store(&current, new_route(1));
    start(threads, use_routes, NULL);
    for (; routes < 1000; routes++)
        put_route(atomic_exchange(&current, new_route((int)routes + 1)));
    join(threads);
    put_route(atomic_exchange(&current, (struct route *)NULL));
    printf("rcuref: %u routes, freed %u\n", routes, atomic_load(&freed));
    check(atomic_load(&freed) == routes, "each route is freed");

    atomic_uint ended = 0;
    check(netmem_percpu_ref_create(&binding) == NETMEM_OK, "a count of each CPU");
    start(threads, use_binding, &ended);
    bool last;
    check(netmem_percpu_ref_kill(binding, &last) == NETMEM_OK, "the kill");
    join(threads);
    unsigned ends = atomic_load(&ended) + last;
    printf("percpu_ref: ended %u time\n", ends);
    check(ends == 1 && !netmem_percpu_ref_try_get(binding), "it ends once");
    check(netmem_percpu_ref_destroy(binding) == NETMEM_OK, "its end");
    return 0;
}
