use super::*;

#[test]
fn positions_go_around() {
    for size in [1, 2, 3, 8, 32768] {
        let mut at = Position::START;
        for n in 0..4 * u32::from(size) {
            assert_eq!((u32::from(at.offset()), at.wrap()), (n % u32::from(size), n / u32::from(size) % 2 == 0));
            assert_eq!(at.since(Position::START, size), n % (2 * u32::from(size)));
            assert_eq!(Position::from_bits(at.bits()), at);
            at = at.step(1, size);
        }
        assert_eq!(at, Position::START, "four turns of {size}");
        assert_eq!(at.step(size, size).since(at, size), u32::from(size));
    }
}

#[test]
fn cursors_go_around() {
    for size in [1, 2, 3, 8] {
        let layout = PackedLayout::new(size);
        let mut block = vec![0u64; layout.total / 8 + 16];
        let base = block.as_mut_ptr().cast::<u8>();
        let base = base.wrapping_add(base.align_offset(PackedLayout::ALIGN));
        // SAFETY: the block is large enough, aligned, and outlives the ring.
        let ring = unsafe { PackedRing::from_layout(base, size) };
        for n in 0..=size {
            let mut at = Position::START;
            let (mut available, mut used) = (ring.available_from(at), ring.used_from(at));
            for _ in 0..5 * size {
                assert_eq!((available.position(), used.position()), (at, at));
                assert_eq!((available.flags(), used.flags()), (at.available(), at.used()));
                used.set_used_desc(PackedDesc { addr: 0, len: 7, id: 1, flags: at.used() });
                assert!(used.used_desc().is_some() && ring.used_desc(at.offset()).is_used(at));
                available.set_desc_behind(PackedDesc { addr: 5, len: 7, id: 1, flags: at.available() });
                assert!(used.used_desc().is_none() && available.desc() == ring.desc(at.offset()));
                at = at.step(n, size);
                available.advance(n);
                used.advance(n);
            }
        }
    }
}

/// A descriptor is available to the device or used for the driver, never both, and stale ones
/// of the turn before are neither.
#[test]
fn the_flags_say_whose_turn_it_is() {
    for turn in [Position::START, Position::from_bits(0)] {
        let other = Position::from_bits(turn.bits() ^ 1 << 15);
        let of = |flags| PackedDesc { flags: flags | DESC_WRITE, ..PackedDesc::default() };
        assert!(of(turn.available()).is_available(turn) && !of(turn.available()).is_used(turn));
        assert!(of(turn.used()).is_used(turn) && !of(turn.used()).is_available(turn));
        for stale in [other.available(), other.used()] {
            assert!(!of(stale).is_available(turn) && !of(stale).is_used(turn));
        }
    }
    // Fresh memory is available to neither side.
    let zero = PackedDesc::default();
    assert!(!zero.is_available(Position::START) && !zero.is_used(Position::START));
}

#[test]
fn both_sides_see_the_same_words() {
    let size = 6;
    let layout = PackedLayout::new(size);
    let mut block = vec![0u64; layout.total / 8 + 16];
    let base = block.as_mut_ptr().cast::<u8>();
    let base = base.wrapping_add(base.align_offset(PackedLayout::ALIGN));
    // SAFETY: the block is large enough, aligned, and outlives both rings.
    let (driver, device) = unsafe { (PackedRing::from_layout(base, size), PackedRing::from_layout(base, size)) };
    let d = PackedDesc { addr: 0x1234_5678_9abc, len: 1526, id: 77, flags: DESC_WRITE | PackedDesc::AVAIL };
    driver.set_desc(5, d);
    assert_eq!(device.desc(5), d);
    // SAFETY: inside of the block, which only this thread uses.
    let bytes: [u8; 16] = unsafe { base.add(5 * 16).cast::<[u8; 16]>().read() };
    assert_eq!(bytes, [0xbc, 0x9a, 0x78, 0x56, 0x34, 0x12, 0, 0, 0xf6, 5, 0, 0, 77, 0, 0x82, 0]);
    let used = PackedDesc { addr: 0, len: 3, id: 9, flags: PackedDesc::AVAIL | PackedDesc::USED };
    device.set_used_desc(5, used);
    assert_eq!((driver.used_desc(5), driver.desc(5).addr), (used, d.addr));
    driver.set_driver_event(Event { position: 0x8005, flags: Event::AT });
    device.set_device_event(Event { position: 0, flags: Event::DISABLE });
    assert_eq!(device.driver_event(), Event { position: 0x8005, flags: Event::AT });
    assert_eq!(driver.device_event().kind(), Event::DISABLE);
    // SAFETY: as above.
    let event: [u8; 4] = unsafe { base.add(layout.driver).cast::<[u8; 4]>().read() };
    assert_eq!(event, [5, 0x80, 2, 0]);
    driver.clear();
    assert_eq!((device.desc(5), device.driver_event()), (PackedDesc::default(), Event::default()));
    // An offset that no ring of this size has stays inside of the ring.
    assert_eq!(device.desc(40_000), device.desc(0));
}
