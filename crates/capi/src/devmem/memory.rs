//! Device memory: a file in its place, or the memory of a GPU.

use super::{bytes, error};
use crate::handle::{self, Kind};
use crate::options::{self, Versioned};
use crate::status::{Coded, Failure, netmem_status, status, value};
use ::netmem_devmem::Binding;
use netmem_refs::Worker;
#[cfg(feature = "cuda")]
use netmem_virtio::guest_memory::cuda::{Gpu, GpuMemory};
#[cfg(feature = "cuda")]
use netmem_virtio::guest_memory::import::ImportedMemory;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// Memory that this process does not map, into which the queue of a network device receives.
#[derive(Debug)]
pub struct netmem_devmem(());

impl Kind for netmem_devmem {
    type Value = Memory;
    const NAME: &'static str = "netmem_devmem";
    const NUMBER: u64 = 0x6e65_746d_656d_0030;
}

/// A binding, and what the memory of it is.
pub(crate) struct Memory {
    pub(super) binding: Binding,
    backing: Backing,
}

/// Several threads use a handle at a time.
const _: fn() = || {
    fn any_thread<T: Send + Sync>() {}
    any_thread::<Memory>();
};

enum Backing {
    File(File),
    #[cfg(feature = "cuda")]
    Gpu(GpuMemory),
}

impl Memory {
    /// Binds the memory of a file that reports its size.
    fn of(file: File) -> Result<Self, Failure> {
        let binding = Binding::new(file.try_clone().map_err(Failure::System)?, 0, &worker()?)?;
        Ok(Self { binding, backing: Backing::File(file) })
    }

    #[cfg(feature = "cuda")]
    fn of_gpu(number: u32, bytes: usize) -> Result<Self, Failure> {
        let memory = Gpu::open(number).and_then(|gpu| gpu.allocate(bytes)).map_err(error::gpu)?;
        let file = memory.export().map_err(error::gpu)?;
        let binding = Binding::exported(file, memory.len() as u64, 0, &worker()?)?;
        Ok(Self { binding, backing: Backing::Gpu(memory) })
    }

    #[cfg(not(feature = "cuda"))]
    fn of_gpu(_number: u32, _bytes: usize) -> Result<Self, Failure> {
        Err(Coded::failure(netmem_status::NETMEM_ERR_UNSUPPORTED, "this library was built without the feature cuda"))
    }

    fn check(&self, offset: u64, len: usize) -> Result<(), Failure> {
        let have = bytes(self.binding.as_ref());
        match offset.checked_add(len as u64) {
            Some(end) if end <= have => Ok(()),
            _ => {
                let text = format!("{len} bytes at {offset} of device memory of {have}");
                Err(Coded::failure(netmem_status::NETMEM_ERR_RANGE, text))
            }
        }
    }

    fn address(&self) -> Result<u64, Failure> {
        match &self.backing {
            Backing::File(_) => {
                let text = "the memory is not of netmem_devmem_create_cuda";
                Err(Coded::failure(netmem_status::NETMEM_ERR_UNSUPPORTED, text))
            }
            #[cfg(feature = "cuda")]
            Backing::Gpu(memory) => Ok(memory.address()),
        }
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), Failure> {
        match &self.backing {
            Backing::File(file) => file.read_exact_at(to, offset).map_err(error::copy),
            #[cfg(feature = "cuda")]
            Backing::Gpu(memory) => memory.read(offset, to).map_err(Failure::System),
        }
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), Failure> {
        match &self.backing {
            Backing::File(file) => file.write_all_at(from, offset).map_err(error::copy),
            #[cfg(feature = "cuda")]
            Backing::Gpu(memory) => memory.write(offset, from).map_err(Failure::System),
        }
    }
}

/// The thread on which memory is released after its last page is back. It stays until the end of
/// the process.
fn worker() -> Result<Arc<Worker>, Failure> {
    static WORKER: Mutex<Option<Arc<Worker>>> = Mutex::new(None);
    let mut worker = WORKER.lock().unwrap_or_else(PoisonError::into_inner);
    match &*worker {
        Some(worker) => Ok(worker.clone()),
        None => Ok(worker.insert(Arc::new(Worker::new("netmem-devmem").map_err(Failure::System)?)).clone()),
    }
}

/// # Safety
///
/// The caller has room for a pointer at `out`, or it is null.
unsafe fn make(out: *mut *mut netmem_devmem, memory: impl FnOnce() -> Result<Memory, Failure>) -> Result<(), Failure> {
    let out = NonNull::new(out).ok_or_else(|| Failure::null("memory"))?;
    let made = handle::create(memory()?);
    // SAFETY: as the caller promises.
    unsafe { out.write(made) };
    Ok(())
}

/// Allocates `bytes` bytes of host memory in the place of a device's, a multiple of 4096: for
/// tests, and for machines without such a device. It is a file in memory, whose pages the kernel
/// allocates when the device writes to them, and this process does not map it.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (bytes), NETMEM_ERR_NO_MEMORY, NETMEM_ERR_SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_create(bytes: usize, memory: *mut *mut netmem_devmem) -> netmem_status {
    let made = || {
        if bytes == 0 || !bytes.is_multiple_of(4096) || i64::try_from(bytes).is_err() {
            return Err(Failure::Argument(format!(
                "{bytes} bytes of device memory; they are a multiple of 4096, not 0"
            )));
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("netmem-devmem", flags).map_err(io::Error::from).map_err(Failure::System)?);
        ftruncate(&file, bytes as u64).map_err(io::Error::from).map_err(Failure::System)?;
        Memory::of(file)
    };
    // SAFETY: as the header says.
    status(|| unsafe { make(memory, made) })
}

/// Allocates at least `bytes` bytes of the memory of an NVIDIA GPU, as CUDA counts them from 0 on.
/// They are rounded up to what the driver allocates, as a rule 2 MiB. The driver, libcuda.so.1, is
/// loaded by this call, and the GPU's primary context is retained until the handle is closed: the
/// program's own kernels read the memory in that context, at netmem_devmem_device_address.
///
/// The network device must be able to import it: `netmem device --cuda NUMBER` is.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_NOT_FOUND (no driver), NETMEM_ERR_UNSUPPORTED (a library
/// that was built without CUDA), NETMEM_ERR_SYSTEM (the driver's, with its text).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_create_cuda(
    gpu: u32,
    bytes: usize,
    memory: *mut *mut netmem_devmem,
) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { make(memory, || Memory::of_gpu(gpu, bytes)) })
}

/// Binds memory that the program has: all of a dma-buf, or of a memfd, whose size is a multiple of
/// 4096. The library has a descriptor of its own; `fd` may be closed. A memfd is sealed against
/// shrinking, so it must have been made with MFD_ALLOW_SEALING.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_ARGUMENT (no such descriptor, no memory, its size),
/// NETMEM_ERR_SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_bind(fd: i32, memory: *mut *mut netmem_devmem) -> netmem_status {
    let made = || {
        if fd < 0 {
            return Err(Failure::Argument(format!("the descriptor is {fd}")));
        }
        // SAFETY: a number that is no descriptor is an error of the system call.
        let file = unsafe { BorrowedFd::borrow_raw(fd) };
        let file = file.try_clone_to_owned().map_err(|why| match why.raw_os_error() {
            Some(number) if number == Errno::BADF.raw_os_error() => {
                Failure::Argument(format!("the descriptor {fd}: {why}"))
            }
            _ => Failure::System(why),
        })?;
        Memory::of(file.into())
    };
    // SAFETY: as the header says.
    status(|| unsafe { make(memory, made) })
}

/// Copies bytes of device memory to the host: a system call, or a copy of the GPU's driver. For
/// checks, and for what the CPU has to see; a device reads payload where it is.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_RANGE, NETMEM_ERR_UNSUPPORTED (a dma-buf,
/// which only a mapping reads), NETMEM_ERR_SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_read(
    memory: *const netmem_devmem,
    offset: u64,
    to: *mut c_void,
    length: usize,
) -> netmem_status {
    status(|| {
        let to = NonNull::new(to.cast::<u8>()).ok_or_else(|| Failure::null("to"))?;
        // SAFETY: as the header says.
        let memory = unsafe { handle::get(memory) }?;
        memory.check(offset, length)?;
        // SAFETY: the caller has room for `length` bytes there.
        unsafe { to.write_bytes(0, length) };
        // SAFETY: as above, and they are initialised. A length above the memory's was refused.
        memory.read(offset, unsafe { std::slice::from_raw_parts_mut(to.as_ptr(), length) })
    })
}

/// Copies bytes of the host to device memory, as netmem_devmem_read does the other way.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_RANGE, NETMEM_ERR_UNSUPPORTED (a
/// dma-buf), NETMEM_ERR_SYSTEM.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_write(
    memory: *const netmem_devmem,
    offset: u64,
    from: *const c_void,
    length: usize,
) -> netmem_status {
    status(|| {
        let from = NonNull::new(from.cast_mut().cast::<u8>()).ok_or_else(|| Failure::null("from"))?;
        // SAFETY: as the header says.
        let memory = unsafe { handle::get(memory) }?;
        memory.check(offset, length)?;
        // SAFETY: the caller has `length` readable bytes there.
        memory.write(offset, unsafe { std::slice::from_raw_parts(from.as_ptr(), length) })
    })
}

/// The address of the first byte for the GPU, in its primary context.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE, NETMEM_ERR_UNSUPPORTED (not of
/// netmem_devmem_create_cuda: such memory has a descriptor).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_device_address(
    memory: *const netmem_devmem,
    address: *mut u64,
) -> netmem_status {
    status(|| {
        let out = NonNull::new(address).ok_or_else(|| Failure::null("address"))?;
        // SAFETY: as the header says.
        let address = unsafe { handle::get(memory) }?.address()?;
        // SAFETY: the caller has room for it there.
        unsafe { out.write(address) };
        Ok(())
    })
}

/// The descriptor of the memory, which is the library's and lives as long as the handle. -1 with a
/// text for misuse, and for the memory of a GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_fd(memory: *const netmem_devmem) -> i32 {
    value(|| {
        // SAFETY: as the header says.
        match &unsafe { handle::get(memory) }?.backing {
            Backing::File(file) => Ok(file.as_raw_fd()),
            #[cfg(feature = "cuda")]
            Backing::Gpu(_) => Err(Failure::Argument("the memory of a GPU has an address".into())),
        }
    })
    .unwrap_or(-1)
}

/// What device memory is used for. Set `size` to sizeof(netmem_devmem_stats).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_devmem_stats {
    /// sizeof(netmem_devmem_stats)
    pub size: usize,
    /// the number by which extents name it, which no other memory of the process ever has; not 0
    pub id: u64,
    /// bytes of memory
    pub bytes: u64,
    /// bytes of a page
    pub page_size: u64,
    /// pages posted to a device, free in a pool, or held by streams and their users
    pub in_use: u64,
    /// queues that receive into it
    pub queues: u64,
}

// SAFETY: repr(C), `size` is first, integers.
unsafe impl Versioned for netmem_devmem_stats {
    const NAME: &'static str = "netmem_devmem_stats";
    const LEAST: usize = 48;
}

/// Counts of device memory.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_STRUCT_SIZE, NETMEM_ERR_HANDLE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_get_stats(
    memory: *const netmem_devmem,
    stats: *mut netmem_devmem_stats,
) -> netmem_status {
    status(|| {
        // SAFETY: as the header says.
        let binding = &unsafe { handle::get(memory) }?.binding;
        let now = binding.stats();
        let written = netmem_devmem_stats {
            size: size_of::<netmem_devmem_stats>(),
            id: now.id,
            bytes: bytes(binding.as_ref()),
            page_size: binding.region().page_size() as u64,
            in_use: now.in_use,
            queues: now.queues as u64,
        };
        // SAFETY: as the header says.
        unsafe { options::write(stats, &written) }
    })
}

/// Gives up the handle, and unbinds the memory: no more pages of it are posted to a device, and no
/// new range is sent. Pages that streams hold stay valid until their tokens are returned, and
/// ranges in flight are sent. The memory is released after the last of them, on a thread of the
/// library. Close the stacks first: a stack whose memory was closed receives into the pages that
/// are posted, and then no more payload.
///
/// Errors: NETMEM_ERR_NULL, NETMEM_ERR_HANDLE.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_devmem_close(memory: *mut netmem_devmem) -> netmem_status {
    // SAFETY: as the header says.
    status(|| unsafe { handle::close(memory) }.map(drop))
}
