//! Static rates as numbers: ibv_rate_to_mult(3), ibv_rate_to_mbps(3) and their inverses.

use core::ffi::c_int;

use doorbell_verbs_sys::*;

/// A rate, its multiple of 2.5 Gb/s (−1 if the library has none), and its signaling rate in Mb/s.
type Rate = (ibv_rate, c_int, c_int);

const RATES: [Rate; 23] = [
    (IBV_RATE_2_5_GBPS, 1, 2_500),
    (IBV_RATE_5_GBPS, 2, 5_000),
    (IBV_RATE_10_GBPS, 4, 10_000),
    (IBV_RATE_14_GBPS, -1, 14_062),
    (IBV_RATE_20_GBPS, 8, 20_000),
    (IBV_RATE_25_GBPS, -1, 25_781),
    (IBV_RATE_28_GBPS, 11, 28_125),
    (IBV_RATE_30_GBPS, 12, 30_000),
    (IBV_RATE_40_GBPS, 16, 40_000),
    (IBV_RATE_50_GBPS, 20, 53_125),
    (IBV_RATE_56_GBPS, -1, 56_250),
    (IBV_RATE_60_GBPS, 24, 60_000),
    (IBV_RATE_80_GBPS, 32, 80_000),
    (IBV_RATE_100_GBPS, -1, 103_125),
    (IBV_RATE_112_GBPS, -1, 112_500),
    (IBV_RATE_120_GBPS, 48, 120_000),
    (IBV_RATE_168_GBPS, -1, 168_750),
    (IBV_RATE_200_GBPS, -1, 206_250),
    (IBV_RATE_300_GBPS, -1, 309_375),
    (IBV_RATE_400_GBPS, 160, 425_000),
    (IBV_RATE_600_GBPS, 240, 637_500),
    (IBV_RATE_800_GBPS, 320, 850_000),
    (IBV_RATE_1200_GBPS, 480, 1_275_000),
];

fn number(rate: ibv_rate, of: fn(&Rate) -> c_int) -> c_int {
    RATES.iter().find(|known| known.0 == rate).map_or(-1, of)
}

/// The rate with this number; `IBV_RATE_MAX` if none.
fn rate(number: c_int, of: fn(&Rate) -> c_int) -> ibv_rate {
    RATES
        .iter()
        .find(|known| number > 0 && of(known) == number)
        .map_or(IBV_RATE_MAX, |known| known.0)
}

pub(crate) unsafe extern "C" fn rate_to_mult(rate: ibv_rate) -> c_int {
    number(rate, |known| known.1)
}

pub(crate) unsafe extern "C" fn mult_to_rate(mult: c_int) -> ibv_rate {
    rate(mult, |known| known.1)
}

pub(crate) unsafe extern "C" fn rate_to_mbps(rate: ibv_rate) -> c_int {
    number(rate, |known| known.2)
}

pub(crate) unsafe extern "C" fn mbps_to_rate(mbps: c_int) -> ibv_rate {
    rate(mbps, |known| known.2)
}
