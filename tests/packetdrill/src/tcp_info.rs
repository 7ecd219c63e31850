//! Linux's `struct tcp_info`, which the scripts check.

/// The structure that `getsockopt(TCP_INFO)` returns, up to the fields of Linux 6.2.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct TcpInfo {
    pub(crate) state: u8,
    pub(crate) ca_state: u8,
    pub(crate) retransmits: u8,
    pub(crate) probes: u8,
    pub(crate) backoff: u8,
    pub(crate) options: u8,
    pub(crate) wscale: u8,
    pub(crate) app_limited: u8,
    pub(crate) rto: u32,
    pub(crate) ato: u32,
    pub(crate) snd_mss: u32,
    pub(crate) rcv_mss: u32,
    pub(crate) unacked: u32,
    pub(crate) sacked: u32,
    pub(crate) lost: u32,
    pub(crate) retrans: u32,
    pub(crate) fackets: u32,
    pub(crate) last_data_sent: u32,
    pub(crate) last_ack_sent: u32,
    pub(crate) last_data_recv: u32,
    pub(crate) last_ack_recv: u32,
    pub(crate) pmtu: u32,
    pub(crate) rcv_ssthresh: u32,
    pub(crate) rtt: u32,
    pub(crate) rttvar: u32,
    pub(crate) snd_ssthresh: u32,
    pub(crate) snd_cwnd: u32,
    pub(crate) advmss: u32,
    pub(crate) reordering: u32,
    pub(crate) rcv_rtt: u32,
    pub(crate) rcv_space: u32,
    pub(crate) total_retrans: u32,
    pub(crate) pacing_rate: u64,
    pub(crate) max_pacing_rate: u64,
    pub(crate) bytes_acked: u64,
    pub(crate) bytes_received: u64,
    pub(crate) segs_out: u32,
    pub(crate) segs_in: u32,
    pub(crate) notsent_bytes: u32,
    pub(crate) min_rtt: u32,
    pub(crate) data_segs_in: u32,
    pub(crate) data_segs_out: u32,
    pub(crate) delivery_rate: u64,
    pub(crate) busy_time: u64,
    pub(crate) rwnd_limited: u64,
    pub(crate) sndbuf_limited: u64,
    pub(crate) delivered: u32,
    pub(crate) delivered_ce: u32,
    pub(crate) bytes_sent: u64,
    pub(crate) bytes_retrans: u64,
    pub(crate) dsack_dups: u32,
    pub(crate) reord_seen: u32,
    pub(crate) rcv_ooopack: u32,
    pub(crate) snd_wnd: u32,
}

/// Each byte of a field that is not known. No script expects such a value: a script that checks
/// the field fails, also if it expects 0.
pub(crate) const UNKNOWN: u8 = 0xa5;

impl TcpInfo {
    /// No field is known.
    pub(crate) const UNKNOWN: Self = {
        let bytes = [UNKNOWN; size_of::<Self>()];
        // SAFETY: all fields are integers, for which any bytes are a value.
        unsafe { std::mem::transmute::<[u8; size_of::<Self>()], Self>(bytes) }
    };
}

/// The values of `ca_state`.
pub(crate) mod ca_state {
    pub(crate) const OPEN: u8 = 0;
    pub(crate) const DISORDER: u8 = 1;
    pub(crate) const CWR: u8 = 2;
    pub(crate) const RECOVERY: u8 = 3;
    pub(crate) const LOSS: u8 = 4;
}
