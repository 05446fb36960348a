//! The queue pair of a stream: messages out and in, credits, and what has ended.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::Arc;

use bytes::Bytes;
use doorbell_verbs::{
    Buffer, Completion, CompletionQueue, Local, PostError, ProtectionDomain, QueueKind, QueuePair, Success,
};

use crate::chunk::{ReceivedChunk, ReturnQueue, SendChunk};
use crate::config::Sizes;
use crate::credits::{Credits, Header};
use crate::events::Waiters;

/// The longest message copied into the work request, where the device allows it, in bytes.
pub(crate) const INLINE: u32 = 128;

/// Send slots that data leaves free: for an update and the last message.
const SLOTS_KEPT: u32 = 2;

/// Requests of a send queue: at least one in half of them is signaled, and what was sent is unknown
/// until that one has completed.
pub(crate) fn send_depth(own: Sizes) -> u32 {
    2 * u32::from(own.chunks) + 2 * SLOTS_KEPT
}

/// Buffers registered as one region: for receiving, and for sending.
pub(crate) struct Memory {
    pub(crate) receiving: Vec<Buffer>,
    pub(crate) sending: Vec<Buffer>,
}

impl Memory {
    pub(crate) fn register(pd: &ProtectionDomain, own: Sizes) -> Result<Self, doorbell_verbs::MemoryError> {
        let (chunk, chunks) = (own.chunk as usize, usize::from(own.chunks));
        let whole = pd.register(vec![0; 2 * chunks * chunk], Local)?;
        let mut receiving: Vec<_> = whole.chunks(chunk).collect();
        let sending = receiving.split_off(chunks);
        Ok(Self { receiving, sending })
    }
}

pub(crate) struct StreamConnection {
    pub(crate) cq: CompletionQueue,
    qp: QueuePair,
    credits: Credits,
    outbound: Outbound,
    inbound: Inbound,
    failure: Option<Failure>,
}

struct Outbound {
    free: Arc<ReturnQueue>,
    /// The most bytes of a message: what the peer's receives take, and the buffers here.
    longest: usize,
    /// Messages with buffers since the last signaled one, and how many there may be.
    unsignaled: usize,
    unsignaled_most: usize,
    fin: Fin,
}

/// The end of this side's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fin {
    Open,
    /// Posted, as the send of that sequence.
    Posted(u64),
    /// The peer has it, and thus all before it.
    Acknowledged,
}

struct Inbound {
    /// In order, with the bytes of each that have been read.
    arrived: VecDeque<Arrived>,
    /// Receive buffers that the program is done with.
    returned: Arc<ReturnQueue>,
    ended: bool,
}

struct Arrived {
    buffer: Buffer,
    len: usize,
    read: usize,
}

/// Why nothing works any more; an `io::Error` cannot be given twice.
#[derive(Debug, Clone)]
struct Failure {
    kind: io::ErrorKind,
    text: Arc<str>,
}

impl Failure {
    fn error(&self) -> io::Error {
        io::Error::new(self.kind, self.text.to_string())
    }
}

impl StreamConnection {
    /// Receives of its own sizes have been posted to `qp`.
    pub(crate) fn new(
        (cq, qp): (CompletionQueue, QueuePair),
        sending: Vec<Buffer>,
        (own, peer): (Sizes, Sizes),
        waiters: &Arc<Waiters>,
    ) -> Self {
        let free = ReturnQueue::new(sending.len(), Arc::clone(waiters));
        let unsignaled_most = sending.len() / 2;
        for buffer in sending {
            free.put(buffer);
        }
        Self {
            cq,
            qp,
            credits: Credits::new(own.chunks, peer.chunks),
            outbound: Outbound {
                longest: own.chunk.min(peer.chunk) as usize,
                unsignaled: 0,
                unsignaled_most,
                free,
                fin: Fin::Open,
            },
            inbound: Inbound {
                arrived: VecDeque::with_capacity(own.chunks.into()),
                returned: ReturnQueue::new(own.chunks.into(), Arc::clone(waiters)),
                ended: false,
            },
            failure: None,
        }
    }

    /// Takes what has completed, posts receives and gives credits back. True if there was anything.
    pub(crate) fn drive(&mut self) -> bool {
        if self.failure.is_some() {
            return false;
        }
        match self.try_drive() {
            Ok(progress) => progress,
            Err(error) => {
                self.fail(error.kind(), &error.to_string());
                true
            }
        }
    }

    fn try_drive(&mut self) -> io::Result<bool> {
        let mut progress = false;
        while let Some(buffer) = self.inbound.returned.take() {
            self.receive_again(buffer)?;
            progress = true;
        }
        let completions = self.cq.poll().map_err(io::Error::other)?;
        for done in completions {
            progress = true;
            match done.queue() {
                QueueKind::Send => self.outbound.sent(done)?,
                QueueKind::Receive => {
                    if let Some(buffer) = self.inbound.received(done, &mut self.credits)? {
                        post(self.qp.receive(buffer))?;
                    }
                }
            }
        }
        if progress {
            self.update_peer()?;
        }
        Ok(progress)
    }

    fn receive_again(&mut self, buffer: Buffer) -> io::Result<()> {
        post(self.qp.receive(buffer))?;
        self.credits.posted_again();
        Ok(())
    }

    fn update_peer(&mut self) -> io::Result<()> {
        if self.qp.free_send_slots() == 0 || self.inbound.ended {
            return Ok(());
        }
        match self.credits.update() {
            Some(header) => post(self.qp.post(|batch| {
                batch.send_inline(&[]).imm(header.to_imm());
            })),
            None => Ok(()),
        }
    }

    /// Whether a message may be posted now.
    fn has_room(&self) -> bool {
        self.credits.available() > 0 && self.qp.free_send_slots() > SLOTS_KEPT
    }

    /// Sends as much of `bytes` as one message takes; `None` when there is no room for one.
    pub(crate) fn write(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        self.check_writable()?;
        let all: usize = bytes.iter().map(|slice| slice.len()).sum();
        if all == 0 {
            return Ok(Some(0));
        }
        if !self.has_room() {
            return Ok(None);
        }
        let len = all.min(self.outbound.longest);
        if len <= self.qp.max_inline_data().min(INLINE) as usize {
            let mut copied = [0; INLINE as usize];
            gather(bytes, &mut copied[..len]);
            self.send_inline(&copied[..len], false)?;
            return Ok(Some(len));
        }
        let Some(mut buffer) = self.outbound.free.take() else {
            return Ok(None);
        };
        gather(bytes, &mut buffer[..len]);
        self.send_buffer(buffer, len)?;
        Ok(Some(len))
    }

    /// A buffer to be filled, of `len` bytes at most; `None` when all are in flight.
    pub(crate) fn reserve(&mut self, len: usize) -> io::Result<Option<SendChunk>> {
        self.check_writable()?;
        let Outbound { free, longest, .. } = &self.outbound;
        Ok(free
            .take()
            .map(|buffer| SendChunk::new(buffer, len.min(*longest), Arc::clone(free))))
    }

    /// Sends a reserved buffer; `None` when there is no room, or no buffer of this stream.
    pub(crate) fn send(&mut self, chunk: &mut SendChunk) -> io::Result<Option<()>> {
        self.check_writable()?;
        let len = chunk.len();
        if len == 0 {
            return Ok(Some(()));
        }
        if !chunk.is_of(&self.outbound.free) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a buffer of another stream",
            ));
        }
        if !self.has_room() {
            return Ok(None);
        }
        match chunk.take() {
            Some(buffer) => self.send_buffer(buffer, len).map(Some),
            None => Ok(Some(())),
        }
    }

    fn check_writable(&self) -> io::Result<()> {
        self.check()?;
        match self.outbound.fin {
            Fin::Open => Ok(()),
            _ => Err(io::Error::new(
                io::ErrorKind::BrokenPipe,
                "this side of the stream has been shut down",
            )),
        }
    }

    fn send_inline(&mut self, bytes: &[u8], fin: bool) -> io::Result<()> {
        let Some(header) = self.credits.send(fin) else {
            return Err(no_credit());
        };
        post(self.qp.post(|batch| {
            batch.send_inline(bytes).imm(header.to_imm()).signaled_if(fin);
        }))
    }

    fn send_buffer(&mut self, buffer: Buffer, len: usize) -> io::Result<()> {
        let Some(header) = self.credits.send(false) else {
            return Err(no_credit());
        };
        // Or all buffers would be in flight with nothing to complete.
        self.outbound.unsignaled += 1;
        let signal = self.outbound.unsignaled >= self.outbound.unsignaled_most;
        if signal {
            self.outbound.unsignaled = 0;
        }
        post(self.qp.post(|batch| {
            batch.send(buffer.part(..len)).imm(header.to_imm()).signaled_if(signal);
        }))
    }

    /// Ends this side's bytes. True once the peer has all of them.
    pub(crate) fn shut_down(&mut self) -> io::Result<bool> {
        match self.outbound.fin {
            Fin::Acknowledged => return Ok(true),
            // It ended its bytes, then its stream: it reads none any more, as with TCP.
            _ if self.inbound.ended && self.is_reset() => return Ok(true),
            Fin::Posted(_) => {}
            Fin::Open if self.has_room() => {
                self.check()?;
                self.outbound.fin = Fin::Posted(self.qp.next_send());
                self.send_inline(&[], true)?;
            }
            Fin::Open => {}
        }
        self.check()?;
        Ok(false)
    }

    /// The peer has said that it has all bytes, if there were any more to come.
    pub(crate) fn acknowledge(&mut self) {
        if let Fin::Posted(_) = self.outbound.fin {
            self.outbound.fin = Fin::Acknowledged;
        }
    }

    /// Whether the peer may lack something of this side's.
    pub(crate) fn is_unfinished(&self) -> bool {
        self.failure.is_none() && self.outbound.fin != Fin::Acknowledged
    }

    /// Copies bytes that have arrived into `into`; `None` when there are none yet, 0 at the end.
    pub(crate) fn read(&mut self, into: &mut [u8]) -> io::Result<Option<usize>> {
        let Some(first) = self.inbound.arrived.front_mut() else {
            return self.at_end().map(|ended| ended.then_some(0));
        };
        let len = into.len().min(first.len - first.read);
        into[..len].copy_from_slice(&first.buffer[first.read..first.read + len]);
        first.read += len;
        if first.read == first.len
            && let Some(done) = self.inbound.arrived.pop_front()
        {
            self.receive_again(done.buffer).and_then(|()| self.update_peer())?;
        }
        Ok(Some(len))
    }

    /// Lends the unread bytes of the next buffer that has arrived; empty at the end.
    pub(crate) fn take(&mut self) -> io::Result<Option<Bytes>> {
        match self.inbound.arrived.pop_front() {
            Some(Arrived { buffer, len, read }) => {
                let chunk = ReceivedChunk::new(buffer, len, Arc::clone(&self.inbound.returned));
                Ok(Some(Bytes::from(chunk).slice(read..)))
            }
            None => self.at_end().map(|ended| ended.then(Bytes::new)),
        }
    }

    /// Whether the peer has ended its bytes, all of which have been read.
    fn at_end(&self) -> io::Result<bool> {
        if !self.inbound.ended {
            self.check()?;
        }
        Ok(self.inbound.ended)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.inbound.ended
    }

    /// The first failure stays.
    pub(crate) fn fail(&mut self, kind: io::ErrorKind, text: &str) {
        self.failure.get_or_insert_with(|| Failure {
            kind,
            text: text.into(),
        });
    }

    fn is_reset(&self) -> bool {
        let kind = self.failure.as_ref().map(|failure| failure.kind);
        kind == Some(io::ErrorKind::ConnectionReset)
    }

    fn check(&self) -> io::Result<()> {
        self.failure.as_ref().map_or(Ok(()), |failure| Err(failure.error()))
    }
}

impl Outbound {
    fn sent(&mut self, mut done: Completion<'_>) -> io::Result<()> {
        done.check()
            .map_err(|error| io::Error::new(io::ErrorKind::ConnectionReset, error))?;
        if self.fin == Fin::Posted(done.sequence()) {
            self.fin = Fin::Acknowledged;
        }
        if let Some(buffer) = done.take::<Local>() {
            self.free.put(buffer);
        }
        Ok(())
    }
}

impl Inbound {
    /// Keeps a message with bytes; returns the buffer of an update, to be posted again.
    fn received(&mut self, mut done: Completion<'_>, credits: &mut Credits) -> io::Result<Option<Buffer>> {
        let failed = |error| io::Error::new(io::ErrorKind::ConnectionReset, error);
        let Success::Receive { len, imm: Some(imm) } = done.result().map_err(failed)? else {
            return Err(protocol("a message without immediate data"));
        };
        let header = Header::from_imm(imm).ok_or_else(|| protocol("immediate data of no stream"))?;
        if !credits.received(header) {
            return Err(protocol("more credits than there are"));
        }
        let buffer = done.take::<Local>().ok_or_else(|| protocol("no buffer"))?;
        self.take_in(header, buffer, len as usize)
    }

    fn take_in(&mut self, header: Header, buffer: Buffer, len: usize) -> io::Result<Option<Buffer>> {
        match header {
            Header { update: true, .. } if len == 0 => return Ok(Some(buffer)),
            Header { fin: true, .. } if len == 0 && !self.ended => self.ended = true,
            Header {
                fin: false,
                update: false,
                ..
            } if len > 0 && !self.ended => {
                self.arrived.push_back(Arrived { buffer, len, read: 0 });
            }
            _ => return Err(protocol("bytes where none may be, or none where some must")),
        }
        Ok(None)
    }
}

fn gather(from: &[IoSlice<'_>], mut into: &mut [u8]) {
    for slice in from {
        let len = slice.len().min(into.len());
        let (now, later) = into.split_at_mut(len);
        now.copy_from_slice(&slice[..len]);
        into = later;
    }
}

fn post(posted: Result<(), PostError>) -> io::Result<()> {
    posted.map_err(io::Error::other)
}

fn protocol(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the peer has sent {what}"))
}

fn no_credit() -> io::Error {
    io::Error::other("a message without a credit")
}
