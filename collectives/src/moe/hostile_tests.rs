//! A rank whose puts are of no dispatch: headers that no routing has, arrival lines of exchanges
//! that have not begun, slots beyond the window. The other ranks end with an error that names it,
//! and nothing but its own places in their windows is written.

use super::*;
use crate::failure::Cause;
use crate::moe::{Received, Routing};
use crate::test_ranks::ranks;
use crate::types::Rank;

const HOSTILE: Rank = Rank(1);
/// What the honest ranks' memory is filled with, where no peer has a place.
const FILL: u8 = 0x5a;

/// Four local experts, top-3 of at most four tokens: a source has 12 slots.
fn options() -> MoeOptions {
    MoeOptions {
        shape: Shape::new(3, 12, 3, 128, 4).unwrap(),
        payload: Payload::Bf16,
        mode: Mode::LowLatency,
        capacity: None,
    }
}

/// What the hostile rank sends to each of the others.
#[derive(Clone, Copy, Debug)]
struct Lie {
    /// Counts by local expert, and the position of the first pair.
    header: [u32; 5],
    /// The arrival line.
    number: u64,
    credit: u64,
}

const HONEST: Lie = Lie {
    header: [1, 0, 2, 4, 5],
    number: 1,
    credit: 0,
};

/// Takes part in the layer's making, and sends what `add` adds for each of the other ranks, from a
/// segment that begins with `header`, by the queue pairs of the communicator.
fn send(comm: &Communicator, lie: Lie, add: impl Fn(&mut Puts, Rank, &Areas)) {
    let options = options();
    let areas = options.areas();
    comm.agree_on_experts(&options).unwrap();
    let window = comm.window(options.depth() as usize * areas.window).unwrap();
    comm.exchange(&[]).unwrap();
    let source = comm.segment(areas.header).unwrap();
    for (index, word) in lie.header.into_iter().enumerate() {
        // SAFETY: a header has room for them, and nothing else uses the segment.
        unsafe { source.start().cast::<u32>().add(index).write(word) };
    }
    let mut puts = Puts::new(&window, (HOSTILE, &source), lie.number, (0, lie.credit));
    for to in [Rank(0), Rank(2)] {
        add(&mut puts, to, &areas);
    }
    // The communicator may have failed before.
    let _ = comm.put(puts, comm.options().deadline).map(|request| request.wait());
}

/// A header where the first dispatch of this rank has its own: that dispatch uses the second area.
fn add_header(puts: &mut Puts, to: Rank, areas: &Areas) {
    let at = areas.window + areas.headers + HOSTILE.index() * areas.header;
    // SAFETY: nothing is written to this rank itself.
    unsafe { puts.add(to, 0, at, areas.header) };
}

fn dispatch<'e>(of: &'e ExpertParallel<'_>) -> Result<Received<'e>, MoeError> {
    let shape = of.options.shape;
    let routing = Routing::new(&shape, &[0, 4, 8, 11, 5, 1], &[0.5; 6]).unwrap();
    of.dispatch(&[crate::kernel::bf16::ONE; 256], &routing)
}

/// The memory that no peer has a place in: the outputs of the experts, and the area of the window
/// that the first dispatch does not use.
fn untouched<'e>(of: &'e mut ExpertParallel<'_>) -> [&'e mut [u8]; 2] {
    let unused = of.areas.window;
    // SAFETY: both are in their memory, and only this test uses it.
    unsafe {
        [
            core::slice::from_raw_parts_mut(of.expert_outputs.start(), of.expert_outputs.len()),
            core::slice::from_raw_parts_mut(of.window.start(), unused),
        ]
    }
}

/// Runs the hostile rank beside two others, and returns the errors of these.
fn errors(hostile: impl Fn(&Communicator) + Sync) -> Vec<MoeError> {
    let errors = ranks(3, &crate::Options::default(), |comm| {
        if comm.rank() == HOSTILE {
            hostile(&comm);
            return None;
        }
        let mut of = comm.expert_parallel(options()).unwrap();
        for memory in untouched(&mut of) {
            memory.fill(FILL);
        }
        comm.exchange(&[]).unwrap();
        let error = dispatch(&of).unwrap_err();
        assert!(
            untouched(&mut of)
                .iter()
                .all(|memory| memory.iter().all(|byte| *byte == FILL))
        );
        Some(error)
    });
    errors.into_iter().flatten().collect()
}

#[test]
fn headers_and_lines_of_no_dispatch_end_it_with_the_name_of_their_rank() {
    let counts = "rank 1 has sent counts that no routing has";
    let line = "rank 1 has announced an exchange that has not begun";
    let header = |header| Lie { header, ..HONEST };
    let cases = [
        (header([u32::MAX, 0, 0, 0, 0]), counts),
        // More tokens than a rank has, and more pairs than it has slots.
        (header([5, 0, 0, 0, 0]), counts),
        (header([4, 4, 4, 1, 0]), counts),
        // Their sum is 0 in 32 bits.
        (header([1 << 31, 1 << 31, 0, 0, 0]), counts),
        // Outputs beyond those of the source's pairs.
        (header([1, 0, 0, 0, 12]), counts),
        (header([0, 0, 0, 1, u32::MAX]), counts),
        (Lie { number: 3, ..HONEST }, line),
        (
            Lie {
                number: u64::MAX,
                ..HONEST
            },
            line,
        ),
        (Lie { credit: 3, ..HONEST }, line),
        (
            Lie {
                credit: u64::MAX,
                ..HONEST
            },
            line,
        ),
    ];
    for (lie, wanted) in cases {
        let errors = errors(|comm| send(comm, lie, add_header));
        assert_eq!(errors.len(), 2);
        for error in errors {
            assert!(error.to_string().contains(wanted), "{lie:?}: {error}");
        }
    }
}

#[test]
fn a_slot_beyond_the_window_is_refused_by_its_device() {
    let beyond = |puts: &mut Puts, to: Rank, areas: &Areas| {
        let memory = Window::memory_bytes(2 * areas.window, 3).unwrap();
        puts.add_unchecked(to, 0, memory, areas.header);
    };
    for error in errors(|comm| send(comm, HONEST, beyond)) {
        let MoeError::Collective(error) = error else {
            panic!("{error}")
        };
        let cause = error.failure().map(|failure| &failure.verdict.cause);
        let is_named = match cause {
            Some(Cause::Broken { rank, peer }) => [rank, peer].contains(&&HOSTILE),
            Some(Cause::CutOff { rank }) => *rank == HOSTILE,
            _ => false,
        };
        assert!(is_named, "{error}");
    }
}
