//! Requests whose task waits no more, as that of a future that is dropped: at each point of a
//! request, among others on its queue. The memory is freed once, and not while the device may
//! access it, which Miri and AddressSanitizer see.

use doorbell_verbs::{CompletionQueue, Local, PostError, ProtectionDomain, QueueKind, QueuePair, ReliableConnection};
use doorbell_verbs_sys::{IBV_WC_RECV, IBV_WC_RETRY_EXC_ERR};

use crate::rig::{PEER, TestBackend, TestCq, over_all_kinds, poll_count, poll_each};
use crate::stub::Stub;

over_all_kinds! {
    memory_is_freed_once_and_never_early_wherever_a_request_is_abandoned,
}

/// Where a request is when its task goes.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Point {
    /// Refused by the device: its buffer is in the error.
    Refused,
    /// With the device, which completes it later.
    Posted,
    /// Completed, and polled: its buffer is kept with the outcome.
    Kept,
    /// Its task has taken the buffer.
    Taken,
    /// Flushed, as the queue pair has failed.
    Flushed,
    /// Completed, and not polled before the completion queue goes.
    NeverPolled,
    /// With the device when the queue pair goes.
    QueuePairGone,
}

fn memory_is_freed_once_and_never_early_wherever_a_request_is_abandoned<B: TestBackend, Q: TestCq>() {
    use Point::*;
    let stub = Stub::new();
    stub.extend();
    for queue in [QueueKind::Send, QueueKind::Receive] {
        for point in [Refused, Posted, Kept, Taken, Flushed, NeverPolled, QueuePairGone] {
            for (before, after) in [(0, 0), (1, 0), (0, 1), (2, 1)] {
                Case::<B, Q>::new(stub, queue, before, after).abandon(point);
                for kind in ["mr", "qp", "cq", "pd", "context"] {
                    assert_eq!(
                        stub.live(kind),
                        0,
                        "{kind} of {queue:?}, {point:?}, {before} before, {after} after"
                    );
                }
            }
        }
    }
}

struct Case<B: TestBackend, Q: TestCq> {
    stub: &'static Stub,
    pd: ProtectionDomain,
    qp: QueuePair<ReliableConnection, B>,
    cq: CompletionQueue<Q>,
    queue: QueueKind,
    before: usize,
    after: usize,
}

impl<B: TestBackend, Q: TestCq> Case<B, Q> {
    fn new(stub: &'static Stub, queue: QueueKind, before: usize, after: usize) -> Self {
        let context = stub.open();
        let pd = context.protection_domain().unwrap();
        let cq = Q::make(&context, 16);
        let builder = pd.queue_pair(&cq).max_send_wr(8).max_recv_wr(8);
        let qp = B::rc(builder).unwrap().connect(&PEER).unwrap();
        Self {
            stub,
            pd,
            qp,
            cq,
            queue,
            before,
            after,
        }
    }

    fn qpn(&self) -> u32 {
        self.qp.qpn().get()
    }

    /// Posts a request with memory of its own.
    fn post(&mut self, signaled: bool) -> Result<(), PostError> {
        let buffer = self.pd.register(vec![7_u8; 8], Local).unwrap();
        match self.queue {
            QueueKind::Receive => self.qp.receive(buffer),
            QueueKind::Send => self.qp.post(|batch| {
                batch.send(buffer).signaled_if(signaled);
            }),
        }
    }

    fn complete(&self, n: usize) {
        match self.queue {
            QueueKind::Send => self.stub.complete_sends(self.qpn(), n),
            QueueKind::Receive => (0..n).for_each(|_| self.stub.complete_receive(self.qpn(), IBV_WC_RECV, 8, None)),
        }
    }

    fn regions(&self) -> usize {
        self.stub.live("mr") as usize
    }

    fn abandon(mut self, point: Point) {
        let (stub, before, after) = (self.stub, self.before, self.after);
        (0..before).for_each(|_| self.post(false).unwrap());
        if point == Point::Refused {
            match self.queue {
                QueueKind::Send => stub.refuse_send(self.qpn(), 0, libc::ENOMEM),
                QueueKind::Receive => stub.refuse_receive(self.qpn(), 0, libc::ENOMEM),
            }
        }
        let refused = self.post(true).err();
        assert_eq!(refused.is_some(), point == Point::Refused);
        (0..after).for_each(|_| self.post(false).unwrap());
        stub.access_memory(self.qpn());
        assert_eq!(self.regions(), before + 1 + after, "freed early");
        let sequence = before as u64;
        match point {
            Point::Refused => {
                drop(refused);
                assert_eq!(self.regions(), before + after);
            }
            Point::Posted => {
                self.complete(before + 1);
                assert_eq!(self.regions(), before + 1 + after, "freed before it is polled");
                assert_eq!(poll_count(&mut self.cq), before + 1);
                assert_eq!(self.regions(), after);
            }
            Point::Kept | Point::Taken => {
                self.complete(before + 1);
                let kept = poll_each(&mut self.cq, |mut done| {
                    let own = done.sequence() == sequence;
                    let taken = (own && point == Point::Taken).then(|| done.take::<Local>().unwrap());
                    (taken, own.then(|| done.into_buffers()))
                });
                stub.access_memory(self.qpn());
                assert_eq!(self.regions(), 1 + after, "freed though it is kept");
                drop(kept);
                assert_eq!(self.regions(), after);
            }
            Point::Flushed => {
                stub.fail_send(self.qpn(), IBV_WC_RETRY_EXC_ERR);
                let flushed = poll_each(&mut self.cq, |done| (done.result().is_err(), done.into_buffers()));
                assert_eq!(flushed.iter().filter(|(failed, _)| *failed).count(), before + 1 + after);
                assert_eq!(self.regions(), before + 1 + after);
                drop(flushed);
                assert_eq!(self.regions(), 0);
            }
            Point::NeverPolled => {
                self.complete(before + 1);
                drop(self.cq);
                assert_eq!(
                    stub.live("mr") as usize,
                    before + 1 + after,
                    "freed with the queue pair alive"
                );
                drop(self.qp);
                return;
            }
            Point::QueuePairGone => {
                drop(self.qp);
                poll_count(&mut self.cq);
                assert_eq!(stub.live("mr"), 0);
                return;
            }
        }
        // Those after it are the device's still.
        stub.access_memory(self.qpn());
    }
}
