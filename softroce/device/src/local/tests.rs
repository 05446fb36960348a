//! Two ends of a lane in one process.

use super::*;

const NOBODY: Referrer<'static> = Referrer { qpn: 0, keys: &[] };

fn lane() -> (Sender, Receiver) {
    let (sender, fd) = Sender::create().unwrap();
    let own = i32::try_from(std::process::id()).unwrap();
    (sender, Receiver::attach(fd, Some(own)).unwrap())
}

fn packet<'a>(header: &'a [u8], payload: Payload<'a>) -> Record<'a> {
    Record {
        kind: Kind::Packet,
        header,
        payload,
    }
}

/// Kind, header and payload.
type Whole = (Kind, Vec<u8>, Result<Vec<u8>, Gone>);

/// Takes a record whole.
fn take(receiver: &mut Receiver) -> Option<Whole> {
    let whole = |received: Received<'_>| {
        let mut payload = vec![0; received.body.len()];
        let copied = received.body.copy_to_slice(0, &mut payload);
        (received.kind, received.header.to_vec(), copied.map(|()| payload))
    };
    receiver.pop(whole).unwrap()
}

#[test]
fn small_and_large_payloads_come_over() {
    let (mut sender, mut receiver) = lane();
    for len in [0, 1, 8, 64, 200, 232, 233, 1024, 4200, LARGEST] {
        let payload: Vec<u8> = (0..len).map(|n| n as u8).collect();
        assert_eq!(sender.room(), Ok(true));
        let record = packet(b"header", Payload::Inline(&payload));
        sender.push(&record, NOBODY).unwrap();
        assert_eq!(
            take(&mut receiver),
            Some((Kind::Packet, b"header".to_vec(), Ok(payload)))
        );
    }
    assert_eq!(take(&mut receiver), None);
}

#[test]
fn process_memory_is_read_by_address() {
    let (mut sender, mut receiver) = lane();
    assert!(sender.peer_reads_memory());
    let memory: Vec<u8> = (0..100_000).map(|n| (n % 251) as u8).collect();
    let addr = memory.as_ptr().expose_provenance() as u64;
    let references = [
        Reference::Process { addr, len: 70_000 },
        Reference::Process {
            addr: addr + 70_000,
            len: 30_000,
        },
    ];
    sender
        .push(&packet(b"", Payload::Referred(&references)), NOBODY)
        .unwrap();
    assert_eq!(take(&mut receiver), Some((Kind::Packet, vec![], Ok(memory))));
}
