//! Arithmetic in the field of the CRC: polynomials over GF(2) modulo CRC-32's, bit-reflected.
//!
//! Feeding a zero byte multiplies the register by x⁸. So the contribution of a header field to the
//! CRC is a product, and computing the field from the CRC is one too: the inverse of x⁸ exists, as
//! the polynomial is primitive and x has order 2³² − 1.

/// x³² + … + 1 without its top bit, reflected (IEEE 802.3, 3.2.9).
const POLYNOMIAL: u32 = 0xedb8_8320;
/// The element 1: the highest bit of the register is the coefficient of x⁰.
const ONE: u32 = 1 << 31;
/// x⁻⁸ = x^(2³² − 1 − 8).
const BYTE_BACK: u32 = power(ONE >> 1, u32::MAX - 8);

const fn multiply(mut a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut bit = 0;
    while bit < 32 {
        // Masks instead of branches: the bits are unpredictable.
        product ^= a & (b >> 31).wrapping_neg();
        b <<= 1;
        a = a >> 1 ^ POLYNOMIAL & (a & 1).wrapping_neg();
        bit += 1;
    }
    product
}

const fn power(mut base: u32, mut exponent: u32) -> u32 {
    let mut product = ONE;
    while exponent != 0 {
        if exponent & 1 != 0 {
            product = multiply(product, base);
        }
        base = multiply(base, base);
        exponent >>= 1;
    }
    product
}

/// The contribution of a big-endian 16-bit field to the CRC, by the value of each byte.
pub(super) struct FieldTable([[u32; 256]; 2]);

impl FieldTable {
    pub(super) const fn new(bytes_after: usize) -> Self {
        let mut table = [[0; 256]; 2];
        let mut at = 0;
        while at < 2 {
            // A byte enters at the low end, and is multiplied by x⁸ for itself and each later byte.
            let shift = power(ONE >> 1, 8 * (bytes_after + 2 - at) as u32);
            let mut value = 0;
            while value < 256 {
                table[at][value] = multiply(value as u32, shift);
                value += 1;
            }
            at += 1;
        }
        Self(table)
    }

    /// The change of the CRC when the field changes from 0 to `value`.
    pub(super) const fn change(&self, value: u16) -> u32 {
        let [high, low] = value.to_be_bytes();
        self.0[0][high as usize] ^ self.0[1][low as usize]
    }
}

/// x⁻⁸ⁿ for n = 0 … 255, and x⁻⁸·²⁵⁶ⁿ.
static STEPS_BACK: [[u32; 256]; 2] = {
    let mut table = [[ONE; 256]; 2];
    let mut unit = BYTE_BACK;
    let mut at = 0;
    while at < 2 {
        let mut n = 1;
        while n < 256 {
            table[at][n] = multiply(table[at][n - 1], unit);
            n += 1;
        }
        unit = multiply(table[at][255], unit);
        at += 1;
    }
    table
};

/// The change of the IPv4 Identification that changes the ICRC by `syndrome`: one syndrome in 65536
/// has one. `len` counts modulo 65536, from the BTH up to, but without, the ICRC.
pub fn solve_ident(syndrome: u32, len: usize) -> Option<u16> {
    let bytes = (len + super::IDENT_TO_BTH + 2) & 0xffff;
    let back = multiply(STEPS_BACK[0][bytes & 0xff], STEPS_BACK[1][bytes >> 8]);
    let register = multiply(syndrome, back);
    // Its two bytes entered at the low end, the first one lowest.
    u16::try_from(register).ok().map(u16::swap_bytes)
}
