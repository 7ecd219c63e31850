//! Connects a virtual machine to an interface: a virtio-net device behind a vhost-user socket, whose port is AF_XDP.
//!
//!     cargo run --release -p netmem --all-features --example xsk_vm -- /run/vm.sock eth1
//!     qemu-system-x86_64 .. -object memory-backend-memfd,id=mem,size=1G,share=on -machine memory-backend=mem \
//!         -chardev socket,id=vhost,path=/run/vm.sock -netdev vhost-user,id=net,chardev=vhost -device virtio-net-pci,netdev=net
//!
//! There is neither a tap nor a bridge of the kernel. Offloads that the guest leaves to the device are done in
//! software: checksums are completed and large segments are cut. `netmem device --port xsk:eth1` does the same, with
//! options. The guest gets all frames of the interface's first queue. The program serves one guest after another, until
//! it is killed; the kernel then removes its XDP program from the interface.

use netmem::XskPort;
use netmem::device::port::PortError;
use netmem::device::{NetDevice, Options};
use netmem::virtio::Spin;
use netmem::virtio::socket::Listener;
use netmem::xsk::ProgramOptions;
use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [socket, interface] = &arguments[..] else { return Err("usage: xsk_vm SOCKET INTERFACE".into()) };
    let mut ports = XskPort::open(interface, Some(vec![0]), ProgramOptions::default())?.into_iter();
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
            let Ok(stream) = listener.accept(Duration::from_millis(200)) else { continue };
            if let Err(e) = control.handle(stream) {
                eprintln!("the guest left after an error: {e}");
            }
            let [to, from] = [&stats.rx_frames, &stats.tx_frames].map(|n| n.load(Ordering::Relaxed));
            println!("a guest has left; frames so far: {to} to guests, {from} from them");
        }
        data.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    Ok(())
}
