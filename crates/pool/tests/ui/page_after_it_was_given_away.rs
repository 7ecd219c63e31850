use netmem_pool::{Page, PagePool, Private};

fn frozen(mut page: Page<Private>) {
    let _frag = page.freeze();
    page.as_mut_slice()[0] = 1;
}

fn posted(page: Page<Private>, ring: &mut Vec<Page<Private>>) {
    ring.push(page);
    page.as_slice();
}

fn quarantined(page: Page<Private>, pool: &mut PagePool<Private>) {
    pool.quarantine(page);
    page.as_slice();
}

fn dropped_twice(page: Page<Private>) {
    drop(page);
    drop(page);
}

fn slice_outlives_page(page: Page<Private>) -> &'static [u8] {
    page.as_slice()
}

fn main() {}
