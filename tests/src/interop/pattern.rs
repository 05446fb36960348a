//! Bytes that differ in every round and at every offset, so that misplaced data is detected.

/// The fill byte of memory that a round does not write.
pub(super) const BACKGROUND: u8 = 0xc3;

/// Fills `bytes` with the pattern of `round`, starting at `offset` of it.
pub(super) fn fill(round: u64, offset: usize, bytes: &mut [u8]) {
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = at(round, offset + i);
    }
}

/// The first byte that differs from the pattern: index, found, expected.
pub(super) fn mismatch(round: u64, offset: usize, bytes: &[u8]) -> Option<(usize, u8, u8)> {
    let expected = |i: usize| at(round, offset + i);
    bytes
        .iter()
        .enumerate()
        .find(|&(i, &byte)| byte != expected(i))
        .map(|(i, &byte)| (i, byte, expected(i)))
}

/// One byte: a multiplicative hash (Knuth, TAOCP vol 3, 6.4) of round and offset.
fn at(round: u64, offset: usize) -> u8 {
    let mixed = (round << 32 | offset as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 40) as u8
}
