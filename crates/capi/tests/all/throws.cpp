/* Callbacks that throw.
 *
 * Usage: throws release | page | read | call */
#include <netmem.hpp>

#include <cstdio>
#include <cstdlib>
#include <cstring>

static void throws(const char *name) {
    std::printf("%s throws\n", name);
    std::fflush(stdout);
    throw 1;
}

static void release(void *name) { throws(static_cast<const char *>(name)); }
static void read(const netmem_rcu_guard *, void *) { throws("read"); }
static void call(void *) { throws("call"); }
static void nothing(const netmem_rcu_guard *, void *) {}

int main(int, char **argv) {
    static char closed[] = "release", page[] = "page";
    /* An exception that got through the library would be caught. */
    try {
        if (std::strcmp(argv[1], "release") == 0) {
            netmem_region *region = nullptr;
            netmem::check(netmem_region_from_memory(std::aligned_alloc(4096, 4096), 4096, 0, release, closed, &region));
            netmem_region_close(region);
        } else if (std::strcmp(argv[1], "page") == 0) {
            /* The last page comes back after the region and the pool were closed. */
            netmem_region *region = nullptr;
            netmem::check(netmem_region_from_memory(std::aligned_alloc(4096, 4096), 4096, 0, release, page, &region));
            netmem_page_pool *pool = nullptr;
            const netmem_pool_options options = netmem::pool_options("throws");
            netmem::check(netmem_page_pool_create(region, &options, &pool));
            netmem_frag frag = netmem_frag();
            if (netmem_page_pool_alloc(pool, &frag, 1) != 1)
                return 1;
            netmem_region_close(region);
            netmem_page_pool_close(pool, nullptr);
            netmem_frag_release(&frag);
        } else if (std::strcmp(argv[1], "read") == 0) {
            netmem_rcu_read(read, nullptr);
        } else {
            netmem::check(netmem_rcu_call(call, nullptr));
            for (int i = 0; i < 1000000; i++) {
                netmem_rcu_read(nothing, nullptr);
                netmem_rcu_call([](void *) {}, nullptr);
            }
        }
    } catch (int) {
        std::puts("caught");
    }
    return 0;
}
