//! A program outside of the tree that depends on the package `netmem` with one of its features, and
//! uses what the feature adds.

use netmem::pool::{PoolOptions, Private, RegionOptions, RegionProvider, SharedPool};

type Done = Result<(), Box<dyn std::error::Error>>;

fn pool() -> Done {
    let memory = RegionProvider::new(RegionOptions::new(64).huge_pages(false).build::<Private>()?);
    let pool: SharedPool<Private> = PoolOptions::new("outside").build_shared(memory, None)?;
    let page = pool.alloc().ok_or("no page")?;
    drop(netmem::net::Packet::new(page.freeze_range(0..64)));
    assert_eq!(pool.close().outstanding, 0);
    Ok(())
}

#[cfg(feature = "virtio")]
fn virtio() -> Done {
    let nothing_listens = netmem::virtio::VhostUser::connect("/nonexistent/socket");
    assert!(nothing_listens.is_err());
    Ok(())
}

#[cfg(feature = "device")]
fn device() -> Done {
    use netmem::device::{NetDevice, Options};
    use netmem::device::port::Gen;
    use netmem::net::{Packet, Poll, RxQueue};
    use netmem::pool::PeerShared;
    use netmem::virtio::{NetOptions, RxMode, VhostUser, VirtioNet};
    let mut device = NetDevice::new(Options::default(), |_| Gen::new(60, Some(10)))?;
    let (front, back) = std::os::unix::net::UnixStream::pair()?;
    let connection = device.control().serve(back)?;
    let (net, mut pairs) = VirtioNet::probe(VhostUser::own_device(front)?, NetOptions::new(RxMode::Small))?;
    let mut frames = 0;
    while frames < 10 {
        device.poll();
        pairs[0].rx.poll(|poll| poll.receive(64, &mut |_: Packet<PeerShared>| frames += 1));
    }
    assert_eq!(pairs.remove(0).rx.close().ok_or("not running")?.outstanding, 0);
    drop((net, connection));
    Ok(())
}

#[cfg(feature = "pcap")]
fn pcap() -> Done {
    use netmem::device::port::{Pcap, Play};
    assert!(Pcap::open(std::path::Path::new("/nonexistent.pcap"), Play::Once).is_err());
    Ok(())
}

#[cfg(feature = "cuda")]
fn cuda() -> Done {
    // There may be a GPU or not.
    assert!(netmem::device::cuda::Gpu::open(u32::MAX).is_err());
    Ok(())
}

#[cfg(feature = "xsk")]
fn xsk() -> Done {
    let memory = RegionProvider::new(RegionOptions::new(64).huge_pages(false).build::<netmem::pool::KernelShared>()?);
    netmem::xdp::Umem::new(memory.region().clone(), &netmem::xdp::UmemOptions::new())?;
    Ok(())
}

#[cfg(feature = "metadata")]
fn metadata() -> Done {
    use netmem::xdp::{KernelMetadata, Program, ProgramOptions};
    let options = ProgramOptions { metadata: KernelMetadata::Required, ..ProgramOptions::default() };
    // There may be a privilege or not, and there is no such interface.
    assert!(Program::attach(u32::MAX >> 1, &options).is_err());
    Ok(())
}

#[cfg(feature = "inet")]
fn inet() -> Done {
    use netmem::tcp::{Address, Host, Interface, Mac};
    let addresses = vec![Address { addr: [192, 0, 2, 2].into(), prefix_len: 24 }];
    let host: Host<netmem::pool::PeerShared> = Host::new(Interface { mac: Mac([2; 6]), mtu: 1500, addresses });
    assert_eq!(host.connections(), 0);
    Ok(())
}

#[cfg(feature = "tokio")]
fn tokio() -> Done {
    fn is_read<T: tokio::io::AsyncRead>() {}
    is_read::<netmem::tcp::TcpStream<netmem::pool::PeerShared>>();
    Ok(())
}

#[cfg(feature = "futures")]
fn futures() -> Done {
    fn is_read<T: futures_io::AsyncRead>() {}
    is_read::<netmem::tcp::TcpStream<netmem::pool::PeerShared>>();
    Ok(())
}

#[cfg(feature = "quinn")]
fn quinn() -> Done {
    fn is_socket<T: quinn::AsyncUdpSocket>() {}
    is_socket::<netmem::tcp::remote::UdpSocket<netmem::pool::PeerShared>>();
    Ok(())
}

#[cfg(feature = "devmem")]
fn devmem() -> Done {
    use netmem::device_memory::{Pages, TokenTable};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    struct Memory(AtomicU32);

    // SAFETY: there is one, of a fixed size, and it is never said to be drained.
    unsafe impl Pages for Memory {
        fn id(&self) -> u64 {
            1
        }

        fn pages(&self) -> u32 {
            4
        }

        unsafe fn put(&self, _index: u32, n: u32) {
            self.0.fetch_sub(n, Ordering::AcqRel);
        }

        fn drained(&self) -> bool {
            false
        }
    }

    let memory = Arc::new(Memory(AtomicU32::new(1)));
    let mut table = TokenTable::new();
    let returner = table.returner();
    let mut receive = table.receive();
    let token = receive.reserve(&memory, 3)?;
    // SAFETY: the reference is ours.
    unsafe { receive.commit() };
    returner.return_tokens(&[token.into()])?;
    assert_eq!(memory.0.load(Ordering::Relaxed), 0);
    Ok(())
}

fn main() -> Done {
    let parts: &[(&str, fn() -> Done)] = &[
        ("pool", pool),
        #[cfg(feature = "virtio")]
        ("virtio", virtio),
        #[cfg(feature = "device")]
        ("device", device),
        #[cfg(feature = "pcap")]
        ("pcap", pcap),
        #[cfg(feature = "cuda")]
        ("cuda", cuda),
        #[cfg(feature = "xsk")]
        ("xsk", xsk),
        #[cfg(feature = "metadata")]
        ("metadata", metadata),
        #[cfg(feature = "inet")]
        ("inet", inet),
        #[cfg(feature = "tokio")]
        ("tokio", tokio),
        #[cfg(feature = "futures")]
        ("futures", futures),
        #[cfg(feature = "quinn")]
        ("quinn", quinn),
        #[cfg(feature = "devmem")]
        ("devmem", devmem),
    ];
    for (name, part) in parts {
        part()?;
        print!("{name} ");
    }
    println!("ok");
    Ok(())
}
