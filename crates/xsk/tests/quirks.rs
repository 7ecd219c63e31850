//! Quirks of drivers: each is logged as a warning, and the drivers of this machine behave as the
//! table has it.
//!
//! A process of its own: the tests install the subscriber of the process (`tracing`), which other
//! tests must not log to.
#![allow(clippy::unwrap_used)]

use netmem_packet::{Packet, Poll, RxQueue, Sum};
use netmem_pool::KernelShared;
use netmem_testing::namespace::{command, in_namespace, in_peer_namespace, ip, nics};
use netmem_testing::xsk::{index, memory, name, on_wire, reopen, until, veth, wire};
use netmem_testing::{fields, on_event};
use netmem_xsk::{InterfaceInfo, Mode, QueueOptions, Umem, UmemOptions, Xsk, XskError, XskOptions};
use std::cell::RefCell;
use std::net::UdpSocket;
use std::sync::Once;

thread_local! {
    /// What this thread has logged as warnings: the fields of each event, as text.
    static SAID: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Keeps the warnings of each thread. It is the subscriber of the whole process, and each test
/// calls it first: if a thread without a subscriber is the first at an event while another thread
/// sets one for itself, `tracing` may treat the event as disabled.
fn listen() {
    static ONCE: Once = Once::new();
    let keep = on_event(tracing::Level::WARN, |event| {
        let said = fields(event).into_iter().map(|(name, value)| format!("{name}={value} ")).collect();
        SAID.with_borrow_mut(|all| all.push(said));
    });
    ONCE.call_once(|| tracing::subscriber::set_global_default(keep).unwrap());
}

/// Opens queues `0..queues` of one UMEM, and returns the warnings.
fn warnings(interface: &str, queues: u32, options: impl Fn() -> QueueOptions) -> Vec<String> {
    SAID.take();
    let (memory, umem) = memory::<KernelShared>(4096, &UmemOptions::new());
    // The kernel may still have the socket of the call before.
    let open = |queue| {
        until("a free queue", || match umem.open(index(interface), queue, memory.clone(), options()) {
            Err(XskError::Busy { .. }) => None,
            opened => Some(opened.unwrap()),
        })
    };
    drop((0..queues).map(open).collect::<Vec<_>>());
    SAID.take()
}

/// The user is warned when the first queue of an interface is opened, whatever the options are, and
/// not again with the next queue, or when the interface is opened again.
#[test]
fn a_warning_for_each_entry_of_the_driver() {
    listen();
    in_namespace(|| {
        for options in [
            QueueOptions::new as fn() -> QueueOptions,
            || QueueOptions::new().mode(Mode::Copy),
            || QueueOptions::new().ignore_quirks(),
        ] {
            let (ours, theirs) = (name("o"), name("t"));
            veth(&ours, &theirs, 2, 1500);
            let [quirk] = InterfaceInfo::of(&ours).unwrap().quirks[..] else { panic!("a veth has one entry") };
            let said = warnings(&ours, 2, options);
            assert_eq!(said.len(), 1, "{said:?}");
            for part in [quirk.text, quirk.source, &ours, "driver=\"veth\""] {
                assert!(said[0].contains(part), "{part}: {said:?}");
            }
            assert_eq!(warnings(&ours, 2, options), [""; 0]);
        }
    });
}

/// The entry of veth: the kernel at the other end leaves checksums out, unless its offloads are
/// off.
#[test]
fn frames_of_the_kernel_behind_a_veth_are_incomplete() {
    listen();
    in_namespace(|| {
        for complete in [false, true] {
            let (ours, theirs) = (name("o"), name("t"));
            ip(&format!("link add {ours} type veth peer name {theirs}"));
            ip(&format!("link set {ours} up"));
            if complete {
                command(&format!("ethtool -K {theirs} tx off gso off tso off"));
            }
            let mut xsk = Xsk::<KernelShared>::open(XskOptions::new(&ours), |_| QueueOptions::new()).unwrap();
            let interface = theirs.clone();
            let peer = in_peer_namespace(&theirs, move || {
                ip(&format!("addr add 198.18.0.1/24 dev {interface}"));
                ip(&format!("link set {interface} up"));
                ip(&format!("neigh add 198.18.0.2 lladdr 02:00:00:00:00:02 dev {interface}"));
                UdpSocket::bind("198.18.0.1:9").unwrap().send_to(&[7; 100], "198.18.0.2:9").unwrap();
            });
            let datagram = until("the datagram", || {
                let mut got = None;
                xsk.pairs[0].0.poll(|poll| {
                    poll.receive(64, &mut |packet: Packet<KernelShared>| {
                        let bytes = packet.to_vec();
                        let udp = bytes[12..14] == [8, 0] && bytes[23] == 17;
                        got = udp.then_some(bytes).or(got.take());
                    });
                });
                got
            });
            peer.join().unwrap();
            // Over the pseudo header and the datagram with its checksum: all ones.
            let mut sum = Sum::default();
            sum.add(&datagram[26..34]);
            sum.add(&[0, 17]);
            sum.add(&datagram[38..40]);
            sum.add(&datagram[34..142]);
            assert_eq!(sum.value() == 0xffff, complete, "{:#x}", sum.value());
        }
    });
}

/// The mode is the best that the driver has for the options, and a mode that it has not is refused:
/// veth has no zero-copy, and virtio-net has it for frames of one buffer, as those of its MTU are.
/// `NETMEM_XSK_PLAIN` names a virtio-net card without the DMA API, which has none.
#[test]
fn the_mode_is_what_the_driver_has() {
    listen();
    in_namespace(|| {
        let (ours, _theirs) = wire(1500);
        let mode = |interface: &str, options: &dyn Fn() -> QueueOptions| {
            let (memory, umem): (_, Umem<KernelShared>) = memory(4096, &UmemOptions::new());
            let opened = reopen(interface, &umem, &memory, options);
            opened.map(|(rx, _tx)| rx.socket().mode())
        };
        let new = QueueOptions::new;
        let refused = |mode: Result<Mode, XskError>| {
            assert!(matches!(mode, Err(XskError::Unsupported { what: "zero-copy mode", .. })), "{mode:?}");
        };
        assert_eq!(mode(&ours, &|| new().multi_buffer(true)).unwrap(), Mode::Copy);
        refused(mode(&ours, &|| new().mode(Mode::ZeroCopy).multi_buffer(true)));
        assert_eq!(mode(&ours, &|| new().mode(Mode::Copy).multi_buffer(false)).unwrap(), Mode::Copy);
        let best = if nics().is_some() { Mode::ZeroCopy } else { Mode::Copy };
        assert_eq!(mode(&ours, &|| on_wire(new())).unwrap(), best);
        assert_eq!(mode(&ours, &|| new().multi_buffer(false)).unwrap(), best);
        assert_eq!(mode(&ours, &new).unwrap(), best);
        if let Ok(plain) = std::env::var("NETMEM_XSK_PLAIN") {
            assert_eq!(mode(&plain, &|| new().multi_buffer(false)).unwrap(), Mode::Copy);
            refused(mode(&plain, &|| new().multi_buffer(false).mode(Mode::ZeroCopy)));
        }
    });
}
