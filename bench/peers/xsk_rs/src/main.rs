//! The jobs of `bench/peers/xsk.sh` on xsk-rs, written as its examples are: frames are descriptors
//! in a list that the program keeps.
//!
//! | job | where a frame is when its packet is done |
//! | --- | --- |
//! | drop | in the batch that it was received in, which goes to the fill ring as it is |
//! | echo | in the batch of completions, likewise |
//! | transmit | in the list, which a batch is popped from |
//! | thread | in a list behind a lock: the second thread adds a batch at a time, and the first pops one |

// Beside this package and not in it: a package within another one is left out of it, and the other
// program is an example there.
#[path = "../../meter.rs"]
mod meter;

use meter::{Arguments, BATCH, CHANNEL, Counts, FRAME, FRAMES, Job, RING, measure, pin, report, second};
use quanta::Clock;
use rtrb::RingBuffer;
use std::error::Error;
use std::hint::black_box;
use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::thread;
use xsk_rs::config::{BindFlags, FrameSize, QueueSize, SocketConfig, UmemConfig};
use xsk_rs::{CompQueue, FillQueue, FrameDesc, RxQueue, Socket, TxQueue, Umem};

struct Xsk {
    umem: Umem,
    rx: RxQueue,
    tx: TxQueue,
    fill: FillQueue,
    done: CompQueue,
    /// Frames that are in no ring.
    free: Vec<FrameDesc>,
}

impl Xsk {
    fn open(interface: &str) -> Result<Self, Box<dyn Error>> {
        let ring = QueueSize::new(RING)?;
        let umem = UmemConfig::builder()
            .frame_size(FrameSize::new(4096)?)
            .fill_queue_size(ring)
            .comp_queue_size(ring)
            .build()?;
        let (umem, mut free) = Umem::new(umem, FRAMES.try_into()?, false)?;
        let socket = SocketConfig::builder()
            .rx_queue_size(ring)
            .tx_queue_size(ring)
            .bind_flags(BindFlags::XDP_COPY | BindFlags::XDP_USE_NEED_WAKEUP)
            .build();
        // SAFETY: the UMEM has this socket alone.
        let (tx, rx, rings) = unsafe { Socket::new(socket, &umem, &interface.parse()?, 0) }?;
        let (mut fill, done) = rings.ok_or("the socket has no fill and completion ring")?;
        let posted = free.split_off(free.len() - RING as usize);
        // SAFETY: frames of this UMEM that are nowhere else.
        let produced = unsafe { fill.produce(&posted) };
        if produced != posted.len() {
            return Err("the fill ring does not take all frames".into());
        }
        Ok(Self { umem, rx, tx, fill, done, free })
    }

    /// Posts frames that were taken from the fill ring or are free: there is always room, because
    /// the ring has been full.
    fn post(fill: &mut FillQueue, frames: &[FrameDesc]) {
        // SAFETY: frames of this UMEM that are in no other ring.
        let produced = unsafe { fill.produce(frames) };
        debug_assert_eq!(produced, frames.len());
    }

    fn run(self, arguments: &Arguments) -> Result<(Counts, Counts), Box<dyn Error>> {
        let clock = Clock::new();
        match arguments.job {
            Job::Drop => Ok((self.drop(&clock, arguments), Counts::default())),
            Job::Echo => Ok((self.echo(&clock, arguments), Counts::default())),
            Job::Transmit => Ok((self.transmit(&clock, arguments), Counts::default())),
            Job::Thread => self.thread(&clock, arguments),
        }
    }

    fn drop(mut self, clock: &Clock, arguments: &Arguments) -> Counts {
        let mut batch = [FrameDesc::default(); BATCH];
        measure(clock, arguments.time, || {
            // SAFETY: the descriptors are of no frame that is in use.
            let received = unsafe { self.rx.consume(&mut batch) };
            Self::post(&mut self.fill, &batch[..received]);
            received
        })
    }

    fn echo(mut self, clock: &Clock, arguments: &Arguments) -> Counts {
        let mut batch = [FrameDesc::default(); BATCH];
        let mut completed = [FrameDesc::default(); BATCH];
        measure(clock, arguments.time, || {
            // SAFETY: the descriptors are of no frame that is in use.
            let received = unsafe { self.rx.consume(&mut batch) };
            for frame in &mut batch[..received] {
                // SAFETY: the frame was just received, and nothing else refers to it.
                let mut data = unsafe { self.umem.data_mut(frame) };
                if let Some(addresses) = data.contents_mut().first_chunk_mut::<12>() {
                    let (to, from) = addresses.split_at_mut(6);
                    to.swap_with_slice(from);
                }
            }
            // SAFETY: frames of this UMEM that were received.
            if unsafe { self.tx.produce(&batch[..received]) } < received {
                self.free.extend_from_slice(&batch[..received]);
            }
            self.kick();
            loop {
                // SAFETY: the descriptors are of no frame that is in use.
                let n = unsafe { self.done.consume(&mut completed) };
                Self::post(&mut self.fill, &completed[..n]);
                if n < BATCH {
                    break;
                }
            }
            received
        })
    }

    /// The kernel sends 32 frames in a call.
    fn kick(&mut self) {
        let mut waiting = RING - self.tx.nb_free_exact();
        while waiting > 0 && self.tx.needs_wakeup() {
            if self.tx.wakeup().is_err() {
                break;
            }
            let left = RING - self.tx.nb_free_exact();
            if left == waiting {
                break;
            }
            waiting = left;
        }
    }

    fn transmit(mut self, clock: &Clock, arguments: &Arguments) -> Counts {
        let mut completed = [FrameDesc::default(); BATCH];
        measure(clock, arguments.time, || {
            let at = self.free.len().saturating_sub(BATCH);
            for frame in &mut self.free[at..] {
                // SAFETY: the frame is in no ring, and nothing else refers to it.
                let mut data = unsafe { self.umem.data_mut(frame) };
                let mut cursor = data.cursor();
                cursor.set_pos(0);
                let written = cursor.write_all(&FRAME);
                debug_assert!(written.is_ok());
            }
            // SAFETY: frames of this UMEM that are in no ring.
            let sent = unsafe { self.tx.produce(&self.free[at..]) };
            // The ring takes all or none.
            if sent > 0 {
                self.free.truncate(at);
            }
            self.kick();
            let mut done = 0;
            loop {
                // SAFETY: the descriptors are of no frame that is in use.
                let n = unsafe { self.done.consume(&mut completed) };
                self.free.extend_from_slice(&completed[..n]);
                done += n;
                if n < BATCH {
                    break;
                }
            }
            done
        })
    }

    fn thread(self, clock: &Clock, arguments: &Arguments) -> Result<(Counts, Counts), Box<dyn Error>> {
        let Self { umem, mut rx, mut fill, free, .. } = self;
        let (umem, free) = (&umem, &Mutex::new(free));
        let list = || free.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut to, mut from) = RingBuffer::<FrameDesc>::new(CHANNEL);
        thread::scope(|scope| {
            let worker = scope.spawn(move || {
                let mut seen = Vec::with_capacity(BATCH);
                second(clock, arguments, || {
                    let n = from.slots().min(BATCH);
                    let Ok(frames) = from.read_chunk(n) else { return 0 };
                    for frame in frames {
                        // SAFETY: the frame is this thread's until it is in the list.
                        let data = unsafe { umem.data(&frame) };
                        black_box(data.contents().first_chunk::<16>().copied());
                        seen.push(frame);
                    }
                    if n > 0 {
                        list().append(&mut seen);
                    }
                    n
                })
            });
            let mut batch = [FrameDesc::default(); BATCH];
            let mut posted = RING as usize;
            let first = measure(clock, arguments.time, || {
                let room = to.slots().min(BATCH);
                // SAFETY: the descriptors are of no frame that is in use.
                let received = unsafe { rx.consume(&mut batch[..room]) };
                if let Ok(chunk) = to.write_chunk_uninit(received) {
                    chunk.fill_from_iter(batch[..received].iter().copied());
                }
                posted -= received;
                if received > 0 || posted < RING as usize / 2 {
                    let mut free = list();
                    let n = free.len().min(RING as usize - posted);
                    let at = free.len() - n;
                    Self::post(&mut fill, &free[at..]);
                    free.truncate(at);
                    posted += n;
                }
                received
            });
            let second = worker.join().map_err(|_| "the second thread has ended")??;
            Ok((first, second))
        })
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments = Arguments::read()?;
    if arguments.busy_poll {
        return Err("xsk-rs has no option for busy polling".into());
    }
    pin(arguments.cpu)?;
    let (first, second) = Xsk::open(&arguments.interface)?.run(&arguments)?;
    report(first, second);
    Ok(())
}
