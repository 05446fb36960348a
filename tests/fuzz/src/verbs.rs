//! Programs of the safe verbs API over the soft device: the input is the sequence of calls.
//!
//! Two queue pairs of this process are connected. What a WRITE, an atomic or a SEND leaves in the
//! peer's memory is known when it is posted, as one queue pair executes its requests in order: each
//! READ and each receive is compared with that. Only a READ may return what a later request without
//! a fence has written (IBTA vol 1, 10.8.3.3): its content is then unknown.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::OnceLock;

use arbitrary::{Result, Unstructured};
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs::{
    AllAccess, AtomicWord, Buffer, Buffers, CompletionQueue, Context, Library, Local, PeerAll, ProtectionDomain,
    QueueKind, QueuePair, Remote,
};

/// Bytes of every buffer, and of the memory that the peer exposes, whose last word is for atomics.
const LEN: usize = 512;
const BUFFERS: usize = 4;
const DEPTH: u32 = 8;

fn device() -> &'static Context {
    static DEVICE: OnceLock<Context> = OnceLock::new();
    DEVICE.get_or_init(|| {
        let [_, _, high, low] = std::process::id().to_be_bytes();
        let address = IpAddr::V4(Ipv4Addr::new(127, 160 + high % 64, low, 1));
        configure(vec![DeviceConfig {
            address: Some(address),
            ..DeviceConfig::new("soft0")
        }])
        .expect("nothing else configures devices");
        Library::new(api()).open("soft0").expect("the address is free")
    })
}

/// What the completion of a request must bring.
enum Expected {
    Nothing,
    /// The bytes of a READ, unless later requests may have overtaken it.
    Bytes {
        bytes: Vec<u8>,
        known: bool,
    },
    /// The value before an atomic.
    Word(u64),
}

struct Program {
    pd: ProtectionDomain,
    cq: CompletionQueue,
    near: QueuePair,
    far: QueuePair,
    /// The peer's memory, and what is in it after all posted requests.
    inbox: Buffer<PeerAll>,
    content: Vec<u8>,
    free: Vec<Buffer<Local>>,
    word: Option<AtomicWord>,
    expected: VecDeque<Expected>,
    /// Receives posted at the peer, and the messages on their way to them.
    receives: usize,
    messages: VecDeque<Vec<u8>>,
}

/// A sequence of calls.
pub fn verbs(data: &[u8]) {
    let mut input = Unstructured::new(data);
    let mut program = Program::new();
    while !input.is_empty() && program.step(&mut input).is_ok() {}
    // Half of the programs end with work in flight, which dropping must take back.
    if data.len().is_multiple_of(2) {
        program.finish();
        let mut left = vec![0; LEN];
        program.inbox.read_at(0, &mut left);
        assert_eq!(left, program.content);
    }
}

impl Program {
    fn new() -> Self {
        let pd = device().protection_domain().expect("a protection domain");
        let cq = device().completion_queue(4 * DEPTH).expect("a completion queue");
        let prepare = || {
            let builder = pd
                .queue_pair(&cq)
                .max_inline_data(64)
                .max_send_wr(DEPTH)
                .max_recv_wr(DEPTH);
            let builder = builder.allow_remote_read().allow_remote_write().allow_remote_atomic();
            builder.rc().expect("a queue pair")
        };
        let (near, far) = (prepare(), prepare());
        let ends = (near.endpoint(), far.endpoint());
        let near = near.connect(&ends.1).expect("its peer exists");
        let far = far.connect(&ends.0).expect("its peer exists");
        let register = || pd.register(vec![0; LEN], Local).expect("memory to register");
        let word = pd.register(vec![0; 8], Local).expect("memory to register").into_word();
        Self {
            inbox: pd.register(vec![0; LEN], PeerAll).expect("memory to register"),
            content: vec![0; LEN],
            free: (0..BUFFERS).map(|_| register()).collect(),
            word: word.ok(),
            expected: VecDeque::new(),
            receives: 0,
            messages: VecDeque::new(),
            pd,
            cq,
            near,
            far,
        }
    }

    fn step(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        match input.arbitrary::<u8>()? % 10 {
            0 => self.write(input)?,
            1 => self.write_inline(input)?,
            2 => self.read(input)?,
            3 => self.send(input)?,
            4 | 5 => self.receive(),
            6 => self.add(input)?,
            7 => self.replace_buffer(),
            _ => drop(self.poll()),
        }
        Ok(())
    }

    /// A range of the peer's memory, without the word of atomics.
    fn range(&self, input: &mut Unstructured<'_>) -> Result<(usize, usize, Remote<AllAccess>)> {
        let at = input.int_in_range(0..=LEN - 8)?;
        let len = input.int_in_range(0..=LEN - 8 - at)?;
        let remote = self.inbox.remote().slice(at as u64, len as u64);
        Ok((at, len, remote.expect("it is inside")))
    }

    fn write(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let (at, len, remote) = self.range(input)?;
        let (byte, fence) = (input.arbitrary()?, input.arbitrary()?);
        let Some(mut buffer) = self.free.pop() else {
            return Ok(());
        };
        buffer[..len].fill(byte);
        let posted = self.near.post(|batch| {
            let write = batch.write(buffer.part(..len), remote).signaled();
            drop(if fence { write.fence() } else { write });
        });
        if posted.is_ok() {
            self.overtakes(fence);
            self.content[at..at + len].fill(byte);
            self.expected.push_back(Expected::Nothing);
        }
        Ok(())
    }

    fn write_inline(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let (at, len, _) = self.range(input)?;
        let len = len.min(self.near.max_inline_data() as usize);
        let (bytes, fence) = (vec![input.arbitrary()?; len], input.arbitrary()?);
        let remote = self.inbox.remote().slice(at as u64, len as u64).expect("it is inside");
        let posted = self.near.post(|batch| {
            let write = batch.write_inline(&bytes, remote).signaled();
            drop(if fence { write.fence() } else { write });
        });
        if posted.is_ok() {
            self.overtakes(fence);
            self.content[at..at + len].copy_from_slice(&bytes);
            self.expected.push_back(Expected::Nothing);
        }
        Ok(())
    }

    fn read(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let (at, len, remote) = self.range(input)?;
        let Some(buffer) = self.free.pop() else { return Ok(()) };
        let posted = self
            .near
            .post(|batch| drop(batch.read(buffer.part(..len), remote).signaled()));
        if posted.is_ok() {
            let bytes = self.content[at..at + len].to_vec();
            self.expected.push_back(Expected::Bytes { bytes, known: true });
        }
        Ok(())
    }

    /// A request that writes was posted.
    fn overtakes(&mut self, fence: bool) {
        for expected in &mut self.expected {
            if let Expected::Bytes { known, .. } = expected {
                *known &= fence;
            }
        }
    }

    /// Only where a receive waits: the peer would answer with RNR NAKs otherwise.
    fn send(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let len = input.int_in_range(0..=LEN)?;
        let byte = input.arbitrary()?;
        if self.messages.len() >= self.receives {
            return Ok(());
        }
        let Some(mut buffer) = self.free.pop() else {
            return Ok(());
        };
        buffer[..len].fill(byte);
        let posted = self.near.post(|batch| drop(batch.send(buffer.part(..len)).signaled()));
        if posted.is_ok() {
            self.messages.push_back(vec![byte; len]);
            self.expected.push_back(Expected::Nothing);
        }
        Ok(())
    }

    fn receive(&mut self) {
        let Some(buffer) = self.free.pop() else { return };
        if self.far.receive(buffer).is_ok() {
            self.receives += 1;
        }
    }

    fn add(&mut self, input: &mut Unstructured<'_>) -> Result<()> {
        let add = input.arbitrary()?;
        let at = self.inbox.remote().word(LEN as u64 - 8).expect("it is aligned");
        let Some(word) = self.word.take() else { return Ok(()) };
        let posted = self.near.post(|batch| drop(batch.fetch_add(word, at, add).signaled()));
        if posted.is_ok() {
            self.overtakes(false);
            let last = self.content.last_chunk_mut::<8>().expect("it has a word");
            let before = u64::from_ne_bytes(*last);
            *last = before.wrapping_add(add).to_ne_bytes();
            self.expected.push_back(Expected::Word(before));
        }
        Ok(())
    }

    /// Deregisters a buffer, and registers another in its place, or those that a refused request
    /// has taken.
    fn replace_buffer(&mut self) {
        drop(self.free.pop());
        let out = self.expected.len() + self.receives;
        while self.free.len() + out < BUFFERS {
            self.free
                .push(self.pd.register(vec![0; LEN], Local).expect("memory to register"));
        }
    }

    /// Takes completions; returns whether there was one.
    fn poll(&mut self) -> bool {
        let mut taken = Vec::new();
        for done in self.cq.poll().expect("the queue has room") {
            let (queue, result) = (done.queue(), done.result());
            result.unwrap_or_else(|failure| panic!("a request failed: {failure}"));
            taken.push((queue, done.into_buffers()));
        }
        let any = !taken.is_empty();
        for (queue, buffers) in taken {
            if queue == QueueKind::Send {
                self.sent(buffers);
            } else {
                self.received(buffers);
            }
        }
        any
    }

    fn sent(&mut self, mut buffers: Buffers) {
        let expected = self
            .expected
            .pop_front()
            .expect("a request has completed that was not posted");
        let buffer = buffers.take::<Local>();
        match (expected, buffer) {
            (Expected::Nothing, buffer) => self.free.extend(buffer),
            (Expected::Bytes { bytes, known }, Some(buffer)) => {
                assert!(
                    !known || buffer[..bytes.len()] == bytes,
                    "a READ returned {buffer:?} for {bytes:?}"
                );
                self.free.push(buffer);
            }
            (Expected::Word(before), Some(buffer)) => {
                let word = buffer.into_word().expect("it was one");
                assert_eq!(word.get(), before);
                self.word = Some(word);
            }
            (_, None) => panic!("a completion without its buffer"),
        }
    }

    fn received(&mut self, mut buffers: Buffers) {
        let message = self.messages.pop_front().expect("a message that was not sent");
        let buffer = buffers.take::<Local>().expect("a receive without its buffer");
        assert_eq!(buffer[..message.len()], message);
        self.receives -= 1;
        self.free.push(buffer);
    }

    fn finish(&mut self) {
        while !self.expected.is_empty() || !self.messages.is_empty() {
            if !self.poll() {
                std::thread::yield_now();
            }
        }
    }
}
