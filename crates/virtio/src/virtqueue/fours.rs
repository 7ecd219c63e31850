//! Loops over arrays, four entries at a time.
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

/// Calls `f` with the entries of both arrays, up to the end of the shorter one, until it returns
/// false. Returns how often it has returned true.
#[inline(always)]
pub(crate) fn count_by_fours<T, U>(a: &mut [T], b: &[U], mut f: impl FnMut(&mut T, &U) -> bool) -> usize {
    let n = a.len().min(b.len());
    let ((a, a_rest), (b, b_rest)) = (a[..n].as_chunks_mut::<4>(), b[..n].as_chunks::<4>());
    let mut at = 0;
    for ([a0, a1, a2, a3], [b0, b1, b2, b3]) in a.iter_mut().zip(b) {
        if !f(a0, b0) {
            return at;
        }
        if !f(a1, b1) {
            return at + 1;
        }
        if !f(a2, b2) {
            return at + 2;
        }
        if !f(a3, b3) {
            return at + 3;
        }
        at += 4;
    }
    for (a, b) in a_rest.iter_mut().zip(b_rest) {
        if !f(a, b) {
            return at;
        }
        at += 1;
    }
    at
}

/// How many entries, from the first on, `f` accepts.
#[inline(always)]
pub(crate) fn accepted_by_fours<T>(a: &[T], mut f: impl FnMut(&T) -> bool) -> usize {
    let (fours, rest) = a.as_chunks::<4>();
    let mut at = 0;
    for [a0, a1, a2, a3] in fours {
        if !f(a0) {
            return at;
        }
        if !f(a1) {
            return at + 1;
        }
        if !f(a2) {
            return at + 2;
        }
        if !f(a3) {
            return at + 3;
        }
        at += 4;
    }
    at + rest.iter().take_while(|a| f(a)).count()
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

    #[test]
    fn entries_up_to_the_first_that_is_refused() {
        let b: Vec<_> = (100..111).collect();
        for (n, m) in (0..=11).flat_map(|n| (0..=11).map(move |m| (n, m))) {
            for refused in 0..=11 {
                let mut a: Vec<_> = (0..n).collect();
                let mut calls = 0;
                let accepted = count_by_fours(&mut a, &b[..m], |a, &b| {
                    assert_eq!((*a, b), (calls, 100 + calls));
                    calls += 1;
                    *a != refused
                });
                assert_eq!((accepted, calls), (n.min(m).min(refused), n.min(m).min(refused + 1)));
                let mut calls = 0;
                let accepted = accepted_by_fours(&b[..n], |&b| {
                    assert_eq!(b, 100 + calls);
                    calls += 1;
                    b != 100 + refused
                });
                assert_eq!((accepted, calls), (n.min(refused), n.min(refused + 1)));
            }
        }
    }
}
