//! Completion channels and events on soft devices: the stub of `verbs` transmits nothing.

mod extended;

use std::thread;
use std::time::{Duration, Instant};

use doorbell_tests::soft::open;
use doorbell_verbs::{
    AsyncEvent, Buffer, CompletionChannel, CompletionQueue, CompletionQueueError, Local, Notify, ProtectionDomain,
    QueuePair, QueuePairEvent, Success,
};

/// Longer than any step takes, on a busy machine too.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How long an unwanted event is waited for.
const QUIET_TIME: Duration = Duration::from_millis(50);

struct End {
    qp: QueuePair,
    cq: CompletionQueue,
}

/// Two connected ends, whose completion queues of 32 entries are on these channels.
fn connect(a: (&ProtectionDomain, &CompletionChannel), b: (&ProtectionDomain, &CompletionChannel)) -> (End, End) {
    let prepare = |(pd, channel): (&ProtectionDomain, &CompletionChannel)| {
        let cq = pd.context().completion_queue_on(channel, 32).unwrap();
        let builder = pd.queue_pair(&cq).max_send_wr(16).max_recv_wr(16).signal_all();
        (builder.allow_remote_write().rc().unwrap(), cq)
    };
    let ((qp_a, cq_a), (qp_b, cq_b)) = (prepare(a), prepare(b));
    let (to_a, to_b) = (qp_a.endpoint(), qp_b.endpoint());
    let (qp_a, qp_b) = (qp_a.connect(&to_b).unwrap(), qp_b.connect(&to_a).unwrap());
    (End { qp: qp_a, cq: cq_a }, End { qp: qp_b, cq: cq_b })
}

fn side(n: u8) -> (ProtectionDomain, CompletionChannel) {
    let context = open(n);
    (
        context.protection_domain().unwrap(),
        context.completion_channel().unwrap(),
    )
}

fn buffer(pd: &ProtectionDomain) -> Buffer {
    pd.register(vec![0; 64], Local).unwrap()
}

fn next(cq: &mut CompletionQueue) -> Buffer {
    let start = Instant::now();
    let mut done = cq.wait(TIMEOUT).unwrap().next().expect("a completion came");
    assert!(start.elapsed() < TIMEOUT, "slept through a completion");
    done.result().unwrap();
    done.take().unwrap()
}

#[test]
fn ping_pong_by_completion_events() {
    let (a, b) = (side(0), side(1));
    let (mut ping, mut pong) = connect((&a.0, &a.1), (&b.0, &b.1));
    let (first, spare) = (buffer(&a.0), buffer(&a.0));
    let (inbox, answer) = (buffer(&b.0), buffer(&b.0));
    pong.qp.receive(inbox).unwrap();
    ping.qp.receive(spare).unwrap();
    // Until the message is received and the answer acknowledged: each returns one buffer.
    let play = |mut end: End, message: Buffer, starts: bool| {
        let mut message = Some(message);
        for round in 0..200 {
            if starts {
                end.qp.send(message.take().unwrap()).unwrap();
            }
            let mut buffers = Vec::new();
            let mut received = false;
            while !received {
                let start = Instant::now();
                for mut done in end.cq.wait(TIMEOUT).unwrap() {
                    received |= matches!(done.result().unwrap(), Success::Receive { .. });
                    buffers.push(done.take::<Local>().unwrap());
                }
                // The last poll of a timeout would also find the completion.
                assert!(start.elapsed() < TIMEOUT, "round {round}: slept through a completion");
            }
            if let Some(answer) = message.take() {
                end.qp.send(answer).unwrap();
            }
            while buffers.len() < 2 {
                buffers.push(next(&mut end.cq));
            }
            message = buffers.pop();
            end.qp.receive(buffers.pop().unwrap()).unwrap();
        }
        end
    };
    thread::scope(|scope| {
        let other = scope.spawn(|| play(pong, answer, false));
        let one = play(ping, first, true);
        drop((one, other.join().unwrap()));
    });
}

#[test]
fn a_channel_reports_its_queue_and_solicited_events() {
    let (a, b) = (side(0), side(1));
    let (mut from_x, mut x) = connect((&a.0, &a.1), (&b.0, &b.1));
    let (mut from_y, mut y) = connect((&a.0, &a.1), (&b.0, &b.1));
    for end in [&mut x, &mut y] {
        end.qp.receive(buffer(&b.0)).unwrap();
        end.qp.receive(buffer(&b.0)).unwrap();
        end.cq.arm(Notify::Solicited).unwrap();
    }
    let send = |end: &mut End, solicited: bool| {
        let message = buffer(&a.0);
        let posted = end.qp.post(|batch| {
            let request = batch.send(message);
            if solicited {
                request.solicited();
            }
        });
        posted.unwrap();
        next(&mut end.cq);
    };
    send(&mut from_x, false);
    assert_eq!(b.1.wait(QUIET_TIME).unwrap(), None, "it was not solicited");
    assert_eq!(x.cq.poll().unwrap().count(), 1, "and has come nevertheless");
    send(&mut from_y, true);
    assert_eq!(b.1.wait(TIMEOUT).unwrap(), Some(y.cq.id()));
    send(&mut from_x, true);
    assert_eq!(b.1.wait(TIMEOUT).unwrap(), Some(x.cq.id()));
    assert_eq!(b.1.try_next().unwrap(), None);
    // Unread events are dropped with their queue.
    y.cq.arm(Notify::Any).unwrap();
    send(&mut from_y, false);
    drop(y);
    assert_eq!(b.1.wait(QUIET_TIME).unwrap(), None);
}

#[test]
fn a_moderated_channel_is_notified_after_its_period() {
    let (a, b) = (side(0), side(1));
    let (mut sender, mut receiver) = connect((&a.0, &a.1), (&b.0, &b.1));
    const PERIOD_US: u16 = 20_000;
    receiver.cq.moderate(16, PERIOD_US).unwrap();
    receiver.qp.receive(buffer(&b.0)).unwrap();
    receiver.cq.arm(Notify::Any).unwrap();
    let start = Instant::now();
    sender.qp.send(buffer(&a.0)).unwrap();
    assert_eq!(b.1.wait(TIMEOUT).unwrap(), Some(receiver.cq.id()));
    let after = start.elapsed();
    assert!(after >= Duration::from_micros(PERIOD_US.into()), "{after:?}");
    next(&mut receiver.cq);
    next(&mut sender.cq);
}

#[test]
fn a_queue_is_resized_while_it_holds_completions() {
    let (a, b) = (side(0), side(1));
    let (mut sender, mut receiver) = connect((&a.0, &a.1), (&b.0, &b.1));
    for _ in 0..16 {
        receiver.qp.receive(buffer(&b.0)).unwrap();
    }
    for _ in 0..16 {
        sender.qp.send(buffer(&a.0)).unwrap();
    }
    let reserved = receiver.cq.resize(31).unwrap_err();
    assert!(
        matches!(reserved, CompletionQueueError::Reserved { reserved: 32, .. }),
        "{reserved}"
    );
    for entries in [64, 32, 128] {
        receiver.cq.resize(entries).unwrap();
        assert_eq!(receiver.cq.unreserved(), receiver.cq.capacity() - 32);
    }
    let second =
        b.0.queue_pair(&receiver.cq)
            .max_send_wr(48)
            .max_recv_wr(48)
            .rc()
            .unwrap();
    for _ in 0..16 {
        next(&mut receiver.cq);
        next(&mut sender.cq);
    }
    drop(second);
    receiver.cq.poll().unwrap();
    assert_eq!(receiver.cq.unreserved(), receiver.cq.capacity() - 32);
}

#[test]
fn a_refused_write_raises_an_event_of_the_queue_pair() {
    let (a, b) = (side(0), side(1));
    let (mut writer, victim) = connect((&a.0, &a.1), (&b.0, &b.1));
    let mut events = b.0.context().events().unwrap();
    assert_eq!(events.try_next().unwrap(), None);
    let invalid = doorbell_verbs::Remote::<doorbell_verbs::WriteAccess>::from_raw(0, 0, 64);
    writer.qp.write(buffer(&a.0), invalid).unwrap();
    let event = events.wait(TIMEOUT).unwrap();
    let qpn = victim.qp.qpn();
    let expected = AsyncEvent::Qp {
        qpn,
        event: QueuePairEvent::AccessError,
    };
    assert_eq!(event, Some(expected));
    // The event is acknowledged, so this does not block.
    drop(victim);
    assert!(writer.cq.wait(TIMEOUT).unwrap().next().unwrap().result().is_err());
}
