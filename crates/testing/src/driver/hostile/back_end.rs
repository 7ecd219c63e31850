//! The back end's end of the socket: how it answers each message of the driver, and the memory and
//! the rings that the messages announce.

use crate::vhost_user::back::{Message, Peer, words};
use netmem_virtio::net::feature;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Condvar, Mutex};

/// Formats of rings, and both orders of use.
pub const FORMATS: [u64; 4] = [0, feature::IN_ORDER, feature::RING_PACKED, feature::RING_PACKED | feature::IN_ORDER];

/// All that the driver could want, but for features of rings.
pub const FEATURES: u64 = feature::VERSION_1
    | feature::VHOST_USER_PROTOCOL
    | feature::MRG_RXBUF
    | feature::CSUM
    | feature::GUEST_CSUM
    | feature::GUEST_TSO4
    | feature::GUEST_TSO6
    | feature::GUEST_UFO
    | feature::HOST_TSO4
    | feature::HOST_TSO6
    | feature::CTRL_VQ
    | feature::MQ;

/// The same without a control queue: a driver of several queue pairs does not wait for answers on
/// one.
pub const WITHOUT_CONTROL: u64 = FEATURES & !feature::CTRL_VQ;

/// What the backend does when a ring is to be stopped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnStop {
    /// Reports the position of the ring.
    #[default]
    Answer,
    /// Answers nothing and hangs up.
    Refuse,
    /// Answers nothing, until [`release`](super::Hostile::release).
    Hang,
}

#[derive(Clone, Debug)]
pub struct Behaviour {
    pub features: u64,
    pub pairs: u64,
    pub on_stop: OnStop,
    /// The message, by name, at which it fails: it refuses, if the driver asks for an
    /// acknowledgement, and hangs up.
    pub fail_at: Option<&'static str>,
    /// Whether answers to requests are confirmed.
    pub acks: bool,
    /// Protocol features beside that.
    pub protocol: u64,
    /// Bits of the device status that it remembers.
    pub status: u64,
    /// What it answers when asked for its configuration space: the whole payload.
    pub config: Vec<u8>,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self {
            features: FEATURES,
            pairs: 1,
            on_stop: OnStop::Answer,
            fail_at: None,
            acks: true,
            protocol: 1,
            status: 0xff,
            config: Vec::new(),
        }
    }
}

pub(super) struct Mapped {
    pub(super) guest: u64,
    pub(super) user: u64,
    pub(super) len: usize,
    pub(super) base: *mut u8,
    pub(super) file: File,
}

// SAFETY: a mapping of its own; tests write it through volatile and atomic accesses.
unsafe impl Send for Mapped {}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `set_mem_table`, and the rings are not used after it.
        unsafe { munmap(self.base.cast(), self.len).unwrap() };
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RingAt {
    pub(super) size: u16,
    pub(super) parts: [u64; 3],
}

#[derive(Default)]
pub(super) struct State {
    pub(super) memory: Vec<Mapped>,
    pub(super) rings: Vec<RingAt>,
    /// Call descriptors.
    pub(super) calls: Vec<File>,
    pub(super) kicks: Vec<File>,
    pub(super) stops: Vec<u32>,
    pub(super) enabled: Vec<(u32, bool)>,
    pub(super) released: bool,
}

pub(super) struct Backend {
    pub(super) behaviour: Mutex<Behaviour>,
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
    pub(super) features: AtomicU64,
    pub(super) status: AtomicU64,
    pub(super) mtu: AtomicU64,
    /// The messages that came, by name.
    pub(super) messages: Mutex<Vec<&'static str>>,
}

impl Backend {
    fn ring(&self, index: u32, change: impl FnOnce(&mut RingAt)) {
        let mut state = self.state.lock().unwrap();
        let index = index as usize;
        if state.rings.len() <= index {
            state.rings.resize(index + 1, RingAt::default());
        }
        change(&mut state.rings[index]);
    }

    /// Does what a message asks for, and answers it. `None`: the connection is to end.
    pub(super) fn handle(&self, peer: &Peer, mut m: Message) -> Option<()> {
        let behaviour = self.behaviour.lock().unwrap().clone();
        self.messages.lock().unwrap().push(m.name());
        let fails = behaviour.fail_at == Some(m.name());
        if fails && !m.confirm {
            return None;
        }
        match m.name() {
            _ if fails => {}
            "GET_FEATURES" => return peer.answer(&m, &words(&[behaviour.features])),
            "GET_PROTOCOL_FEATURES" => {
                return peer.answer(&m, &words(&[behaviour.protocol | if behaviour.acks { 1 << 3 } else { 0 }]));
            }
            "GET_CONFIG" => return peer.answer(&m, &behaviour.config),
            "GET_QUEUE_NUM" => return peer.answer(&m, &words(&[behaviour.pairs])),
            "GET_STATUS" => return peer.answer(&m, &words(&[self.status.load(Relaxed) & behaviour.status])),
            "GET_VRING_BASE" => {
                let index = m.u32(0);
                let mut state = self.state.lock().unwrap();
                state.stops.push(index);
                match behaviour.on_stop {
                    OnStop::Answer => {}
                    OnStop::Refuse => return None,
                    OnStop::Hang => drop(self.changed.wait_while(state, |s| !s.released).unwrap()),
                }
                return peer.answer(&m, &words(&[u64::from(index)]));
            }
            "SET_OWNER" | "SET_PROTOCOL_FEATURES" | "SET_VRING_BASE" => {}
            "SET_FEATURES" => self.features.store(m.u64(0), Relaxed),
            "SET_STATUS" => self.status.store(m.u64(0), Relaxed),
            "NET_SET_MTU" => self.mtu.store(m.u64(0), Relaxed),
            "SET_MEM_TABLE" => {
                let fds = std::mem::take(&mut m.fds);
                assert_eq!(fds.len(), m.u32(0) as usize);
                let map = |(i, fd): (usize, _)| {
                    let [guest, size, user, offset] = [0, 8, 16, 24].map(|at| m.u64(8 + 32 * i + at));
                    let (len, prot, file) = (size as usize, ProtFlags::READ | ProtFlags::WRITE, File::from(fd));
                    // SAFETY: a new mapping of a foreign file.
                    let base =
                        unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, &file, offset).unwrap() };
                    Mapped { guest, user, len, base: base.cast(), file }
                };
                self.state.lock().unwrap().memory = fds.into_iter().enumerate().map(map).collect();
            }
            "SET_VRING_NUM" => self.ring(m.u32(0), |r| r.size = m.u32(4) as u16),
            "SET_VRING_ADDR" => self.ring(m.u32(0), |r| r.parts = [m.u64(8), m.u64(24), m.u64(16)]),
            "SET_VRING_KICK" | "SET_VRING_CALL" => {
                let mut state = self.state.lock().unwrap();
                let kept = if m.name() == "SET_VRING_KICK" { &mut state.kicks } else { &mut state.calls };
                kept.push(m.fds.remove(0).into());
                assert!(m.fds.is_empty());
            }
            "SET_VRING_ENABLE" => self.state.lock().unwrap().enabled.push((m.u32(0), m.u32(4) != 0)),
            other => panic!("the driver sent {other}"),
        }
        let answered = if m.confirm { peer.answer(&m, &words(&[u64::from(fails)])) } else { Some(()) };
        answered.filter(|()| !fails)
    }
}
