use netmem_inet::{ListenOptions, SocketError, Stack, TcpStream, Time};
use netmem_packet::{PollThenSleep, RxQueue, TxQueue, Wait};
use netmem_pool::Mapped;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A connection, and the bytes that were read and are not written yet.
struct Echo<M: Mapped> {
    stream: TcpStream<M>,
    rest: Vec<u8>,
}

impl<M: Mapped> Echo<M> {
    /// Writes what was read. Returns false when the connection has ended.
    fn serve(&mut self) -> Result<bool, SocketError> {
        loop {
            while !self.rest.is_empty() {
                match self.stream.write(&self.rest) {
                    // The stream copies as many bytes as it has room for. The others are kept.
                    Ok(written) => drop(self.rest.drain(..written)),
                    // The peer does not read. Nothing more is read from it, until it does.
                    Err(SocketError::WouldBlock) => return Ok(true),
                    Err(error) => return Err(error),
                }
            }
            let mut bytes = [0; 4096];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Ok(false),
                Ok(n) => self.rest.extend_from_slice(&bytes[..n]),
                Err(SocketError::WouldBlock) => return Ok(true),
                Err(error) => return Err(error),
            }
        }
    }
}

/// Echoes what each connection sends. Another thread sets `stop`, and ends the sleep by a
/// `StackWaker`.
pub fn serve<R, T>(stack: &mut Stack<R, T>, stop: &AtomicBool) -> Result<(), Box<dyn std::error::Error>>
where
    R: RxQueue<Mem: Mapped> + Wait,
    T: TxQueue<Mem = R::Mem> + Wait,
{
    let beginning = Instant::now();
    let now = || Time::ZERO + beginning.elapsed();
    let mut listener = stack.sockets().listen("0.0.0.0:7".parse()?, ListenOptions::default())?;
    let mut echoes = Vec::new();
    let mut pause = PollThenSleep::new(Duration::from_micros(50));
    while !stop.load(Ordering::Relaxed) {
        let work = stack.poll(now());
        while let Ok(stream) = listener.accept() {
            echoes.push(Echo { stream, rest: Vec::new() });
        }
        // A connection that has failed is dropped.
        echoes.retain_mut(|echo| echo.serve().unwrap_or(false));
        let sleep = stack.poll_timeout().map(|at| at.since(now()));
        pause.turn(work, &mut [stack], sleep)?;
    }
    // What was written is sent, then FIN. Connections that are left after five seconds are reset.
    stack.finish(now() + Duration::from_secs(5), now)?;
    Ok(())
}
