//! The queue against a model: buffers return exactly once, requests complete in order.

use std::collections::VecDeque;

use doorbell_verbs::{
    Buffer, ClassicCq, CompletionQueue, ExtendedCq, Local, PostList, QueuePair, ReliableConnection, Success, WrPost,
};
use proptest::prelude::*;

use crate::rig::{TestBackend, TestCq, rig_of};
use crate::stub::Stub;

#[derive(Debug, Clone)]
enum Step {
    /// A batch: whether each request has a buffer and is signaled. The device may refuse one.
    Post(Vec<(bool, bool)>, Option<usize>),
    Complete(usize),
    /// Poll, and take at most that many from the iterator.
    Poll(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (
            prop::collection::vec((any::<bool>(), any::<bool>()), 0..6),
            prop::option::weighted(0.2, 0..4_usize)
        )
            .prop_map(|(requests, refused)| Step::Post(requests, refused)),
        (0..6_usize).prop_map(Step::Complete),
        (0..6_usize).prop_map(Step::Poll),
    ]
}

#[derive(Debug, Clone, PartialEq)]
struct Request {
    sequence: u64,
    buffer: Option<u64>,
}

struct Model<B: TestBackend, Q: TestCq> {
    stub: &'static Stub,
    qp: QueuePair<ReliableConnection, B>,
    cq: CompletionQueue<Q>,
    free: Vec<Buffer>,
    depth: usize,
    in_flight: VecDeque<Request>,
    /// Posted to the device and not completed: whether signaled.
    at_device: VecDeque<bool>,
    /// For each completion not yet fully yielded: up to which sequence it confirms.
    completed_through: VecDeque<u64>,
    device_done: u64,
}

impl<B: TestBackend, Q: TestCq> Model<B, Q> {
    fn new(depth: usize) -> Self {
        let stub = Stub::new();
        let (qp, cq, free) = rig_of(stub, depth as u32, depth);
        Self {
            stub,
            qp,
            cq,
            free,
            depth,
            in_flight: VecDeque::new(),
            at_device: VecDeque::new(),
            completed_through: VecDeque::new(),
            device_done: 0,
        }
    }

    fn qpn(&self) -> u32 {
        self.qp.qpn().get()
    }

    fn post(&mut self, requests: &[(bool, bool)], refused: Option<usize>) {
        let mut planned = Vec::new();
        let mut buffers = Vec::new();
        for (offset, &(with_buffer, signaled)) in requests.iter().enumerate() {
            let buffer = if with_buffer { self.free.pop() } else { None };
            planned.push(Request {
                sequence: self.qp.next_send() + offset as u64,
                buffer: buffer.as_ref().map(Buffer::addr),
            });
            buffers.push((buffer, signaled));
        }
        let refused = refused.filter(|&index| index < requests.len());
        if let Some(index) = refused {
            self.stub.refuse_send(self.qpn(), index, libc::ENOMEM);
        }
        let fits = requests.len() <= self.depth - self.in_flight.len();
        let result = self.qp.post(|batch| {
            for (buffer, signaled) in buffers {
                match (buffer, signaled) {
                    (Some(buffer), true) => {
                        batch.send(buffer).signaled();
                    }
                    (Some(buffer), false) => {
                        batch.send(buffer);
                    }
                    (None, true) => {
                        batch.send_inline(b"inline").signaled();
                    }
                    (None, false) => {
                        batch.send_inline(b"inline");
                    }
                }
            }
        });
        let posted = match (fits, refused) {
            (false, _) => 0,
            (true, Some(_)) if B::WHOLE => 0,
            (true, Some(index)) => index,
            (true, None) => requests.len(),
        };
        assert_eq!(result.is_ok(), posted == requests.len());
        if !fits && let Some(index) = refused {
            // Nothing was posted: clear the device's instruction.
            self.stub.refuse_send(self.qpn(), index + 1000, 0);
        }
        if let Err(refused) = result {
            let refused = *refused;
            assert_eq!(refused.posted, posted);
            assert_eq!(refused.buffers.len(), requests.len() - posted);
            for (mut back, planned) in refused.buffers.into_iter().zip(&planned[posted..]) {
                let buffer = back.take::<Local>();
                assert_eq!(buffer.as_ref().map(Buffer::addr), planned.buffer);
                self.free.extend(buffer);
                assert!(back.is_empty());
            }
        }
        self.in_flight.extend(planned.into_iter().take(posted));
        let given = self.stub.pending_sends(self.qpn());
        for request in given.iter().skip(self.at_device.len()) {
            self.at_device.push_back(request.signaled());
        }
        for (at, &(_, requested)) in requests.iter().take(posted).enumerate() {
            let signaled = self.at_device[self.at_device.len() - posted + at];
            assert!(signaled || !requested, "a requested completion was not signaled");
        }
    }

    fn complete(&mut self, n: usize) {
        self.stub.complete_sends(self.qpn(), n);
        for _ in 0..n {
            let Some(signaled) = self.at_device.pop_front() else {
                return;
            };
            if signaled {
                self.completed_through.push_back(self.device_done);
            }
            self.device_done += 1;
        }
    }

    fn poll(&mut self, n: usize) {
        let mut taken = 0;
        let mut completions = self.cq.poll().unwrap();
        while taken < n {
            let Some(mut done) = completions.next_completion() else {
                break;
            };
            taken += 1;
            let through = self.completed_through[0];
            // Bufferless requests confirmed by a later completion are skipped.
            let expected = loop {
                let request = self.in_flight.pop_front().unwrap();
                if request.sequence == through || request.buffer.is_some() {
                    break request;
                }
            };
            let confirmed = expected.sequence != through;
            assert_eq!(done.sequence(), expected.sequence);
            assert_eq!(done.result().unwrap() == Success::Confirmed, confirmed);
            let buffer = done.take::<Local>();
            assert_eq!(buffer.as_ref().map(Buffer::addr), expected.buffer);
            self.free.extend(buffer);
            if !confirmed {
                self.completed_through.pop_front();
            }
        }
        // One call yields what an earlier one left, or else polls the device.
        assert!(
            taken > 0 || n == 0 || self.completed_through.is_empty(),
            "a completion was withheld"
        );
    }

    fn check(&self) {
        assert_eq!(self.qp.free_send_slots() as usize, self.depth - self.in_flight.len());
        let held = self.in_flight.iter().filter(|request| request.buffer.is_some()).count();
        assert_eq!(self.free.len() + held, self.depth, "a buffer is lost or doubled");
        assert!(
            self.in_flight.len() < self.depth || self.at_device.contains(&true) || !self.completed_through.is_empty(),
            "a full queue with no completion to come"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn the_queue_does_as_its_model(depth in 1..9_usize, steps in prop::collection::vec(step(), 0..120)) {
        run::<PostList, ClassicCq>(depth, steps);
    }

    #[test]
    fn the_queue_posted_to_by_calls_does_as_its_model(depth in 1..9_usize, steps in prop::collection::vec(step(), 0..120)) {
        run::<WrPost, ClassicCq>(depth, steps);
    }

    #[test]
    fn the_queue_does_as_its_model_when_polled_by_calls(depth in 1..9_usize, steps in prop::collection::vec(step(), 0..120)) {
        run::<PostList, ExtendedCq>(depth, steps);
    }

    #[test]
    fn the_queue_does_as_its_model_when_posted_to_and_polled_by_calls(depth in 1..9_usize, steps in prop::collection::vec(step(), 0..120)) {
        run::<WrPost, ExtendedCq>(depth, steps);
    }
}

fn run<B: TestBackend, Q: TestCq>(depth: usize, steps: Vec<Step>) {
    let mut model = Model::<B, Q>::new(depth);
    for step in steps {
        match step {
            Step::Post(requests, refused) => model.post(&requests, refused),
            Step::Complete(n) => model.complete(n),
            Step::Poll(n) => model.poll(n),
        }
        model.check();
    }
    while !model.completed_through.is_empty() {
        model.poll(usize::MAX);
    }
    model.check();
    let stub = model.stub;
    drop(model);
    for kind in ["qp", "mr", "cq", "pd", "context"] {
        assert_eq!(stub.live(kind), 0, "{kind}");
    }
}
