//! The host memory of a test: the cycle buffers, and the check that there is enough.

use doorbell_verbs::{Buffer, Frozen, HugePage, Local, Memory, ProtectionDomain, Registration, Rights, Scratch};

use super::super::settings::Settings;
use super::super::wire::SharedParameters;
use super::Target;
use crate::engine::message::Cycle;
use crate::failure::{Failure, refused};

/// Cycling through a buffer as the C tools do: each message starts at a cache line behind the
/// previous one until the page is full. Messages longer than half a page all use the same place.
///
/// For messages of `bytes`, with a header of `header` bytes (the GRH of UD) where they are
/// received.
pub(super) fn cycle(bytes: u64, header: u64, parameters: &SharedParameters) -> Cycle {
    let (line, page) = (u64::from(parameters.cache_line), u64::from(parameters.page));
    let stride = bytes
        .saturating_add(header)
        .checked_next_multiple_of(line)
        .unwrap_or(u64::MAX)
        .max(line);
    Cycle {
        bytes,
        stride,
        slots: if stride <= page / 2 { page / stride } else { 1 },
    }
}

/// Alignment of the pieces of memory.
const PAGE: usize = 4096;
/// Bytes of free memory that a test leaves to the machine.
const SPARE: u64 = 64 << 20;

/// Zeroed private memory as in the C tools, of huge pages with `--use_hugepages`. Not shared
/// memory, which the userspace device copies faster.
///
/// # Errors
/// [`Failure::Test`] when there is too little, before any of it is touched.
pub(crate) fn allocate(settings: &Settings, len: usize) -> Result<Memory, Failure> {
    if let Some(available) = available_memory()
        && (len as u64).saturating_add(SPARE) > available
        && !settings.huge_pages
    {
        return Err(Failure::test(format!(
            "the test needs {} MiB of memory at once, and the machine has {} MiB left: smaller messages (-s) or fewer queue pairs (-q)",
            len >> 20,
            available >> 20
        )));
    }
    if settings.huge_pages {
        return Memory::huge(len, HugePage::Size2M).map_err(refused);
    }
    Ok(Memory::zeroed(len))
}

/// The bytes that the kernel can give without swapping, where it reports them.
pub(crate) fn available_memory() -> Option<u64> {
    available(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

/// MemAvailable.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

pub(crate) fn registration<'a>(settings: &Settings, pd: &'a ProtectionDomain) -> Registration<'a> {
    let registration = pd.registration();
    if settings.relaxed_ordering {
        registration.relaxed_ordering()
    } else {
        registration
    }
}

/// Memory for the peer, at least `len` bytes per queue pair: one memory region, or with
/// `--mr_per_qp` one each.
pub(super) fn pieces<R: Rights>(
    settings: &Settings,
    pd: &ProtectionDomain,
    len: u64,
    rights: R,
    target: fn(Buffer<R>) -> Target,
) -> Result<Vec<Target>, Failure> {
    let (piece, regions, each) = layout(settings, len)?;
    let mut pieces = Vec::with_capacity(settings.qps as usize);
    for _ in 0..regions {
        let chunks = registration(settings, pd)
            .register_chunks(allocate(settings, each)?, piece, rights)
            .map_err(refused)?;
        pieces.extend(chunks.map(target));
    }
    Ok(pieces)
}

/// The length of a piece of at least `len` bytes, the number of regions, and the length of each.
pub(super) fn layout(settings: &Settings, len: u64) -> Result<(usize, usize, usize), Failure> {
    let qps = settings.qps as usize;
    let piece = usize::try_from(len)
        .ok()
        .and_then(|len| len.max(1).checked_next_multiple_of(PAGE))
        .ok_or_else(|| Failure::test(format!("{len} B exceed the address space")))?;
    let whole = piece
        .checked_mul(qps)
        .ok_or_else(|| Failure::test(format!("{qps} times {piece} B exceed the address space")))?;
    Ok(if settings.region_per_qp {
        (piece, qps, piece)
    } else {
        (piece, 1, whole)
    })
}

/// `count` handles for sending from the cycle buffer.
pub(crate) fn frozen(
    settings: &Settings,
    pd: &ProtectionDomain,
    cycle: &Cycle,
    count: usize,
) -> Result<Vec<Buffer<Frozen>>, Failure> {
    let slots = slots(settings, pd, cycle, 0)?;
    let slots: Vec<_> = slots.map(Buffer::<Local>::freeze).collect();
    Ok(slots.iter().cycle().take(count).cloned().collect())
}

/// `count` handles for receiving or reading into the cycle buffer; `header` bytes precede each
/// message.
pub(crate) fn scratch(
    settings: &Settings,
    pd: &ProtectionDomain,
    cycle: &Cycle,
    header: u64,
    count: usize,
) -> Result<Vec<Buffer<Scratch>>, Failure> {
    let slots = slots(settings, pd, cycle, header)?;
    let slots: Vec<_> = slots.map(Buffer::scratch).collect();
    Ok(slots.iter().cycle().take(count).cloned().collect())
}

/// The messages of a cycle buffer, each with a header.
fn slots(
    settings: &Settings,
    pd: &ProtectionDomain,
    cycle: &Cycle,
    header: u64,
) -> Result<impl Iterator<Item = Buffer<Local>>, Failure> {
    let (Ok(len), Ok(stride)) = (usize::try_from(cycle.len()), usize::try_from(cycle.stride)) else {
        return Err(Failure::test(format!("{} B exceed the address space", cycle.bytes)));
    };
    let chunks = registration(settings, pd)
        .register_chunks(allocate(settings, len)?, stride, Local)
        .map_err(refused)?;
    let bytes = usize::try_from(cycle.bytes.saturating_add(header)).unwrap_or(usize::MAX);
    Ok(chunks.map(move |slot| head(slot, bytes)))
}

fn head(slot: Buffer<Local>, bytes: usize) -> Buffer<Local> {
    if (1..slot.len()).contains(&bytes) {
        slot.split_at(bytes).0
    } else {
        slot
    }
}

#[cfg(test)]
mod tests {
    use doorbell_verbs::Mtu;

    use super::*;
    use crate::engine::message::Cursor;

    const PARAMETERS: SharedParameters = SharedParameters {
        page: 4096,
        cache_line: 64,
        mtu: Mtu::B1024,
    };

    #[test]
    fn short_messages_cycle_through_a_page_and_long_ones_stay() {
        for (bytes, stride, slots) in [
            (1, 64, 64),
            (64, 64, 64),
            (65, 128, 32),
            (2048, 2048, 2),
            (2049, 2112, 1),
            (4096, 4096, 1),
            (65536, 65536, 1),
        ] {
            let cycle = cycle(bytes, 0, &PARAMETERS);
            assert_eq!(cycle, Cycle { bytes, stride, slots });
            let mut cursor = Cursor::new(cycle);
            let offsets: Vec<u64> = (0..=slots).map(|_| cursor.advance()).collect();
            assert!(offsets[..slots as usize].is_sorted_by(|a, b| a + stride == *b));
            assert_eq!(offsets[slots as usize], 0);
            assert!(offsets[slots as usize - 1] + bytes <= cycle.len().max(bytes));
        }
        assert_eq!(cycle(88, 40, &PARAMETERS).stride, 128);
    }

    #[test]
    fn a_message_never_goes_beyond_the_page_and_itself() {
        for bytes in 1..=9000 {
            let cycle = cycle(bytes, 0, &PARAMETERS);
            let mut cursor = Cursor::new(cycle);
            for _ in 0..200 {
                let end = cursor.advance() + bytes;
                assert!(end <= 4096.max(bytes.next_multiple_of(64)), "{bytes}");
            }
        }
    }

    #[test]
    fn available_memory_is_the_kernels_estimate() {
        assert_eq!(
            available("MemTotal: 9 kB\nMemAvailable:   21000000 kB\n"),
            Some(21_000_000 << 10)
        );
        assert_eq!(available("MemTotal: 9 kB\n"), None);
        assert_eq!(available("MemAvailable: many kB\n"), None);
    }
}
