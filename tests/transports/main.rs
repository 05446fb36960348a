//! UC, UD, memory and the attributes of queue pairs in use by the safe API on soft devices, both
//! ends in this process: what the stub of `verbs` cannot test, because it transmits nothing.

mod attributes;
mod backends;
mod connected;
mod datagrams;
mod descriptions;
mod memory;
mod shared;
mod stopped;

use std::time::{Duration, Instant};

use doorbell_verbs::{
    Backend, Buffer, CompletionQueue, CompletionStatus, Connected, Context, Library, Local, PreparedQueuePair,
    ProtectionDomain, QueueKind, QueuePair, QueuePairBuilder, QueuePairError,
};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Names a system device to run both ends on instead.
const DEVICE: &str = "DOORBELL_TRANSPORTS_DEVICE";

fn is_soft() -> bool {
    std::env::var_os(DEVICE).is_none()
}

/// Device `soft0` or `soft1`, on an address of its own for each process `of`.
fn open(of: u32, n: u8) -> Context {
    if let Ok(name) = std::env::var(DEVICE) {
        return Library::system().unwrap().open(&name).unwrap();
    }
    doorbell_tests::soft::open_of(of, n)
}

/// One side: a device, a protection domain, and a completion queue of 64 entries.
struct Side {
    context: Context,
    pd: ProtectionDomain,
    cq: CompletionQueue,
}

impl Side {
    fn new(n: u8) -> Self {
        Self::of(std::process::id(), n)
    }

    fn of(process: u32, n: u8) -> Self {
        let context = open(process, n);
        let pd = context.protection_domain().unwrap();
        let cq = context.completion_queue(64).unwrap();
        Self { context, pd, cq }
    }

    /// Queues of 16 requests.
    fn builder(&self) -> QueuePairBuilder<'_> {
        self.pd
            .queue_pair(&self.cq)
            .max_send_wr(16)
            .max_recv_wr(16)
            .max_inline_data(64)
    }

    fn buffer(&self, len: usize) -> Buffer {
        self.pd.register(vec![0; len], Local).unwrap()
    }

    /// Passes the next completion of `queue`, of any queue pair, to `take`; others are dropped.
    #[track_caller]
    fn next<R>(&mut self, queue: QueueKind, mut take: impl FnMut(&mut doorbell_verbs::Completion<'_>) -> R) -> R {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            for mut completion in self.cq.poll().unwrap() {
                if completion.queue() == queue {
                    return take(&mut completion);
                }
                completion.result().unwrap();
            }
            assert!(Instant::now() < deadline, "no completion of the {queue:?} queue came");
        }
    }

    /// The status of the next request, which must have failed.
    fn failed(&mut self) -> CompletionStatus {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            if let Some(completion) = self.cq.poll().unwrap().next() {
                return completion.result().unwrap_err().status;
            }
            assert!(Instant::now() < deadline, "no completion came");
        }
    }
}

fn connect<T: Connected, B: Backend>(
    a: &Side,
    b: &Side,
    make: impl Fn(QueuePairBuilder<'_>) -> Result<PreparedQueuePair<T, B>, QueuePairError>,
) -> (QueuePair<T, B>, QueuePair<T, B>) {
    let (to_b, to_a) = (make(a.builder()).unwrap(), make(b.builder()).unwrap());
    let (of_a, of_b) = (to_b.endpoint(), to_a.endpoint());
    (to_b.connect(&of_b).unwrap(), to_a.connect(&of_a).unwrap())
}
