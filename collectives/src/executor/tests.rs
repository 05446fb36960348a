//! Engine tests step by step, for interleavings that otherwise depend on thread timing.

use std::thread;
use std::time::{Duration, Instant};

use super::link::SEND_DEPTH;
use super::*;
use crate::algorithm::Algorithm;
use crate::bootstrap::Group;
use crate::kernel::Function;
use crate::plan::Collective;
use crate::protocol::LineProtocol;
use crate::test_ranks::device;
use crate::types::{DataType, Protocol, ReduceOp};

/// Longer than any step takes, on a busy machine too.
const TIMEOUT: Duration = Duration::from_secs(30);

fn two() -> [Engine; 2] {
    let make = |mut group: Group| {
        thread::spawn(move || {
            let rank = group.rank();
            Engine::new(&[device()], rank, 2, Config::default(), group.control_mut()).unwrap()
        })
    };
    let threads: Vec<_> = Group::local(2).unwrap().into_iter().map(make).collect();
    let engines: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    engines.try_into().unwrap()
}

fn until(what: &str, mut step: impl FnMut() -> bool) {
    let began = Instant::now();
    while !step() {
        assert!(began.elapsed() < TIMEOUT, "{what} does not come");
        thread::yield_now();
    }
}

/// One rank sends LL messages until the send queue of the other, which polls no completions, is
/// full of credit writes; then in short operations, while it polls. All have to complete.
fn full_queue(messages: u64) {
    const SLOTS: u64 = LineProtocol::Ll.slots();
    // Each half ring is a credit write; a full queue of them leaves credits for one more ring.
    let most = u64::from(SEND_DEPTH) * (SLOTS / 2) + SLOTS;
    assert!(most.is_multiple_of(messages));
    let (first, all) = (most / messages, most / messages + 2 * SLOTS);
    let count = if messages == 1 {
        1
    } else {
        messages * LineProtocol::Ll.capacity() as u64 / 4
    };
    let [mut sender, mut receiver] = two();
    let order = [Rank(0), Rank(1)];
    let schedule = Algorithm::FullMesh
        .schedule(Collective::Broadcast, &order, Rank(0))
        .unwrap();
    let mut last = None;
    for engine in [&mut sender, &mut receiver] {
        let plan = engine.prepare(&*schedule).unwrap();
        let memory = engine.allocate(count as usize * 8).unwrap();
        for number in 0..all {
            let operation = Operation {
                plan,
                function: Function::new(DataType::U32, ReduceOp::Sum, 2).unwrap(),
                count: if number < first { count } else { 1 },
                parts: None,
                input: Data::Registered(Arc::clone(&memory), 0),
                output: Data::Registered(Arc::clone(&memory), count as usize * 4),
                scale: None,
                tuning: Tuning {
                    protocol: Protocol::Ll,
                    channels: 1,
                    // One message each.
                    slice: LineProtocol::Ll.capacity(),
                },
                deadline: None,
            };
            // SAFETY: the segment is as long; the operations own it.
            last = Some(unsafe { engine.submit(operation) }.unwrap());
        }
    }
    until("a full queue", || {
        sender.progress();
        receiver.drive().unwrap();
        receiver.finished() == first
    });
    assert_eq!(sender.finished(), first, "the sender has no slot");
    assert!(receiver.links[0][0].as_ref().is_some_and(Link::has_control_writes));
    until("the end of all operations", || {
        sender.progress();
        receiver.progress();
        assert!(sender.failed().is_none() && receiver.failed().is_none());
        receiver.finished() == all
    });
    assert_eq!(receiver.take(last.unwrap()), Some(Ok(())));
}

/// The receiver is in an operation, which does nothing until a message arrives.
#[test]
fn credits_that_did_not_fit_are_sent_while_an_operation_waits() {
    full_queue(1);
}

/// The operation whose credits did not fit is done: a short one follows.
#[test]
fn credits_that_did_not_fit_are_sent_in_the_next_operation() {
    full_queue(LineProtocol::Ll.slots());
}

/// Ranks that send as many messages as they receive need no control writes: each request of the
/// queue pair is a message.
#[test]
fn credits_piggyback_on_messages() {
    const OPERATIONS: u64 = 100;
    let schedule = Algorithm::RecursiveDoubling
        .schedule(Collective::AllReduce, &[Rank(0), Rank(1)], Rank(0))
        .unwrap();
    for protocol in [Protocol::Ll, Protocol::Simple] {
        let mut engines = two();
        let plan = engines.each_mut().map(|engine| engine.prepare(&*schedule).unwrap());
        let memory = engines.each_mut().map(|engine| engine.allocate(8).unwrap());
        for _ in 0..OPERATIONS {
            for (engine, (plan, memory)) in engines.iter_mut().zip(plan.iter().zip(&memory)) {
                let operation = Operation {
                    plan: *plan,
                    function: Function::new(DataType::U32, ReduceOp::Sum, 2).unwrap(),
                    count: 2,
                    parts: None,
                    input: Data::Registered(Arc::clone(memory), 0),
                    output: Data::Registered(Arc::clone(memory), 0),
                    scale: None,
                    tuning: Tuning {
                        protocol,
                        channels: 1,
                        slice: usize::MAX,
                    },
                    deadline: None,
                };
                // SAFETY: the segment is as long; the operations own it.
                unsafe { engine.submit(operation) }.unwrap();
            }
            until("the end of an operation", || {
                for engine in &mut engines {
                    engine.progress();
                }
                engines.iter().all(Engine::is_idle)
            });
        }
        for (engine, peer) in engines.iter().zip([1, 0]) {
            let requests = engine.links[0][peer].as_ref().map(Link::requests);
            assert_eq!(requests, Some(OPERATIONS), "{protocol}");
        }
    }
}

/// A receiver grants memory for messages before those ahead of them have arrived, so that many
/// short ones do not need a round trip each.
#[test]
fn grants_run_ahead_into_later_messages() {
    let [mut sender, mut receiver] = two();
    let submit = |engine: &mut Engine, direction| {
        let (peer, memory) = (Rank(1 - engine.rank().0), engine.allocate(24).unwrap());
        [0, 8, 16].map(|offset| {
            let message = Message {
                peer,
                direction,
                data: Data::Registered(Arc::clone(&memory), offset),
                bytes: 8,
                deadline: None,
            };
            // SAFETY: the segment is as long; the messages own it.
            unsafe { engine.submit_message(message) }.unwrap()
        })
    };
    submit(&mut sender, Direction::Send);
    let received = submit(&mut receiver, Direction::Receive);
    // Once, before any has arrived.
    receiver.drive().unwrap();
    until("the acknowledgement of all messages", || {
        sender.progress();
        !sender.exchanges()
    });
    until("the end of all messages", || {
        receiver.progress();
        !receiver.exchanges()
    });
    assert_eq!(
        received.map(|ticket| receiver.take(ticket)),
        [const { Some(Ok(())) }; 3]
    );
}

/// Plain memory is lent to the device by an operation that sends long messages from it, once where
/// input and output are one, and until the operation has a result that is taken or has failed.
#[test]
fn plain_memory_is_lent_while_an_operation_sends_from_it() {
    let long = 8 * Config::default().eager;
    let mut memory = vec![0_u8; 2 * long];
    let [mut engine, _other] = two();
    let schedule = Algorithm::Ring
        .schedule(Collective::AllReduce, &[Rank(0), Rank(1)], Rank(0))
        .unwrap();
    let plan = engine.prepare(&*schedule).unwrap();
    let input = memory.as_mut_ptr();
    let output = input.wrapping_add(long);
    let lent = |engine: &mut Engine, (input, output), bytes: usize| {
        let operation = Operation {
            plan,
            function: Function::new(DataType::U8, ReduceOp::Sum, 2).unwrap(),
            count: bytes as u64,
            parts: None,
            input: Data::Plain(input),
            output: Data::Plain(output),
            scale: None,
            tuning: Tuning {
                protocol: Protocol::Simple,
                channels: 1,
                slice: usize::MAX,
            },
            deadline: None,
        };
        // SAFETY: the memory is as long, and outlives the engine.
        let ticket = unsafe { engine.submit(operation) }.unwrap();
        let op = engine.operations.get(ticket.number).unwrap();
        op.lent.each_ref().map(Option::is_some)
    };
    assert_eq!(lent(&mut engine, (input, input), long - 1), [false, false]);
    assert_eq!(lent(&mut engine, (input, input), long), [false, true]);
    assert_eq!(lent(&mut engine, (input, output), long), [true, true]);
    for (direction, lends) in [(Direction::Send, true), (Direction::Receive, false)] {
        let message = Message {
            peer: Rank(1),
            direction,
            data: Data::Plain(input),
            bytes: long,
            deadline: None,
        };
        // SAFETY: as above.
        let ticket = unsafe { engine.submit_message(message) }.unwrap();
        let stream = engine.p2p.streams[ticket.stream.unwrap() as usize].as_ref().unwrap();
        let op = stream.queue.get(ticket.number).unwrap();
        assert_eq!(op.lent.iter().any(Option::is_some), lends);
    }
    engine.abort("of the test");
    let mut operations = engine
        .operations
        .open()
        .chain(engine.p2p.queues_mut().flat_map(OperationQueue::open));
    assert!(operations.all(|op| op.lent.iter().all(Option::is_none)));
}

/// What lies within allocated memory is found by its address; neither what follows it, nor what was
/// freed.
#[test]
fn memory_is_found_by_its_address() {
    let [mut engine, _other] = two();
    let segments = [4096, 8000].map(|len| engine.allocate(len).unwrap());
    for segment in &segments {
        for offset in [0, 8, segment.len() - 1] {
            match engine.memory_at(segment.start().wrapping_add(offset)) {
                Data::Registered(found, at) => assert!(Arc::ptr_eq(&found, segment) && at == offset),
                data => panic!("{offset}: {data:?}"),
            }
        }
    }
    let [first, second] = segments;
    let (freed, end) = (first.start(), second.start().wrapping_add(second.len()));
    drop(first);
    for plain in [freed, end, end.wrapping_add(8)] {
        assert!(matches!(engine.memory_at(plain), Data::Plain(start) if start == plain));
    }
    assert!(matches!(engine.memory_at(core::ptr::null_mut()), Data::None));
}
