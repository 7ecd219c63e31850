/* The wrappers of netmem.hpp: a header and a payload of one page, held by different owners, and
 * threads that wait for a page of a shared pool. */
#include <netmem.hpp>

#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

int main() {
    netmem::region region(64);
    netmem::page_pool pool(region, netmem::pool_options("rx0"));
    netmem::frag payload;
    {
        netmem::frag frame = pool.alloc();
        std::memcpy(frame.data_mut(), "header payload", 14);
        frame.truncate(14);
        payload = frame.split(7);
        if (frame.data_mut() != nullptr)
            return std::puts("a page with two holders can be written"), 1;
    }
    std::printf("%.*s: %llu page in flight\n", static_cast<int>(payload.size()), reinterpret_cast<const char *>(payload.data()),
                static_cast<unsigned long long>(pool.stats().in_flight));
    payload = netmem::frag();
    if (pool.stats().in_flight != 0)
        return std::puts("the page is not back"), 1;

    /* A region of its own: the page pool keeps the pages of the first one in its cache. */
    netmem::shared_pool shared(netmem::region(4), netmem::pool_options("tx"));
    std::vector<std::thread> threads;
    for (int i = 0; i < 8; i++)
        threads.emplace_back([&shared] {
            for (int turn = 0; turn < 1000; turn++)
                shared.wait().data_mut()[0] = 1;
        });
    for (std::thread &thread : threads)
        thread.join();
    std::vector<netmem::frag> pages;
    while (netmem::frag page = shared.alloc())
        pages.push_back(std::move(page));
    std::printf("8 threads waited for %zu pages\n", pages.size());

    try {
        netmem::region none(0);
        return std::puts("a region without pages"), 1;
    } catch (const netmem::error &error) {
        std::printf("no pages: %s\n", error.what());
    }
    return 0;
}
