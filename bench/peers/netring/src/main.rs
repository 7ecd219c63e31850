//! The jobs of `bench/peers/xsk.sh` on netring. A received frame is a loan that ends with its
//! batch, and what is sent is copied into a frame of the socket.
//!
//! There is no job `thread`, for which each packet would have to be copied. netring sets the
//! options for busy polling, and has no call in which the driver polls.

#[allow(dead_code, reason = "it has fewer jobs")]
#[path = "../../meter.rs"]
mod meter;

use meter::{Arguments, BATCH, Counts, FRAME, Job, RING, measure, pin, report};
use netring::xdp::XdpFlags;
use netring::{XdpMode, XdpSocket, XdpSocketBuilder};
use quanta::Clock;
use std::error::Error;

/// Its four rings have an entry for each frame, so it gets fewer frames than the others: this many
/// more than are posted.
const SENT: u32 = RING;
/// More than the sender's frames have.
const ROOM: usize = 128;

fn open(interface: &str, job: Job) -> Result<XdpSocket, Box<dyn Error>> {
    let builder = XdpSocketBuilder::default().interface(interface).frame_count((RING + SENT) as usize);
    Ok(match job {
        Job::Transmit => builder.mode(XdpMode::Tx),
        _ => {
            builder.mode(XdpMode::Custom { prefill: RING }).with_default_program().xdp_attach_flags(XdpFlags::DRV_MODE)
        }
    }
    .build()?)
}

/// The frames of a batch with their addresses exchanged: the loans have ended when they are sent.
struct Copies {
    bytes: [[u8; ROOM]; BATCH],
    lengths: [usize; BATCH],
}

fn echo(socket: &mut XdpSocket, copies: &mut Copies) -> usize {
    let mut received = 0;
    if let Some(batch) = socket.next_batch() {
        for packet in &batch {
            let data = packet.data();
            let Some(frame) = copies.bytes[received].get_mut(..data.len()).filter(|_| data.len() >= 12) else {
                continue;
            };
            frame[..6].copy_from_slice(&data[6..12]);
            frame[6..12].copy_from_slice(&data[..6]);
            frame[12..].copy_from_slice(&data[12..]);
            copies.lengths[received] = data.len();
            received += 1;
        }
    }
    let sent =
        (0..received).filter(|&i| matches!(socket.send(&copies.bytes[i][..copies.lengths[i]]), Ok(true))).count();
    // The kernel sends 32 frames in a call. What is left is sent by a later one.
    for _ in 0..sent.div_ceil(32) {
        let _ = socket.flush();
    }
    sent
}

/// Returns how many frames the ring has taken.
fn transmit(socket: &mut XdpSocket) -> usize {
    let sent = (0..BATCH).take_while(|_| matches!(socket.send(&FRAME), Ok(true))).count();
    for _ in 0..BATCH / 32 {
        let _ = socket.flush();
    }
    sent
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::read()?;
    pin(arguments.cpu)?;
    if arguments.busy_poll || arguments.job == Job::Thread {
        return Err("netring has no such job".into());
    }
    let mut socket = open(&arguments.interface, arguments.job)?;
    let clock = Clock::new();
    let mut copies = Copies { bytes: [[0; ROOM]; BATCH], lengths: [0; BATCH] };
    let counts = measure(&clock, arguments.time, || match arguments.job {
        Job::Echo => echo(&mut socket, &mut copies),
        Job::Transmit => transmit(&mut socket),
        Job::Drop | Job::Thread => socket.next_batch().map_or(0, |batch| batch.len()),
    });
    report(counts, Counts::default());
    Ok(())
}
