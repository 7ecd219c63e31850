//! The two kinds of tokens, on the receiving and the returning side of a socket.

use netmem_bench::baselines::tokens::{self, BATCH, Locked, Receive, Return};
use netmem_devmem::stream::{DeviceStream, StreamFragment, StreamReturner};
use netmem_devmem::{BindingCount, BindingRef, Fragment, Returner, Socket, Token, TokenRange};
use std::hint::black_box;

/// A socket with tokens of some kind.
pub(super) trait Way<C: BindingCount>: Send {
    /// Wraps a socket that will receive from this binding alone.
    fn new(socket: Socket<C>, binding: &BindingRef<C>) -> Self;

    /// Receives up to 16 datagrams, and appends their tokens. Returns how many there were.
    fn receive(&mut self, held: &mut Vec<TokenRange>) -> usize;

    /// Returns up to 128 tokens. The result is how many fragments were freed.
    fn return_tokens(&self, tokens: &[TokenRange]) -> usize;

    fn socket(&self) -> &Socket<C>;
}

/// The tokens of the socket itself.
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

    fn return_tokens(&self, tokens: &[TokenRange]) -> usize {
        self.returner.return_tokens(tokens).unwrap_or(0)
    }

    fn socket(&self) -> &Socket<C> {
        &self.socket
    }
}

/// The socket's datagrams without tokens, and ids from a map behind a lock.
pub(super) struct LockedMap<C: BindingCount> {
    socket: Socket<C>,
    map: Locked<false, BindingRef<C>>,
}

impl<C: BindingCount> Way<C> for LockedMap<C> {
    fn new(socket: Socket<C>, binding: &BindingRef<C>) -> Self {
        // SAFETY: the packets received below come from `recv_bare`, each with a count on its page;
        // the flow table's one queue receives into this binding.
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

    fn return_tokens(&self, tokens: &[TokenRange]) -> usize {
        Return::return_tokens(&self.map, tokens)
    }

    fn socket(&self) -> &Socket<C> {
        &self.socket
    }
}

/// A stream with tokens of some kind.
pub(super) trait StreamWay<C: BindingCount> {
    /// The half that returns tokens, on another thread.
    type Back: StreamBack;

    /// Wraps a stream that receives from this binding alone.
    fn new(stream: &DeviceStream<C>, binding: &BindingRef<C>) -> Self;

    fn back(&self) -> Self::Back;

    /// Receives up to 16 fragments, and calls `f` with the bytes and the tokens of each. Returns
    /// how many there were.
    fn receive(&mut self, stream: &mut DeviceStream<C>, f: impl FnMut(u64, TokenRange)) -> usize;
}

/// Returns tokens.
pub(super) trait StreamBack: Send {
    /// Returns up to 128 tokens. The result is how many fragments were freed.
    fn return_tokens(&self, tokens: &[TokenRange]) -> usize;
}

impl<C: BindingCount> StreamBack for StreamReturner<C> {
    fn return_tokens(&self, tokens: &[TokenRange]) -> usize {
        StreamReturner::return_tokens(self, tokens).unwrap_or(0)
    }
}

/// The tokens of the stream itself.
pub(super) struct StreamRanges<C: BindingCount>(StreamReturner<C>);

impl<C: BindingCount> StreamWay<C> for StreamRanges<C> {
    type Back = StreamReturner<C>;

    fn new(stream: &DeviceStream<C>, _: &BindingRef<C>) -> Self {
        Self(stream.returner())
    }

    fn back(&self) -> StreamReturner<C> {
        self.0.clone()
    }

    fn receive(&mut self, stream: &mut DeviceStream<C>, mut f: impl FnMut(u64, TokenRange)) -> usize {
        let mut places = [const { StreamFragment::Empty }; BATCH];
        let n = stream.recv(&mut places).unwrap_or(0);
        for place in black_box(&places[..n]) {
            if let StreamFragment::Device { len, tokens, .. } = place {
                f((*len).into(), *tokens);
            }
        }
        n
    }
}

/// The stream's fragments without tokens, and ids from a map behind a lock.
pub(super) struct StreamLocked<C: BindingCount>(LockedBack<C>);

/// The half that returns tokens.
pub(super) struct LockedBack<C: BindingCount> {
    map: Locked<false, BindingRef<C>>,
    returner: StreamReturner<C>,
}

impl<C: BindingCount> StreamBack for LockedBack<C> {
    fn return_tokens(&self, tokens: &[TokenRange]) -> usize {
        let freed = Return::return_tokens(&self.map, tokens);
        self.returner.return_bare(freed as u32);
        freed
    }
}

impl<C: BindingCount> StreamWay<C> for StreamLocked<C> {
    type Back = LockedBack<C>;

    fn new(stream: &DeviceStream<C>, binding: &BindingRef<C>) -> Self {
        // SAFETY: the fragments received below come from `recv_bare`, each with a count on its
        // page; the stack's one queue receives into this binding.
        let map = unsafe { Locked::over(vec![binding.clone()].into()) };
        Self(LockedBack { map, returner: stream.returner() })
    }

    fn back(&self) -> LockedBack<C> {
        LockedBack { map: self.0.map.clone(), returner: self.0.returner.clone() }
    }

    fn receive(&mut self, stream: &mut DeviceStream<C>, mut f: impl FnMut(u64, TokenRange)) -> usize {
        let mut places = [const { StreamFragment::Empty }; BATCH];
        let n = stream.recv_bare(&mut places).unwrap_or(0);
        let (mut pages, mut ids) = ([tokens::Fragment { binding: 0, index: 0 }; BATCH], [0; BATCH]);
        for (page, place) in pages.iter_mut().zip(black_box(&places[..n])) {
            if let StreamFragment::Device { tokens, .. } = place {
                page.index = tokens.start;
            }
        }
        self.0.map.receive(&pages[..n], &mut ids[..n]);
        for (id, place) in ids.iter().zip(&places[..n]) {
            if let StreamFragment::Device { len, .. } = place {
                f((*len).into(), Token(*id).into());
            }
        }
        n
    }
}
