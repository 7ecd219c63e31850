//! Functions of the C library that the preloaded object replaces: see the [crate](crate).

use crate::tcp_info::{TcpInfo, UNKNOWN, ca_state};
use crate::world::{WORLD, World};
use libc::{c_int, c_long, c_void, socklen_t};
use netmem_inet::tcp::sender::RecoveryState;
use std::time::Duration;

/// `TCP_INFO`, and the other options that packetdrill reads, for descriptors of this object. For
/// all other descriptors the system is called.
#[unsafe(no_mangle)]
extern "C" fn getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, len: *mut socklen_t) -> c_int {
    const TCP_CC_INFO: c_int = 26;
    let ours = WORLD.get().filter(|shared| shared.lock().sockets.contains_key(&fd));
    // SAFETY: the caller's pointers are those of the system call.
    unsafe {
        match (ours, level, name) {
            (Some(shared), libc::SOL_TCP, libc::TCP_INFO) => {
                let info = shared.call(|world| info(world, fd));
                let room = (*len as usize).min(size_of::<TcpInfo>());
                value.cast::<u8>().write_bytes(UNKNOWN, *len as usize);
                std::ptr::copy_nonoverlapping((&raw const info).cast::<u8>(), value.cast::<u8>(), room);
                0
            }
            (Some(_), libc::SOL_TCP, TCP_CC_INFO) => {
                *len = 0;
                0
            }
            (Some(_), libc::SOL_SOCKET, libc::SO_MEMINFO) => {
                value.cast::<u8>().write_bytes(UNKNOWN, *len as usize);
                0
            }
            _ => libc::syscall(libc::SYS_getsockopt, fd, level, name, value, len) as c_int,
        }
    }
}

/// The state of the connection of a descriptor.
fn info(world: &mut World, fd: c_int) -> TcpInfo {
    let now = world.now;
    let Ok((_, stream)) = world.stream(fd) else { return TcpInfo::UNKNOWN };
    let info = stream.connection.info(now);
    let send = info.send;
    let micros = |time: Duration| time.as_micros() as u32;
    TcpInfo {
        ca_state: match send.state {
            RecoveryState::Open => ca_state::OPEN,
            RecoveryState::Disorder => ca_state::DISORDER,
            RecoveryState::Cwr => ca_state::CWR,
            RecoveryState::Recovery => ca_state::RECOVERY,
            RecoveryState::Loss => ca_state::LOSS,
        },
        probes: send.probes as u8,
        backoff: send.backoff as u8,
        rto: micros(send.rto),
        snd_mss: send.segment_size,
        rcv_mss: info.received_mss,
        unacked: send.unacked,
        sacked: send.sacked,
        lost: send.lost,
        retrans: send.retrans,
        total_retrans: send.retransmitted,
        last_data_recv: info.idle.as_millis() as u32,
        pmtu: send.max_payload,
        rtt: micros(send.rtt),
        rttvar: micros(send.rttvar),
        snd_ssthresh: send.ssthresh,
        snd_cwnd: send.cwnd,
        advmss: info.announced_mss.into(),
        reordering: send.reordering,
        notsent_bytes: send.unsent as u32,
        min_rtt: micros(send.min_rtt),
        busy_time: send.busy.as_micros() as u64,
        rwnd_limited: send.window_limited.as_micros() as u64,
        sndbuf_limited: stream.buffer_limited(now).as_micros() as u64,
        delivered: send.delivered,
        dsack_dups: send.duplicates,
        reord_seen: send.reordered,
        ..TcpInfo::UNKNOWN
    }
}

/// Each call returns one tick more.
#[unsafe(no_mangle)]
extern "C" fn times(_: *mut c_void) -> c_long {
    use std::sync::atomic::{AtomicI64, Ordering};
    static TICKS: AtomicI64 = AtomicI64::new(1);
    TICKS.fetch_add(1, Ordering::Relaxed)
}

#[unsafe(no_mangle)]
extern "C" fn mlockall(_: c_int) -> c_int {
    0
}

#[unsafe(no_mangle)]
extern "C" fn sched_setscheduler(_: libc::pid_t, _: c_int, _: *const c_void) -> c_int {
    0
}
