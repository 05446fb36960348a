//! Sleeping and events over the stub: no wake-up is lost, every event is acknowledged once.

use std::io;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use doorbell_verbs::{
    AsyncEvent, Buffer, CompletionChannel, CompletionQueue, CompletionQueueError, Context, EventError, Local, Notify,
    PortEvent, ProtectionDomain, QueuePair, QueuePairEvent,
};
use doorbell_verbs_sys as sys;

use crate::rig::{PEER, opened};
use crate::stub::{Stub, Verb};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Long enough to notice an event that must not happen.
const SHORT_TIMEOUT: Duration = Duration::from_millis(20);

fn opened_with_channel() -> (&'static Stub, Context, ProtectionDomain, CompletionChannel) {
    let (stub, context, pd) = opened();
    let channel = context.completion_channel().unwrap();
    (stub, context, pd, channel)
}

fn on_channel(pd: &ProtectionDomain, channel: &CompletionChannel) -> (QueuePair, CompletionQueue, Buffer) {
    let cq = pd.context().completion_queue_on(channel, 32).unwrap();
    let qp = pd
        .queue_pair(&cq)
        .max_send_wr(16)
        .max_recv_wr(16)
        .signal_all()
        .rc()
        .unwrap();
    let buffer = pd.register(vec![0_u8; 64], Local).unwrap();
    (qp.connect(&PEER).unwrap(), cq, buffer)
}

/// The next buffer, where an event ended the sleep: not the timeout, after which a poll finds it.
fn woken(cq: &mut CompletionQueue) -> Buffer {
    let start = Instant::now();
    let mut done = cq.wait(TIMEOUT).unwrap().next().expect("a completion came");
    assert!(start.elapsed() < TIMEOUT, "slept through a completion");
    done.take().unwrap()
}

#[test]
fn a_sleeper_is_woken_by_a_completion() {
    let (stub, _context, pd, channel) = opened_with_channel();
    let (mut qp, mut cq, mut buffer) = on_channel(&pd, &channel);
    let qpn = qp.qpn().get();
    for _ in 0..200 {
        qp.send(buffer).unwrap();
        buffer = thread::scope(|scope| {
            scope.spawn(|| stub.complete_sends(qpn, 1));
            woken(&mut cq)
        });
    }
    drop((qp, cq, channel));
    assert_eq!(stub.live("channel"), 0);
}

#[test]
fn a_wait_times_out_and_returns_earlier_completions_at_once() {
    let (stub, _context, pd, channel) = opened_with_channel();
    let (mut qp, mut cq, buffer) = on_channel(&pd, &channel);
    assert_eq!(cq.wait(SHORT_TIMEOUT).unwrap().count(), 0);
    qp.send(buffer).unwrap();
    stub.complete_sends(qp.qpn().get(), 1);
    assert_eq!(cq.wait(None).unwrap().count(), 1, "without any event");
    // The completion came when the first wait had armed: its event is stale, and ends no wait.
    assert_eq!(cq.wait(SHORT_TIMEOUT).unwrap().count(), 0);
}

#[test]
fn a_completion_between_poll_and_arming_is_not_missed() {
    let (stub, _context, pd, channel) = opened_with_channel();
    let (mut qp, mut cq, buffer) = on_channel(&pd, &channel);
    qp.send(buffer).unwrap();
    stub.complete_before_arming(qp.qpn().get());
    // It raises no event: nothing would end this sleep.
    assert_eq!(cq.wait(None).unwrap().count(), 1);
    assert_eq!(channel.try_next().unwrap(), None);
}

#[test]
fn events_of_a_channel_identify_their_queue() {
    let (stub, _context, pd, channel) = opened_with_channel();
    let (mut a, mut cq_a, buffer_a) = on_channel(&pd, &channel);
    let (mut b, mut cq_b, buffer_b) = on_channel(&pd, &channel);
    assert_ne!(cq_a.id(), cq_b.id());
    assert_eq!(channel.try_next().unwrap(), None);
    cq_a.arm(Notify::Any).unwrap();
    cq_b.arm(Notify::Any).unwrap();
    b.send(buffer_b).unwrap();
    stub.complete_sends(b.qpn().get(), 1);
    a.send(buffer_a).unwrap();
    stub.complete_sends(a.qpn().get(), 1);
    assert_eq!(channel.wait(TIMEOUT).unwrap(), Some(cq_b.id()));
    assert_eq!(channel.try_next().unwrap(), Some(cq_a.id()));
    assert_eq!(channel.wait(SHORT_TIMEOUT).unwrap(), None, "armed for one event only");
}

#[test]
fn solicited_only_arming_reports_failures_alone() {
    let (stub, _context, pd, channel) = opened_with_channel();
    let (mut qp, mut cq, buffer) = on_channel(&pd, &channel);
    cq.arm(Notify::Solicited).unwrap();
    qp.send(buffer).unwrap();
    stub.complete_sends(qp.qpn().get(), 1);
    assert_eq!(channel.try_next().unwrap(), None);
    let buffer = cq.poll().unwrap().next().unwrap().take::<Local>().unwrap();
    qp.send(buffer).unwrap();
    stub.fail_send(qp.qpn().get(), sys::IBV_WC_RETRY_EXC_ERR);
    assert_eq!(channel.try_next().unwrap(), Some(cq.id()));
}

/// Each thread sleeps for its own queue, and reads the events of the others as well.
#[test]
fn no_thread_loses_its_event_to_another() {
    let (stub, _context, pd, channel) = opened_with_channel();
    let sleepers: Vec<_> = (0..4).map(|_| on_channel(&pd, &channel)).collect();
    thread::scope(|scope| {
        let running = sleepers.into_iter().map(|(mut qp, mut cq, mut buffer)| {
            scope.spawn(move || {
                let qpn = qp.qpn().get();
                for _ in 0..100 {
                    qp.send(buffer).unwrap();
                    let completer = thread::spawn(move || stub.complete_sends(qpn, 1));
                    buffer = woken(&mut cq);
                    completer.join().unwrap();
                }
            })
        });
        let running: Vec<_> = running.collect();
        while !running.iter().all(|sleeper| sleeper.is_finished()) {
            channel.try_next().unwrap();
        }
    });
}

#[test]
fn events_are_acknowledged_together_and_all_before_the_queue_goes() {
    let (stub, _context, pd, channel) = opened_with_channel();
    let (mut qp, mut cq, mut buffer) = on_channel(&pd, &channel);
    for _ in 0..100 {
        cq.arm(Notify::Any).unwrap();
        qp.send(buffer).unwrap();
        stub.complete_sends(qp.qpn().get(), 1);
        assert_eq!(channel.wait(TIMEOUT).unwrap(), Some(cq.id()));
        buffer = cq.poll().unwrap().next().unwrap().take::<Local>().unwrap();
    }
    assert_eq!(stub.acknowledgements(), 1);
    cq.arm(Notify::Any).unwrap();
    qp.send(buffer).unwrap();
    stub.complete_sends(qp.qpn().get(), 1);
    // The stub asserts that none is left.
    drop((qp, cq));
    assert_eq!(stub.acknowledgements(), 2);
    assert_eq!(channel.try_next().unwrap(), None);
}

#[test]
fn a_queue_that_cannot_be_destroyed_keeps_its_channel() {
    let stub = Stub::new();
    let context = stub.open();
    let channel = context.completion_channel().unwrap();
    let cq = context.completion_queue_on(&channel, 8).unwrap();
    stub.fail(Verb::DestroyCq, libc::EBUSY);
    drop((cq, channel, context));
    assert_eq!((stub.live("cq"), stub.live("channel"), stub.live("context")), (1, 1, 1));
}

#[test]
fn events_use_the_requested_completion_vector() {
    let stub = Stub::new();
    let context = stub.open();
    let channel = context.completion_channel().unwrap();
    assert_eq!(context.completion_vectors(), 4);
    drop(context.completion_queue_on_vector(&channel, 3, 8).unwrap());
    assert_eq!(stub.vector(), Some(3));
    drop(context.completion_queue_on(&channel, 8).unwrap());
    assert_eq!(stub.vector(), Some(0));
    let error = context.completion_queue_on_vector(&channel, 4, 8).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("completion vector 4: {} has 4, counted from 0", stub.name)
    );
}

#[test]
fn busy_polling_needs_no_channel_and_ends_at_its_timeout() {
    let (stub, context, pd) = opened();
    let mut cq = context.completion_queue(4).unwrap();
    let qp = pd
        .queue_pair(&cq)
        .max_send_wr(2)
        .max_recv_wr(2)
        .signal_all()
        .rc()
        .unwrap();
    let mut qp = qp.connect(&PEER).unwrap();
    qp.send(pd.register(vec![0_u8; 64], Local).unwrap()).unwrap();
    assert_eq!(cq.busy_poll(SHORT_TIMEOUT).unwrap().count(), 0);
    let qpn = qp.qpn().get();
    thread::scope(|scope| {
        scope.spawn(|| stub.complete_sends(qpn, 1));
        assert_eq!(cq.busy_poll(None).unwrap().count(), 1);
    });
}

#[test]
fn a_queue_without_a_channel_says_so() {
    let stub = Stub::new();
    let context = stub.open();
    let mut cq = context.completion_queue(8).unwrap();
    let error = cq.wait(SHORT_TIMEOUT).unwrap_err();
    assert!(matches!(error, EventError::NoChannel { .. }), "{error}");
    assert!(error.to_string().contains("completion_queue_on"), "{error}");
    assert!(matches!(cq.arm(Notify::Any), Err(EventError::NoChannel { .. })));
    let elsewhere = Stub::new().open().completion_channel().unwrap();
    let error = context.completion_queue_on(&elsewhere, 8).unwrap_err();
    assert!(matches!(error, CompletionQueueError::ForeignChannel { .. }), "{error}");
    let channel = context.completion_channel().unwrap();
    stub.fail(Verb::CreateCq, libc::ENOMEM);
    let error = context.completion_queue_on(&channel, 8).unwrap_err();
    assert!(matches!(error, CompletionQueueError::Create { .. }), "{error}");
}

#[test]
fn asynchronous_events_name_their_objects() {
    let (stub, context, pd, channel) = opened_with_channel();
    let (qp, cq, _buffer) = on_channel(&pd, &channel);
    let qpn = qp.qpn();
    let mut events = context.events().unwrap();
    assert!(matches!(context.events(), Err(EventError::ReaderTaken { .. })));
    assert_eq!(events.try_next().unwrap(), None);
    assert_eq!(events.wait(SHORT_TIMEOUT).unwrap(), None);
    for (code, event) in [
        (sys::IBV_EVENT_QP_FATAL, QueuePairEvent::Fatal),
        (sys::IBV_EVENT_QP_REQ_ERR, QueuePairEvent::RequestError),
        (sys::IBV_EVENT_QP_ACCESS_ERR, QueuePairEvent::AccessError),
        (sys::IBV_EVENT_COMM_EST, QueuePairEvent::CommunicationEstablished),
        (sys::IBV_EVENT_SQ_DRAINED, QueuePairEvent::SendQueueDrained),
        (sys::IBV_EVENT_QP_LAST_WQE_REACHED, QueuePairEvent::LastRequestReached),
        (sys::IBV_EVENT_PATH_MIG, QueuePairEvent::PathMigrated),
        (sys::IBV_EVENT_PATH_MIG_ERR, QueuePairEvent::PathMigrationFailed),
    ] {
        stub.raise_on(qpn.get(), code);
        assert_eq!(events.wait(TIMEOUT).unwrap(), Some(AsyncEvent::Qp { qpn, event }));
    }
    for (code, event) in [
        (sys::IBV_EVENT_PORT_ACTIVE, PortEvent::Active),
        (sys::IBV_EVENT_PORT_ERR, PortEvent::Error),
        (sys::IBV_EVENT_LID_CHANGE, PortEvent::LidChanged),
        (sys::IBV_EVENT_PKEY_CHANGE, PortEvent::PkeysChanged),
        (sys::IBV_EVENT_SM_CHANGE, PortEvent::SubnetManagerChanged),
        (sys::IBV_EVENT_CLIENT_REREGISTER, PortEvent::ClientsMustReregister),
        (sys::IBV_EVENT_GID_CHANGE, PortEvent::GidsChanged),
    ] {
        stub.raise_on_port(code);
        assert_eq!(events.wait(TIMEOUT).unwrap(), Some(AsyncEvent::Port { port: 1, event }));
    }
    stub.raise_on_port(sys::IBV_EVENT_DEVICE_FATAL);
    assert_eq!(events.try_next().unwrap(), Some(AsyncEvent::DeviceFatal));
    stub.raise_overrun(qpn.get());
    assert_eq!(events.try_next().unwrap(), Some(AsyncEvent::CqOverrun(cq.id())));
    stub.raise_on(qpn.get(), sys::IBV_EVENT_WQ_FATAL);
    assert_eq!(
        events.try_next().unwrap(),
        Some(AsyncEvent::Other(sys::IBV_EVENT_WQ_FATAL))
    );
    drop(events);
    assert!(context.events().is_ok(), "one at a time");
}

#[test]
fn a_queue_pair_may_be_dropped_for_its_event() {
    let (stub, context, pd, channel) = opened_with_channel();
    let (qp, _cq, _buffer) = on_channel(&pd, &channel);
    let mut events = context.events().unwrap();
    let raiser = thread::spawn({
        let qpn = qp.qpn().get();
        move || stub.raise_on(qpn, sys::IBV_EVENT_QP_FATAL)
    });
    let event = events.wait(None).unwrap();
    assert!(matches!(event, Some(AsyncEvent::Qp { qpn, .. }) if qpn == qp.qpn()));
    // The stub asserts that the event is acknowledged.
    drop(qp);
    raiser.join().unwrap();
}

#[test]
fn a_queue_is_resized_but_not_below_what_is_reserved() {
    let (stub, context, pd) = opened();
    let mut cq = context.completion_queue(40).unwrap();
    let qp = pd.queue_pair(&cq).max_send_wr(20).max_recv_wr(20).rc().unwrap();
    assert_eq!((cq.capacity(), cq.unreserved()), (40, 0));
    let error = cq.resize(39).unwrap_err();
    assert!(
        matches!(
            error,
            CompletionQueueError::Reserved {
                entries: 39,
                reserved: 40,
                ..
            }
        ),
        "{error}"
    );
    cq.resize(100).unwrap();
    assert_eq!(
        (cq.capacity(), cq.unreserved()),
        (112, 72),
        "what the device made of it"
    );
    let second = pd.queue_pair(&cq).max_send_wr(36).max_recv_wr(36).rc().unwrap();
    drop(qp);
    cq.poll().unwrap();
    assert_eq!(cq.unreserved(), 40);
    cq.resize(72).unwrap();
    assert_eq!((cq.capacity(), cq.unreserved()), (80, 8));
    stub.fail(Verb::ResizeCq, libc::EOPNOTSUPP);
    let error = cq.resize(100).unwrap_err();
    assert!(error.to_string().contains("from the start"), "{error}");
    let error = cq.resize(10_000).unwrap_err();
    assert!(
        matches!(error, CompletionQueueError::TooLarge { max: 8192, .. }),
        "{error}"
    );
    assert_eq!((cq.capacity(), cq.unreserved()), (80, 8), "as it was");
    drop(second);
}

#[test]
fn moderation_reaches_the_device_or_is_unsupported() {
    let stub = Stub::new();
    let mut plain = stub.open().completion_queue(8).unwrap();
    match plain.moderate(16, 100).unwrap_err() {
        CompletionQueueError::Moderate { error, .. } => assert_eq!(error.kind(), io::ErrorKind::Unsupported),
        other => panic!("{other}"),
    }
    assert_eq!(stub.moderation(), None);
    drop(plain);
    stub.extend();
    let mut extended = stub.open().completion_queue(8).unwrap();
    extended.moderate(16, 100).unwrap();
    assert_eq!(stub.moderation(), Some((16, 100)));
}

#[test]
fn descriptors_do_not_block() {
    let stub = Stub::new();
    let context = stub.open();
    let (channel, events) = (context.completion_channel().unwrap(), context.events().unwrap());
    for fd in [channel.as_fd(), events.as_fd()] {
        let fd = fd.try_clone_to_owned().unwrap();
        let error = io::Read::read(&mut std::fs::File::from(fd), &mut [0; 8]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}

#[cfg(feature = "tokio")]
mod tokio_feature {
    use doorbell_verbs::{TokioChannel, TokioEvents};

    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let bounded = async { tokio::time::timeout(TIMEOUT, future).await };
        runtime.block_on(bounded).expect("nothing sleeps for ever")
    }

    #[test]
    fn no_task_loses_its_event_to_another() {
        let (stub, _context, pd, channel) = opened_with_channel();
        let sleepers: Vec<_> = (0..4).map(|_| on_channel(&pd, &channel)).collect();
        block_on(async {
            let channel = std::sync::Arc::new(TokioChannel::new(channel).unwrap());
            let tasks = sleepers.into_iter().map(|(mut qp, mut cq, mut buffer)| {
                let channel = channel.clone();
                tokio::spawn(async move {
                    for _ in 0..100 {
                        let qpn = qp.qpn().get();
                        qp.send(buffer).unwrap();
                        // Cancelling a wait loses nothing.
                        let brief = tokio::time::timeout(Duration::ZERO, channel.completions(&mut cq, Notify::Any));
                        assert!(brief.await.is_err(), "nothing is complete");
                        let completer = thread::spawn(move || stub.complete_sends(qpn, 1));
                        let mut done = channel.completions(&mut cq, Notify::Any).await.unwrap();
                        buffer = done.next().unwrap().take::<Local>().unwrap();
                        completer.join().unwrap();
                    }
                })
            });
            for task in tasks.collect::<Vec<_>>() {
                task.await.unwrap();
            }
        });
    }

    #[test]
    fn a_task_and_a_thread_share_a_channel() {
        let (stub, _context, pd, channel) = opened_with_channel();
        let (mut a, mut cq_a, buffer_a) = on_channel(&pd, &channel);
        let (mut b, mut cq_b, buffer_b) = on_channel(&pd, &channel);
        let (qpn_a, qpn_b) = (a.qpn().get(), b.qpn().get());
        a.send(buffer_a).unwrap();
        b.send(buffer_b).unwrap();
        thread::scope(|scope| {
            // Holds the lead on the descriptor for longer than the task takes.
            let sleeper = scope.spawn(|| woken(&mut cq_b));
            block_on(async {
                let channel = TokioChannel::new(channel).unwrap();
                scope.spawn(|| stub.complete_sends(qpn_a, 1));
                assert_eq!(channel.completions(&mut cq_a, Notify::Any).await.unwrap().count(), 1);
            });
            stub.complete_sends(qpn_b, 1);
            sleeper.join().unwrap();
        });
    }

    #[test]
    fn tasks_receive_completion_and_asynchronous_events() {
        let (stub, context, pd, channel) = opened_with_channel();
        let (mut qp, mut cq, buffer) = on_channel(&pd, &channel);
        let mut elsewhere = context.completion_queue(8).unwrap();
        cq.arm(Notify::Any).unwrap();
        qp.send(buffer).unwrap();
        block_on(async {
            let channel = TokioChannel::new(channel.clone()).unwrap();
            let mut events = TokioEvents::new(context.events().unwrap()).unwrap();
            assert!(
                TokioChannel::new(channel.channel().clone()).is_err(),
                "registered already"
            );
            let foreign = channel.completions(&mut elsewhere, Notify::Any).await;
            assert!(matches!(foreign, Err(EventError::ForeignChannel)));
            let qpn = qp.qpn();
            let raiser = thread::spawn(move || {
                stub.complete_sends(qpn.get(), 1);
                stub.raise_on(qpn.get(), sys::IBV_EVENT_COMM_EST);
            });
            assert_eq!(channel.wait().await.unwrap(), cq.id());
            let event = QueuePairEvent::CommunicationEstablished;
            assert_eq!(events.next().await.unwrap(), AsyncEvent::Qp { qpn, event });
            raiser.join().unwrap();
        });
    }
}
