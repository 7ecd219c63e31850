//! The device's side in a process of its own. This process has the only mappings of device memory,
//! and checks the bytes there.
//!
//! ```text
//!   the test's process                                 the device's process
//!     driver, stack, tokens ◄──── vhost-user ────────►   device ◄──► link ◄──► tap
//!     a descriptor of the memory                         mapping of the memory
//!     `check`, `fill`       ───── requests ──────────►   reads and writes the bytes
//! ```
//!
//! The device's process is a second run of the test program, with the one test [`the_device`]. The
//! bytes are those of a [`pattern`]: they follow from a stream's seed and a position in the stream.
//! So no bytes are passed from one process to the other.

use crate::memory_common::Memory;
use netmem_testing::device_memory::{self, MemoryKind};
use netmem_virtio::Spin;
use netmem_virtio::device::port::{Linked, Port, Steering, Tap};
use netmem_virtio::device::{NetDevice, Options};
use std::fs::File;
use std::io::{self, Read, Write};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const WORDS: &str = "NETMEM_DEVICE_END";
/// In place of a tap's name.
const NO_DEVICE: &str = "-";
/// The most bytes of a span in one request.
const MOST: u64 = 1 << 20;

/// The bytes of a stream from `position` on.
pub fn pattern(seed: u64, position: u64, bytes: &mut [u8]) {
    for (position, byte) in (position..).zip(bytes) {
        *byte = ((position ^ seed << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8;
    }
}

/// Bytes of a stream that lie in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    /// The index of the memory.
    pub memory: usize,
    pub offset: u64,
    pub len: u32,
    /// The seed of the stream, and the position in it.
    pub seed: u64,
    pub position: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(u64)]
enum What {
    Check,
    Fill,
    Steer,
}

/// A request: six numbers. The answer is one: 0, or 1 and the position of the first byte that is
/// wrong.
fn message(what: What, span: &Span) -> [u8; 48] {
    let numbers =
        [what as u64, span.memory as u64, span.offset, span.len.into(), span.seed, span.position].map(u64::to_le_bytes);
    let mut bytes = [0; 48];
    numbers.iter().zip(bytes.chunks_mut(8)).for_each(|(number, place)| place.copy_from_slice(number));
    bytes
}

/// The test's handle on the device's process. The process ends when this value is dropped.
pub struct DeviceEnd {
    child: Child,
    requests: UnixStream,
    /// The driver's end of the vhost-user connection, until the driver connects by it.
    pub front: Option<UnixStream>,
}

impl DeviceEnd {
    /// A process that only reads `memories` and writes them: the device is another program.
    pub fn beside(memories: &[&Memory]) -> Self {
        Self::spawn(NO_DEVICE, 0, None, memories)
    }

    /// A device with `pairs` queue pairs on the tap `tap`, in this thread's network. If there are
    /// several, frames go to queue 0 until connections are [steered](Self::steer). It knows
    /// `memories` by their index. `link` is a bad link, as in `--link`.
    pub fn spawn(tap: &str, pairs: u16, link: Option<&str>, memories: &[&Memory]) -> Self {
        let pair = || UnixStream::pair().expect("sockets");
        let ((requests, answers), (front, back)) = (pair(), pair());
        let fds: Vec<RawFd> = [answers.as_raw_fd(), back.as_raw_fd()]
            .into_iter()
            .chain(memories.iter().map(|memory| memory.file.as_raw_fd()))
            .collect();
        let words: Vec<String> = fds.iter().map(RawFd::to_string).collect();
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(["device_end::the_device", "--exact", "--ignored", "--nocapture"]);
        command.env(WORDS, format!("{tap} {pairs} {} {}", link.unwrap_or("-"), words.join(" ")));
        command.stdin(Stdio::null()).stdout(Stdio::null());
        // SAFETY: `fcntl` may be called between fork and exec; the descriptors are open.
        unsafe {
            command.pre_exec(move || {
                for &fd in &fds {
                    if libc::fcntl(fd, libc::F_SETFD, 0) < 0 {
                        return Err(io::Error::last_os_error());
                    }
                }
                Ok(())
            });
        }
        let child = command.spawn().expect("this program runs");
        // If the process fails, the test reads the end of the file, and does not wait for ever.
        drop((answers, back));
        requests.set_read_timeout(Some(Duration::from_secs(120))).expect("it can be set");
        let mut end = Self { child, requests, front: Some(front) };
        assert_eq!(end.answer(), 0, "the device is ready");
        end
    }

    #[track_caller]
    fn answer(&mut self) -> u64 {
        let mut bytes = [0; 8];
        self.requests.read_exact(&mut bytes).expect("the device's process answers");
        u64::from_le_bytes(bytes)
    }

    /// Checks each byte of these spans, from the device's side.
    #[track_caller]
    pub fn check(&mut self, spans: &[Span]) {
        self.ask(What::Check, spans);
    }

    /// Writes the spans, from the device's side.
    #[track_caller]
    pub fn fill(&mut self, spans: &[Span]) {
        self.ask(What::Fill, spans);
    }

    /// From now on, the device steers segments of this TCP connection over IPv4 to `queue`.
    #[track_caller]
    pub fn steer(&mut self, remote: SocketAddr, local: SocketAddr, queue: u8) {
        let [from, to] = [remote, local].map(|addr| match addr {
            SocketAddr::V4(addr) => u64::from(addr.ip().to_bits()) << 16 | u64::from(addr.port()),
            SocketAddr::V6(_) => panic!("over IPv4"),
        });
        self.ask(What::Steer, &[Span { memory: queue.into(), offset: from, len: 0, seed: to, position: 0 }]);
    }

    #[track_caller]
    fn ask(&mut self, what: What, spans: &[Span]) {
        // Send no more requests than a socket buffers, so that the two sides do not wait for each
        // other.
        for spans in spans.chunks(256) {
            let bytes: Vec<u8> = spans.iter().flat_map(|span| message(what, span)).collect();
            self.requests.write_all(&bytes).expect("the device's process listens");
            for span in spans {
                let answer = self.answer();
                assert_eq!(answer, 0, "{span:?}: the byte at {} is wrong", answer.wrapping_sub(1));
            }
        }
    }
}

impl Drop for DeviceEnd {
    fn drop(&mut self) {
        let _ = self.requests.shutdown(std::net::Shutdown::Both);
        let patience = Instant::now() + Duration::from_secs(120);
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => {
                    return assert!(std::thread::panicking() || status.success(), "the device: {status}");
                }
                Ok(None) if Instant::now() < patience => std::thread::sleep(Duration::from_millis(1)),
                other => {
                    let _ = self.child.kill();
                    let _ = self.child.wait();
                    assert!(std::thread::panicking(), "the device's process does not end: {other:?}");
                    return;
                }
            }
        }
    }
}

/// The main function of the device's process. Does nothing if it is called as a test.
pub fn serve() {
    let Ok(words) = std::env::var(WORDS) else { return };
    let words: Vec<&str> = words.split(' ').collect();
    let [tap, pairs, link, answers, back, memories @ ..] = &words[..] else { panic!("{words:?}") };
    // SAFETY: the parent has left these descriptors open for this process, each once.
    let fd = |word: &str| unsafe { OwnedFd::from_raw_fd(word.parse().expect("a descriptor")) };
    let (answers, back) = (UnixStream::from(fd(answers)), UnixStream::from(fd(back)));
    let memories: Vec<File> = memories.iter().map(|memory| File::from(fd(memory))).collect();
    let steering = Steering::new();
    if *tap == NO_DEVICE {
        return answer(answers, &memories, &steering).expect("the test listens");
    }
    let tap = Tap::open(tap, 1, true).expect("a tap").remove(0);
    let pairs = pairs.parse().expect("a number");
    match *link {
        "-" if pairs == 1 => device(vec![tap], back, answers, &memories, &steering),
        "-" => device(steering.spread(tap, pairs).expect("descriptors"), back, answers, &memories, &steering),
        link => {
            assert_eq!(pairs, 1, "links are for one queue");
            let linked = Linked::new(tap, link.parse().expect("a link"), 0, Arc::default());
            device(vec![linked], back, answers, &memories, &steering);
        }
    }
}

fn device<P: Port + 'static>(
    ports: Vec<P>,
    back: UnixStream,
    answers: UnixStream,
    memories: &[File],
    steering: &Steering,
) {
    let pairs = ports.len();
    let mut ports = ports.into_iter();
    let options = Options { max_pairs: pairs, serve_control: pairs > 1, ..Options::default() };
    let mut device = NetDevice::new(options, |_| Ok(ports.next().expect("one for each"))).expect("a device");
    let (control, stop) = (device.control(), Arc::new(AtomicBool::new(false)));
    let flag = stop.clone();
    let thread =
        std::thread::spawn(move || device.run(&flag, Spin::default()).expect("it runs until it is told to stop"));
    let connection = control.serve(back).expect("a connection");
    answer(answers, memories, steering).expect("the test listens");
    stop.store(true, Ordering::Relaxed);
    control.wake();
    thread.join().expect("the device has not failed");
    drop(connection);
}

/// Answers requests until the test ends.
fn answer(mut socket: UnixStream, memories: &[File], steering: &Steering) -> io::Result<()> {
    let (kind, mut request) = (MemoryKind::of_this_run(), [0; 48]);
    socket.write_all(&0u64.to_le_bytes())?;
    let (mut bytes, mut want) = (Vec::new(), Vec::new());
    loop {
        match socket.read_exact(&mut request) {
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        }
        let numbers: Vec<u64> =
            request.chunks(8).map(|bytes| u64::from_le_bytes(bytes.try_into().expect("eight"))).collect();
        let [what, memory, offset, len, seed, position] = numbers[..] else { unreachable!("48 bytes") };
        if what == What::Steer as u64 {
            let [remote, local] = [offset, seed].map(|addr| (((addr >> 16) as u32).to_be_bytes(), addr as u16).into());
            steering.steer_connection(remote, local, Some(memory as u8));
            socket.write_all(&0u64.to_le_bytes())?;
            continue;
        }
        assert!(len <= MOST);
        want.resize(len as usize, 0);
        pattern(seed, position, &mut want);
        let (file, mut wrong) = (&memories[memory as usize], None);
        if what == What::Fill as u64 {
            device_memory::write_all_at(file, kind, &want, offset)?;
        } else {
            bytes.resize(len as usize, 0);
            device_memory::read_exact_at(file, kind, &mut bytes, offset)?;
            wrong = bytes.iter().zip(&want).position(|(is, want)| is != want);
        }
        socket.write_all(&wrong.map_or(0, |at| 1 + position + at as u64).to_le_bytes())?;
    }
}

#[test]
#[ignore = "the device's process of the other tests"]
fn the_device() {
    serve();
}
