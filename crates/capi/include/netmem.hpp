/* Netmem for C++17: the handles of netmem.h as values that close themselves. MIT OR Apache-2.0.
 *
 * Each class owns its handle: it moves, and does not copy. A constructor that fails throws
 * netmem::error with the library's text. Threads and misuse: the tables of netmem.h. */
#ifndef NETMEM_HPP
#define NETMEM_HPP

#include <netmem.h>

#include <stdexcept>
#include <utility>

namespace netmem {

/* A status that is not NETMEM_OK, with the text of its thread. */
class error : public std::runtime_error {
  public:
    explicit error(netmem_status status) : std::runtime_error(netmem_error_text()), status_(status) {}
    netmem_status status() const noexcept { return status_; }

  private:
    netmem_status status_;
};

inline void check(netmem_status status) {
    if (status != NETMEM_OK)
        throw error(status);
}

/* Counted bytes of a page. */
class frag {
  public:
    frag() noexcept : frag_() {}
    /* Becomes the owner of what `owned` holds. */
    explicit frag(netmem_frag owned) noexcept : frag_(owned) {}
    frag(frag &&from) noexcept : frag_(std::exchange(from.frag_, netmem_frag())) {}
    frag &operator=(frag &&from) noexcept {
        std::swap(frag_, from.frag_);
        return *this;
    }
    ~frag() { netmem_frag_release(&frag_); }

    explicit operator bool() const noexcept { return data() != nullptr; }
    const unsigned char *data() const noexcept { return static_cast<const unsigned char *>(netmem_frag_data(&frag_)); }
    /* null if there is another holder */
    unsigned char *data_mut() noexcept { return static_cast<unsigned char *>(netmem_frag_data_mut(&frag_)); }
    std::size_t size() const noexcept { return netmem_frag_length(&frag_); }
    frag share(std::size_t offset, std::size_t length) const {
        netmem_frag out;
        check(netmem_frag_share(&frag_, offset, length, &out));
        return frag(out);
    }
    /* Keeps the first `at` bytes, and returns the rest. */
    frag split(std::size_t at) {
        netmem_frag out;
        check(netmem_frag_split(&frag_, at, &out));
        return frag(out);
    }
    void advance(std::size_t n) { check(netmem_frag_advance(&frag_, n)); }
    void truncate(std::size_t length) { check(netmem_frag_truncate(&frag_, length)); }

  private:
    netmem_frag frag_;
};

class region {
  public:
    explicit region(const netmem_region_options &options) { check(netmem_region_create(&options, &handle_)); }
    explicit region(std::size_t pages) {
        netmem_region_options options = netmem_region_options();
        options.size = sizeof options;
        options.pages = pages;
        check(netmem_region_create(&options, &handle_));
    }
    region(region &&from) noexcept : handle_(std::exchange(from.handle_, nullptr)) {}
    region &operator=(region &&from) noexcept {
        std::swap(handle_, from.handle_);
        return *this;
    }
    ~region() { netmem_region_close(handle_); }
    const netmem_region *get() const noexcept { return handle_; }
    std::size_t page_size() const noexcept { return netmem_region_page_size(handle_); }

  private:
    netmem_region *handle_ = nullptr;
};

inline netmem_pool_options pool_options(const char *name) {
    netmem_pool_options options = netmem_pool_options();
    options.size = sizeof options;
    options.name = name;
    return options;
}

/* The pool of the thread that allocates from it first. */
class page_pool {
  public:
    page_pool(const region &region, const netmem_pool_options &options) { check(netmem_page_pool_create(region.get(), &options, &handle_)); }
    page_pool(page_pool &&from) noexcept : handle_(std::exchange(from.handle_, nullptr)) {}
    page_pool &operator=(page_pool &&from) noexcept {
        std::swap(handle_, from.handle_);
        return *this;
    }
    ~page_pool() { netmem_page_pool_close(handle_, nullptr); }
    /* Empty if there is no page. */
    frag alloc() noexcept {
        netmem_frag out = netmem_frag();
        netmem_page_pool_alloc(handle_, &out, 1);
        return frag(out);
    }
    netmem_page_pool_stats stats() {
        netmem_page_pool_stats stats = netmem_page_pool_stats();
        stats.size = sizeof stats;
        check(netmem_page_pool_get_stats(handle_, &stats));
        return stats;
    }
    netmem_page_pool *get() noexcept { return handle_; }

  private:
    netmem_page_pool *handle_ = nullptr;
};

/* The pool of every thread. */
class shared_pool {
  public:
    shared_pool(const region &region, const netmem_pool_options &options) {
        check(netmem_shared_pool_create(region.get(), &options, &handle_));
    }
    shared_pool(shared_pool &&from) noexcept : handle_(std::exchange(from.handle_, nullptr)) {}
    shared_pool &operator=(shared_pool &&from) noexcept {
        std::swap(handle_, from.handle_);
        return *this;
    }
    ~shared_pool() { netmem_shared_pool_close(handle_, nullptr); }
    /* Empty if there is no page. */
    frag alloc() const noexcept {
        netmem_frag out = netmem_frag();
        netmem_shared_pool_alloc(handle_, &out, 1);
        return frag(out);
    }
    /* Sleeps until there is a page. */
    frag wait() const {
        netmem_frag out;
        check(netmem_shared_pool_wait(handle_, &out));
        return frag(out);
    }
    netmem_shared_pool_stats stats() const {
        netmem_shared_pool_stats stats = netmem_shared_pool_stats();
        stats.size = sizeof stats;
        check(netmem_shared_pool_get_stats(handle_, &stats));
        return stats;
    }

  private:
    netmem_shared_pool *handle_ = nullptr;
};

} // namespace netmem

#endif
