//! A loop over two arrays, four entries at a time.
//!
//! Why: a compiler does not join the steps of loops over atomics, so that counting and comparing
//! cost as many instructions as the two stores of an entry.

/// Calls `f` with the number of each entry and the entry in both arrays, up to the end of the
/// shorter one.
#[inline(always)]
pub(crate) fn for_each_by_fours<T, U: Copy>(a: &[T], b: &[U], mut f: impl FnMut(usize, &T, U)) {
    let n = a.len().min(b.len());
    let (a, b) = (a[..n].chunks_exact(4), b[..n].chunks_exact(4));
    let rest = (n & !3..n).zip(a.remainder().iter().zip(b.remainder()));
    let mut at = 0;
    for (a, b) in a.zip(b) {
        f(at, &a[0], b[0]);
        f(at + 1, &a[1], b[1]);
        f(at + 2, &a[2], b[2]);
        f(at + 3, &a[3], b[3]);
        at += 4;
    }
    rest.for_each(|(i, (a, &b))| f(i, a, b));
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_entry_of_the_shorter_array_once() {
        let (a, b): (Vec<_>, Vec<_>) = ((0..11).collect(), (100..111).collect());
        for (n, m) in (0..=11).flat_map(|n| (0..=11).map(move |m| (n, m))) {
            let mut got = Vec::new();
            for_each_by_fours(&a[..n], &b[..m], |i, &a, b| got.push((i, a, b)));
            assert_eq!(got, (0..n.min(m)).map(|i| (i, i, 100 + i)).collect::<Vec<_>>());
        }
    }
}
