//! Extended completion queues on soft devices: unlike the stub of `verbs`, this provider takes
//! locks and timestamps completions.

use std::time::{SystemTime, UNIX_EPOCH};

use doorbell_verbs::{
    BestCompletionQueue, Buffer, BufferPool, CompletionQueue, Context, ExtendedCq, Local, ProtectionDomain, QueuePair,
    Success,
};

use super::{TIMEOUT, open};

const DEPTH: u32 = 32;
const BYTES: usize = 256;

struct Side {
    context: Context,
    pd: ProtectionDomain,
    cq: CompletionQueue<ExtendedCq>,
    pool: BufferPool,
}

impl Side {
    fn new(n: u8) -> Self {
        let context = open(n);
        let pd = context.protection_domain().unwrap();
        let channel = context.completion_channel().unwrap();
        let queue = context.extended_completion_queue(4 * DEPTH).on(&channel);
        let cq = queue.timestamps().wallclock().create().unwrap();
        let memory = vec![0_u8; BYTES * 2 * DEPTH as usize];
        let pool = pd.register(memory, Local).unwrap().chunks(BYTES).collect();
        Self { context, pd, cq, pool }
    }
}

fn connect(a: &Side, b: &Side) -> (QueuePair, QueuePair) {
    let prepare = |side: &Side| {
        let builder = side.pd.queue_pair(&side.cq).max_send_wr(DEPTH).max_recv_wr(DEPTH);
        builder.rc().unwrap()
    };
    let (to_a, to_b) = (prepare(a), prepare(b));
    let (at_a, at_b) = (to_a.endpoint(), to_b.endpoint());
    (to_a.connect(&at_b).unwrap(), to_b.connect(&at_a).unwrap())
}

fn since_1970() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64
}

#[test]
fn a_stream_over_extended_queues_arrives_in_order_and_stamped() {
    const MESSAGES: u32 = 2000;
    let (mut a, mut b) = (Side::new(0), Side::new(1));
    let (mut sender, mut receiver) = connect(&a, &b);
    let clock = b.context.attr().clock.unwrap();
    let (start, start_ticks) = (since_1970(), b.context.clock_ticks().unwrap());
    let (mut sent, mut received) = (0, 0);
    let mut last = (start_ticks, 0);
    while received < MESSAGES {
        while receiver.free_receive_slots() > 0
            && let Some(buffer) = b.pool.pop()
        {
            receiver.receive(buffer).unwrap();
        }
        while sent < MESSAGES
            && sender.free_send_slots() > 0
            && let Some(mut buffer) = a.pool.pop()
        {
            buffer[..4].copy_from_slice(&u32::to_be_bytes(sent));
            sender.send(buffer).unwrap();
            sent += 1;
        }
        a.cq.poll().unwrap().for_each(|done| {
            done.check().unwrap();
            a.pool.extend(done.into_buffer());
        });
        let taken = b.cq.poll().unwrap().try_for_each(|done| {
            let Success::Receive { len, imm: None } = done.result()? else {
                panic!("not a receive")
            };
            let (ticks, wallclock) = (done.timestamp_ticks().unwrap(), done.wallclock_ns().unwrap());
            assert!(ticks >= last.0 && wallclock >= start, "time is monotonic");
            last = (ticks, wallclock);
            let buffer: Buffer = done.into_buffer().unwrap();
            assert_eq!((len as usize, &buffer[..4]), (BYTES, &u32::to_be_bytes(received)[..]));
            received += 1;
            b.pool.push(buffer);
            Ok::<_, doorbell_verbs::CompletionError>(())
        });
        taken.unwrap();
    }
    let (end, end_ticks) = (since_1970(), b.context.clock_ticks().unwrap());
    assert!(last.0 <= end_ticks && last.1 <= end, "stamped when it came, not later");
    assert!(clock.between(start_ticks, end_ticks).as_nanos() > 0);
}

#[test]
fn queue_pairs_come_and_go_while_an_extended_queue_is_polled() {
    let (mut a, mut b) = (Side::new(0), Side::new(1));
    for round in 0..20_u8 {
        let (mut sender, receiver) = connect(&a, &b);
        let mut receiver = Some(receiver);
        for _ in 0..4 {
            let buffer = b.pool.pop().unwrap();
            receiver.as_mut().unwrap().receive(buffer).unwrap();
        }
        for _ in 0..2 {
            sender.send_inline(&[]).unwrap();
        }
        let mut received = 0;
        while received < 2 {
            b.cq.wait(TIMEOUT).unwrap().for_each(|done| {
                // Those flushed by the drop may arrive in the same poll.
                received += u32::from(done.is_ok());
                b.pool.extend(done.into_buffer());
                // With two receives in flight, by the polling thread.
                if received == 2 {
                    drop(receiver.take());
                }
            });
        }
        assert!(receiver.is_none(), "round {round}");
        // The queue pair is destroyed now, with what it had in flight.
        assert!(b.cq.poll().unwrap().next_completion().is_none());
        drop(sender);
        a.cq.poll().unwrap().for_each(|_| {});
        assert_eq!(
            (a.cq.unreserved(), b.cq.unreserved()),
            (4 * DEPTH, 4 * DEPTH),
            "round {round}"
        );
    }
}

#[test]
fn the_best_queue_of_a_soft_device_is_an_extended_one() {
    let best = open(0).best_completion_queue(8).unwrap();
    assert!(matches!(best, BestCompletionQueue::Extended(_)), "{best:?}");
}
