//! Connects a virtual machine to an interface: a virtio-net device behind a vhost-user socket,
//! whose port is AF_XDP.
//!
//!     cargo run --release -p netmem --all-features --example xsk_vm -- /run/vm.sock eth1
//!     qemu-system-x86_64 .. -object memory-backend-memfd,id=mem,size=1G,share=on \
//!         -machine memory-backend=mem -chardev socket,id=vhost,path=/run/vm.sock \
//!         -netdev vhost-user,id=net,chardev=vhost -device virtio-net-pci,netdev=net
//!
//! There is neither a tap nor a bridge of the kernel. Offloads that the guest leaves to the device
//! are done in software: checksums are completed and large segments are cut.
//! `netmem device --port xsk:eth1` does the same, with options. The guest receives all frames of
//! the interface's first queue. The program serves one guest after another, until it is killed; the
//! kernel then removes its XDP program from the interface.

use netmem::device::port::PortError;
use netmem::device::{NetDevice, Options};
use netmem::virtio::Spin;
use netmem::virtio::socket::Listener;
use netmem::xdp::{ProgramOptions, QueueOptions, XskPort};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// How soon this thread notices that a guest has left, or that the device cannot go on.
const LOOK: Duration = Duration::from_millis(100);

fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, interface] = &arguments[..] else { anyhow::bail!("usage: xsk_vm SOCKET INTERFACE") };
    let mut ports =
        XskPort::open(interface, Some(vec![0]), ProgramOptions::default(), |_| QueueOptions::new())?.into_iter();
    let mut device =
        NetDevice::new(Options::default(), |_| ports.next().ok_or_else(|| PortError::Other("no queue".into())))?;
    let (control, stats, over) = (device.control(), device.stats(), AtomicBool::new(false));
    let listener = Listener::bind(socket)?;
    eprintln!("ready: {socket}, {interface}");
    std::thread::scope(|scope| {
        let data = scope.spawn(|| {
            let ended = device.run(&over, Spin::default());
            over.store(true, Ordering::Relaxed);
            ended
        });
        while !over.load(Ordering::Relaxed) {
            let Ok(stream) = listener.accept(LOOK) else { continue };
            let guest = match control.serve(stream) {
                Ok(guest) => guest,
                Err(error) => {
                    eprintln!("a guest cannot be served: {:#}", anyhow::Error::new(error));
                    continue;
                }
            };
            while !guest.is_finished() && !over.load(Ordering::Relaxed) {
                std::thread::sleep(LOOK);
            }
            if guest.is_finished()
                && let Err(error) = guest.wait()
            {
                eprintln!("the guest left after an error: {:#}", anyhow::Error::new(error));
            }
            let [to, from] = [&stats.rx_frames, &stats.tx_frames].map(|n| n.load(Ordering::Relaxed));
            println!("a guest has left; frames so far: {to} to guests, {from} from them");
        }
        data.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).map_err(anyhow::Error::new)
    })
}
