//! The control side: vhost-user messages of one front end at a time, each checked and then applied to the shared state.

use std::fs::File;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use vhost::vhost_user::VhostUserBackendReqHandler;
use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight, VhostUserLog,
    VhostUserMemoryRegion, VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{BackendReqHandler, Error as WireError, GpuBackend, Result as WireResult};

use super::DeviceError;
use super::memory::{MemoryTable, RegionInfo};
use super::state::{Shared, State};
use crate::notify::{Notifier, NotifyError};
use crate::ring::SplitLayout;

/// The control side of a device. Clones serve the same device.
#[derive(Clone, Debug)]
pub struct Control {
    shared: Arc<Shared>,
}

impl Control {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// The features ([`crate::net::feature`]) that the device offers.
    #[must_use]
    pub fn offered(&self) -> u64 {
        self.shared.offered
    }

    /// Serves the front end at the other end of `stream` on this thread, until it goes. Afterwards all rings are
    /// stopped and none of its memory is mapped, however it went.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Busy`], or what the front end did wrong. A front end that hangs up between two messages is no
    /// error.
    pub fn handle(&self, stream: UnixStream) -> Result<(), DeviceError> {
        let _connected = Connected::claim(&self.shared)?;
        let result = serve(&self.shared, stream);
        if let Err(e) = &result {
            tracing::warn!("front end dropped: {e}");
            self.shared.stats.connection_errors.fetch_add(1, Ordering::Relaxed);
        }
        result
    }

    /// The same on a thread of its own.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Io`] where no thread can be had. What happens on the connection is [`Connection::wait`]'s to say.
    pub fn serve(&self, stream: UnixStream) -> Result<Connection, DeviceError> {
        let io = |what| move |source| DeviceError::Io { what, source };
        let hangup = stream.try_clone().map_err(io("duplicating the connection"))?;
        let control = self.clone();
        let body = move || control.handle(stream);
        let thread =
            std::thread::Builder::new().name("netmem-vhost".into()).spawn(body).map_err(io("starting a thread"))?;
        Ok(Connection { hangup, thread: Some(thread) })
    }

    /// Ends a sleep of [`super::NetDevice::run`], so that it looks at its `stop` flag.
    pub fn wake(&self) {
        self.shared.wake();
    }
}

/// Holds the device for one front end.
struct Connected<'a>(&'a Shared);

impl<'a> Connected<'a> {
    fn claim(shared: &'a Shared) -> Result<Self, DeviceError> {
        if shared.connected.swap(true, Ordering::Acquire) { Err(DeviceError::Busy) } else { Ok(Self(shared)) }
    }
}

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        self.0.change(State::reset);
        self.0.connected.store(false, Ordering::Release);
    }
}

/// A front end that is being served. Dropping it hangs up.
#[derive(Debug)]
#[must_use = "a connection ends when it is dropped"]
pub struct Connection {
    hangup: UnixStream,
    thread: Option<JoinHandle<Result<(), DeviceError>>>,
}

impl Connection {
    /// Whether the front end is gone.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the front end goes.
    ///
    /// # Errors
    ///
    /// As [`Control::handle`].
    pub fn wait(mut self) -> Result<(), DeviceError> {
        self.join()
    }

    fn join(&mut self) -> Result<(), DeviceError> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => Ok(()),
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let _ = self.hangup.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn serve(shared: &Arc<Shared>, stream: UnixStream) -> Result<(), DeviceError> {
    let handler = Arc::new(Handler { shared: Arc::clone(shared) });
    let ahead = stream.try_clone().map_err(|source| DeviceError::Io { what: "duplicating the connection", source })?;
    let mut requests = BackendReqHandler::from_stream(stream, handler);
    loop {
        let early = peek_enable(&ahead);
        match requests.handle_request() {
            Ok(()) | Err(WireError::SocketRetry(_)) => {}
            // QEMU enables its rings before it acknowledges features, and not again. The library refuses to hand that on,
            // so it is read before the library reads it.
            Err(WireError::InactiveFeature(_)) => {
                if let Some((ring, enable)) = early {
                    shared.change(|s| s.set_enabled(ring, enable))?;
                }
            }
            Err(WireError::Disconnected) => return Ok(()),
            Err(e) => return Err(cause(e)),
        }
    }
}

/// If the next message is a SET_VRING_ENABLE that is there as a whole: its ring, and whether to enable it. Waits for the
/// message, and leaves it to be read.
fn peek_enable(stream: &UnixStream) -> Option<(usize, bool)> {
    const SET_VRING_ENABLE: u32 = 18;
    let mut message = [0; 20];
    let (n, _) = rustix::net::recv(stream, &mut message[..], rustix::net::RecvFlags::PEEK).ok()?;
    let word = |at: usize| u32::from_le_bytes([message[at], message[at + 1], message[at + 2], message[at + 3]]);
    let whole = n == message.len() && word(0) == SET_VRING_ENABLE && word(8) == 8;
    whole.then(|| (word(12) as usize, word(16) != 0))
}

/// What a failed message says about its sender.
fn cause(e: WireError) -> DeviceError {
    match e {
        WireError::PartialMessage => DeviceError::CutOff,
        WireError::ReqHandlerError(e) => match e.downcast::<DeviceError>() {
            Ok(e) => e,
            Err(source) => DeviceError::Io { what: "handling a message", source },
        },
        WireError::SocketBroken(_) | WireError::SocketError(_) | WireError::SocketConnect(_) => {
            DeviceError::Connection(e)
        }
        e => DeviceError::Malformed(e),
    }
}

fn refuse(e: DeviceError) -> WireError {
    WireError::ReqHandlerError(std::io::Error::other(e))
}

fn unsupported<T>(what: &'static str) -> WireResult<T> {
    Err(refuse(DeviceError::Unsupported { what }))
}

/// Takes a descriptor of the front end's for events, by `accept`.
fn event<T>(
    message: &'static str,
    ring: u8,
    fd: Option<File>,
    accept: impl FnOnce(OwnedFd) -> Result<T, NotifyError>,
) -> WireResult<Option<T>> {
    let accepted = fd.map(|file| accept(file.into())).transpose();
    accepted.map_err(|source| refuse(DeviceError::Event { message, ring: ring.into(), source }))
}

struct Handler {
    shared: Arc<Shared>,
}

impl Handler {
    fn change<T>(&self, f: impl FnOnce(&mut State) -> Result<T, DeviceError>) -> WireResult<T> {
        self.shared.change(f).map_err(refuse)
    }

    /// `struct virtio_net_config`, as far as it is spoken here: MAC, status, pairs, MTU.
    fn config(&self) -> [u8; 12] {
        let options = &self.shared.options;
        let mut config = [0; 12];
        config[..6].copy_from_slice(&options.mac.unwrap_or_default());
        config[6..8].copy_from_slice(&1u16.to_le_bytes());
        config[8..10].copy_from_slice(&(options.max_pairs as u16).to_le_bytes());
        config[10..].copy_from_slice(&options.mtu.unwrap_or_default().to_le_bytes());
        config
    }
}

impl VhostUserBackendReqHandler for Handler {
    fn set_owner(&self) -> WireResult<()> {
        Ok(())
    }

    fn reset_owner(&self) -> WireResult<()> {
        self.shared.change(State::disable_all);
        Ok(())
    }

    fn reset_device(&self) -> WireResult<()> {
        unsupported("RESET_DEVICE")
    }

    fn get_features(&self) -> WireResult<u64> {
        Ok(self.shared.offered)
    }

    fn set_features(&self, features: u64) -> WireResult<()> {
        self.change(|s| s.set_features(features, self.shared.offered))
    }

    fn set_mem_table(
        &self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> WireResult<Option<Vec<u64>>> {
        let info = |r: &VhostUserMemoryRegion| RegionInfo {
            guest_addr: r.guest_phys_addr,
            user_addr: r.user_addr,
            size: r.memory_size,
            mmap_offset: r.mmap_offset,
        };
        // Mapped before the state is asked for: that takes a while, and the data side need not wait for it.
        let regions: Vec<_> = regions.iter().map(info).collect();
        let memory = MemoryTable::new(&regions, &files).map_err(refuse)?;
        self.shared.change(|s| s.set_memory(memory, &self.shared.stats));
        Ok(None)
    }

    fn set_vring_num(&self, index: u32, num: u32) -> WireResult<()> {
        self.change(|s| s.set_size(index as usize, num))
    }

    fn set_vring_addr(
        &self,
        index: u32,
        _: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _: u64,
    ) -> WireResult<()> {
        self.change(|s| s.set_parts(index as usize, [descriptor, available, used]))
    }

    fn set_vring_base(&self, index: u32, base: u32) -> WireResult<()> {
        self.change(|s| s.set_base(index as usize, base))
    }

    fn get_vring_base(&self, index: u32) -> WireResult<VhostUserVringState> {
        let base = self.change(|s| s.get_base(index as usize))?;
        Ok(VhostUserVringState::new(index, u32::from(base)))
    }

    fn set_vring_kick(&self, index: u8, fd: Option<File>) -> WireResult<()> {
        let kick = event("SET_VRING_KICK", index, fd, |fd| self.shared.kicks.watch(fd))?;
        self.change(|s| s.set_kick(usize::from(index), kick))
    }

    fn set_vring_call(&self, index: u8, fd: Option<File>) -> WireResult<()> {
        let call = event("SET_VRING_CALL", index, fd, Notifier::new)?;
        self.change(|s| s.set_call(usize::from(index), call))
    }

    fn set_vring_err(&self, index: u8, fd: Option<File>) -> WireResult<()> {
        let err = event("SET_VRING_ERR", index, fd, Notifier::new)?;
        self.change(|s| s.set_err(usize::from(index), err))
    }

    fn get_protocol_features(&self) -> WireResult<VhostUserProtocolFeatures> {
        let features = VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::CONFIG;
        Ok(features | VhostUserProtocolFeatures::REPLY_ACK)
    }

    fn set_protocol_features(&self, features: u64) -> WireResult<()> {
        let extra = features & !self.get_protocol_features()?.bits();
        if extra == 0 { Ok(()) } else { unsupported("a protocol feature that was not offered") }
    }

    fn get_queue_num(&self) -> WireResult<u64> {
        // For network devices, front ends (QEMU, DPDK) understand this as pairs.
        Ok(self.shared.options.max_pairs as u64)
    }

    fn set_vring_enable(&self, index: u32, enable: bool) -> WireResult<()> {
        self.change(|s| s.set_enabled(index as usize, enable))
    }

    fn get_config(&self, offset: u32, size: u32, _: VhostUserConfigFlags) -> WireResult<Vec<u8>> {
        let config = self.config();
        let at = offset as usize;
        // Fields beyond those known here read as zero.
        let byte = |i: usize| config.get(at.saturating_add(i)).copied().unwrap_or(0);
        Ok((0..(size as usize).min(usize::from(SplitLayout::MAX_SIZE))).map(byte).collect())
    }

    fn set_config(&self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> WireResult<()> {
        unsupported("SET_CONFIG")
    }

    fn set_gpu_socket(&self, _: GpuBackend) -> WireResult<()> {
        unsupported("GPU_SET_SOCKET")
    }

    fn get_shared_object(&self, _: VhostUserSharedMsg) -> WireResult<File> {
        unsupported("GET_SHARED_OBJECT")
    }

    fn get_inflight_fd(&self, _: &VhostUserInflight) -> WireResult<(VhostUserInflight, File)> {
        unsupported("GET_INFLIGHT_FD")
    }

    fn set_inflight_fd(&self, _: &VhostUserInflight, _: File) -> WireResult<()> {
        unsupported("SET_INFLIGHT_FD")
    }

    fn get_max_mem_slots(&self) -> WireResult<u64> {
        unsupported("GET_MAX_MEM_SLOTS")
    }

    fn add_mem_region(&self, _: &VhostUserSingleMemoryRegion, _: File, _: Option<bool>) -> WireResult<Option<u64>> {
        unsupported("ADD_MEM_REG")
    }

    fn remove_mem_region(&self, _: &VhostUserSingleMemoryRegion) -> WireResult<()> {
        unsupported("REM_MEM_REG")
    }

    fn set_device_state_fd(
        &self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> WireResult<Option<File>> {
        unsupported("SET_DEVICE_STATE_FD")
    }

    fn check_device_state(&self) -> WireResult<()> {
        unsupported("CHECK_DEVICE_STATE")
    }

    fn get_shmem_config(&self) -> WireResult<VhostUserShMemConfig> {
        unsupported("GET_SHMEM_CONFIG")
    }

    fn set_log_base(&self, _: &VhostUserLog, _: File) -> WireResult<()> {
        unsupported("SET_LOG_BASE")
    }
}
