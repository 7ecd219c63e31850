//! The memory of a GPU for the loader, and the kernel that checks what is in it.

use netmem::device::cuda::cudarc::driver::sys;
use netmem::device::cuda::{Gpu, GpuMemory, check};
use netmem::device::import::ImportedMemory;
use std::ffi::{CStr, c_void};
use std::io;
use std::os::fd::OwnedFd;
use std::ptr;

/// Adds to `sum`, modulo 2^64, each byte times its position in the file. Each thread adds every
/// n-th byte; n is the number of threads.
const KERNEL: &CStr = c"
.version 6.0
.target sm_60
.address_size 64
.visible .entry checksum(.param .u64 bytes, .param .u64 len, .param .u64 position, .param .u64 sum)
{
    .reg .pred %end;
    .reg .b32 %r<5>;
    .reg .b64 %bytes, %len, %position, %sum, %i, %n, %mine, %at, %byte, %factor, %old;
    ld.param.u64 %bytes, [bytes];
    ld.param.u64 %len, [len];
    ld.param.u64 %position, [position];
    ld.param.u64 %sum, [sum];
    cvta.to.global.u64 %bytes, %bytes;
    cvta.to.global.u64 %sum, %sum;
    mov.u32 %r0, %ctaid.x;
    mov.u32 %r1, %ntid.x;
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %nctaid.x;
    mad.lo.u32 %r2, %r0, %r1, %r2;
    mul.lo.u32 %r3, %r3, %r1;
    cvt.u64.u32 %i, %r2;
    cvt.u64.u32 %n, %r3;
    mov.u64 %mine, 0;
next:
    setp.ge.u64 %end, %i, %len;
    @%end bra done;
    add.u64 %at, %bytes, %i;
    ld.global.u8 %r4, [%at];
    cvt.u64.u32 %byte, %r4;
    add.u64 %factor, %position, %i;
    mad.lo.u64 %mine, %byte, %factor, %mine;
    add.u64 %i, %i, %n;
    bra next;
done:
    atom.global.add.u64 %old, [%sum], %mine;
    ret;
}
";

/// Memory of a GPU, exported, and the kernel, loaded.
pub(crate) struct Checked {
    gpu: Gpu,
    memory: GpuMemory,
    sum: GpuMemory,
    module: sys::CUmodule,
    kernel: sys::CUfunction,
}

impl Checked {
    /// Memory of at least `bytes` bytes of GPU `number`.
    pub(crate) fn new(number: u32, bytes: usize) -> io::Result<Self> {
        let gpu = Gpu::open(number)?;
        let (memory, sum) = (gpu.allocate(bytes)?, gpu.allocate(size_of::<u64>())?);
        let mut checked = Self { gpu, memory, sum, module: ptr::null_mut(), kernel: ptr::null_mut() };
        // SAFETY: the context is current; the text and the name end with a zero, and live through
        // the calls.
        unsafe {
            check("cuModuleLoadData", sys::cuModuleLoadData(&raw mut checked.module, KERNEL.as_ptr().cast()))?;
            let kernel = sys::cuModuleGetFunction(&raw mut checked.kernel, checked.module, c"checksum".as_ptr());
            check("cuModuleGetFunction", kernel)?;
        }
        Ok(checked)
    }

    /// Bytes of memory.
    pub(crate) fn len(&self) -> usize {
        self.memory.len()
    }

    /// The file by which the device imports the memory.
    pub(crate) fn export(&self) -> io::Result<OwnedFd> {
        self.memory.export()
    }

    /// The checksum of a file that lies in these extents (offset, length): each byte times its
    /// position, from 1 on.
    pub(crate) fn checksum(&self, extents: impl IntoIterator<Item = (u64, u32)>) -> io::Result<u64> {
        self.sum.write(0, &[0; size_of::<u64>()])?;
        self.gpu.make_current()?;
        let (mut position, mut sum) = (1, self.sum.address());
        for (offset, len) in extents {
            let (mut bytes, mut len) = (self.memory.address() + offset, u64::from(len));
            let mut arguments: [*mut c_void; 4] =
                [(&raw mut bytes).cast(), (&raw mut len).cast(), (&raw mut position).cast(), (&raw mut sum).cast()];
            let (threads, null) = (256, ptr::null_mut());
            let blocks = len.div_ceil(threads.into()).clamp(1, 1024) as u32;
            // SAFETY: the kernel has these four parameters, of which a launch copies the values. It
            // reads the extent, which is in the memory, and writes the sum.
            let launched = unsafe {
                let (arguments, extra) = (arguments.as_mut_ptr(), ptr::null_mut());
                sys::cuLaunchKernel(self.kernel, blocks, 1, 1, threads, 1, 1, 0, null, arguments, extra)
            };
            check("cuLaunchKernel", launched)?;
            position += len;
        }
        // SAFETY: the context is current.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })?;
        let mut bytes = [0; size_of::<u64>()];
        self.sum.read(0, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }
}

impl Drop for Checked {
    fn drop(&mut self) {
        if self.gpu.make_current().is_ok() && !self.module.is_null() {
            // SAFETY: no kernel is running: `checksum` waits for them.
            let _ = unsafe { sys::cuModuleUnload(self.module) };
        }
    }
}
