//! Opens a stack: on a tap, or on the two queues of an AF_XDP socket.

use crate::handle;
use crate::options::{self, Versioned};
use crate::owned;
use crate::region::Kept;
use crate::stack::Over;
use crate::stack::handles::netmem_stack;
use crate::stack::memory::SendMemory;
use crate::stack::stack::{Parts, Running};
use crate::status::{Failure, netmem_status, status};
use crate::xsk::rx::netmem_xsk_rx;
use crate::xsk::tx::netmem_xsk_tx;
use crate::xsk::umem::netmem_umem;
use netmem::host::{OpenError, TapOptions, check_mtu, kernel_has};
use netmem::tcp::{Address, Host, Interface, Mac, Payload, Stack, StackOptions, Time};
use netmem_pool::PoolOptions;
use netmem_xsk::Interface as Link;
use std::ffi::{CStr, c_char};
use std::net::IpAddr;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

/// The most pages of an AF_XDP stack for headers and for payload that is copied, as a tap has. Of
/// either, the most for netmem_stack_alloc.
const SEND_PAGES: usize = 2048;

/// How a stack is opened. Set `size` to sizeof(netmem_stack_options), and the rest to zero where
/// the default will do.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_stack_options {
    /// sizeof(netmem_stack_options)
    pub size: usize,
    /// The name of the tap, which is made if there is none; null for netmem_stack_open_xsk.
    pub tap: *const c_char,
    /// The addresses of the stack, each with the length of its prefix, separated by spaces:
    /// "192.0.2.2/24", or "192.0.2.2/24 2001:db8::2/64".
    pub addresses: *const c_char,
    /// The routers to other networks, at most one of each family, separated by spaces:
    /// "192.0.2.1". Null: only stations of the networks of `addresses` can be reached.
    pub gateways: *const c_char,
    /// The most received pages that wait for the program; 0: 512. Payload beyond them is dropped,
    /// and the peer sends it again. At most 2048 on a tap. On AF_XDP the UMEM has these, those that
    /// the kernel has to receive into, and a quarter of its pages, 2048 at most, which the stack
    /// takes for headers and copied payload. netmem_stack_alloc allocates as many from the rest.
    pub pages: u32,
    /// The most connections, closing ones included; 0: 65536.
    pub connections: u32,
    /// Bytes of an IP packet; 0: 1500, and for netmem_stack_open_xsk the interface's. The kernel's
    /// end of a tap keeps its own, which is set by `ip link set`.
    pub mtu: u16,
    /// Zero.
    pub reserved: [u8; 6],
}

// SAFETY: repr(C), `size` is first, integers and pointers.
unsafe impl Versioned for netmem_stack_options {
    const NAME: &'static str = "netmem_stack_options";
    const LEAST: usize = 48;
}

/// The most received pages that may wait in a stack on a tap: half of those that it has, so that
/// the ring is full whatever the program does not receive.
const MOST_PAGES: u32 = 2048;

/// The options, as they were validated.
struct Given {
    addresses: Vec<Address>,
    gateways: Vec<IpAddr>,
    mtu: Option<u16>,
    stack: StackOptions,
}

/// # Safety
///
/// Null, or a string that ends with a zero byte.
unsafe fn words(from: *const c_char) -> Vec<String> {
    if from.is_null() {
        return Vec::new();
    }
    // SAFETY: as the caller promises.
    let text = unsafe { CStr::from_ptr(from) }.to_string_lossy();
    text.split_whitespace().map(str::to_owned).collect()
}

impl netmem_stack_options {
    /// # Safety
    ///
    /// Strings, or null.
    unsafe fn validate(&self) -> Result<Given, Failure> {
        let argument = |error: String| Failure::Argument(error);
        if self.reserved != [0; 6] {
            return Err(argument("netmem_stack_options.reserved is not zero".into()));
        }
        // SAFETY: as the caller promises.
        let (addresses, gateways) = unsafe { (words(self.addresses), words(self.gateways)) };
        let addresses = addresses.iter().map(|text| text.parse::<Address>()).collect::<Result<Vec<_>, _>>();
        let addresses = addresses.map_err(|error| argument(error.to_string()))?;
        let gateway = |text: &String| {
            text.parse().map_err(|_| argument(format!("`{text}` is not the address of a gateway, such as 192.0.2.1")))
        };
        let gateways = gateways.iter().map(gateway).collect::<Result<Vec<_>, _>>()?;
        if addresses.is_empty() {
            return Err(OpenError::NoAddress.into());
        }
        let mut stack = StackOptions::default();
        if self.pages > 0 {
            stack.pages = self.pages;
        }
        if self.connections > 0 {
            stack.connections = self.connections as usize;
        }
        Ok(Given { addresses, gateways, mtu: (self.mtu > 0).then_some(self.mtu), stack })
    }
}

impl Given {
    fn add_gateways<P: Payload>(&self, host: &Host<P>) -> Result<(), Failure> {
        for &gateway in &self.gateways {
            let all: IpAddr = if gateway.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
            host.add_route(all, 0, gateway).map_err(|error| Failure::Argument(error.to_string()))?;
        }
        Ok(())
    }
}

/// A handle that belongs to this thread from now on.
///
/// # Safety
///
/// The caller has room for a pointer at `out`.
unsafe fn write(running: Running, out: NonNull<*mut netmem_stack>) -> Result<(), Failure> {
    let made = handle::create(running);
    // SAFETY: it was just made, and `out` as the caller promises.
    unsafe {
        owned::get_mut::<netmem_stack>(made)?;
        out.write(made);
    }
    Ok(())
}

/// Opens a stack with addresses of its own on a tap. The kernel is the peer on the other side, with
/// an address that the caller assigns to the tap (ip addr add). The stack belongs to this thread. A
/// thread of the library moves frames between the tap and the stack, until the stack is closed. It
/// has the signal mask of this call: a program that has threads for its signals blocks them before.
/// The tap goes with the stack, unless it was there before.
///
/// The stack holds 8192 pages of 4096 bytes. Needs CAP_NET_ADMIN, unless the tap was made for this
/// user. The strings of the options are not kept.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_ARGUMENT (an address, also one that
/// the kernel has, a gateway that is not in the network of an address, the MTU, the tap's name),
/// NETMEM_ERR_PRIVILEGE, NETMEM_ERR_BUSY (another process has the tap), NETMEM_ERR_UNSUPPORTED (no
/// /dev/net/tun), NETMEM_ERR_NO_MEMORY, NETMEM_ERR_SYSTEM. Nothing is open then.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_stack_open_tap(
    options: *const netmem_stack_options,
    stack: *mut *mut netmem_stack,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(stack).ok_or_else(|| Failure::null("stack"))?;
        // SAFETY: as the header says.
        let given = unsafe { options::read(options) }?;
        let name = NonNull::new(given.tap.cast_mut()).ok_or_else(|| Failure::null("netmem_stack_options.tap"))?;
        // SAFETY: as the header says.
        let (name, given) = unsafe { (CStr::from_ptr(name.as_ptr()).to_string_lossy(), given.validate()?) };
        if given.stack.pages > MOST_PAGES {
            return Err(Failure::Argument(format!(
                "{} pages wait in a stack on a tap; at most {MOST_PAGES} can",
                given.stack.pages
            )));
        }
        let mut options = TapOptions::new().user_pages(SEND_PAGES);
        if let Some(mtu) = given.mtu {
            options = options.mtu(mtu);
        }
        let mut opened = options.open(&name, 1, &given.addresses)?;
        given.add_gateways(&opened.host)?;
        let queue = opened.queues.pop().ok_or_else(|| Failure::Argument("a tap without a queue".into()))?;
        let (beginning, pool) = (Instant::now(), queue.pool().clone());
        let user_pool = queue.user_pool().unwrap_or(&pool).clone();
        let memory = SendMemory::Domain(pool.dma_domain());
        let (stack, device) = queue.apart(given.stack, Time::ZERO).map_err(Failure::Queue)?;
        let parts = Parts { stack, device: Some(device), pool, user_pool };
        // SAFETY: as the header says.
        unsafe { write(Running::new(Over::Tap(parts), memory, beginning), out) }
    })
}

/// Opens a stack with addresses of its own on the two queues of an AF_XDP socket, which become the
/// stack's: `rx` and `tx` are closed handles then. Frames for the addresses are to be redirected to
/// `rx` by an XDP program, with a rule for each address (netmem_xdp_rule.address), before or after
/// this call. The thread is in the interface's network namespace. Connections arrive only by the
/// queues of the interface that are redirected. The stack has the Ethernet address of the
/// interface, and belongs to this thread. Frames that `rx` holds at this call are dropped. `umem`
/// is that of the queues, and its handle may be closed afterwards.
///
/// The interface is to have no segmentation offloads for received frames (ethtool -K NAME gro off
/// lro off), and the peer of a veth no checksum and segmentation offloads.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE, NETMEM_ERR_THREAD,
/// NETMEM_ERR_ARGUMENT (as netmem_stack_open_tap; queues of another UMEM or of two sockets; an MTU
/// above the interface's, or below 576, or 1280 for IPv6; a UMEM with too few pages for `pages`),
/// NETMEM_ERR_NO_PAGES, NETMEM_ERR_NOT_FOUND (the interface is gone), NETMEM_ERR_NO_MEMORY,
/// NETMEM_ERR_SYSTEM. The queues stay with the caller. NETMEM_ERR_CLOSED: the system has too few
/// descriptors, and the queues were closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_stack_open_xsk(
    options: *const netmem_stack_options,
    umem: *const netmem_umem,
    rx: *mut netmem_xsk_rx,
    tx: *mut netmem_xsk_tx,
    stack: *mut *mut netmem_stack,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(stack).ok_or_else(|| Failure::null("stack"))?;
        // SAFETY: as the header says.
        let (given, (umem, provider)) = unsafe { (options::read(options)?.validate()?, handle::get(umem)?) };
        // SAFETY: as the header says.
        let (receive, transmit) = unsafe { (owned::peek(rx)?, owned::peek(tx)?) };
        let region = umem.region().clone();
        if !Arc::ptr_eq(&region, receive.queue.umem().region()) || !Arc::ptr_eq(&region, transmit.umem().region()) {
            return Err(Failure::Argument("the queues are of another UMEM".into()));
        }
        if !std::ptr::eq(receive.queue.socket(), transmit.socket()) {
            return Err(Failure::Argument("the queues are of two sockets".into()));
        }
        if let Some(own) = given.addresses.iter().find(|own| kernel_has(own.addr)) {
            return Err(OpenError::Kernel(own.addr).into());
        }
        let name = receive.queue.socket().interface().to_owned();
        let link = Link::by_name(&name).map_err(|source| OpenError::Interface { name, source })?;
        let most = u16::try_from(link.mtu).unwrap_or(u16::MAX);
        let mtu = given.mtu.unwrap_or(most);
        check_mtu(mtu, most, &given.addresses)?;
        let mac = Mac(link.mac.unwrap_or_default());
        let host: Host<Kept> = Host::new(Interface { mac, mtu, addresses: given.addresses.clone() });
        given.add_gateways(&host)?;
        let pages = region.pages() as usize;
        let limit = SEND_PAGES.min(pages / 4);
        let (waiting, filled) = (given.stack.pages as usize, receive.queue.fill_level());
        if waiting + filled + limit > pages {
            return Err(Failure::Argument(format!(
                "the UMEM has {pages} pages, fewer than {waiting} that wait in the stack, {filled} of the kernel, and {limit} for \
                 headers and copied payload"
            )));
        }
        let pool = |options: PoolOptions| {
            options.limit(limit).build_shared(provider.clone(), Some(umem.domain())).map(Arc::new)
        };
        // Pages for headers are there even if the program holds all others.
        let (pool, user_pool) =
            (pool(PoolOptions::new("stack").cache(limit).prefill(limit))?, pool(PoolOptions::new("stack pages"))?);
        let beginning = Instant::now();
        // SAFETY: as the header says.
        let (rx, tx) = unsafe { (owned::close(rx)?.queue, owned::close(tx)?) };
        let stack = Stack::new(&host, rx, tx, pool.clone(), given.stack, Time::ZERO).map_err(Failure::QueuesClosed)?;
        let parts = Parts { stack, device: None, pool, user_pool };
        // SAFETY: as the header says.
        unsafe { write(Running::new(Over::Xsk(parts), SendMemory::Region(region), beginning), out) }
    })
}
