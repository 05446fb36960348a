//! UC: a stream of messages and writes to one peer.

use doorbell_verbs::{PeerWrite, QueueKind, QueuePairBuilder, Success};

use crate::{Side, connect};

#[test]
fn uc_streams_messages_and_writes() {
    let (mut a, mut b) = (Side::new(0), Side::new(1));
    let (mut to_b, mut to_a) = connect(&a, &b, |builder| builder.allow_remote_write().uc());
    let inbox = b.pd.register(vec![0; 3 << 10], PeerWrite).unwrap();
    let mut message = Some(a.buffer(5 << 10));
    for round in 0..100_u32 {
        to_a.receive(b.buffer(6 << 10)).unwrap();
        to_a.receive(b.buffer(8)).unwrap();
        let mut whole = message.take().unwrap();
        whole.fill(round as u8);
        let written = [0x80 | round as u8; 64];
        // The WRITE overtakes nothing: its immediate consumes the second receive.
        to_b.post(|batch| {
            batch.send(whole.part(..)).imm(round);
            batch.write_inline(&written, inbox.remote()).imm(!round).signaled();
        })
        .unwrap();
        b.next(QueueKind::Receive, |completion| {
            let (len, imm) = (5 << 10, Some(round));
            assert_eq!(completion.result(), Ok(Success::Receive { len, imm }));
            assert!(completion.datagram().is_none(), "UC has no datagrams");
            let buffer = completion.take::<doorbell_verbs::Local>().unwrap();
            assert!(buffer[..5 << 10].iter().all(|&byte| byte == round as u8));
        });
        b.next(QueueKind::Receive, |completion| {
            assert_eq!(completion.result(), Ok(Success::ReceiveWrite { len: 64, imm: !round }));
        });
        let mut first = [0; 64];
        inbox.read_at(0, &mut first);
        assert_eq!(first, written);
        // The WRITE's completion, which has no buffer, retires the SEND and returns its buffer.
        while message.is_none() {
            message = a.next(QueueKind::Send, |completion| completion.take());
        }
    }
}

#[test]
fn uc_refuses_unsupported_rights() {
    let side = Side::new(0);
    type Allow = for<'a> fn(QueuePairBuilder<'a>) -> QueuePairBuilder<'a>;
    let refused: [(Allow, &str); 2] = [
        (|builder| builder.allow_remote_read(), "allow_remote_read"),
        (
            |builder| builder.allow_remote_write().allow_remote_atomic(),
            "allow_remote_atomic",
        ),
    ];
    for (allow, named) in refused {
        let error = allow(side.builder()).uc().unwrap_err().to_string();
        assert_eq!(
            error,
            format!("a UC queue pair has no use for {named}: only RC has READ and atomics, and UD has SEND alone")
        );
    }
    assert!(side.builder().allow_remote_write().ud().is_err());
}
