//! Requests to the device for a sent frame, and the times at which frames were sent.

use super::tx::netmem_xsk_tx;
use crate::frag::netmem_frag;
use crate::groups;
use crate::owned;
use crate::queues;
use crate::region::Kept;
use crate::status::{Failure, netmem_status, status, value};
use netmem_packet::{Checksum, Packet};
use netmem_xsk::{NoLaunchTimes, TxRequest, XskTx};
use std::ptr::NonNull;

/// In netmem_xsk_request.flags: the device computes a checksum.
pub const NETMEM_XSK_CHECKSUM: u32 = 1;
/// In netmem_xsk_request.flags: the device sends the frame at `launch_time`, and not before.
pub const NETMEM_XSK_LAUNCH_TIME: u32 = 2;
/// In netmem_xsk_request.flags: the time at which the frame was sent is asked for.
pub const NETMEM_XSK_TIMESTAMP: u32 = 4;

/// What the device is asked to do with a frame. All zeros: nothing.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_xsk_request {
    /// NETMEM_XSK_CHECKSUM, NETMEM_XSK_LAUNCH_TIME and NETMEM_XSK_TIMESTAMP
    pub flags: u32,
    /// The checksum is of the bytes from here to the end of the frame.
    pub checksum_start: u16,
    /// It is stored so many bytes behind `checksum_start`, where the sum of the pseudo-header is.
    pub checksum_offset: u16,
    /// Nanoseconds of the device's clock or of CLOCK_TAI, which depends on the driver.
    pub launch_time: u64,
    /// The number under which netmem_xsk_tx_timestamps returns the time.
    pub timestamp: u64,
}

/// The time at which a frame was sent.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct netmem_xsk_timestamp {
    /// The number in the frame's request.
    pub timestamp: u64,
    /// Nanoseconds of the device's clock; 0 if the driver has stored no time.
    pub time: u64,
}

impl netmem_xsk_request {
    const FLAGS: u32 = NETMEM_XSK_CHECKSUM | NETMEM_XSK_LAUNCH_TIME | NETMEM_XSK_TIMESTAMP;

    fn has(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    /// The checksum and the rest of the request.
    fn parts(&self, tx: &XskTx<Kept>) -> Result<(Checksum, TxRequest), Failure> {
        if self.flags & !Self::FLAGS != 0 {
            return Err(Failure::Argument(format!("flags of a netmem_xsk_request are {:#x}", self.flags)));
        }
        match tx.launch_times() {
            Err(NoLaunchTimes::NoMetadata) => {
                return Err(Failure::Argument("requests need a UMEM with netmem_umem_options.tx_metadata".into()));
            }
            Err(missing) if self.has(NETMEM_XSK_LAUNCH_TIME) => return Err(Failure::NoLaunchTimes(missing)),
            _ => {}
        }
        let (start, offset) = (self.checksum_start, self.checksum_offset);
        let checksum = self.has(NETMEM_XSK_CHECKSUM).then_some(Checksum::Partial { start, offset });
        let launch_time = self.has(NETMEM_XSK_LAUNCH_TIME).then_some(self.launch_time);
        let timestamp = self.has(NETMEM_XSK_TIMESTAMP).then_some(self.timestamp);
        Ok((checksum.unwrap_or_default(), TxRequest { launch_time, timestamp }))
    }

    /// Queues a frame. False if the queue is full: the variables have their fragments again.
    ///
    /// # Safety
    ///
    /// Fragments of the header.
    unsafe fn send(&self, tx: &mut XskTx<Kept>, frags: &mut [netmem_frag]) -> Result<bool, Failure> {
        if self.flags == 0 {
            // SAFETY: as the caller promises.
            return unsafe { groups::send_frame(tx, frags) };
        }
        let (checksum, request) = self.parts(tx)?;
        // SAFETY: as the caller promises; the queue compares each page with its region.
        let mut packet = unsafe { groups::packet(frags) }?;
        packet.meta.checksum = checksum;
        let before = tx.stats().no_offload;
        let Err(packet) = tx.send_with(packet, request) else { return Ok(true) };
        if tx.stats().no_offload > before {
            groups::put_back(packet, frags);
            return Err(Failure::Unsendable(
                "its first fragment has another holder, less than 24 free bytes in front of it in its chunk, or no room for \
                 the checksum in its chunk",
            ));
        }
        let again = |tx: &mut XskTx<Kept>, packet: Packet<Kept>| tx.send_with(packet, request);
        groups::refused(tx, packet, frags, again)
    }
}

/// Sends fragments as netmem_xsk_tx_send does, with requests to the device: `requests` has `n`, and
/// that of a frame's first fragment is the frame's. A request is written into the 24 bytes in front
/// of the frame, which must be free, in the chunk of its first byte: advance the fragment by 24 or
/// more before the frame is written. The first fragment has no other holder.
///
/// The UMEM was created with `tx_metadata` (Linux 6.11). A launch time needs Linux 6.15, and a
/// driver that has them. `netmem info` lists what a driver has. Warning: in zero-copy mode, a
/// driver without checksums sends the frame as it is. A driver without times reports none.
///
/// Errors: those of netmem_xsk_tx_send; NETMEM_ERR_ARGUMENT (unknown flags, a UMEM without
/// `tx_metadata`), NETMEM_ERR_UNSUPPORTED (no launch times), NETMEM_ERR_UNSENDABLE (no 24 bytes,
/// another holder, a checksum that is not in the first fragment and its first chunk).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_tx_send_with(
    tx: *mut netmem_xsk_tx,
    frags: *mut netmem_frag,
    flags: *const u8,
    requests: *const netmem_xsk_request,
    n: usize,
    sent: *mut usize,
) -> netmem_status {
    let each = |done: &mut usize| {
        // SAFETY: as the header says.
        let tx = unsafe { owned::get_mut(tx) }?;
        let requests = match NonNull::new(requests.cast_mut()) {
            // SAFETY: the caller has so many requests there.
            Some(requests) => unsafe { std::slice::from_raw_parts(requests.as_ptr(), n) },
            None if n == 0 => &[],
            None => return Err(Failure::null("requests")),
        };
        let frame = |tx: &mut XskTx<Kept>, frags: &mut [netmem_frag], at: usize| {
            // SAFETY: as the header says.
            unsafe { requests[at].send(tx, frags) }
        };
        // SAFETY: as the header says.
        unsafe { groups::send_each(tx, (frags, flags, n), done, frame) }
    };
    // SAFETY: as the header says.
    status(|| unsafe { queues::counted(sent, each) })
}

/// Writes up to `n` times at which frames with NETMEM_XSK_TIMESTAMP were sent, in the order of
/// their completion, each once, and returns how many. Call it after netmem_xsk_tx_complete. The
/// queue keeps 65536, and drops the oldest of more. Misuse returns 0, with a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn netmem_xsk_tx_timestamps(
    tx: *mut netmem_xsk_tx,
    times: *mut netmem_xsk_timestamp,
    n: usize,
) -> usize {
    value(|| {
        // SAFETY: as the header says.
        let tx = unsafe { owned::get_mut(tx) }?;
        if times.is_null() && n > 0 {
            return Err(Failure::null("times"));
        }
        let mut done = 0;
        while done < n
            && let Some(stamp) = tx.timestamp()
        {
            let time = netmem_xsk_timestamp { timestamp: stamp.id, time: stamp.time.unwrap_or(0) };
            // SAFETY: the caller has room for `n`.
            unsafe { times.add(done).write(time) };
            done += 1;
        }
        Ok(done)
    })
    .unwrap_or(0)
}
