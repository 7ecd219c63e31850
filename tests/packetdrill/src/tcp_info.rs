//! Linux's `struct tcp_info`, which the scripts check.

/// The structure that `getsockopt(TCP_INFO)` returns, up to the fields of Linux 6.2.
#[expect(missing_docs, reason = "the fields are those of linux/tcp.h")]
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct TcpInfo {
    pub state: u8,
    pub ca_state: u8,
    pub retransmits: u8,
    pub probes: u8,
    pub backoff: u8,
    pub options: u8,
    pub wscale: u8,
    pub app_limited: u8,
    pub rto: u32,
    pub ato: u32,
    pub snd_mss: u32,
    pub rcv_mss: u32,
    pub unacked: u32,
    pub sacked: u32,
    pub lost: u32,
    pub retrans: u32,
    pub fackets: u32,
    pub last_data_sent: u32,
    pub last_ack_sent: u32,
    pub last_data_recv: u32,
    pub last_ack_recv: u32,
    pub pmtu: u32,
    pub rcv_ssthresh: u32,
    pub rtt: u32,
    pub rttvar: u32,
    pub snd_ssthresh: u32,
    pub snd_cwnd: u32,
    pub advmss: u32,
    pub reordering: u32,
    pub rcv_rtt: u32,
    pub rcv_space: u32,
    pub total_retrans: u32,
    pub pacing_rate: u64,
    pub max_pacing_rate: u64,
    pub bytes_acked: u64,
    pub bytes_received: u64,
    pub segs_out: u32,
    pub segs_in: u32,
    pub notsent_bytes: u32,
    pub min_rtt: u32,
    pub data_segs_in: u32,
    pub data_segs_out: u32,
    pub delivery_rate: u64,
    pub busy_time: u64,
    pub rwnd_limited: u64,
    pub sndbuf_limited: u64,
    pub delivered: u32,
    pub delivered_ce: u32,
    pub bytes_sent: u64,
    pub bytes_retrans: u64,
    pub dsack_dups: u32,
    pub reord_seen: u32,
    pub rcv_ooopack: u32,
    pub snd_wnd: u32,
}

/// Each byte of a field that is not known. No script expects such a value: a script that checks
/// the field fails, also if it expects 0.
pub(crate) const UNKNOWN: u8 = 0xa5;

impl TcpInfo {
    /// No field is known.
    pub const UNKNOWN: Self = {
        let bytes = [UNKNOWN; size_of::<Self>()];
        // SAFETY: all fields are integers, for which any bytes are a value.
        unsafe { std::mem::transmute::<[u8; size_of::<Self>()], Self>(bytes) }
    };
}

/// The values of [`TcpInfo::ca_state`], by their names in linux/tcp.h without `TCP_CA_`.
#[expect(missing_docs, reason = "the names are those of linux/tcp.h")]
pub mod ca_state {
    pub const OPEN: u8 = 0;
    pub const DISORDER: u8 = 1;
    pub const CWR: u8 = 2;
    pub const RECOVERY: u8 = 3;
    pub const LOSS: u8 = 4;
}
