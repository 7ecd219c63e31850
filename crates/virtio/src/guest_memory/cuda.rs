//! The memory of an NVIDIA GPU, through the CUDA driver's calls for virtual memory and for copies.
//!
//! ```text
//!   the application                                     the process of the device
//!   cuMemCreate ─► cuMemExportToShareableHandle ─ file ─► cuMemImportFromShareableHandle
//!   cuMemAddressReserve, cuMemMap, cuMemSetAccess         the same three
//!   a kernel reads the payload                            cuMemcpyHtoD, cuMemcpyDtoH
//! ```
//!
//! `libcuda.so.1` is loaded at run time: nothing of CUDA is needed to build this. The calls have
//! the types of the crate `cudarc`, which is exported again, so that an application can launch
//! kernels on the same context.
//!
//! *Never run on a GPU.* The tests run these calls against a library that stands in for the driver.
//! That proves the order of the calls, their offsets and lengths, what is released when, and what
//! happens when a call fails. It proves nothing about a GPU.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::Arc;

pub use cudarc;
use cudarc::driver::sys::{self, CUresult};

use super::import::{ImportedMemory, Importer};

/// How memory is exported: as a descriptor of this process, which another process gets by a
/// message.
const FILE: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// The result of the driver's call `name` as an error that names it.
///
/// # Errors
///
/// The call has failed.
pub fn check(name: &str, result: CUresult) -> io::Result<()> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = ptr::null();
    // SAFETY: the driver writes the address of a static string, or fails and leaves the null.
    let known = unsafe { sys::cuGetErrorString(result, &raw mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
    // SAFETY: as above: a static string, which ends with a zero.
    let text = if known { unsafe { CStr::from_ptr(text) }.to_string_lossy() } else { "an unknown error".into() };
    Err(io::Error::other(format!("{name}: {text} ({})", result as u32)))
}

/// The primary context of a GPU. Clones share it.
///
/// As an [`Importer`] it imports memory that a process has exported from the same GPU with
/// [`GpuMemory::export`], or by the same calls. The driver checks whether a file is such memory.
#[derive(Clone, Debug)]
pub struct Gpu(Arc<Context>);

#[derive(Debug)]
struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: the driver's calls may come from any thread, and the handle of a context is valid in all
// of them.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: `open` has retained it once. All memory of the context is gone, because it holds
        // the context.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

impl Gpu {
    /// The GPU with this number, from 0 on, as CUDA counts them.
    ///
    /// # Errors
    ///
    /// There is no `libcuda.so.1`; there is no such GPU; or the driver cannot use it.
    pub fn open(number: u32) -> io::Result<Self> {
        // SAFETY: loading the driver's library runs its initialisation, which has no preconditions.
        if !unsafe { sys::is_culib_present() } {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                "there is no libcuda.so.1: no driver of a GPU is installed",
            ));
        }
        let number = i32::try_from(number).map_err(io::Error::other)?;
        let (mut device, mut context) = (0, ptr::null_mut());
        // SAFETY: the library is there. Each call writes what it is named for, to a place of that
        // type.
        unsafe {
            check("cuInit", sys::cuInit(0))?;
            check("cuDeviceGet", sys::cuDeviceGet(&raw mut device, number))?;
            check("cuDevicePrimaryCtxRetain", sys::cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        }
        Ok(Self(Arc::new(Context { device, context })))
    }

    /// Makes the context current in this thread, as all calls that use memory need it.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn make_current(&self) -> io::Result<()> {
        // SAFETY: the context is retained.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.0.context) })
    }

    fn location(&self) -> sys::CUmemLocation {
        sys::CUmemLocation { type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE, id: self.0.device }
    }

    /// Allocates at least `bytes` of the GPU's memory, which can be exported. They are rounded up
    /// to what the driver allocates, as a rule 2 MiB.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn allocate(&self, bytes: usize) -> io::Result<GpuMemory> {
        self.make_current()?;
        // SAFETY: a structure of numbers and an unused pointer, for which zero is a value.
        let mut properties: sys::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.requestedHandleTypes = FILE;
        properties.location = self.location();
        let (mut granularity, mut handle) = (0, 0);
        let least = sys::CUmemAllocationGranularity_flags_enum::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: the structure is complete, and lives through both calls.
        let len = unsafe {
            let result = sys::cuMemGetAllocationGranularity(&raw mut granularity, &raw const properties, least);
            check("cuMemGetAllocationGranularity", result)?;
            let len = bytes.max(1).checked_next_multiple_of(granularity.max(1));
            let len = len.ok_or_else(|| io::Error::other("no GPU has so many bytes"))?;
            check("cuMemCreate", sys::cuMemCreate(&raw mut handle, len, &raw const properties, 0))?;
            len
        };
        GpuMemory::map(self, handle, len)
    }
}

impl Importer for Gpu {
    fn import(&self, file: BorrowedFd<'_>, len: u64) -> io::Result<Box<dyn ImportedMemory>> {
        self.make_current()?;
        let (len, mut handle) = (usize::try_from(len).map_err(io::Error::other)?, 0);
        let file = ptr::without_provenance_mut(file.as_raw_fd() as usize);
        // SAFETY: the argument is a descriptor in the place of a pointer, and open. The driver
        // checks what it is of.
        let result = unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, file, FILE) };
        check("cuMemImportFromShareableHandle", result)?;
        Ok(Box::new(GpuMemory::map(self, handle, len)?))
    }
}

/// Memory of a GPU, allocated or imported, and mapped for the GPU. The CPU cannot access its
/// addresses.
#[derive(Debug)]
pub struct GpuMemory {
    gpu: Gpu,
    handle: sys::CUmemGenericAllocationHandle,
    /// 0 if no addresses are reserved.
    at: sys::CUdeviceptr,
    len: usize,
    mapped: bool,
}

impl GpuMemory {
    /// Owns `handle` from now on, and maps its `len` bytes. The driver refuses a length that is not
    /// that of the memory.
    fn map(gpu: &Gpu, handle: sys::CUmemGenericAllocationHandle, len: usize) -> io::Result<Self> {
        // From here on, an error releases what was made.
        let mut memory = Self { gpu: gpu.clone(), handle, at: 0, len, mapped: false };
        let flags = sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location: gpu.location(), flags };
        // SAFETY: the handle is valid, the range is reserved when it is mapped, and mapped when it
        // becomes accessible.
        unsafe {
            check("cuMemAddressReserve", sys::cuMemAddressReserve(&raw mut memory.at, len, 0, 0, 0))?;
            check("cuMemMap", sys::cuMemMap(memory.at, len, 0, handle, 0))?;
            memory.mapped = true;
            check("cuMemSetAccess", sys::cuMemSetAccess(memory.at, len, &raw const access, 1))?;
        }
        Ok(memory)
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of its first byte for the GPU, in the context.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.at
    }

    /// A file by which another process can import the memory. It has no size; a message that
    /// carries it must have [`len`](Self::len), too.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn export(&self) -> io::Result<OwnedFd> {
        self.gpu.make_current()?;
        let mut file: RawFd = -1;
        // SAFETY: for this kind of handle the driver writes a descriptor.
        let result = unsafe { sys::cuMemExportToShareableHandle((&raw mut file).cast(), self.handle, FILE, 0) };
        check("cuMemExportToShareableHandle", result)?;
        if file < 0 {
            return Err(io::Error::other("cuMemExportToShareableHandle made no descriptor"));
        }
        // SAFETY: the driver has made the descriptor for this call.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }

    /// The address of `len` bytes from `offset` on.
    fn range(&self, offset: u64, len: usize) -> io::Result<sys::CUdeviceptr> {
        let end = offset.checked_add(len as u64).filter(|&end| end <= self.len as u64);
        end.map(|_| self.at + offset).ok_or_else(|| io::Error::other("a copy beyond the memory of the GPU"))
    }
}

impl ImportedMemory for GpuMemory {
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let to = self.range(offset, bytes.len())?;
        self.gpu.make_current()?;
        // SAFETY: the range is mapped and accessible, and the bytes are readable.
        check("cuMemcpyHtoD", unsafe { sys::cuMemcpyHtoD_v2(to, bytes.as_ptr().cast(), bytes.len()) })?;
        // The copy may return while the GPU still moves the bytes from the driver's own buffer to
        // their place. SAFETY: the null stream is the one that the copy was on.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(ptr::null_mut()) })
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let from = self.range(offset, bytes.len())?;
        self.gpu.make_current()?;
        // SAFETY: the range is mapped and accessible, and the bytes are ours to write. The call
        // waits for the copy.
        check("cuMemcpyDtoH", unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), from, bytes.len()) })
    }
}

impl Drop for GpuMemory {
    fn drop(&mut self) {
        let _ = self.gpu.make_current();
        // SAFETY: each was made, and nothing uses it any more: copies borrow the memory.
        unsafe {
            if self.mapped {
                let _ = sys::cuMemUnmap(self.at, self.len);
            }
            if self.at != 0 {
                let _ = sys::cuMemAddressFree(self.at, self.len);
            }
            let _ = sys::cuMemRelease(self.handle);
        }
    }
}
