//! Packets are edited in place: against a model, with pages shared and not, and every page is
//! returned.

use netmem_packet::{Checksum, CopyHeadError, Gso, GsoKind, MAX_FRAGS, Meta, Packet, XdpFrame};
use netmem_pool::{
    Frag, OutOfRange, PagePool, PeerShared, PoolOptions, Private, Provider, RawPage, Region, RegionOptions,
    RegionProvider, SystemMemory, WriteError,
};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn pool<M: SystemMemory>(pages: usize) -> PagePool<M> {
    let region = RegionOptions::new(pages).huge_pages(false).populate(false).build::<M>().unwrap();
    PoolOptions::new("edits").build(RegionProvider::new(region), None).unwrap()
}

/// A fragment of a page of its own.
fn frag<M: SystemMemory>(pool: &mut PagePool<M>, offset: usize, bytes: &[u8]) -> Frag<M> {
    let mut page = pool.alloc().unwrap();
    page.copy_from(offset, bytes).unwrap();
    page.freeze_range(offset..offset + bytes.len())
}

fn partial(start: u16, offset: u16) -> Meta {
    Meta { checksum: Checksum::Partial { start, offset }, gso: None }
}

/// What a packet is to be: its bytes, and where in them the sum begins and is stored.
#[derive(Clone)]
struct Model {
    bytes: Vec<u8>,
    checksum: Option<(isize, usize)>,
    verified: bool,
}

impl Model {
    fn pull(&mut self, n: usize) {
        self.bytes.drain(..n);
        if let Some((start, _)) = &mut self.checksum {
            *start -= n as isize;
            if *start < 0 {
                (self.checksum, self.verified) = (None, true);
            }
        }
    }

    fn prepend(&mut self, header: &[u8]) {
        self.bytes.splice(..0, header.iter().copied());
        if let Some((start, _)) = &mut self.checksum {
            *start += header.len() as isize;
        }
    }

    fn truncate(&mut self, len: usize) {
        self.bytes.truncate(len);
        if self.checksum.is_some_and(|(start, offset)| start as usize + offset + 2 > self.bytes.len()) {
            self.checksum = None;
        }
    }

    fn check(&self, packet: &Packet<Private>) {
        assert_eq!((packet.len(), packet.to_vec()), (self.bytes.len(), self.bytes.clone()));
        assert_eq!(packet.io_slices().flat_map(|s| s.to_vec()).collect::<Vec<_>>(), self.bytes);
        assert!(packet.frags().len() <= MAX_FRAGS);
        let checksum = match self.checksum {
            Some((start, offset)) => Checksum::Partial { start: start as u16, offset: offset as u16 },
            None if self.verified => Checksum::Verified,
            None => Checksum::Unknown,
        };
        assert_eq!(packet.meta.checksum, checksum);
    }
}

/// Proves NET-9 and POOL-5: any sequence of edits leaves a packet with the bytes and the checksum's
/// place that a plain vector has; a clone never changes; and all pages are back afterwards.
#[test]
fn edits_against_a_model() {
    let mut rng = fastrand::Rng::with_seed(11);
    let mut pool = pool::<Private>(4096);
    for _ in 0..400 {
        let mut bytes = |n: usize| -> Vec<u8> { (0..n).map(|_| rng.u8(..)).collect() };
        let first = bytes(200);
        let more = bytes(64);
        let mut model = Model { bytes: first.clone(), checksum: Some((34, 16)), verified: false };
        let mut packet = Packet::new(frag(&mut pool, 128, &first));
        packet.meta = partial(34, 16);
        let mut clones: Vec<(Model, Packet<Private>)> = Vec::new();
        for _ in 0..40 {
            let len = model.bytes.len();
            let n = rng.usize(0..=(len + 8).min(60));
            match rng.u32(0..9) {
                0 if n <= len => {
                    packet.pull(n).unwrap();
                    model.pull(n);
                }
                0 => {
                    let error = packet.pull(n).unwrap_err();
                    assert_eq!(error, OutOfRange { offset: 0, len: n, have: len });
                }
                1 => {
                    let keep = len.saturating_sub(n / 4);
                    packet.truncate(keep);
                    model.truncate(keep);
                }
                2 => {
                    if packet.prepend(&more[..n]) {
                        model.prepend(&more[..n]);
                    }
                }
                3 => {
                    let at = rng.usize(0..=len);
                    match packet.write_at(at, &more[..n]) {
                        Ok(()) => model.bytes[at..at + n].copy_from_slice(&more[..n]),
                        Err(WriteError::OutOfRange(_)) => assert!(at + n > len),
                        Err(error) => assert!(error == WriteError::Shared && at + n <= len),
                    }
                }
                4 => match packet.push(frag(&mut pool, rng.usize(0..99), &more[..n])) {
                    Ok(()) => model.bytes.extend(&more[..n]),
                    Err(_) => assert_eq!(packet.frags().len(), MAX_FRAGS),
                },
                5 => {
                    let mut other = Packet::new(frag(&mut pool, 0, &more[..n]));
                    other.push(other.head().clone()).unwrap();
                    match packet.append(other) {
                        Ok(()) => model.bytes.extend([&more[..n], &more[..n]].concat()),
                        Err(other) => {
                            assert!(packet.frags().len() + 2 > MAX_FRAGS);
                            assert_eq!(other.len(), 2 * n);
                        }
                    }
                }
                6 => clones.push((model.clone(), packet.clone())),
                7 => drop(clones.pop()),
                _ => {
                    let n = n.min(len);
                    match packet.copy_head(n, pool.alloc().unwrap(), rng.usize(0..200)) {
                        Ok(()) => packet.write_at(0, &model.bytes[..n]).unwrap(),
                        Err(error) => assert_eq!(error, CopyHeadError::TooManyFrags { head: packet.head().len() }),
                    }
                }
            }
            model.check(&packet);
        }
        clones.iter().for_each(|(model, packet)| model.check(packet));
    }
    assert_eq!(pool.stats().inflight(), 0);
}

/// Proves POOL-6: bytes with another holder, in whichever packet, are not written, and of a write
/// that reaches into them nothing is written; once the holder is gone they are.
#[test]
fn shared_bytes_are_not_written() {
    let mut pool = pool::<PeerShared>(8);
    let mut packet = Packet::new(frag(&mut pool, 100, b"head"));
    packet.push(frag(&mut pool, 0, b"tail")).unwrap();
    let tail = packet.frags()[0].clone();
    assert_eq!(packet.write_at(2, b"1234"), Err(WriteError::Shared));
    assert_eq!(packet.to_vec(), b"headtail");
    packet.write_at(0, b"HEAD").unwrap();
    drop(tail);
    packet.write_at(2, b"1234").unwrap();
    assert_eq!(packet.to_vec(), b"HE1234il");
    // A fragment of the packet's own is a holder like any other, and so is a posted part of the
    // page.
    packet.push(packet.head().clone()).unwrap();
    assert_eq!((packet.write_at(0, b"x"), packet.prepend(b"x")), (Err(WriteError::Shared), false));
    let mut posted = pool.alloc().unwrap();
    let mut packet = Packet::from(posted.split_off(2048));
    assert_eq!((packet.write_at(0, b"x"), packet.prepend(b"x")), (Err(WriteError::Shared), false));
    packet.copy_head(34, pool.alloc().unwrap(), 64).unwrap();
    packet.write_at(0, b"x").unwrap();
    assert!(packet.prepend(&[7; 64]) && !packet.prepend(b"x"));
    assert_eq!((packet.len(), packet.frags().len(), packet.frags()[0].len()), (64 + 2048, 1, 2048 - 34));
    assert_eq!(posted.read_at::<2048>(0), Ok([0; 2048]), "the device's bytes");
    let far = OutOfRange { offset: 4090, len: 7, have: 4096 };
    assert_eq!(packet.copy_head(7, pool.alloc().unwrap(), 4090), Err(CopyHeadError::OutOfRange(far)));
}

/// Proves NET-9: what is known of a frame moves with its bytes at the edges of what the types can
/// say, of a packet as of an XDP frame.
#[test]
fn offload_information_moves_with_the_bytes() {
    let mut pool = pool::<Private>(4);
    let gso = |headers| Some(Gso { kind: GsoKind::TcpV4, size: 1448, headers, ecn: false });
    let mut packet = Packet::new(frag(&mut pool, 100, &[0; 400]));
    packet.meta = Meta { checksum: Checksum::Partial { start: 34, offset: 16 }, gso: gso(54) };
    packet.pull(34).unwrap();
    assert_eq!((packet.meta.checksum, packet.meta.gso), (Checksum::Partial { start: 0, offset: 16 }, gso(20)));
    packet.truncate(18);
    assert_eq!(packet.meta.checksum, Checksum::Partial { start: 0, offset: 16 });
    let mut cut = packet.clone();
    cut.truncate(17);
    assert_eq!(cut.meta.checksum, Checksum::Unknown);
    // The transport header goes, and with it what was to be computed.
    packet.pull(18).unwrap();
    assert_eq!((packet.meta.checksum, packet.meta.gso, packet.len()), (Checksum::Verified, gso(2), 0));
    drop(cut);
    assert!(packet.prepend(&[0; 9]));
    assert_eq!((packet.meta.checksum, packet.meta.gso), (Checksum::Verified, gso(11)));

    let far = Meta { checksum: Checksum::Partial { start: u16::MAX - 3, offset: 0 }, gso: None };
    packet.meta = far;
    assert!(!packet.prepend(&[0; 4]) && packet.len() == 9 && packet.meta == far);
    assert!(packet.prepend(&[0; 3]));
    assert_eq!(packet.meta, partial(u16::MAX, 0));

    let mut frame = XdpFrame::new(pool.alloc().unwrap(), 100, 400);
    frame.meta = Meta { gso: gso(54), ..partial(34, 16) };
    frame.adjust_head(14).unwrap();
    assert_eq!(frame.meta, Meta { gso: gso(40), ..partial(20, 16) });
    frame.adjust_head(-50).unwrap();
    assert_eq!(frame.meta, Meta { gso: gso(90), ..partial(70, 16) });
    frame.adjust_tail(-436 + 88).unwrap();
    assert_eq!((frame.len(), frame.meta.checksum), (88, Checksum::Partial { start: 70, offset: 16 }));
    frame.adjust_tail(-1).unwrap();
    assert_eq!(frame.meta.checksum, Checksum::Unknown);
    frame.meta = far;
    assert!(frame.adjust_head(-4).is_err() && frame.meta == far && frame.len() == 87);
}

/// Proves POOL-7: taking a header off keeps what is around it: the head with its room in front,
/// even if nothing is left of its bytes, until bytes behind it go.
#[test]
fn a_head_that_is_used_up() {
    let mut pool = pool::<Private>(8);
    let mut packet = Packet::new(frag(&mut pool, 64, b"headers"));
    for part in [&b"first"[..], b"", b"second"] {
        packet.push(frag(&mut pool, 0, part)).unwrap();
    }
    packet.pull(7).unwrap();
    assert_eq!((packet.head().len(), packet.frags().len(), packet.len()), (0, 3, 11));
    assert!(packet.prepend(b"HDR"));
    packet.pull(3 + 4).unwrap();
    assert_eq!((&packet.head()[..], packet.frags().len(), packet.to_vec()), (&b"t"[..], 2, b"tsecond".to_vec()));
    packet.pull(2).unwrap();
    assert_eq!((&packet.head()[..], packet.frags().len()), (&b"econd"[..], 0));
    assert!(packet.pull(6).is_err());
    packet.pull(5).unwrap();
    assert_eq!((packet.len(), pool.stats().inflight()), (0, 1));
}

/// A provider that panics over the first page that it gets back.
#[derive(Debug)]
struct Brittle(Arc<RegionProvider<Private>>, AtomicBool);

// SAFETY: it is the provider inside.
unsafe impl Provider<Private> for Brittle {
    fn alloc(&self, pages: &mut [Option<RawPage<Private>>]) -> usize {
        self.0.alloc(pages)
    }

    unsafe fn release(&self, page: RawPage<Private>) {
        // SAFETY: the caller's.
        unsafe { self.0.release(page) };
        if !self.1.swap(true, Ordering::Relaxed) {
            resume_unwind(Box::new("as the test wants it"));
        }
    }

    fn page_size(&self) -> usize {
        self.0.page_size()
    }

    fn each(&self, f: &mut dyn FnMut(&Region<Private>)) {
        self.0.each(f);
    }
}

/// The only fragment is taken out of a packet; a packet of more is returned whole.
#[test]
fn the_head_of_a_packet_without_others() {
    let mut pool = pool::<Private>(4);
    let head = Packet::new(frag(&mut pool, 64, b"head")).into_head().unwrap();
    assert_eq!((&head[..], head.offset()), (&b"head"[..], 64));
    let mut packet = Packet::new(head);
    packet.push(frag(&mut pool, 0, b" and rest")).unwrap();
    let mut packet = packet.into_head().unwrap_err();
    assert_eq!(packet.to_vec(), b"head and rest");
    // The list of fragments stays when they are gone.
    packet.truncate(4);
    assert_eq!(&packet.into_head().unwrap()[..], b"head");
    assert_eq!(pool.stats().inflight(), 0);
}

/// User code panics while a fragment is dropped: the packet is edited all the same.
#[test]
fn a_panic_while_fragments_are_dropped() {
    type Edit = fn(&mut Packet<Private>);
    let edits: [(Edit, &[u8], Meta); 3] = [
        (|p| p.pull(24).unwrap(), b"cddddddddddd", partial(6, 6)),
        (|p| p.pull(36).unwrap(), b"", Meta { checksum: Checksum::Verified, gso: None }),
        (|p| p.truncate(5), b"aaaaa", Meta::default()),
    ];
    for (edit, bytes, meta) in edits {
        let region = RegionOptions::new(8).huge_pages(false).populate(false).build().unwrap();
        let memory = RegionProvider::new(region);
        let provider = Arc::new(Brittle(memory.clone(), AtomicBool::new(false)));
        let mut pool = PoolOptions::new("brittle").cache(8).build(provider, None).unwrap();
        let mut packet = Packet::new(frag(&mut pool, 0, b"aaaaaaaaaa"));
        for bytes in [b"bbbbbbbb".as_slice(), b"ccccccc", b"ddddddddddd"] {
            packet.push(frag(&mut pool, 0, bytes)).unwrap();
        }
        packet.meta = partial(30, 6);
        // Without its pool, a page goes to the provider when it is dropped.
        let _ = pool.close();
        assert!(catch_unwind(AssertUnwindSafe(|| edit(&mut packet))).is_err());
        assert_eq!((packet.to_vec().as_slice(), packet.len(), packet.meta), (bytes, bytes.len(), meta));
        assert_eq!(packet.fragments().map(|f| f.len()).sum::<usize>(), bytes.len());
        drop(packet);
        assert_eq!(std::iter::from_fn(|| memory.page()).collect::<Vec<_>>().len(), 8);
    }
}

/// A copy into one page keeps the headroom, and what an XDP program has written in front of the
/// frame, as far as there is room.
#[test]
fn a_frame_in_one_page_keeps_what_is_in_front_of_it() {
    let mut pool = pool::<Private>(8);
    for (start, head, fragment, room) in [(300, 400, 500, 300), (8, 100, 100, 8), (1000, 2000, 2000, 96)] {
        let mut page = pool.alloc().unwrap();
        let bytes: Vec<u8> = (0..start + head).map(|i| (i % 251) as u8).collect();
        page.copy_from(0, &bytes).unwrap();
        let mut frame = XdpFrame::new(page, start, head);
        let mut page = pool.alloc().unwrap();
        page.copy_from(0, &vec![7; fragment]).unwrap();
        frame.push(page.freeze().slice(..fragment)).unwrap();
        pool.poll(|napi| frame.linearise(napi)).unwrap();
        assert_eq!((frame.headroom(), frame.len()), (room, head + fragment));
        assert_eq!(frame.data()[..head], bytes[start..]);
        let most = room.min(256);
        let page = frame.into_page();
        assert_eq!(page.as_slice()[room - most..room], bytes[start - most..start]);
    }
}
