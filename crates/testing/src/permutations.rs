//! All orders in which things can end, for tests that try them all.

/// All orders of the numbers below `n`.
pub fn permutations(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![vec![]];
    }
    let insert = |p: Vec<usize>| (0..n).map(move |at| [&p[..at], &[n - 1], &p[at..]].concat());
    permutations(n - 1).into_iter().flat_map(insert).collect()
}
