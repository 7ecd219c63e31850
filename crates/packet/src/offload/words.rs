//! The ones' complement sum of bytes (RFC 1071), in words of 64 bits.
//!
//! 2^16, 2^32, 2^64 and 1 are equal modulo 0xffff. So words of any of these widths can be added, if
//! their carries are added, too. A processor with AVX2 adds halves of 32 bits into sums of 64 bits,
//! four at a time: no carry is lost, because fewer than 2^32 of them are added. Other processors
//! add words of 64 bits and count carries apart from the sum.
//!
//! Both ways add numbers that are equal modulo 0xffff, and both return 0 only if all bytes are 0.

/// Bytes for which the vectors are worth the call.
#[cfg(target_arch = "x86_64")]
const VECTORS_PAY: usize = 128;

/// The sum modulo 2^64 - 1: a carry out of the highest bit is added to the lowest. It is 0 only if
/// both numbers are.
#[inline]
pub(super) fn plus(one: u64, other: u64) -> u64 {
    let (sum, carry) = one.overflowing_add(other);
    sum + u64::from(carry)
}

/// The sum of `bytes` as words in the byte order of this machine, an odd byte filled up with zero.
#[inline]
pub(super) fn words(bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if bytes.len() >= VECTORS_PAY && std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { avx2(bytes) };
    }
    portable(bytes)
}

/// [`words`] by AVX2: 8 instructions for 64 bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2(bytes: &[u8]) -> u64 {
    use std::arch::x86_64::{
        __m128i, __m256i, _mm_loadu_si128, _mm256_add_epi64, _mm256_cvtepu32_epi64, _mm256_extract_epi64,
        _mm256_setzero_si256,
    };
    let wide = |bytes: &[u8; 16]| {
        // SAFETY: there are 16 bytes, and the load needs no alignment.
        _mm256_cvtepu32_epi64(unsafe { _mm_loadu_si128(bytes.as_ptr().cast::<__m128i>()) })
    };
    // Independent of each other, so that the processor adds to all at the same time.
    let mut sums: [__m256i; 4] = [_mm256_setzero_si256(); 4];
    let (blocks, rest) = bytes.as_chunks::<64>();
    for block in blocks {
        for (sum, part) in sums.iter_mut().zip(block.as_chunks::<16>().0) {
            *sum = _mm256_add_epi64(*sum, wide(part));
        }
    }
    let (parts, rest) = rest.as_chunks::<16>();
    for part in parts {
        sums[0] = _mm256_add_epi64(sums[0], wide(part));
    }
    let sum = _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]), _mm256_add_epi64(sums[2], sums[3]));
    let lanes = [
        _mm256_extract_epi64::<0>(sum),
        _mm256_extract_epi64::<1>(sum),
        _mm256_extract_epi64::<2>(sum),
        _mm256_extract_epi64::<3>(sum),
    ];
    lanes.into_iter().fold(tail(rest), |all, lane| plus(all, lane.cast_unsigned()))
}

/// [`words`] for any processor. Two sums are independent of each other, so that the processor adds
/// to both at the same time.
#[inline]
fn portable(bytes: &[u8]) -> u64 {
    let (blocks, rest) = bytes.as_chunks::<64>();
    let mut sums = [0_u128; 2];
    for block in blocks {
        for [one, two] in block.as_chunks::<8>().0.as_chunks::<2>().0 {
            sums[0] += u128::from(u64::from_ne_bytes(*one));
            sums[1] += u128::from(u64::from_ne_bytes(*two));
        }
    }
    let sum = sums[0] + sums[1];
    plus(plus(sum as u64, (sum >> 64) as u64), tail(rest))
}

/// The sum of fewer than 64 bytes.
#[inline]
fn tail(bytes: &[u8]) -> u64 {
    let (eights, mut rest) = bytes.as_chunks::<8>();
    let mut all = 0;
    for eight in eights {
        all = plus(all, u64::from_ne_bytes(*eight));
    }
    if let Some((four, behind)) = rest.split_first_chunk::<4>() {
        (all, rest) = (plus(all, u32::from_ne_bytes(*four).into()), behind);
    }
    if let Some((two, behind)) = rest.split_first_chunk::<2>() {
        (all, rest) = (plus(all, u16::from_ne_bytes(*two).into()), behind);
    }
    if let Some(&last) = rest.first() {
        all = plus(all, u16::from_ne_bytes([last, 0]).into());
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::checksum::fold;
    use super::*;

    /// All lengths up to a page and all alignments in a vector, with random bytes, and with bytes
    /// that make the most carries and none.
    #[test]
    fn vectors_and_words_have_the_same_sum() {
        let mut rng = fastrand::Rng::with_seed(11);
        let random: Vec<u8> = (0..4200).map(|_| rng.u8(..)).collect();
        for bytes in [random, vec![0xff; 4200], vec![0; 4200]] {
            for len in 0..=4096 {
                let at = len % 33;
                let part = &bytes[at..at + len];
                let plain = part.chunks(2).fold(0_u32, |sum, word| {
                    let sum = sum + u32::from(u16::from_ne_bytes([word[0], *word.get(1).unwrap_or(&0)]));
                    (sum & 0xffff) + (sum >> 16)
                });
                assert_eq!(fold(portable(part)), plain as u16, "{len} bytes from {at}");
                assert_eq!(fold(words(part)), plain as u16, "{len} bytes from {at}");
            }
        }
    }

    /// The longest packet: no lane overflows.
    #[test]
    fn the_longest_packet_loses_no_carry() {
        for bytes in [vec![0xff; 65535], vec![0xff; 1 << 20]] {
            assert_eq!(fold(words(&bytes)), fold(portable(&bytes)));
        }
    }
}
