//! A UDP echo server with ARP, on a tap: the kernel's own network stack is the peer.
//!
//!     sudo cargo run -p netmem --all-features --example echo_tap
//!     sudo cargo run -p netmem --all-features --example echo_tap serve
//!
//! The first echoes three datagrams of its own, and ends. The second echoes until it is killed; try
//! `nc -u 192.0.2.2 7`.
//!
//! Needs CAP_NET_ADMIN and `ip` (iproute2). The interface goes when the program ends.
//!
//! ```text
//!   UDP socket ── kernel ── tap ── virtio-net device ── virtio-net driver ── Echo
//!   192.0.2.1                      a thread             this thread          192.0.2.2, port 7
//! ```

use anyhow::Context;
use netmem::device::port::{ALL_OFFLOADS, Tap};
use netmem::device::{NetDevice, Options};
use netmem::net::{Handler, Packet, Poll, PollThenSleep, RxQueue, TxBulk, TxQueue, Verdict, XdpFrame};
use netmem::pool::TrustedPeer;
use netmem::virtio::{NetOptions, RxMode, Spin, VirtioTx};
use std::net::UdpSocket;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const OUR_MAC: [u8; 6] = [2, 0, 0, 0, 0, 2];
const OUR_IP: [u8; 4] = [192, 0, 2, 2];
const PORT: u16 = 7;

/// Turns a request around where it is: the reply leaves from the page that the request came in.
struct Echo<'a> {
    replies: TxBulk<&'a mut VirtioTx<TrustedPeer>>,
}

impl Handler<TrustedPeer> for Echo<'_> {
    fn run(&mut self, frame: &mut XdpFrame<TrustedPeer>) -> Verdict {
        // Headers are copied out, checked, changed, and written back.
        let Ok(mut head) = frame.read_at::<42>(0) else { return Verdict::Drop };
        let answered = match [head[12], head[13]] {
            [0x08, 0x06] => answer_arp(&mut head),
            [0x08, 0x00] => answer_udp(&mut head),
            _ => false,
        };
        if answered && frame.write_at(0, &head).is_ok() { Verdict::Tx } else { Verdict::Drop }
    }

    /// Frames for which `run` returned `Tx`.
    fn tx(&mut self, packet: Packet<TrustedPeer>) {
        self.replies.push(packet);
    }

    /// The batch is over.
    fn flush(&mut self) {
        self.replies.flush();
    }

    /// No frame is passed here.
    fn pass(&mut self, _: Packet<TrustedPeer>) {}
}

/// An ARP request for our address becomes the reply.
fn answer_arp(head: &mut [u8; 42]) -> bool {
    let request = head[20..22] == [0, 1] && head[38..42] == OUR_IP;
    if request {
        head.copy_within(6..12, 0); // Ethernet: to the sender
        head[6..12].copy_from_slice(&OUR_MAC);
        head[21] = 2; // a reply
        head.copy_within(22..32, 32); // to the sender's addresses
        head[22..28].copy_from_slice(&OUR_MAC);
        head[28..32].copy_from_slice(&OUR_IP);
    }
    request
}

/// A datagram to our port goes back to its sender. Checksums are sums: they do not change when
/// addresses and ports change places.
fn answer_udp(head: &mut [u8; 42]) -> bool {
    let whole = head[20] & 0x3f == 0 && head[21] == 0;
    let ours =
        head[14] == 0x45 && whole && head[23] == 17 && head[30..34] == OUR_IP && head[36..38] == PORT.to_be_bytes();
    if ours {
        head.copy_within(6..12, 0);
        head[6..12].copy_from_slice(&OUR_MAC);
        let (source, destination) = head[26..34].split_at_mut(4);
        source.swap_with_slice(destination);
        let (source, destination) = head[34..38].split_at_mut(2);
        source.swap_with_slice(destination);
    }
    ours
}

/// Three datagrams from a socket of the kernel to the echo server and back.
fn demo() -> std::io::Result<()> {
    let socket = UdpSocket::bind("192.0.2.1:0")?;
    socket.connect("192.0.2.2:7")?;
    socket.set_read_timeout(Some(Duration::from_secs(5)))?;
    for number in 1..=3 {
        let (sent, mut received) = (format!("hello {number}"), [0; 64]);
        socket.send(sent.as_bytes())?;
        let n = socket.recv(&mut received)?;
        println!("sent {sent:?}, the echo is {:?}", String::from_utf8_lossy(&received[..n]));
    }
    Ok(())
}

fn main() -> anyhow::Result<()> {
    let serve = std::env::args().nth(1).is_some_and(|argument| argument == "serve");
    let name = format!("nmecho{}", std::process::id() % 10_000_000);

    // The device, plugged into a tap, runs on a thread of its own. It offers no offloads: the
    // kernel then completes checksums.
    let mut taps = Tap::open(&name, 1, true)?;
    let ip = Command::new("ip").args(["addr", "add", "192.0.2.1/24", "dev", &name]).status().context("ip")?;
    anyhow::ensure!(ip.success(), "`ip addr add` failed: {ip}");
    let options = Options { withhold: ALL_OFFLOADS, ..Options::default() };
    let mut device = NetDevice::new(options, |_| Ok(taps.remove(0)))?;
    let (control, stop) = (device.control(), Arc::new(AtomicBool::new(false)));
    let flag = stop.clone();
    let device = std::thread::spawn(move || device.run(&flag, Spin::default()));

    // The driver, and the loop that polls it.
    let mut driver = control.connect(NetOptions::new(RxMode::Small))?;
    let pair = driver.pairs.first_mut().context("the device has a queue pair")?;
    println!("{name}: 192.0.2.2 echoes UDP port {PORT}");
    let client = (!serve).then(|| std::thread::spawn(demo));
    let mut echo = Echo { replies: TxBulk::new(&mut pair.tx) };
    let mut pause = PollThenSleep::new(Duration::from_micros(50));
    while !client.as_ref().is_some_and(|client| client.is_finished()) {
        let frames = pair.rx.poll(|poll| {
            echo.replies.target().complete(); // pages of replies that were sent are returned
            poll.receive(64, &mut echo)
        });
        // Polls on for 50 us after the last frame, then sleeps; not for long, because the client's
        // end wakes no queue.
        pause.turn(frames, &mut [&mut pair.rx], Some(Duration::from_millis(10)))?;
    }
    if let Some(client) = client {
        client.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    }
    println!("{:?}", echo.replies.stats());
    drop(driver);
    stop.store(true, Ordering::Relaxed);
    control.wake();
    device.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
    Ok(())
}
