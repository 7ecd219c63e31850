//! Random bytes in the memory and on the socket, in place of a driver: the device neither panics
//! nor touches memory outside of the table. The generator is seeded, so a failure repeats.

use std::io::Write;
use std::os::unix::net::UnixStream;

use netmem_testing::device::*;
use netmem_virtio::device::port::{Echo, Sink};
use netmem_virtio::device::{DriverFault, NetDevice, Options};
use netmem_virtio::net::feature;
use netmem_virtio::virtqueue::Desc;

/// xorshift64.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

/// Proves NET-6 from the other side.
#[test]
fn noise_in_the_rings() {
    let mut noise = Noise(0x5eed);
    let options = Options { max_pairs: 1, serve_control: true, ..Options::default() };
    let mut device = NetDevice::new(options, |_| Ok(Echo::new())).unwrap();
    let mut driver = Driver::start(&device, MERGEABLE | feature::CTRL_VQ, 3);
    let near = [GUEST, GUEST + MEMORY as u64, 0, u64::MAX, USER];
    for _ in 0..3000 {
        let ring = noise.below(3) as usize;
        for _ in 0..16 {
            // Mostly plausible, so that the walks get somewhere.
            let addr = match noise.below(8) {
                0 => noise.next(),
                1 => near[noise.below(5) as usize].wrapping_add(noise.below(200)).wrapping_sub(100),
                _ => GUEST + BUFFERS as u64 + noise.below(1 << 20),
            };
            let len = if noise.below(10) == 0 { noise.next() as u32 } else { noise.below(3000) as u32 };
            let flags = if noise.below(20) == 0 { noise.next() as u16 } else { noise.below(4) as u16 };
            let next = if noise.below(20) == 0 { noise.next() as u16 } else { noise.below(32) as u16 };
            let id = noise.below(32) as u16;
            driver.rings[ring].ring.set_desc(id, Desc { addr, len, flags, next });
        }
        for _ in 0..noise.below(8) {
            let head = if noise.below(50) == 0 { noise.next() as u16 } else { noise.below(32) as u16 };
            driver.rings[ring].post(head);
        }
        if noise.below(100) == 0 {
            driver.rings[ring].ring.set_avail_idx(noise.next() as u16);
        }
        device.poll();
        device.poll();
        for at in 0..3 {
            if driver.rings[at].err.read().is_err() {
                continue;
            }
            let base = driver.front.get_vring_base(at).unwrap() as u16;
            driver.rings[at].avail = base;
            driver.rings[at].ring.set_avail_idx(base);
            driver.describe(at, SIZE, base);
        }
    }
    let seen = driver.queue_errors().len();
    // Without indirect tables and packed rings, changes of the memory table, chains of 4 GiB, and
    // chains of 1024 pieces, which a ring of 256 entries in one region does not have.
    assert!(seen >= DriverFault::NAMES.len() - 8, "the noise reaches the checks: {:?}", driver.queue_errors());
    driver.hang_up();
}

#[test]
fn noise_on_the_socket() {
    let mut noise = Noise(0xfeed);
    let mut device = NetDevice::new(Options::default(), |_| Ok(Sink)).unwrap();
    for round in 0..3000u64 {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let connection = device.control().serve(theirs).unwrap();
        let mut bytes = Vec::new();
        // First what makes the others possible: features, then protocol features.
        let known = [
            (1, vec![]),
            (2, (PLAIN | feature::MRG_RXBUF).to_le_bytes().to_vec()),
            (15, vec![]),
            (16, 0x209u64.to_le_bytes().to_vec()),
        ];
        for (request, body) in known.into_iter().take(noise.below(5) as usize) {
            let header: Vec<u8> = [request, 1, body.len() as u32].into_iter().flat_map(u32::to_le_bytes).collect();
            bytes.extend([header, body].concat());
        }
        for _ in 0..=noise.below(3) {
            let (request, len) = ((round % 48) as u32, noise.below(12) * 4);
            let flags = if noise.below(8) == 0 { noise.next() as u32 } else { 1 | (noise.below(2) as u32) << 3 };
            let claimed = if noise.below(8) == 0 { noise.next() as u32 } else { len as u32 };
            bytes.extend([request, flags, claimed].into_iter().flat_map(u32::to_le_bytes));
            bytes.extend((0..len).map(|_| if noise.below(2) == 0 { 0 } else { noise.next() as u8 }));
        }
        // The device may have hung up already.
        let _ = ours.write_all(&bytes);
        device.poll();
        drop(ours);
        let _ = connection.wait();
        assert_eq!(device.poll(), 0);
    }
}
