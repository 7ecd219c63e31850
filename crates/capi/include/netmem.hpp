/* Netmem for C++17: the handles of netmem.h as values that close themselves. MIT OR Apache-2.0.
 *
 * Each class owns its handle: it moves, and does not copy. A constructor that fails throws
 * netmem::error with the library's text. Threads and misuse: the tables of netmem.h. */
#ifndef NETMEM_HPP
#define NETMEM_HPP

#include <netmem.h>

#include <stdexcept>
#include <utility>
#include <vector>

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
    /* Gives up what it holds, which the caller owns then. */
    netmem_frag release() noexcept { return std::exchange(frag_, netmem_frag()); }

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

/* Up to N fragments in order, which a queue receives or sends at once. */
template <std::size_t N> class frag_group {
  public:
    frag_group() noexcept : frags_(), size_(0) {}
    frag_group(const frag_group &) = delete;
    frag_group &operator=(const frag_group &) = delete;
    ~frag_group() { clear(); }

    std::size_t size() const noexcept { return size_; }
    netmem_frag &operator[](std::size_t at) noexcept { return frags_[at]; }
    /* False if there is no room: `from` keeps the fragment. */
    bool push(frag &from) noexcept {
        if (size_ == N)
            return false;
        frags_[size_++] = from.release();
        return true;
    }
    /* Leaves an empty one in its place, which a queue does not send: send what is in front of it. */
    frag take(std::size_t at) noexcept { return frag(std::exchange(frags_[at], netmem_frag())); }
    void clear() noexcept {
        netmem_frags_release(frags_, size_);
        size_ = 0;
    }

  private:
    friend class xsk_rx;
    friend class xsk_tx;
    friend class virtio_rx;
    friend class virtio_tx;
    friend class virtio_device;
    /* Frames were sent from the front. */
    void remove(std::size_t sent) noexcept {
        size_ -= sent;
        for (std::size_t i = 0; sent > 0 && i < size_; i++)
            frags_[i] = std::exchange(frags_[i + sent], netmem_frag());
    }
    netmem_frag frags_[N];
    std::size_t size_;
};

/* A region, registered with the kernel for AF_XDP. */
class umem {
  public:
    umem(const region &region, const netmem_umem_options &options) { check(netmem_umem_create(region.get(), &options, &handle_)); }
    explicit umem(const region &region) {
        netmem_umem_options options = netmem_umem_options();
        options.size = sizeof options;
        check(netmem_umem_create(region.get(), &options, &handle_));
    }
    umem(umem &&from) noexcept : handle_(std::exchange(from.handle_, nullptr)) {}
    umem &operator=(umem &&from) noexcept {
        std::swap(handle_, from.handle_);
        return *this;
    }
    ~umem() { netmem_umem_close(handle_); }
    const netmem_umem *get() const noexcept { return handle_; }

  private:
    netmem_umem *handle_ = nullptr;
};

/* The receive queue of an AF_XDP socket, of the thread that uses it first. */
class xsk_rx {
  public:
    /* Becomes the owner of a handle of netmem_xsk_open. */
    explicit xsk_rx(netmem_xsk_rx *owned) noexcept : handle_(owned) {}
    xsk_rx(xsk_rx &&from) noexcept : handle_(std::exchange(from.handle_, nullptr)) {}
    xsk_rx &operator=(xsk_rx &&from) noexcept {
        std::swap(handle_, from.handle_);
        return *this;
    }
    ~xsk_rx() { netmem_xsk_rx_close(handle_, nullptr); }
    /* Releases what the group has, and receives up to N frames, each in one fragment. */
    template <std::size_t N> std::size_t receive(frag_group<N> &group) {
        netmem_xsk_rx_release(handle_, group.frags_, group.size_);
        std::size_t received = 0;
        const netmem_status status = netmem_xsk_rx_receive(handle_, group.frags_, nullptr, N, &received);
        /* On a wrong thread the queue has released nothing. Else they are empty. */
        if (status != NETMEM_OK)
            netmem_frags_release(group.frags_, group.size_);
        group.size_ = received;
        check(status);
        return received;
    }
    int fd() const noexcept { return netmem_xsk_rx_fd(handle_); }
    /* Whether to sleep until `fd` is readable. */
    bool arm() {
        bool waits = false;
        check(netmem_xsk_rx_arm(handle_, &waits));
        return waits;
    }
    void disarm() noexcept { netmem_xsk_rx_disarm(handle_); }
    netmem_xsk_rx_stats stats() {
        netmem_xsk_rx_stats stats = netmem_xsk_rx_stats();
        stats.size = sizeof stats;
        check(netmem_xsk_rx_get_stats(handle_, &stats));
        return stats;
    }
    netmem_xsk_rx *get() const noexcept { return handle_; }

  private:
    netmem_xsk_rx *handle_;
};

/* The transmit queue of an AF_XDP socket, of the thread that uses it first. */
class xsk_tx {
  public:
    /* Becomes the owner of a handle of netmem_xsk_open. */
    explicit xsk_tx(netmem_xsk_tx *owned) noexcept : handle_(owned) {}
    xsk_tx(xsk_tx &&from) noexcept : handle_(std::exchange(from.handle_, nullptr)) {}
    xsk_tx &operator=(xsk_tx &&from) noexcept {
        std::swap(handle_, from.handle_);
        return *this;
    }
    ~xsk_tx() { netmem_xsk_tx_close(handle_); }
    /* Sends the fragments of the group, each a frame, and returns how many. The others stay in the
     * group, also if this throws. */
    template <std::size_t N> std::size_t send(frag_group<N> &group) {
        std::size_t sent = 0;
        const netmem_status status = netmem_xsk_tx_send(handle_, group.frags_, nullptr, group.size_, &sent);
        group.remove(sent);
        check(status);
        return sent;
    }
    /* Returns pages of sent frames, those of `rx` to its cache. */
    std::size_t complete(xsk_rx &rx) noexcept { return netmem_xsk_tx_complete(handle_, rx.get()); }
    std::size_t complete() noexcept { return netmem_xsk_tx_complete(handle_, nullptr); }
    int fd() const noexcept { return netmem_xsk_tx_fd(handle_); }
    /* Whether to sleep until `fd` is readable. */
    bool arm() {
        bool waits = false;
        check(netmem_xsk_tx_arm(handle_, &waits));
        return waits;
    }
    void disarm() noexcept { netmem_xsk_tx_disarm(handle_); }
    netmem_xsk_tx_stats stats() {
        netmem_xsk_tx_stats stats = netmem_xsk_tx_stats();
        stats.size = sizeof stats;
        check(netmem_xsk_tx_get_stats(handle_, &stats));
        return stats;
    }
    netmem_xsk_tx *get() const noexcept { return handle_; }

  private:
    netmem_xsk_tx *handle_;
};

/* Both queues of an AF_XDP socket. */
struct xsk {
    xsk_rx rx;
    xsk_tx tx;
};

inline netmem_xsk_options xsk_options(const char *interface, std::uint32_t queue) {
    netmem_xsk_options options = netmem_xsk_options();
    options.size = sizeof options;
    options.interface = interface;
    options.queue = queue;
    return options;
}

inline xsk open_xsk(const umem &umem, const netmem_xsk_options &options) {
    netmem_xsk_rx *rx = nullptr;
    netmem_xsk_tx *tx = nullptr;
    check(netmem_xsk_open(umem.get(), &options, &rx, &tx));
    return xsk{xsk_rx(rx), xsk_tx(tx)};
}

/* An XDP program on an interface, until the end of the value. */
class xdp_program {
  public:
    xdp_program(const char *interface, const netmem_xdp_options &options) { check(netmem_xdp_program_attach(interface, &options, &handle_)); }
    /* Redirects every frame. */
    explicit xdp_program(const char *interface) {
        netmem_xdp_options options = netmem_xdp_options();
        options.size = sizeof options;
        check(netmem_xdp_program_attach(interface, &options, &handle_));
    }
    xdp_program(xdp_program &&from) noexcept : handle_(std::exchange(from.handle_, nullptr)) {}
    xdp_program &operator=(xdp_program &&from) noexcept {
        std::swap(handle_, from.handle_);
        return *this;
    }
    ~xdp_program() { netmem_xdp_program_close(handle_); }
    void insert(const xsk_rx &rx) { check(netmem_xdp_program_insert(handle_, rx.get())); }

  private:
    netmem_xdp_program *handle_ = nullptr;
};

/* A receive queue of a virtio-net device, of the thread that uses it first. */
class virtio_rx {
  public:
    /* Becomes the owner of a handle of netmem_virtio_connect. */
    explicit virtio_rx(netmem_virtio_rx *owned) noexcept : handle_(owned) {}
    virtio_rx(virtio_rx &&from) noexcept : handle_(std::exchange(from.handle_, nullptr)) {}
    virtio_rx &operator=(virtio_rx &&from) noexcept {
        std::swap(handle_, from.handle_);
        return *this;
    }
    ~virtio_rx() { netmem_virtio_rx_close(handle_, nullptr); }
    /* Releases what the group has, and receives up to N frames, each in one fragment. */
    template <std::size_t N> std::size_t receive(frag_group<N> &group) {
        netmem_virtio_rx_release(handle_, group.frags_, group.size_);
        std::size_t received = 0;
        const netmem_status status = netmem_virtio_rx_receive(handle_, group.frags_, nullptr, N, &received);
        /* On a wrong thread the queue has released nothing. Else they are empty. */
        if (status != NETMEM_OK)
            netmem_frags_release(group.frags_, group.size_);
        group.size_ = received;
        check(status);
        return received;
    }
    int fd() const noexcept { return netmem_virtio_rx_fd(handle_); }
    /* Whether to sleep until `fd` is readable. */
    bool arm() {
        bool waits = false;
        check(netmem_virtio_rx_arm(handle_, &waits));
        return waits;
    }
    void disarm() noexcept { netmem_virtio_rx_disarm(handle_); }
    netmem_virtio_rx_stats stats() {
        netmem_virtio_rx_stats stats = netmem_virtio_rx_stats();
        stats.size = sizeof stats;
        check(netmem_virtio_rx_get_stats(handle_, &stats));
        return stats;
    }
    netmem_virtio_rx *get() const noexcept { return handle_; }

  private:
    netmem_virtio_rx *handle_;
};

/* A transmit queue of a virtio-net device, of the thread that uses it first. */
class virtio_tx {
  public:
    /* Becomes the owner of a handle of netmem_virtio_connect. */
    explicit virtio_tx(netmem_virtio_tx *owned) noexcept : handle_(owned) {}
    virtio_tx(virtio_tx &&from) noexcept : handle_(std::exchange(from.handle_, nullptr)) {}
    virtio_tx &operator=(virtio_tx &&from) noexcept {
        std::swap(handle_, from.handle_);
        return *this;
    }
    ~virtio_tx() { netmem_virtio_tx_close(handle_); }
    /* Sends the fragments of the group, each a frame, and returns how many. The others stay in the
     * group, also if this throws. */
    template <std::size_t N> std::size_t send(frag_group<N> &group) {
        std::size_t sent = 0;
        const netmem_status status = netmem_virtio_tx_send(handle_, group.frags_, nullptr, group.size_, &sent);
        group.remove(sent);
        check(status);
        return sent;
    }
    /* Returns pages of sent frames, those of `rx` to its cache. */
    std::size_t complete(virtio_rx &rx) noexcept { return netmem_virtio_tx_complete(handle_, rx.get()); }
    std::size_t complete() noexcept { return netmem_virtio_tx_complete(handle_, nullptr); }
    int fd() const noexcept { return netmem_virtio_tx_fd(handle_); }
    /* Whether to sleep until `fd` is readable. */
    bool arm() {
        bool waits = false;
        check(netmem_virtio_tx_arm(handle_, &waits));
        return waits;
    }
    void disarm() noexcept { netmem_virtio_tx_disarm(handle_); }
    netmem_virtio_tx_stats stats() {
        netmem_virtio_tx_stats stats = netmem_virtio_tx_stats();
        stats.size = sizeof stats;
        check(netmem_virtio_tx_get_stats(handle_, &stats));
        return stats;
    }
    netmem_virtio_tx *get() const noexcept { return handle_; }

  private:
    netmem_virtio_tx *handle_;
};

inline netmem_virtio_options virtio_options(const char *socket) {
    netmem_virtio_options options = netmem_virtio_options();
    options.size = sizeof options;
    options.socket = socket;
    return options;
}

/* A virtio-net device that the driver is connected to, with its queues: `rx` and `tx` are taken out
 * by those who use them. */
class virtio_net {
  public:
    explicit virtio_net(const netmem_virtio_options &options) {
        const std::size_t pairs = options.pairs == 0 ? 1 : options.pairs;
        std::vector<netmem_virtio_rx *> receive(pairs);
        std::vector<netmem_virtio_tx *> transmit(pairs);
        rx.reserve(pairs);
        tx.reserve(pairs);
        check(netmem_virtio_connect(&options, &handle_, receive.data(), transmit.data()));
        for (std::size_t i = 0; i < pairs; i++) {
            rx.emplace_back(receive[i]);
            tx.emplace_back(transmit[i]);
        }
    }
    virtio_net(virtio_net &&from) noexcept
        : rx(std::move(from.rx)), tx(std::move(from.tx)), handle_(std::exchange(from.handle_, nullptr)) {}
    virtio_net &operator=(virtio_net &&from) noexcept {
        std::swap(rx, from.rx);
        std::swap(tx, from.tx);
        std::swap(handle_, from.handle_);
        return *this;
    }
    ~virtio_net() { netmem_virtio_net_close(handle_); }
    /* Empty if there is no page to send from. */
    frag alloc() const noexcept {
        netmem_frag out = netmem_frag();
        netmem_virtio_net_alloc(handle_, &out, 1);
        return frag(out);
    }
    bool is_connected() const noexcept { return netmem_virtio_net_is_connected(handle_); }
    void reconnect(const char *socket) { check(netmem_virtio_net_reconnect(handle_, socket)); }
    /* For the `share` of another driver's options. */
    netmem_virtio_net *get() const noexcept { return handle_; }

    std::vector<virtio_rx> rx;
    std::vector<virtio_tx> tx;

  private:
    netmem_virtio_net *handle_ = nullptr;
};

/* A virtio-net device for virtual machines, of the thread that moves its frames. */
class virtio_device {
  public:
    virtio_device(const region &region, const netmem_virtio_device_options &options) {
        check(netmem_virtio_device_create(region.get(), &options, &handle_));
    }
    explicit virtio_device(const region &region) {
        netmem_virtio_device_options options = netmem_virtio_device_options();
        options.size = sizeof options;
        check(netmem_virtio_device_create(region.get(), &options, &handle_));
    }
    virtio_device(virtio_device &&from) noexcept : handle_(std::exchange(from.handle_, nullptr)) {}
    virtio_device &operator=(virtio_device &&from) noexcept {
        std::swap(handle_, from.handle_);
        return *this;
    }
    ~virtio_device() { netmem_virtio_device_close(handle_, nullptr); }
    void listen(const char *socket) { check(netmem_virtio_device_listen(handle_, socket)); }
    void serve(int fd) { check(netmem_virtio_device_serve(handle_, fd)); }
    /* Throws the reason why a front end was dropped, if one was. */
    void check_connection() const { check(netmem_virtio_device_check(handle_)); }
    /* Releases what the group has, makes a pass over the rings, and receives up to N frames, each in
     * one fragment. */
    template <std::size_t N> std::size_t receive(frag_group<N> &group) {
        group.clear();
        check(netmem_virtio_device_receive(handle_, group.frags_, nullptr, N, &group.size_));
        return group.size_;
    }
    /* Queues the fragments of the group, each a frame, and returns how many. The others stay in the
     * group, also if this throws. */
    template <std::size_t N> std::size_t send(frag_group<N> &group) {
        std::size_t sent = 0;
        const netmem_status status = netmem_virtio_device_send(handle_, group.frags_, nullptr, group.size_, &sent);
        group.remove(sent);
        check(status);
        return sent;
    }
    int fd() const noexcept { return netmem_virtio_device_fd(handle_); }
    /* Whether to sleep until `fd` is readable. */
    bool arm() {
        bool waits = false;
        check(netmem_virtio_device_arm(handle_, &waits));
        return waits;
    }
    void disarm() noexcept { netmem_virtio_device_disarm(handle_); }
    netmem_virtio_device_stats stats() {
        netmem_virtio_device_stats stats = netmem_virtio_device_stats();
        stats.size = sizeof stats;
        check(netmem_virtio_device_get_stats(handle_, &stats));
        return stats;
    }
    netmem_virtio_device *get() const noexcept { return handle_; }

  private:
    netmem_virtio_device *handle_ = nullptr;
};

} // namespace netmem

#endif
