//! The machine's own limits.

use std::time::Duration;

use doorbell_perftest_sys::limits::{self, LimitError};

use super::Measurement;

pub(super) struct Limit {
    pub(super) name: &'static str,
    pub(super) what: &'static str,
    pub(super) measure: fn(Duration) -> Result<Measurement, String>,
    /// It and the test compared with it have one CPU per end.
    pub(super) one_core_a_side: bool,
}

const fn limit(name: &'static str, what: &'static str, measure: fn(Duration) -> Result<Measurement, String>) -> Limit {
    Limit {
        name,
        what,
        measure,
        one_core_a_side: false,
    }
}

/// All limits. The first four names are a contract.
pub(super) const LIMITS: [Limit; 9] = [
    limit("memcpy", "one thread copies 1 MiB blocks", |duration| {
        Ok(Measurement::BytesPerS(limits::memcpy(duration).bytes_per_s))
    }),
    Limit {
        one_core_a_side: true,
        ..limit(
            "udp_gso",
            "UDP over loopback in GSO batches, CRC and one copy at each end",
            |duration| bandwidth(limits::udp_gso(duration)),
        )
    },
    Limit {
        one_core_a_side: true,
        ..limit(
            "shm_pingpong",
            "half round trip of two threads that busy-poll shared memory",
            |duration| match limits::shm_pingpong(duration) {
                Ok(limit) => Ok(Measurement::Ns(limit.ns)),
                Err(error) => Err(error.to_string()),
            },
        )
    },
    limit("process_vm_writev", "1 MiB copies into another process", |duration| {
        bandwidth(limits::process_vm_writev(duration, limits::BLOCK))
    }),
    limit(
        "process_vm_writev_256k",
        "256 KiB copies into another process",
        |duration| bandwidth(limits::process_vm_writev(duration, 256 << 10)),
    ),
    limit(
        "process_vm_writev_64k",
        "64 KiB copies into another process",
        |duration| bandwidth(limits::process_vm_writev(duration, 64 << 10)),
    ),
    limit(
        "memcpy_again_1m",
        "one thread copies the same 1 MiB again and again: in a cache",
        |duration| again(duration, 1 << 20),
    ),
    limit(
        "memcpy_again_256k",
        "one thread copies the same 256 KiB again and again",
        |duration| again(duration, 256 << 10),
    ),
    limit(
        "memcpy_again_64k",
        "one thread copies the same 64 KiB again and again",
        |duration| again(duration, 64 << 10),
    ),
];

fn again(duration: Duration, block: usize) -> Result<Measurement, String> {
    Ok(Measurement::BytesPerS(
        limits::memcpy_repeated(duration, block).bytes_per_s,
    ))
}

fn bandwidth(measured: Result<limits::Bandwidth, LimitError>) -> Result<Measurement, String> {
    match measured {
        Ok(bandwidth) => Ok(Measurement::BytesPerS(bandwidth.bytes_per_s)),
        Err(error) => Err(error.to_string()),
    }
}
