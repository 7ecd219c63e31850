//! The ones' complement sum of bytes (RFC 1071).
//!
//! 2^16, 2^32, 2^64 and 1 are equal modulo 0xffff. So words of any of these widths can be added, if
//! their carries are added, too: 64 bits at a time, with the carries counted apart from the sum.
//!
//! A processor with AVX2 adds 16 words of 16 bits by three instructions. `vpmaddwd` by ones adds
//! neighbours into 32 bits, but reads them as signed. Each word is therefore lowered by 2^15
//! before, by flipping its highest bit, and as many times 2^15 as there are words are added at the
//! end.
//!
//! Both ways add numbers that are equal modulo 0xffff, and both return 0 only if all bytes are 0.

/// Bytes for which the vectors are worth the call, and for which no sum of 32 bits overflows: the
/// words of 64 KiB add up to at most 2^30.
#[cfg(target_arch = "x86_64")]
const VECTORS: std::ops::RangeInclusive<usize> = 128..=1 << 16;

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
    if VECTORS.contains(&bytes.len()) && std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { avx2(bytes) };
    }
    portable(bytes)
}

/// [`words`] by AVX2, for [`VECTORS`] bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn avx2(bytes: &[u8]) -> u64 {
    use std::arch::x86_64::{
        __m256i, _mm_add_epi32, _mm_cvtsi128_si32, _mm_shuffle_epi32, _mm256_add_epi32, _mm256_castsi256_si128,
        _mm256_extracti128_si256, _mm256_loadu_si256, _mm256_madd_epi16, _mm256_set1_epi16, _mm256_setzero_si256,
        _mm256_xor_si256,
    };
    let (lowered, ones) = (_mm256_set1_epi16(i16::MIN), _mm256_set1_epi16(1));
    let add = |sum: &mut __m256i, bytes: &[u8; 32]| {
        // SAFETY: there are 32 bytes, and the load needs no alignment.
        let words = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast::<__m256i>()) };
        *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(_mm256_xor_si256(words, lowered), ones));
    };
    // Independent of each other, so that the processor adds to all at the same time.
    let [mut a, mut b, mut c, mut d] = [_mm256_setzero_si256(); 4];
    let (blocks, rest) = bytes.as_chunks::<128>();
    for block in blocks {
        if let [one, two, three, four] = block.as_chunks::<32>().0 {
            add(&mut a, one);
            add(&mut b, two);
            add(&mut c, three);
            add(&mut d, four);
        }
    }
    let (parts, rest) = rest.as_chunks::<32>();
    for part in parts {
        add(&mut a, part);
    }
    let sum = _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d));
    let sum = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256::<1>(sum));
    let sum = _mm_add_epi32(sum, _mm_shuffle_epi32::<0b00_00_11_10>(sum));
    let sum = _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32::<0b01>(sum)));
    let count = (bytes.len() - rest.len()) / 2;
    let sum = i64::from(sum) + ((count as i64) << 15);
    plus(sum.cast_unsigned(), tail(rest))
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

    /// No sum overflows: the largest and the smallest words, in as many bytes as are added by
    /// vectors, and in more.
    #[test]
    fn the_longest_packet_loses_no_carry() {
        for len in [65535, 1 << 16, (1 << 16) + 1, 1 << 20] {
            for byte in [0xff, 0x80, 0x7f, 0] {
                let bytes = vec![byte; len];
                assert_eq!(fold(words(&bytes)), fold(portable(&bytes)), "{len} times {byte}");
            }
        }
    }
}
