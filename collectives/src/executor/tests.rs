//! An engine with its turns taken apart: what else depends on which thread comes first.

use std::net::{IpAddr, Ipv4Addr};
use std::thread;
use std::time::{Duration, Instant};

use doorbell_softroce_ibverbs::{DeviceConfig, LinkChoice, api, configure};
use doorbell_verbs::Library;

use super::link::SEND_DEPTH;
use super::*;
use crate::algorithm::Algorithm;
use crate::bootstrap::Group;
use crate::kernel::Function;
use crate::protocol::Lines;
use crate::types::{DataType, Protocol, ReduceOp};

/// Longer than anything here takes, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two ranks, each on a device over UDP.
fn two() -> [Engine; 2] {
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let device = DeviceConfig {
        address: Some(IpAddr::V4(Ipv4Addr::new(127, 160 + high % 64, low, 9))),
        link: LinkChoice::Udp,
        ..DeviceConfig::new("soft0".to_owned())
    };
    // The only test of this process that opens one.
    configure(vec![device]).unwrap();
    let make = |mut group: Group| {
        thread::spawn(move || {
            let device = Library::new(api()).open("soft0").unwrap();
            let rank = group.rank();
            Engine::new(&[device], rank, 2, Config::default(), group.control_mut()).unwrap()
        })
    };
    let threads: Vec<_> = Group::local(2).unwrap().into_iter().map(make).collect();
    let engines: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
    engines.try_into().unwrap()
}

/// Turns, until this is so.
fn until(what: &str, mut turn: impl FnMut() -> bool) {
    let began = Instant::now();
    while !turn() {
        assert!(began.elapsed() < PATIENCE, "{what} does not come");
        thread::yield_now();
    }
}

/// A receiver that always has something to do takes no completions, and so its send queue fills with the slots that it gives back. Those that find no room in it have to leave when there is, though nothing else is received or sent:
/// the sender waits for them.
#[test]
fn slots_that_the_queue_had_no_room_for_are_given_back_later() {
    let slots = Lines::Ll.slots();
    // Each half ring is a request; when the queue is full of them, the sender has slots for a ring more.
    let most = u64::from(SEND_DEPTH) * (slots / 2) + slots;
    let operations = most + 2 * slots;
    let [mut sender, mut receiver] = two();
    let order = [Rank(0), Rank(1)];
    let schedule = Algorithm::FullMesh
        .schedule(Collective::Broadcast, &order, Rank(0))
        .unwrap();
    let mut last = None;
    for engine in [&mut sender, &mut receiver] {
        let plan = engine.prepare(&*schedule).unwrap();
        let memory = engine.allocate(16).unwrap();
        for _ in 0..operations {
            // SAFETY: the segment is as long as that, and the engine keeps it.
            last = Some(unsafe {
                engine.submit(Operation {
                    plan,
                    function: Function::new(DataType::U32, ReduceOp::Sum, 2).unwrap(),
                    count: 1,
                    parts: None,
                    input: Data::Registered(Arc::clone(&memory), 0),
                    output: Data::Registered(Arc::clone(&memory), 8),
                    scale: None,
                    tuning: Tuning {
                        protocol: Protocol::Ll,
                        channels: 1,
                        slice: 1 << 16,
                    },
                    deadline: None,
                })
            });
        }
    }
    until("a full queue", || {
        sender.progress();
        // A turn, but for the completions.
        receiver.drive().unwrap();
        receiver.finished() == most
    });
    assert_eq!(sender.finished(), most, "the sender has no slot");
    assert!(receiver.links[0][0].as_ref().is_some_and(Link::has_notes));
    let last = last.unwrap().unwrap();
    until("the end of all operations", || {
        sender.progress();
        receiver.progress();
        assert!(sender.failed().is_none() && receiver.failed().is_none());
        receiver.finished() == operations
    });
    assert_eq!(receiver.take(last), Some(Ok(())));
}
