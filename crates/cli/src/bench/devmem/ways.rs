//! The two kinds of tokens, at a socket's two ends.

use netmem_bench::tokens::{self, BATCH, Locked, Receive, Return};
use netmem_devmem::{BindingCount, BindingRef, Fragment, Returner, Socket, Token, TokenRange};
use std::hint::black_box;

/// A socket with tokens of some kind.
pub(super) trait Way<C: BindingCount>: Send {
    /// Over a socket that will receive from that binding alone.
    fn new(socket: Socket<C>, binding: &BindingRef<C>) -> Self;

    /// Receives up to 16 datagrams, and adds their tokens; how many there were.
    fn receive(&mut self, held: &mut Vec<TokenRange>) -> usize;

    /// Gives tokens back, at most 128; how many were freed.
    fn give_back(&self, tokens: &[TokenRange]) -> usize;

    fn socket(&self) -> &Socket<C>;
}

/// The socket as it is.
pub(super) struct Ranges<C: BindingCount> {
    socket: Socket<C>,
    returner: Returner<BindingRef<C>>,
}

impl<C: BindingCount> Way<C> for Ranges<C> {
    fn new(socket: Socket<C>, _: &BindingRef<C>) -> Self {
        let returner = socket.returner();
        Self { socket, returner }
    }

    fn receive(&mut self, held: &mut Vec<TokenRange>) -> usize {
        let mut out = [Fragment::Empty];
        for n in 0..BATCH {
            match self.socket.recv(&mut out) {
                Ok(_) => {}
                Err(_) => return n,
            }
            if let [Fragment::Device { token, .. }] = black_box(&out) {
                held.push((*token).into());
            }
        }
        BATCH
    }

    fn give_back(&self, tokens: &[TokenRange]) -> usize {
        self.returner.give_back(tokens).unwrap_or(0)
    }

    fn socket(&self) -> &Socket<C> {
        &self.socket
    }
}

/// The socket's datagrams without tokens, and ids from a map under a lock.
pub(super) struct LockedMap<C: BindingCount> {
    socket: Socket<C>,
    map: Locked<false, BindingRef<C>>,
}

impl<C: BindingCount> Way<C> for LockedMap<C> {
    fn new(socket: Socket<C>, binding: &BindingRef<C>) -> Self {
        // SAFETY: what is received below comes from `recv_bare`, with a count of its page; the flow table's one queue receives
        // into this binding.
        let map = unsafe { Locked::over(vec![binding.clone()].into()) };
        Self { socket, map }
    }

    fn receive(&mut self, held: &mut Vec<TokenRange>) -> usize {
        let mut pages = [tokens::Fragment { binding: 0, index: 0 }; BATCH];
        let (mut ids, mut out, mut n) = ([0; BATCH], Fragment::Empty, 0);
        while n < BATCH
            && let Some(index) = self.socket.recv_bare(&mut out)
        {
            black_box(&out);
            pages[n].index = index;
            n += 1;
        }
        if n > 0 {
            self.map.receive(&pages[..n], &mut ids[..n]);
            held.extend(ids[..n].iter().map(|&id| TokenRange::from(Token(id))));
        }
        n
    }

    fn give_back(&self, tokens: &[TokenRange]) -> usize {
        Return::give_back(&self.map, tokens)
    }

    fn socket(&self) -> &Socket<C> {
        &self.socket
    }
}
