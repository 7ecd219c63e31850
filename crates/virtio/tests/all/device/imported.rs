//! Memory that the device imports and reaches by copies: the memory of a GPU.
//!
//! There is a GPU on few machines. So each test runs in a process of its own on a library that
//! stands in for the driver (`libcuda.c`), which proves the order and the arguments of the calls,
//! and what happens when they fail. It proves nothing about a GPU. [`on_a_gpu`] runs the same on a
//! GPU where there is one.

use netmem_testing::device;
use netmem_testing::driver;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use netmem_testing::device::{Driver, GUEST, PLAIN, USER, poll_until, region};
use netmem_testing::driver::split::{BoundDevice, DeviceMemory, compare};
use netmem_testing::driver::tcp::{WireFrames, flow, payload, receive};
use netmem_testing::driver::{frames, pcap, until};
use netmem_testing::libcuda;
use netmem_testing::{installed, skip};
use netmem_virtio::device::port::{Echo, Play, Port, Posted};
use netmem_virtio::device::{DropReason, NetDevice, Options};
use netmem_virtio::driver::{NetOptions, RxMode, SplitOptions};
use netmem_virtio::guest_memory::cuda::Gpu;
use netmem_virtio::guest_memory::import::ImportedMemory;
use netmem_virtio::guest_memory::{MemoryError, MemoryLimits, MemoryTable, RegionInfo};
use netmem_virtio::net::{Offloads, VnetHdr};
use netmem_virtio::virtqueue::DESC_WRITE;

const MIB: usize = 1 << 20;
/// Where the memory of the GPU lies for the guest.
const FAR: u64 = GUEST + (1 << 36);
const FAR_USER: u64 = USER + (1 << 36);

/// Runs `body` in a process of its own, this test's, whose GPU is the library. The calls `fail`
/// (`CALL:FIRST:LAST`) fail. Everything must have been released at the end. Returns what the
/// library reports of its copies; nothing in the process itself.
fn stand_in(test: &str, fail: &str, body: impl FnOnce(&Gpu)) -> Option<String> {
    if std::env::var_os("NETMEM_FAKE_CUDA_LOG").is_some() {
        body(&Gpu::open(0).unwrap());
        return None;
    }
    if let Err(why) = installed(&["cc"]) {
        skip(&why);
        return None;
    }
    let log = tempfile::NamedTempFile::new().unwrap();
    let paths = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let output = Command::new(std::env::current_exe().unwrap())
        .args([&format!("device::imported::{test}"), "--exact", "--nocapture"])
        .env("LD_LIBRARY_PATH", format!("{}:{paths}", libcuda::build().display()))
        .env("NETMEM_FAKE_CUDA_FAIL", fail)
        .env("NETMEM_FAKE_CUDA_LOG", log.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    let log = std::fs::read_to_string(log.path()).unwrap();
    let (left, copies) = log.trim_end().split_once("; ").unwrap();
    assert_eq!(left, "unreleased: 0 contexts, 0 handles, 0 ranges");
    Some(copies.to_owned())
}

fn options(gpu: &Gpu) -> Options {
    Options { importer: Some(Arc::new(gpu.clone())), ..Options::default() }
}

fn device<P: Port>(gpu: &Gpu, port: P) -> NetDevice<P> {
    let mut port = Some(port);
    NetDevice::new(options(gpu), |_| Ok(port.take().unwrap())).unwrap()
}

/// Memory of the GPU that the device imports.
fn on_gpu(gpu: &Gpu, bytes: usize) -> DeviceMemory {
    let memory = gpu.allocate(bytes).unwrap();
    DeviceMemory::imported(memory.export().unwrap(), memory.len(), Box::new(memory))
}

/// Frames of all sizes, of which these must arrive in the memory of the GPU behind the host parts,
/// and be as they were sent.
fn receives(gpu: &Gpu, sent: &[Vec<u8>], want: &[Vec<u8>]) {
    let memory = on_gpu(gpu, MIB);
    let split = memory.split().header_bytes(SplitOptions::UDP_V4);
    let mut bound = BoundDevice::on(device(gpu, pcap(sent, Play::Once)), memory.options(), &split);
    compare(&mut bound.rx, &memory, want);
    let lost = (sent.len() - want.len()) as u64;
    until(|| bound.device_thread.stats.dropped(DropReason::CopyFailed) == lost);
    // The device counts at the end of a pass, after the driver has the frames.
    until(|| bound.device_thread.stats.rx_frames.load(Relaxed) == want.len() as u64);
    bound.close();
}

/// Proves MEM-11: payload goes to memory that the device imports, one copy for each frame.
#[test]
fn frames_arrive_in_imported_memory() {
    let sent = frames(2000, 1518);
    let copies = stand_in("frames_arrive_in_imported_memory", "", |gpu| receives(gpu, &sent, &sent));
    // The test has read them.
    if let Some(copies) = copies {
        assert_eq!(copies, "2000 copies in, 2000 copies out, 0 launches");
    }
}

/// A copy that fails in the middle loses its frame, which is counted. The frames before and after
/// it arrive, and no chain is lost.
#[test]
fn copies_that_fail() {
    let sent = frames(2000, 1518);
    let want = [&sent[..499], &sent[1499..]].concat();
    stand_in("copies_that_fail", "cuMemcpyHtoD:500:1499", |gpu| receives(gpu, &sent, &want));
}

/// Segments of one flow, of which the device joins those that it can copy.
fn joins(gpu: &Gpu, lost: Option<usize>) {
    let memory = on_gpu(gpu, 16 * MIB);
    let segments = flow(false, 1, 7, &[1000; 4]);
    let split = memory.split().header_bytes(SplitOptions::TCP_V6);
    let port = WireFrames::new(VnetHdr::PLAIN, &segments);
    let options = memory.add(NetOptions::new(RxMode::Big)).pages(2000);
    let mut bound = BoundDevice::on(device(gpu, port), options, &split);
    let all = driver::frame(7, 4000);
    let pieces: Vec<_> = match lost {
        None => vec![all],
        // The segment behind the gap begins another frame.
        Some(n) => vec![all[..1000 * n].to_vec(), all[1000 * (n + 1)..].to_vec()],
    };
    let got: Vec<_> = receive(&mut bound.rx, pieces.len()).iter().map(|frame| payload(&memory, frame)).collect();
    assert!(got == pieces);
    until(|| bound.device_thread.stats.dropped(DropReason::CopyFailed) == u64::from(lost.is_some()));
    bound.close();
}

#[test]
fn segments_are_joined() {
    stand_in("segments_are_joined", "", |gpu| joins(gpu, None));
}

/// A segment whose copy fails is not joined. The segments before it are delivered without its
/// bytes.
#[test]
fn a_segment_that_fails_is_not_joined() {
    stand_in("a_segment_that_fails_is_not_joined", "cuMemcpyHtoD:3:3", |gpu| joins(gpu, Some(2)));
}

/// An echo that would read frames into posted buffers, as a tap does. It must not be asked to: the
/// kernel cannot read into imported memory.
struct Reads(Echo);

impl Port for Reads {
    const WANTS_BYTES: bool = Echo::WANTS_BYTES;
    const FEATURES: u64 = Echo::FEATURES;
    const READS: bool = true;

    fn peek(&mut self) -> Option<&[u8]> {
        self.0.peek()
    }

    fn expects(&self) -> Option<usize> {
        Some(1000)
    }

    fn read(&mut self, _: Offloads, _: Posted<'_>) -> Option<(VnetHdr, usize)> {
        panic!("a frame was to be read into imported memory")
    }

    fn consume(&mut self) {
        self.0.consume();
    }

    fn send(&mut self, wire: &[u8]) -> bool {
        self.0.send(wire)
    }
}

/// Frames go out of imported memory and come back into it, on queues that are not split: buffers of
/// both kinds of memory in one chain. Those of which copies out fail are lost.
fn echoes(gpu: &Gpu, lost: Option<u8>) {
    let memory = gpu.allocate(1).unwrap();
    let file = memory.export().unwrap();
    let mut device = device(gpu, Reads(Echo::new()));
    let mut driver = Driver::connect(&device, PLAIN);
    driver.share_memory();
    driver.add_memory(&region(&file, FAR, FAR_USER, memory.len() as u64, 0));
    for ring in 0..2 {
        driver.start_ring(device::SIZE);
        driver.enable(ring);
    }
    for n in 0..4 {
        let payload: Vec<u8> = (0..900).map(|i| (i * 7 + n) as u8).collect();
        memory.write(0, &payload).unwrap();
        // 12 bytes of header, and the two addresses of Ethernet, which are exchanged.
        let (to, out) = driver.buffer(1, 0, 2048);
        let head = [&[0; 12][..], &[2; 6], &[4; 6]].concat();
        driver.memory.write(out, &head);
        driver.rings[1].chain(0, &[(to, 24, 0), (FAR, 300, 0), (FAR + 300, 1, 0), (FAR + 301, 599, 0)]);
        let (from, back) = driver.buffer(0, 0, 2048);
        let parts = [(from, 24, DESC_WRITE), (FAR + 5000, 500, DESC_WRITE), (FAR + 9000, 500, DESC_WRITE)];
        if n == 0 || lost != Some(n as u8 - 1) {
            driver.rings[0].chain(0, &parts);
        }
        poll_until(&mut device, || driver.rings[1].take().is_some());
        if lost == Some(n as u8) {
            continue;
        }
        let mut used = None;
        poll_until(&mut device, || {
            used = driver.rings[0].take();
            used.is_some()
        });
        let mut got = vec![0; 900];
        let (near, far) = got.split_at_mut(500);
        memory.read(5000, near).unwrap();
        memory.read(9000, far).unwrap();
        assert_eq!((used, &driver.memory.read(back, 24)[12..]), (Some((0, 924)), &[[4; 6], [2; 6]].concat()[..]));
        assert!(got == payload);
    }
    let drops: Vec<_> = lost.map(|_| ("copy_failed", 1)).into_iter().collect();
    assert_eq!((driver.drops(), driver.queue_errors()), (drops, vec![]));
    // Without the region the same chain is a fault, and nothing is imported any more.
    driver.remove_memory(&region(&file, FAR, FAR_USER, memory.len() as u64, 0));
    driver.rings[1].chain(0, &[(FAR, 300, 0)]);
    poll_until(&mut device, || driver.queue_errors() == [("outside_table", 1)]);
}

/// Buffers that follow each other are copied by one call. In each round the device copies out once
/// and in twice, and the test in once and out twice.
#[test]
fn frames_leave_imported_memory() {
    let copies = stand_in("frames_leave_imported_memory", "", |gpu| echoes(gpu, None));
    if let Some(copies) = copies {
        assert_eq!(copies, "12 copies in, 12 copies out, 0 launches");
    }
}

#[test]
fn copies_out_that_fail() {
    // In the first round the device copies out once, and the test twice.
    stand_in("copies_out_that_fail", "cuMemcpyDtoH:4:4", |gpu| echoes(gpu, Some(1)));
}

/// Files that cannot be imported are refused, and what an import has acquired is released. Rings
/// cannot be in imported memory.
fn refuses(gpu: &Gpu) {
    let memory = gpu.allocate(1).unwrap();
    let info = |size| [RegionInfo { guest_addr: FAR, user_addr: FAR_USER, size, mmap_offset: 0 }];
    let limits = MemoryLimits { importer: Some(Arc::new(gpu.clone())), ..MemoryLimits::default() };
    let table = |size, file: OwnedFd, limits| MemoryTable::new(&info(size), vec![file], limits);
    let len = memory.len() as u64;
    let good = table(len, memory.export().unwrap(), &limits).unwrap();
    assert_eq!((good.translate(FAR, 1), good.translate_user(FAR_USER, 1)), (None, None));
    assert_eq!((good.mapped(), good.unsealed(), good.usage().regions), (len, 0, 1));
    // Not of a GPU; longer than its memory; shorter.
    let socket = || UnixStream::pair().unwrap().0.into();
    for (size, file) in [(len, socket()), (2 * len, memory.export().unwrap()), (4096, memory.export().unwrap())] {
        let error = table(size, file, &limits).unwrap_err();
        assert!(matches!(&error, MemoryError::RegionImport { index: 0, .. }), "{error:?}");
    }
    let sealed = MemoryLimits { require_sealed: true, ..limits.clone() };
    let error = table(len, memory.export().unwrap(), &sealed).unwrap_err();
    assert!(matches!(error, MemoryError::RegionUnsealed { index: 0 }), "{error:?}");
    let none = MemoryLimits::default();
    let error = table(len, memory.export().unwrap(), &none).unwrap_err();
    assert!(matches!(error, MemoryError::RegionNotMemory { index: 0 }), "{error:?}");
    // A file that may be one of a file system is no memory of a GPU, and is asked nothing more.
    let file = || tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
    if rustix::fs::fcntl_get_seals(file()).is_err() {
        let error = table(len, file().into(), &limits).unwrap_err();
        assert!(matches!(error, MemoryError::RegionNotMemory { index: 0 }), "{error:?}");
    }
}

#[test]
fn files_that_cannot_be_imported() {
    stand_in("files_that_cannot_be_imported", "", refuses);
}

/// Each step of an import fails in turn. The front end's message is refused, and what the steps
/// before have acquired is released.
#[test]
fn imports_that_fail() {
    for call in ["cuMemImportFromShareableHandle:1", "cuMemAddressReserve:2", "cuMemMap:2", "cuMemSetAccess:2"] {
        let copies = stand_in("imports_that_fail", &format!("{call}:9"), |gpu| {
            let memory = gpu.allocate(1).unwrap();
            let (device, file) = (device(gpu, Echo::new()), memory.export().unwrap());
            let driver = Driver::connect(&device, PLAIN);
            driver.share_memory();
            let region = region(&file, FAR, FAR_USER, memory.len() as u64, 0);
            assert!(driver.front.add_memory(&region).is_err());
            assert_eq!(device.stats().refused.load(Relaxed), 1);
            driver.hang_up();
        });
        // The process of one call is not used for the next.
        if copies.is_none() {
            return;
        }
    }
}

/// The same on a GPU, without the failures. `NETMEM_GPU=none` states that there is none.
#[test]
fn on_a_gpu() {
    if std::env::var("NETMEM_GPU").as_deref() == Ok("none") {
        eprintln!("skipped: on_a_gpu: NETMEM_GPU=none");
        return;
    }
    match Gpu::open(0) {
        Err(error) => skip(&format!("there is no GPU: {error}")),
        Ok(gpu) => {
            let sent = frames(2000, 1518);
            receives(&gpu, &sent, &sent);
            joins(&gpu, None);
            echoes(&gpu, None);
            refuses(&gpu);
        }
    }
}
