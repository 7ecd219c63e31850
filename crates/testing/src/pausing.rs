//! A client of the kernel's sockets that sends and does not read. A server that forgets what its
//! stream did not take loses data then.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

/// How long the bytes that wait to be read must stay as many, until the server counts as stopped by
/// them.
const PAUSE: Duration = Duration::from_millis(300);

/// `len` bytes without a pattern.
pub fn bytes(len: usize) -> Vec<u8> {
    (0..len as u32).map(|n| (n.wrapping_mul(0x9E37_79B1) >> 24) as u8).collect()
}

/// Connects, and sends all of it. Reads nothing until the server can send no more. Then reads the
/// answer up to its end.
#[track_caller]
pub fn answer_after_a_pause(to: SocketAddr, sent: Vec<u8>) -> Vec<u8> {
    let mut socket = TcpStream::connect(to).unwrap();
    let mut writer = socket.try_clone().unwrap();
    let writing = std::thread::spawn(move || {
        writer.write_all(&sent).unwrap();
        writer.shutdown(Shutdown::Write).unwrap();
        sent.len()
    });
    let (mut before, mut waiting) = (0, 0);
    while waiting == 0 || waiting != before {
        before = waiting;
        std::thread::sleep(PAUSE);
        waiting = rustix::io::ioctl_fionread(&socket).unwrap();
    }
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).unwrap();
    writing.join().unwrap();
    assert!(
        (answer.len() as u64) > waiting,
        "the pause was no obstacle: {waiting} bytes waited, and there were no more"
    );
    answer
}

/// The same with an echo server. There are more bytes than all buffers have room for.
#[track_caller]
pub fn echo_after_a_pause(to: SocketAddr) {
    let sent = bytes(32 << 20);
    let echo = answer_after_a_pause(to, sent.clone());
    assert!(echo == sent, "{} bytes sent, {} came back", sent.len(), echo.len());
}
