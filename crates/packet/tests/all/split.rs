//! Payload in device memory: fragments, and the extents that they form.

use netmem_packet::{DevicePayload, Extent};
use netmem_pool::{Device, PAGE_SIZE, Page, Region, RegionProvider};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// The pages of a file, in order.
fn pages(count: usize) -> Vec<Page<Device>> {
    let file =
        memfd_create("device-memory", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a file in memory");
    ftruncate(&file, (count * PAGE_SIZE) as u64).expect("it grows");
    let provider = RegionProvider::new(Region::unmapped(file, 0).expect("whole pages"));
    let mut pages: Vec<_> = std::iter::from_fn(|| provider.page()).collect();
    pages.sort_by_key(Page::file_offset);
    pages
}

#[test]
fn pages_in_a_row_are_one_extent() {
    let mut pages = pages(6).into_iter().map(Some).collect::<Vec<_>>();
    let mut payload = DevicePayload::default();
    assert!(payload.is_empty() && payload.extents().next().is_none());
    let page = PAGE_SIZE as u64;
    // Two consecutive pages; one page before them; two consecutive pages, the first of which is not
    // full.
    for (index, bytes) in [(1, 100..4096), (2, 0..4096), (0, 0..4096), (4, 0..4095), (5, 0..7)] {
        payload.push(pages[index].take().unwrap().freeze_range(bytes)).unwrap();
    }
    let extent = |offset, len, fragments| Extent { offset, len, fragments };
    let want =
        [extent(page + 100, 8192 - 100, 2), extent(0, 4096, 1), extent(4 * page, 4095, 1), extent(5 * page, 7, 1)];
    assert_eq!(payload.extents().collect::<Vec<_>>(), want);
    assert_eq!((payload.len(), payload.fragments().count()), (2 * 8192 - 100 + 4095 - 4096 + 7, 5));
    let lens: Vec<_> = payload.into_iter().map(|frag| frag.len()).collect();
    assert_eq!(lens, [3996, 4096, 4096, 4095, 7]);
}

#[test]
fn seventeen_fragments_are_the_most() {
    let mut pages = pages(18).into_iter();
    let mut payload = DevicePayload::from(pages.next().map(Page::freeze));
    for page in pages.by_ref().take(16) {
        payload.push(page.freeze()).unwrap();
    }
    let refused = payload.push(pages.next().unwrap().freeze()).unwrap_err();
    assert_eq!(refused.0.index(), 17);
    let want = Extent { offset: 0, len: 17 * PAGE_SIZE as u32, fragments: 17 };
    assert_eq!(payload.extents().collect::<Vec<_>>(), [want]);
}

#[test]
fn fragments_are_taken_from_the_front() {
    let mut payload = DevicePayload::default();
    for (page, len) in pages(3).into_iter().zip([100, 0, 7]) {
        payload.push(page.freeze_range(0..len)).unwrap();
    }
    for (index, rest) in [(0, 7), (1, 7), (2, 0)] {
        assert_eq!(payload.pop_front().map(|frag| frag.index()), Some(index));
        assert_eq!(
            (payload.len(), payload.fragments().count(), payload.is_empty()),
            (rest, 2 - index as usize, index == 2)
        );
    }
    assert!(payload.pop_front().is_none());
    // An empty payload can be filled again.
    payload.push(pages(1).remove(0).freeze_range(0..5)).unwrap();
    assert_eq!((payload.len(), payload.fragments().count()), (5, 1));
}
