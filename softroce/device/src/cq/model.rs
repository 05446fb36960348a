//! Loom model of a queue that is armed and polled while a completion arrives: the poll finds it, or
//! the channel is notified. Run by `cargo xtask sanitize loom`.

use doorbell_roce_proto::Qpn;
use doorbell_roce_proto::work::CompletionOpcode;
use loom::thread;

use super::*;

fn queue() -> (Arc<CqRing>, Arc<EventQueue<Token>>) {
    let channel = Arc::new(EventQueue::new().unwrap());
    let notify = CqNotify {
        channel: Arc::clone(&channel),
        token: 1,
    };
    let owner = EventOwner {
        queue: Arc::new(EventQueue::new().unwrap()),
        token: 1,
    };
    (
        Arc::new(CqRing::new(2, Some(notify), TimestampClocks::default(), owner)),
        channel,
    )
}

fn completion() -> Completion {
    Completion {
        wr_id: 1,
        status: Status::Success,
        opcode: CompletionOpcode::Send,
        byte_len: 0,
        imm: None,
        invalidated: None,
        qpn: Qpn::new(2),
        src_qpn: Qpn::new(2),
        solicited: false,
        grh: None,
    }
}

#[test]
fn a_completion_is_polled_after_arming_or_notified() {
    loom::model(|| {
        let (ring, channel) = queue();
        let pushing = thread::spawn({
            let ring = Arc::clone(&ring);
            move || ring.push(completion(), || Instant(0))
        });
        ring.arm(false);
        let found = ring.take(2, |_, _| {}).unwrap();
        pushing.join().unwrap();
        assert!(found == 1 || channel.len() == 1, "it would be slept through");
        assert_eq!(found + ring.take(2, |_, _| {}).unwrap(), 1);
    });
}
