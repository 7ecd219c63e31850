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

/* What the classes below are made of: not for programs. */
namespace detail {

/* A structure of the header, of its size, and zeros. */
template <typename Structure> Structure sized() {
    Structure made = Structure();
    made.size = sizeof made;
    return made;
}

/* What a function of the header writes through its last argument. */
template <typename From, typename Out, typename Handle> Out written(netmem_status (*call)(From, Out *), Handle from) {
    Out out = Out();
    check(call(from, &out));
    return out;
}

template <typename From, typename Stats, typename Handle> Stats counted(netmem_status (*call)(From, Stats *), Handle from) {
    Stats stats = sized<Stats>();
    check(call(from, &stats));
    return stats;
}

/* The owner of a handle, which it closes. */
template <typename Handle, auto close> class owner {
  public:
    explicit owner(Handle *owned) noexcept : handle_(owned) {}
    owner(owner &&from) noexcept : handle_(from.release()) {}
    owner &operator=(owner &&from) noexcept {
        std::swap(handle_, from.handle_);
        return *this;
    }
    ~owner() {
        if (handle_ != nullptr)
            end(close);
    }
    Handle *get() noexcept { return handle_; }
    const Handle *get() const noexcept { return handle_; }
    /* Gives up the handle, which the caller owns then. */
    Handle *release() noexcept { return std::exchange(handle_, nullptr); }

  protected:
    owner() noexcept = default;

    Handle *handle_ = nullptr;

  private:
    /* Zeros for the arguments behind the handle. */
    template <typename Result, typename... More> void end(Result (*function)(Handle *, More...)) noexcept {
        function(handle_, More()...);
    }
};

} // namespace detail

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

class region : public detail::owner<netmem_region, netmem_region_close> {
  public:
    explicit region(const netmem_region_options &options) { check(netmem_region_create(&options, &handle_)); }
    explicit region(std::size_t pages) {
        netmem_region_options options = detail::sized<netmem_region_options>();
        options.pages = pages;
        check(netmem_region_create(&options, &handle_));
    }
    std::size_t page_size() const noexcept { return netmem_region_page_size(handle_); }
};

inline netmem_pool_options pool_options(const char *name) {
    netmem_pool_options options = detail::sized<netmem_pool_options>();
    options.name = name;
    return options;
}

/* The pool of the thread that allocates from it first. */
class page_pool : public detail::owner<netmem_page_pool, netmem_page_pool_close> {
  public:
    page_pool(const region &region, const netmem_pool_options &options) { check(netmem_page_pool_create(region.get(), &options, &handle_)); }
    /* Empty if there is no page. */
    frag alloc() noexcept {
        netmem_frag out = netmem_frag();
        netmem_page_pool_alloc(handle_, &out, 1);
        return frag(out);
    }
    netmem_page_pool_stats stats() { return detail::counted(netmem_page_pool_get_stats, handle_); }
};

/* The pool of every thread. */
class shared_pool : public detail::owner<netmem_shared_pool, netmem_shared_pool_close> {
  public:
    shared_pool(const region &region, const netmem_pool_options &options) {
        check(netmem_shared_pool_create(region.get(), &options, &handle_));
    }
    /* Empty if there is no page. */
    frag alloc() const noexcept {
        netmem_frag out = netmem_frag();
        netmem_shared_pool_alloc(handle_, &out, 1);
        return frag(out);
    }
    /* Sleeps until there is a page. */
    frag wait() const { return frag(detail::written(netmem_shared_pool_wait, handle_)); }
    netmem_shared_pool_stats stats() const { return detail::counted(netmem_shared_pool_get_stats, handle_); }
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
    /* Leaves an empty one in its place, which a queue does not send: send what is in front of
     * it. */
    frag take(std::size_t at) noexcept { return frag(std::exchange(frags_[at], netmem_frag())); }
    void clear() noexcept {
        netmem_frags_release(frags_, size_);
        size_ = 0;
    }

    /* Receives up to N fragments by a function of (fragments, N, where to write how many). What the
     * group has is released before. */
    template <typename Receive> netmem_status receive_by(Receive receive) {
        clear();
        return receive(frags_, N, &size_);
    }
    /* The same for a queue, whose own function releases what the group has: `release`, a function
     * of (fragments, how many). Returns how many were received. */
    template <typename Release, typename Receive> std::size_t receive_by(Release release, Receive receive) {
        release(frags_, size_);
        std::size_t received = 0;
        const netmem_status status = receive(frags_, N, &received);
        /* On a wrong thread the queue has released nothing. Else they are empty. */
        if (status != NETMEM_OK)
            netmem_frags_release(frags_, size_);
        size_ = received;
        check(status);
        return received;
    }
    /* Sends the fragments by a function of (fragments, how many, where to write how many were
     * sent), and returns how many. The others stay in the group, also if this throws. */
    template <typename Send> std::size_t send_by(Send send) {
        std::size_t sent = 0;
        const netmem_status status = send(frags_, size_, &sent);
        size_ -= sent;
        for (std::size_t i = 0; sent > 0 && i < size_; i++)
            frags_[i] = std::exchange(frags_[i + sent], netmem_frag());
        check(status);
        return sent;
    }

  private:
    netmem_frag frags_[N];
    std::size_t size_;
};

/* A region, registered with the kernel for AF_XDP. */
class umem : public detail::owner<netmem_umem, netmem_umem_close> {
  public:
    umem(const region &region, const netmem_umem_options &options) { check(netmem_umem_create(region.get(), &options, &handle_)); }
    explicit umem(const region &region) {
        netmem_umem_options options = detail::sized<netmem_umem_options>();
        check(netmem_umem_create(region.get(), &options, &handle_));
    }
};

/* The receive queue of an AF_XDP socket, of the thread that uses it first. */
class xsk_rx : public detail::owner<netmem_xsk_rx, netmem_xsk_rx_close> {
  public:
    /* Becomes the owner of a handle of netmem_xsk_open. */
    using owner::owner;
    xsk_rx() = delete;
    /* Releases what the group has, and receives up to N frames, each in one fragment. */
    template <std::size_t N> std::size_t receive(frag_group<N> &group) {
        return group.receive_by([this](netmem_frag *frags, std::size_t n) { netmem_xsk_rx_release(handle_, frags, n); },
                                [this](netmem_frag *frags, std::size_t n, std::size_t *received) {
                                    return netmem_xsk_rx_receive(handle_, frags, nullptr, n, received);
                                });
    }
    /* Copies `n` bytes in front of a frame of the group: what the caller's own XDP program
     * wrote. */
    void metadata(const netmem_frag &frame, void *to, std::size_t n) const {
        check(netmem_xsk_rx_metadata(handle_, &frame, to, n));
    }
    int fd() const noexcept { return netmem_xsk_rx_fd(handle_); }
    /* Whether to sleep until `fd` is readable. */
    bool arm() { return detail::written(netmem_xsk_rx_arm, handle_); }
    void disarm() noexcept { netmem_xsk_rx_disarm(handle_); }
    netmem_xsk_rx_stats stats() { return detail::counted(netmem_xsk_rx_get_stats, handle_); }
};

/* The transmit queue of an AF_XDP socket, of the thread that uses it first. */
class xsk_tx : public detail::owner<netmem_xsk_tx, netmem_xsk_tx_close> {
  public:
    /* Becomes the owner of a handle of netmem_xsk_open. */
    using owner::owner;
    xsk_tx() = delete;
    /* Sends the fragments of the group, each a frame, and returns how many. The others stay in the
     * group, also if this throws. */
    template <std::size_t N> std::size_t send(frag_group<N> &group) {
        return group.send_by([this](netmem_frag *frags, std::size_t n, std::size_t *sent) {
            return netmem_xsk_tx_send(handle_, frags, nullptr, n, sent);
        });
    }
    /* The same with requests to the device, of which `requests` has as many as the group
     * fragments. */
    template <std::size_t N> std::size_t send(frag_group<N> &group, const netmem_xsk_request *requests) {
        return group.send_by([this, requests](netmem_frag *frags, std::size_t n, std::size_t *sent) {
            return netmem_xsk_tx_send_with(handle_, frags, nullptr, requests, n, sent);
        });
    }
    /* Times at which frames were sent; call it after `complete`. */
    std::size_t timestamps(netmem_xsk_timestamp *times, std::size_t n) noexcept {
        return netmem_xsk_tx_timestamps(handle_, times, n);
    }
    /* Returns pages of sent frames, those of `rx` to its cache. */
    std::size_t complete(xsk_rx &rx) noexcept { return netmem_xsk_tx_complete(handle_, rx.get()); }
    std::size_t complete() noexcept { return netmem_xsk_tx_complete(handle_, nullptr); }
    int fd() const noexcept { return netmem_xsk_tx_fd(handle_); }
    /* Whether to sleep until `fd` is readable. */
    bool arm() { return detail::written(netmem_xsk_tx_arm, handle_); }
    void disarm() noexcept { netmem_xsk_tx_disarm(handle_); }
    netmem_xsk_tx_stats stats() { return detail::counted(netmem_xsk_tx_get_stats, handle_); }
};

/* Both queues of an AF_XDP socket. */
struct xsk {
    xsk_rx rx;
    xsk_tx tx;
};

inline netmem_xsk_options xsk_options(const char *interface, std::uint32_t queue) {
    netmem_xsk_options options = detail::sized<netmem_xsk_options>();
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

/* A queue that only sends. */
inline xsk_tx open_xsk_tx(const umem &umem, const netmem_xsk_options &options) {
    netmem_xsk_tx *tx = nullptr;
    check(netmem_xsk_open_tx(umem.get(), &options, &tx));
    return xsk_tx(tx);
}

/* Sockets that a helper has opened, and its program, until the end of the value. */
class xsk_grant : public detail::owner<netmem_xsk_grant, netmem_xsk_grant_close> {
  public:
    /* Null: of any interface. */
    explicit xsk_grant(const char *socket, const char *interface = nullptr) {
        check(netmem_xsk_grant_receive(socket, interface, &handle_));
    }
    /* Those whose sockets were not used. */
    std::vector<std::uint32_t> queues() const {
        std::vector<std::uint32_t> queues(netmem_xsk_grant_queues(handle_, nullptr, 0));
        const std::size_t left = netmem_xsk_grant_queues(handle_, queues.data(), queues.size());
        /* Another thread may have used one. */
        if (left < queues.size())
            queues.resize(left);
        return queues;
    }
    /* The options of a queue on its socket. */
    netmem_xsk_options options(std::uint32_t queue) const {
        netmem_xsk_options options = xsk_options(nullptr, queue);
        options.grant = handle_;
        return options;
    }
    /* All queues are open: frames arrive from now on. */
    void bound() const { check(netmem_xsk_grant_bound(handle_)); }
};

/* An XDP program on an interface, until the end of the value. */
class xdp_program : public detail::owner<netmem_xdp_program, netmem_xdp_program_close> {
  public:
    xdp_program(const char *interface, const netmem_xdp_options &options) { check(netmem_xdp_program_attach(interface, &options, &handle_)); }
    /* Redirects every frame. */
    explicit xdp_program(const char *interface) {
        netmem_xdp_options options = detail::sized<netmem_xdp_options>();
        check(netmem_xdp_program_attach(interface, &options, &handle_));
    }
    void insert(const xsk_rx &rx) { check(netmem_xdp_program_insert(handle_, rx.get())); }
};

inline netmem_endpoint endpoint(const char *text) {
    netmem_endpoint endpoint = netmem_endpoint();
    check(netmem_endpoint_parse(text, &endpoint));
    return endpoint;
}

inline netmem_tcp_options tcp_options() {
    netmem_tcp_options options = detail::sized<netmem_tcp_options>();
    return options;
}

/* A TCP connection, of the thread of its stack. */
class tcp : public detail::owner<netmem_tcp, netmem_tcp_close> {
  public:
    /* None. */
    tcp() noexcept = default;
    /* Becomes the owner of a handle of netmem_tcp_connect or netmem_tcp_accept. */
    using owner::owner;
    explicit operator bool() const noexcept { return handle_ != nullptr; }
    /* Releases what the group has, and receives up to N fragments. False: the peer sends no
     * more. */
    template <std::size_t N> bool receive(frag_group<N> &group) {
        const netmem_status status = group.receive_by([this](netmem_frag *frags, std::size_t n, std::size_t *received) {
            return netmem_tcp_receive(handle_, frags, n, received);
        });
        if (status == NETMEM_ERR_END)
            return false;
        check(status);
        return true;
    }
    /* Sends the fragments of the group, and returns how many. The others stay in the group, also if
     * this throws. */
    template <std::size_t N> std::size_t send(frag_group<N> &group, bool more = false) {
        return group.send_by([this, more](netmem_frag *frags, std::size_t n, std::size_t *sent) {
            return netmem_tcp_send(handle_, frags, n, more, sent);
        });
    }
    /* Copies bytes, and returns how many were accepted. */
    std::size_t write(const void *bytes, std::size_t n) {
        std::size_t written = 0;
        check(netmem_tcp_write(handle_, bytes, n, &written));
        return written;
    }
    /* Throws why the connection was not made, or has ended. */
    bool is_connected() { return detail::written(netmem_tcp_is_connected, handle_); }
    netmem_endpoint local() const {
        netmem_endpoint endpoint;
        check(netmem_tcp_endpoints(handle_, &endpoint, nullptr));
        return endpoint;
    }
    netmem_endpoint remote() const {
        netmem_endpoint endpoint;
        check(netmem_tcp_endpoints(handle_, nullptr, &endpoint));
        return endpoint;
    }
    void set_context(void *context) { check(netmem_tcp_set_context(handle_, context)); }
    void shutdown() { check(netmem_tcp_shutdown(handle_)); }
    /* Resets the connection. This is none then. */
    void abort() { check(netmem_tcp_abort(release())); }
};

/* A socket that accepts connections, of the thread of its stack: netmem::stack::listen. */
class tcp_listener : public detail::owner<netmem_tcp_listener, netmem_tcp_listener_close> {
  public:
    /* Becomes the owner of a handle of netmem_tcp_listen. */
    using owner::owner;
    tcp_listener() = delete;
    /* None if none waits. */
    tcp accept() { return tcp(detail::written(netmem_tcp_accept, handle_)); }
    netmem_endpoint local() const { return detail::written(netmem_tcp_listener_local, handle_); }
    void set_context(void *context) { check(netmem_tcp_listener_set_context(handle_, context)); }
};

inline netmem_stack_options stack_options(const char *addresses) {
    netmem_stack_options options = detail::sized<netmem_stack_options>();
    options.addresses = addresses;
    return options;
}

/* A TCP/IP stack, of the thread that makes it. Its listeners and connections may live longer. */
class stack : public detail::owner<netmem_stack, netmem_stack_close> {
  public:
    /* On the tap of the options. */
    explicit stack(const netmem_stack_options &options) { check(netmem_stack_open_tap(&options, &handle_)); }
    /* On both queues of an AF_XDP socket, which become the stack's. */
    stack(const netmem_stack_options &options, const umem &umem, xsk queues) {
        const netmem_status status = netmem_stack_open_xsk(&options, umem.get(), queues.rx.get(), queues.tx.get(), &handle_);
        if (status == NETMEM_OK || status == NETMEM_ERR_CLOSED)
            queues.rx.release(), queues.tx.release();
        check(status);
    }
    std::size_t poll() { return detail::written(netmem_stack_poll, handle_); }
    /* False if there is no event. */
    bool next_event(netmem_event &event) noexcept {
        event.size = sizeof event;
        return netmem_stack_next_event(handle_, &event);
    }
    int fd() const noexcept { return netmem_stack_fd(handle_); }
    /* Nanoseconds to sleep at most until `fd` is readable: 0 for no sleep, -1 for ever. */
    std::int64_t arm() { return detail::written(netmem_stack_arm, handle_); }
    void disarm() noexcept { netmem_stack_disarm(handle_); }
    /* Empty if there is no page. */
    frag alloc() noexcept {
        netmem_frag out = netmem_frag();
        netmem_stack_alloc(handle_, &out, 1);
        return frag(out);
    }
    tcp_listener listen(const netmem_endpoint &local, const netmem_tcp_options &options = tcp_options()) {
        netmem_tcp_listener *listener = nullptr;
        check(netmem_tcp_listen(handle_, &local, &options, &listener));
        return tcp_listener(listener);
    }
    tcp connect(const netmem_endpoint &remote, const netmem_tcp_options &options = tcp_options()) {
        netmem_tcp *connection = nullptr;
        check(netmem_tcp_connect(handle_, &remote, &options, &connection));
        return tcp(connection);
    }
    void shutdown() { check(netmem_stack_shutdown(handle_)); }
    bool is_shut_down() noexcept { return netmem_stack_is_shut_down(handle_); }
    netmem_stack_stats stats() { return detail::counted(netmem_stack_get_stats, handle_); }
};

/* Device memory. */
class devmem : public detail::owner<netmem_devmem, netmem_devmem_close> {
  public:
    /* Becomes the owner of a handle of netmem_devmem_create, _create_cuda or _bind. */
    using owner::owner;
    /* Host memory in its place. */
    explicit devmem(std::size_t bytes) { check(netmem_devmem_create(bytes, &handle_)); }
    static devmem cuda(std::uint32_t gpu, std::size_t bytes) {
        netmem_devmem *made = nullptr;
        check(netmem_devmem_create_cuda(gpu, bytes, &made));
        return devmem(made);
    }
    static devmem bind(int fd) {
        netmem_devmem *made = nullptr;
        check(netmem_devmem_bind(fd, &made));
        return devmem(made);
    }
    void read(std::uint64_t offset, void *to, std::size_t length) const { check(netmem_devmem_read(handle_, offset, to, length)); }
    void write(std::uint64_t offset, const void *from, std::size_t length) { check(netmem_devmem_write(handle_, offset, from, length)); }
    std::uint64_t device_address() const { return detail::written(netmem_devmem_device_address, handle_); }
    int fd() const noexcept { return netmem_devmem_fd(handle_); }
    netmem_devmem_stats stats() const { return detail::counted(netmem_devmem_get_stats, handle_); }
};

/* Returns tokens of a stream, on any thread. */
class devmem_returner : public detail::owner<netmem_devmem_returner, netmem_devmem_returner_close> {
  public:
    using owner::owner;
    devmem_returner() = delete;
    /* Returns how many pages were. */
    std::size_t give_back(const netmem_devmem_extent *extents, std::size_t n) const {
        std::size_t returned = 0;
        check(netmem_devmem_return(handle_, extents, n, &returned));
        return returned;
    }
};

/* A TCP connection into and out of device memory, on the thread of its stack. */
class devmem_stream : public detail::owner<netmem_devmem_stream, netmem_devmem_stream_close> {
  public:
    using owner::owner;
    devmem_stream() = delete;
    explicit operator bool() const noexcept { return handle_ != nullptr; }
    /* Returns how many extents were received. `ended`: the peer sends no more. */
    std::size_t receive(netmem_devmem_extent *extents, std::size_t n, bool &ended) {
        std::size_t received = 0;
        check(netmem_devmem_stream_receive(handle_, extents, n, &received, &ended));
        return received;
    }
    /* Copies bytes of received extents in host memory. */
    std::size_t read(void *to, std::size_t length) {
        std::size_t done = 0;
        check(netmem_devmem_stream_read(handle_, to, length, &done));
        return done;
    }
    /* False if the send buffer is full. */
    bool send(const devmem &memory, std::uint64_t offset, std::uint32_t length, bool more = false) {
        bool accepted = false;
        check(netmem_devmem_stream_send(handle_, memory.get(), offset, length, more, &accepted));
        return accepted;
    }
    /* The numbers of ranges that may be used again. */
    std::size_t sent(std::uint64_t *ranges, std::size_t n) {
        std::size_t done = 0;
        check(netmem_devmem_stream_sent(handle_, ranges, n, &done));
        return done;
    }
    std::size_t write(const void *from, std::size_t length) {
        std::size_t done = 0;
        check(netmem_devmem_stream_write(handle_, from, length, &done));
        return done;
    }
    void shutdown() { check(netmem_devmem_stream_shutdown(handle_)); }
    devmem_returner returner() { return devmem_returner(detail::written(netmem_devmem_returner_open, handle_)); }
    netmem_devmem_stream_stats stats() { return detail::counted(netmem_devmem_stream_get_stats, handle_); }
};

class devmem_listener : public detail::owner<netmem_devmem_listener, netmem_devmem_listener_close> {
  public:
    using owner::owner;
    devmem_listener() = delete;
    /* False if no connection waits. */
    devmem_stream accept() { return devmem_stream(detail::written(netmem_devmem_accept, handle_)); }
};

inline netmem_devmem_stack_options devmem_stack_options(const char *socket, const char *address) {
    netmem_devmem_stack_options options = detail::sized<netmem_devmem_stack_options>();
    options.socket = socket;
    options.address = address;
    return options;
}

/* A host on a virtio-net device. The end of the value resets connections that are open: close()
 * waits for what was sent. */
class devmem_stack : public detail::owner<netmem_devmem_stack, netmem_devmem_stack_close> {
  public:
    devmem_stack(const devmem &memory, const netmem_devmem_stack_options &options) {
        check(netmem_devmem_stack_open(memory.get(), &options, &handle_));
    }
    std::size_t poll() { return detail::written(netmem_devmem_stack_poll, handle_); }
    int fd() const noexcept { return netmem_devmem_stack_fd(handle_); }
    /* Nanoseconds to sleep at most until `fd` is readable: 0 for no sleep, -1 for ever. */
    std::int64_t arm() { return detail::written(netmem_devmem_stack_arm, handle_); }
    void disarm() noexcept { netmem_devmem_stack_disarm(handle_); }
    devmem_listener listen(std::uint16_t port) {
        netmem_devmem_listener *made = nullptr;
        check(netmem_devmem_listen(handle_, port, &made));
        return devmem_listener(made);
    }
    devmem_stream connect(const char *peer) {
        netmem_devmem_stream *made = nullptr;
        check(netmem_devmem_connect(handle_, peer, &made));
        return devmem_stream(made);
    }
    netmem_devmem_stack_stats stats() { return detail::counted(netmem_devmem_stack_get_stats, handle_); }
    /* Sends what is left, for at most so long. After a misuse the value is still open. */
    void close(std::uint32_t milliseconds) {
        const netmem_status status = netmem_devmem_stack_close(handle_, milliseconds);
        if (status != NETMEM_ERR_THREAD && status != NETMEM_ERR_HANDLE)
            release();
        check(status);
    }
};

/* A receive queue of a virtio-net device, of the thread that uses it first. */
class virtio_rx : public detail::owner<netmem_virtio_rx, netmem_virtio_rx_close> {
  public:
    /* Becomes the owner of a handle of netmem_virtio_connect. */
    using owner::owner;
    virtio_rx() = delete;
    /* Releases what the group has, and receives up to N frames, each in one fragment. */
    template <std::size_t N> std::size_t receive(frag_group<N> &group) {
        return group.receive_by([this](netmem_frag *frags, std::size_t n) { netmem_virtio_rx_release(handle_, frags, n); },
                                [this](netmem_frag *frags, std::size_t n, std::size_t *received) {
                                    return netmem_virtio_rx_receive(handle_, frags, nullptr, n, received);
                                });
    }
    int fd() const noexcept { return netmem_virtio_rx_fd(handle_); }
    /* Whether to sleep until `fd` is readable. */
    bool arm() { return detail::written(netmem_virtio_rx_arm, handle_); }
    void disarm() noexcept { netmem_virtio_rx_disarm(handle_); }
    netmem_virtio_rx_stats stats() { return detail::counted(netmem_virtio_rx_get_stats, handle_); }
};

/* A transmit queue of a virtio-net device, of the thread that uses it first. */
class virtio_tx : public detail::owner<netmem_virtio_tx, netmem_virtio_tx_close> {
  public:
    /* Becomes the owner of a handle of netmem_virtio_connect. */
    using owner::owner;
    virtio_tx() = delete;
    /* Sends the fragments of the group, each a frame, and returns how many. The others stay in the
     * group, also if this throws. */
    template <std::size_t N> std::size_t send(frag_group<N> &group) {
        return group.send_by([this](netmem_frag *frags, std::size_t n, std::size_t *sent) {
            return netmem_virtio_tx_send(handle_, frags, nullptr, n, sent);
        });
    }
    /* Returns pages of sent frames, those of `rx` to its cache. */
    std::size_t complete(virtio_rx &rx) noexcept { return netmem_virtio_tx_complete(handle_, rx.get()); }
    std::size_t complete() noexcept { return netmem_virtio_tx_complete(handle_, nullptr); }
    int fd() const noexcept { return netmem_virtio_tx_fd(handle_); }
    /* Whether to sleep until `fd` is readable. */
    bool arm() { return detail::written(netmem_virtio_tx_arm, handle_); }
    void disarm() noexcept { netmem_virtio_tx_disarm(handle_); }
    netmem_virtio_tx_stats stats() { return detail::counted(netmem_virtio_tx_get_stats, handle_); }
};

inline netmem_virtio_options virtio_options(const char *socket) {
    netmem_virtio_options options = detail::sized<netmem_virtio_options>();
    options.socket = socket;
    return options;
}

/* A virtio-net device that the driver is connected to, with its queues: `rx` and `tx` are moved out
 * by the threads that use them. `get` is also for the `share` of another driver's options. */
class virtio_net : public detail::owner<netmem_virtio_net, netmem_virtio_net_close> {
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
    virtio_net(virtio_net &&from) noexcept = default;
    /* Swaps, so that a move to itself changes nothing. */
    virtio_net &operator=(virtio_net &&from) noexcept {
        owner::operator=(std::move(from));
        std::swap(rx, from.rx);
        std::swap(tx, from.tx);
        return *this;
    }
    /* The handle is closed before the queues: the last queue closes the connection. */
    ~virtio_net() {
        if (handle_ != nullptr)
            netmem_virtio_net_close(release());
    }
    /* Empty if there is no page to send from. */
    frag alloc() const noexcept {
        netmem_frag out = netmem_frag();
        netmem_virtio_net_alloc(handle_, &out, 1);
        return frag(out);
    }
    bool is_connected() const noexcept { return netmem_virtio_net_is_connected(handle_); }
    void reconnect(const char *socket) { check(netmem_virtio_net_reconnect(handle_, socket)); }

    std::vector<virtio_rx> rx;
    std::vector<virtio_tx> tx;
};

/* A virtio-net device for virtual machines, of the thread that moves its frames. */
class virtio_device : public detail::owner<netmem_virtio_device, netmem_virtio_device_close> {
  public:
    virtio_device(const region &region, const netmem_virtio_device_options &options) {
        check(netmem_virtio_device_create(region.get(), &options, &handle_));
    }
    explicit virtio_device(const region &region) {
        netmem_virtio_device_options options = detail::sized<netmem_virtio_device_options>();
        check(netmem_virtio_device_create(region.get(), &options, &handle_));
    }
    void listen(const char *socket) { check(netmem_virtio_device_listen(handle_, socket)); }
    void serve(int fd) { check(netmem_virtio_device_serve(handle_, fd)); }
    /* Throws the reason why a front end was dropped, if one was. */
    void check_connection() const { check(netmem_virtio_device_check(handle_)); }
    /* Releases what the group has, makes a pass over the rings, and receives up to N frames, each
     * in one fragment. */
    template <std::size_t N> std::size_t receive(frag_group<N> &group) {
        check(group.receive_by([this](netmem_frag *frags, std::size_t n, std::size_t *received) {
            return netmem_virtio_device_receive(handle_, frags, nullptr, n, received);
        }));
        return group.size();
    }
    /* Queues the fragments of the group, each a frame, and returns how many. The others stay in the
     * group, also if this throws. */
    template <std::size_t N> std::size_t send(frag_group<N> &group) {
        return group.send_by([this](netmem_frag *frags, std::size_t n, std::size_t *sent) {
            return netmem_virtio_device_send(handle_, frags, nullptr, n, sent);
        });
    }
    int fd() const noexcept { return netmem_virtio_device_fd(handle_); }
    /* Whether to sleep until `fd` is readable. */
    bool arm() { return detail::written(netmem_virtio_device_arm, handle_); }
    void disarm() noexcept { netmem_virtio_device_disarm(handle_); }
    netmem_virtio_device_stats stats() { return detail::counted(netmem_virtio_device_get_stats, handle_); }
};

} // namespace netmem

#endif
