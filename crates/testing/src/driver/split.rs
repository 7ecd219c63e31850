//! Device memory to receive into and send from: a memfd that the tests read and write by system
//! calls, and never map.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use netmem_packet::SplitFrame;
use netmem_pool::{Device, Frag, PAGE_SIZE, PeerMemory, Region, RegionProvider};
use netmem_virtio::VhostUser;
use netmem_virtio::device::port::Port;
use netmem_virtio::device::{NetDevice, Options};
use netmem_virtio::driver::{
    NetOptions, QueuePair, Restarted, RxMode, SplitClosed, SplitOptions, VirtioNet, VirtioRx, VirtioSplitRx, VirtioTx,
};
use netmem_virtio::guest_memory::import::ImportedMemory;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::{Accounting, DeviceThread, Digest, assert_closed, until};

pub struct DeviceMemory {
    file: File,
    /// The memory of a GPU, or what stands in for it, in the place of the file.
    imported: Option<Box<dyn ImportedMemory>>,
    pub provider: Arc<RegionProvider<Device>>,
}

impl DeviceMemory {
    pub fn new(pages: usize) -> Self {
        Self::of_order(pages, 0)
    }

    /// Pages of 4 KiB times 2 to the power of `order`.
    pub fn of_order(pages: usize, order: u8) -> Self {
        let fd = memfd_create("device-memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, (pages * (PAGE_SIZE << order)) as u64).unwrap();
        let file = File::from(fd.as_fd().try_clone_to_owned().unwrap());
        Self { file, imported: None, provider: RegionProvider::new(Region::unmapped(fd, order).unwrap()) }
    }

    /// Memory that `file` stands for, of `len` bytes, and that is reached by `memory` only.
    pub fn imported(file: OwnedFd, len: usize, memory: Box<dyn ImportedMemory>) -> Self {
        let provider = RegionProvider::new(Region::exported(file, len as u64, 0).unwrap());
        Self { file: File::open("/dev/null").unwrap(), imported: Some(memory), provider }
    }

    /// Small mode, with this memory in the device's table.
    pub fn options(&self) -> NetOptions {
        self.add(NetOptions::new(RxMode::Small))
    }

    pub fn add<M: PeerMemory>(&self, options: NetOptions<M>) -> NetOptions<M> {
        options.device_memory(self.provider.region().clone())
    }

    pub fn split(&self) -> SplitOptions {
        SplitOptions::new(self.provider.clone()).header_bytes(SplitOptions::UDP_V4)
    }

    /// What the device has written there.
    pub fn read(&self, frag: &Frag<Device>) -> Vec<u8> {
        let mut bytes = vec![0; frag.len()];
        match &self.imported {
            Some(memory) => memory.read(frag.file_offset(), &mut bytes).unwrap(),
            None => self.file.read_exact_at(&mut bytes, frag.file_offset()).unwrap(),
        }
        bytes
    }

    /// Pages in it.
    pub fn pages(&self) -> usize {
        self.provider.region().pages() as usize
    }

    /// Pages that are free.
    pub fn free_pages(&self) -> usize {
        let pages: Vec<_> = std::iter::from_fn(|| self.provider.page()).collect();
        pages.len()
    }

    /// As `/proc/PID/maps` shows it.
    pub fn inode(&self) -> String {
        self.file.metadata().unwrap().ino().to_string()
    }

    pub fn write(&self, offset: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, offset).unwrap();
    }

    /// The bytes of a frame from both memories.
    pub fn bytes<M: PeerMemory>(&self, frame: &SplitFrame<M>) -> Vec<u8> {
        let mut bytes = vec![0; frame.head().len()];
        frame.head().copy_to(0, &mut bytes).unwrap();
        bytes.extend(frame.payload().fragments().flat_map(|frag| self.read(frag)));
        bytes
    }
}

/// Binds the queue to the memory.
pub fn bind<M: PeerMemory>(rx: VirtioRx<M>, options: &SplitOptions) -> VirtioSplitRx<M> {
    let Restarted { queue, closed, .. } = rx.restart_split(options).unwrap();
    assert_closed(&closed, 0);
    queue
}

/// The frames of one poll, kept.
pub fn take<M: PeerMemory>(rx: &mut VirtioSplitRx<M>) -> Vec<SplitFrame<M>> {
    let mut frames = Vec::new();
    rx.poll(|poll| poll.receive(256, &mut |f| frames.push(f)));
    frames
}

/// Receives until as many frames as there are in `want` have come, in order and as they were sent.
#[track_caller]
pub fn compare(rx: &mut VirtioSplitRx, memory: &DeviceMemory, want: &[Vec<u8>]) {
    let (mut seen, mut digest, in_host) = (0, Digest::new(), rx.header_bytes());
    until(|| {
        rx.poll(|poll| {
            poll.receive(256, &mut |f: SplitFrame| {
                let want = &want[seen];
                assert_eq!((f.len(), f.head().len()), (want.len(), want.len().min(in_host)));
                assert_eq!(f.payload().is_empty(), want.len() <= in_host);
                let got = memory.bytes(&f);
                assert!(got == *want, "frame {seen} of {} bytes is not as it was sent", want.len());
                digest.add(&got);
                seen += 1;
            })
        });
        seen == want.len()
    });
    assert_eq!(digest, Digest::of(want));
}

#[track_caller]
pub fn assert_split_closed(closed: &SplitClosed, quarantined: u64) {
    assert_closed(&closed.device, quarantined);
    assert_closed(&closed.host, closed.host.stats.quarantined);
    assert_eq!(closed.host.stats.quarantined > 0, quarantined > 0);
}

/// A device whose first queue is bound before it moves its first frame.
pub struct BoundDevice<P: Port + 'static> {
    pub rx: VirtioSplitRx,
    pub tx: VirtioTx,
    pub more: Vec<QueuePair>,
    pub net: VirtioNet,
    pub accounting: Accounting,
    pub device_thread: DeviceThread<P>,
}

impl<P: Port + 'static> BoundDevice<P> {
    pub fn new(port: P, options: NetOptions, split: &SplitOptions) -> Self {
        let mut port = Some(port);
        Self::on(NetDevice::new(Options::default(), |_| Ok(port.take().unwrap())).unwrap(), options, split)
    }

    pub fn on(device: NetDevice<P>, options: NetOptions, split: &SplitOptions) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (connection, accounting) = (device.control().serve(theirs).unwrap(), Accounting::default());
        let (net, mut more) =
            VirtioNet::probe(VhostUser::own_device(ours).unwrap(), accounting.count(options)).unwrap();
        let pair = more.remove(0);
        let rx = bind(pair.rx, split);
        let mut device_thread = DeviceThread::new(device);
        device_thread.connection = Some(connection);
        Self { rx, tx: pair.tx, more, net, accounting, device_thread }
    }

    /// Stops all queues; every page was returned, and nothing is mapped any more.
    #[track_caller]
    pub fn close(self) {
        drop(self.tx);
        assert_split_closed(&self.rx.close().unwrap(), 0);
        self.more.into_iter().for_each(super::close_clean);
        drop(self.net);
        self.accounting.assert_balanced();
    }
}
