//! The machine's own limits.

use std::time::Duration;

use doorbell_softroce::limits::{self, LimitError};

use super::Figure;

/// A limit.
pub(super) struct Limit {
    pub(super) name: &'static str,
    pub(super) what: &'static str,
    pub(super) measure: fn(Duration) -> Result<Figure, String>,
}

/// All of them. The first four names are a contract.
pub(super) const LIMITS: [Limit; 9] = [
    Limit {
        name: "memcpy",
        what: "one thread copies 1 MiB blocks",
        measure: |duration| Ok(Figure::BytesPerS(limits::memcpy(duration).bytes_per_s)),
    },
    Limit {
        name: "udp_gso",
        what: "UDP over loopback in GSO batches, CRC and one copy at each end",
        measure: |duration| bandwidth(limits::udp_gso(duration)),
    },
    Limit {
        name: "shm_pingpong",
        what: "half a round trip of two threads that spin on shared memory",
        measure: |duration| match limits::shm_pingpong(duration) {
            Ok(limit) => Ok(Figure::Ns(limit.ns)),
            Err(error) => Err(reason(&error)),
        },
    },
    Limit {
        name: "process_vm_writev",
        what: "1 MiB copies into another process",
        measure: |duration| bandwidth(limits::process_vm_writev(duration, limits::BLOCK)),
    },
    Limit {
        name: "process_vm_writev_256k",
        what: "256 KiB copies into another process",
        measure: |duration| bandwidth(limits::process_vm_writev(duration, 256 << 10)),
    },
    Limit {
        name: "process_vm_writev_64k",
        what: "64 KiB copies into another process",
        measure: |duration| bandwidth(limits::process_vm_writev(duration, 64 << 10)),
    },
    Limit {
        name: "memcpy_again_1m",
        what: "one thread copies the same 1 MiB again and again: in a cache",
        measure: |duration| again(duration, 1 << 20),
    },
    Limit {
        name: "memcpy_again_256k",
        what: "one thread copies the same 256 KiB again and again",
        measure: |duration| again(duration, 256 << 10),
    },
    Limit {
        name: "memcpy_again_64k",
        what: "one thread copies the same 64 KiB again and again",
        measure: |duration| again(duration, 64 << 10),
    },
];

fn again(duration: Duration, block: usize) -> Result<Figure, String> {
    Ok(Figure::BytesPerS(limits::memcpy_again(duration, block).bytes_per_s))
}

fn bandwidth(measured: Result<limits::Bandwidth, LimitError>) -> Result<Figure, String> {
    match measured {
        Ok(bandwidth) => Ok(Figure::BytesPerS(bandwidth.bytes_per_s)),
        Err(error) => Err(reason(&error)),
    }
}

/// An error and what lies under it.
pub(super) fn reason(error: &LimitError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
