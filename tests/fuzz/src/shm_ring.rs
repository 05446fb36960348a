//! A shm ring whose other end writes anything to it: records, heads, tags, at any time.
//!
//! The hostile end writes with pwrite(2) to the ring's file. Until it does, every record arrives as
//! it was sent, in order.

use std::collections::VecDeque;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use arbitrary::{Result, Unstructured};
use doorbell_softroce::links::shm_ring::segment::SegmentId;
use doorbell_softroce::links::shm_ring::{
    Disposition, HEADER, LARGEST, Payload, Received, Receiver, Record, RecordKind, Reference, Referrer, Sender,
};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

const REFERRER: Referrer<'static> = Referrer { qpn: 1, keys: &[2] };
/// Where the sender's and the receiver's words, and the slots, begin.
const AREAS: [u64; 5] = [0, 64, 128, 192, 4096];
const SLOT: u64 = 256;
const SEGMENT_LEN: u64 = 4096;
/// Mostly consumed.
const TAKES: [Disposition; 4] = [
    Disposition::Consumed,
    Disposition::Consumed,
    Disposition::Retained,
    Disposition::Deferred,
];

/// A file as another process gives it: sealed against shrinking.
pub(crate) fn sealed(len: u64) -> OwnedFd {
    let fd = memfd_create(c"fuzz", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING).expect("a memfd");
    let file = File::from(fd);
    file.set_len(len).expect("its length");
    fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).expect("its seal");
    file.into()
}

struct Ring {
    sender: Sender,
    receiver: Receiver,
    file: File,
    /// Headers and payloads in flight, while the ring is genuine.
    sent: VecDeque<(Vec<u8>, Vec<u8>)>,
    genuine: bool,
    /// One end has found the ring corrupt, and closes it.
    closed: bool,
}

/// Operations on a ring.
pub fn shm_ring(data: &[u8]) {
    let (sender, fd) = Sender::create().expect("a ring");
    let file = File::from(fd.try_clone().expect("a descriptor"));
    let mut ring = Ring {
        sender,
        receiver: Receiver::attach(fd).expect("our own ring"),
        file,
        sent: VecDeque::new(),
        genuine: true,
        closed: false,
    };
    let mut input = Unstructured::new(data);
    while !input.is_empty() && !ring.closed && ring.step(&mut input).is_ok() {}
}

impl Ring {
    fn step(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        match input.arbitrary::<u8>()? % 8 {
            0 | 1 => self.send_inline(input)?,
            2 => self.send_referred(input)?,
            3 | 4 => self.receive(*input.choose(&TAKES)?),
            5 => self.write(input)?,
            6 => self.write_record(input)?,
            _ => self.control(input)?,
        }
        Ok(())
    }

    fn send_inline(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let header = vec![input.arbitrary()?; input.int_in_range(0..=HEADER)?];
        let len = match input.arbitrary::<u8>()? {
            255 => LARGEST,
            long @ 200.. => usize::from(long) * 100,
            short => short.into(),
        };
        self.send(header, vec![input.arbitrary()?; len], None);
        Ok(())
    }

    /// A payload in the bulk area, and perhaps in a segment.
    fn send_referred(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let segment = Reference::Segment {
            id: SegmentId(input.int_in_range(1..=2)?),
            offset: input.arbitrary::<u16>()?.into(),
            len: input.arbitrary::<u16>()?.into(),
        };
        // Where the sender copies in is written by the hostile end alone: its content is unknown.
        self.genuine = false;
        let Ok((bulk, _)) = self.sender.copy_in(input.int_in_range(0..=LARGEST)?) else {
            return Ok(());
        };
        if bulk.len() + segment.len() > LARGEST {
            self.sender.discard();
            return Ok(());
        }
        self.send(vec![1; 12], Vec::new(), Some(&[bulk, segment]));
        Ok(())
    }

    fn send(&mut self, header: Vec<u8>, payload: Vec<u8>, referred: Option<&[Reference]>) {
        let record = Record {
            kind: RecordKind::Packet,
            header: &header,
            payload: referred.map_or(Payload::Inline(&payload), Payload::Referred),
        };
        match self.sender.has_space() {
            Ok(true) => {
                self.sender.push(&record, REFERRER).expect("there is space");
                self.sent.push_back((header, payload));
            }
            Ok(false) => self.sender.discard(),
            Err(_) => self.corrupt(),
        }
    }

    fn receive(&mut self, after: Disposition) {
        let inline = self.receiver.next_is_inline();
        let copy = |received: Received<'_>| {
            assert!(received.header.len() <= HEADER && received.body.len() <= LARGEST);
            let mut payload = vec![0; received.body.len()];
            let copied = received.body.copy_to_slice(0, &mut payload);
            (after, (received.header.to_vec(), payload, copied.is_ok()))
        };
        match self.receiver.pop_with(copy) {
            Ok(Some((header, payload, copied))) if self.genuine => {
                assert!(copied);
                assert_eq!(self.sent.front(), Some(&(header, payload)));
                if !matches!(after, Disposition::Deferred) {
                    self.sent.pop_front();
                }
            }
            Ok(None) => {
                assert!(!inline && (!self.genuine || self.sent.is_empty()), "a record is lost");
            }
            Ok(_) => {}
            Err(_) => self.corrupt(),
        }
    }

    fn corrupt(&mut self) {
        assert!(!self.genuine, "a genuine ring is found corrupt");
        self.closed = true;
    }

    /// Bytes anywhere: mostly in the words of either end, and the first slots.
    fn write(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        self.genuine = false;
        let at = *input.choose(&AREAS)? + u64::from(input.arbitrary::<u16>()? % 2048);
        let len = input.int_in_range(1..=16)?;
        let bytes = input.bytes(len)?;
        self.file
            .write_all_at(bytes, at)
            .expect("the file is not sealed against writing");
        Ok(())
    }

    /// A record in one of the first slots, with any control word and content, that its tag
    /// publishes.
    fn write_record(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        self.genuine = false;
        let slot = input.int_in_range(0..=3)?;
        let [kind, location, header, references] = input.arbitrary::<[u8; 4]>()?;
        let control = [kind % 4, location % 6, header, references];
        let len = input.int_in_range(0..=64)?;
        let mut bytes = (slot + 1_u64).to_ne_bytes().to_vec();
        bytes.extend(control);
        bytes.extend(input.arbitrary::<u32>()?.to_ne_bytes());
        bytes.extend(input.bytes(len)?);
        self.file.write_all_at(&bytes, 4096 + slot * SLOT).expect("as above");
        Ok(())
    }

    fn control(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let id = SegmentId(input.int_in_range(1..=2)?);
        let done = match input.arbitrary::<u8>()? % 9 {
            0 => self.sender.request_credit_wakeup().map(drop),
            1 => self.sender.revoke_region(2),
            2 => self.sender.revoke_qp(1),
            3 => {
                self.sender.announce(id);
                Ok(())
            }
            4 => {
                let _ = self.receiver.add_segment(id, sealed(SEGMENT_LEN));
                Ok(())
            }
            5 => {
                let _ = self.receiver.sleep();
                self.receiver.awake();
                Ok(())
            }
            6 => {
                let _ = self.receiver.was_revoked();
                self.receiver.release();
                Ok(())
            }
            7 => {
                self.receiver.enable_device_memory();
                self.receiver.add_device_memory(input.arbitrary()?);
                self.receiver.remove_segment(id);
                Ok(())
            }
            _ => {
                let _ = self.receiver.credit_wakeup_pending();
                Ok(())
            }
        };
        if done.is_err() {
            self.corrupt();
        }
        Ok(())
    }
}
