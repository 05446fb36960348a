//! `lat write` and `lat send`: a ping-pong; both ends send, wait for the peer's message, and send
//! again. With `--verify` each end checks every byte before it answers.

use std::marker::PhantomData;

use doorbell_verbs::{Buffer, Local, Memory, PeerWrite, ProtectionDomain};

use super::super::bw::client::{ConnectOp, buffers, sinks};
use super::super::bw::receive::header;
use super::super::monitor::LoopMonitor;
use super::super::test_end::{AdvertisedMemory, Peer, QpMemory, QpRequirements, Test, TestEnd};
use crate::engine::gpu::{GpuMessages, GpuPool};
use crate::engine::lat::{Monitor, Trips};
use crate::engine::message::{Payloads, Sinks};
use crate::engine::pingpong::{BUFFERS, PingPong, PingPongMemory, PingPongParams, SendBuffers, Written};
use crate::engine::receiver::Receiver;
use crate::engine::requester::MessageOp;
use crate::engine::setup::RemoteAccess;
use crate::engine::transport::TestTransport;
use crate::failure::{Failure, refused};
use crate::plan::Verb;

const PARAMS: PingPongParams = PingPongParams {
    signal_every: 4,
    complete_first: false,
    polls: 2,
    times: 1,
    sleeps: false,
    advice: "",
};

#[derive(Debug)]
pub(crate) struct UnconnectedMemory<O> {
    out: SendBuffers,
    receiver: Option<Receiver>,
    written: Written,
    op: PhantomData<O>,
}

impl<O: ConnectOp> QpMemory for UnconnectedMemory<O> {
    type Connected = PingPongMemory<O>;

    fn requirements(test: &Test<'_>) -> QpRequirements {
        let (receive, access) = match test.plan.verb {
            Verb::Send => (BUFFERS, RemoteAccess::Nothing),
            Verb::Write if test.plan.gpu => (BUFFERS, RemoteAccess::Write),
            Verb::Write | Verb::Read | Verb::Atomic(_) => (1, RemoteAccess::Write),
        };
        QpRequirements::new(BUFFERS, receive, 0, access)
    }

    fn new(test: &Test<'_>, pd: &ProtectionDomain, _: usize) -> Result<Self, Failure> {
        let (len, count) = (test.len(), test.window().clamp(2, BUFFERS) as usize);
        let gpu = test.device.gpu.as_ref();
        let sends = test.plan.verb == Verb::Send;
        let out = match gpu {
            Some(gpu) => SendBuffers::Gpu(Box::new(GpuPool::new(gpu, pd, len, count)?)),
            None if test.is_inline() => SendBuffers::Host {
                free: Vec::new(),
                inline: vec![0; len],
            },
            None => SendBuffers::Host {
                free: buffers(test, pd, len, count)?,
                inline: Vec::new(),
            },
        };
        let receives = if sends {
            Some(sinks(test, pd, payloads(test)[1], count)?)
        } else if test.plan.gpu {
            // The payload is in the memory written to; a completion only reports it.
            let few = pd
                .register_chunks(Memory::zeroed(BUFFERS as usize), 1, Local)
                .map_err(refused)?;
            Some(Sinks::Scratch(few.map(Buffer::scratch).collect()))
        } else {
            None
        };
        let written = match gpu {
            _ if sends => Written::Nothing,
            Some(gpu) => {
                let (messages, written) = GpuMessages::in_one(gpu, pd, (len, 1), PeerWrite)?;
                Written::Gpu(Box::new(messages), written)
            }
            None => Written::Host(pd.register(test.memory(len)?, PeerWrite).map_err(refused)?),
        };
        Ok(UnconnectedMemory {
            out,
            receiver: receives.map(|free| Receiver::new(free, 1, None)),
            written,
            op: PhantomData,
        })
    }

    fn advertised_memory(&self) -> AdvertisedMemory {
        AdvertisedMemory {
            slots: 1,
            data: match &self.written {
                Written::Nothing => None,
                Written::Host(written) => Some(written.remote().to_bytes()),
                Written::Gpu(_, written) => Some(written.remote().to_bytes()),
            },
            ..AdvertisedMemory::default()
        }
    }

    fn connect<T: TestTransport>(mut self, peer: Peer<'_, T>) -> Result<PingPongMemory<O>, Failure> {
        let test = peer.test;
        if let Some(receiver) = &mut self.receiver {
            receiver.post(peer.test_qp, None)?;
        }
        Ok(PingPongMemory {
            op: O::connect(test, peer.keys)?,
            out: self.out,
            receiver: self.receiver,
            written: self.written,
            payloads: test.plan.verify.then(|| payloads(test)),
        })
    }
}

/// The payloads that this end sends, and those of the other direction.
fn payloads(test: &Test<'_>) -> [Payloads; 2] {
    let direction = |of_server| Payloads {
        stream: usize::from(of_server),
        header: header(test),
        ..Payloads::new(test.plan.seed, 0)
    };
    [direction(test.is_server), direction(!test.is_server)]
}

/// The server: answers until the client has finished. Returns the messages received.
pub(crate) fn serve<T: TestTransport, O: ConnectOp + MessageOp<T>>(
    test: &Test<'_>,
    test_end: &mut TestEnd<T, UnconnectedMemory<O>>,
) -> Result<Vec<u64>, Failure> {
    let mut pingpong = pingpong(test, test_end)?;
    let mut monitor = LoopMonitor::new(test);
    let mut index = 0;
    loop {
        while !pingpong.has_arrived(index)? {
            // The client finishes after the answer to its last message.
            if let Some(sent) = monitor.finished() {
                return if sent == [index] {
                    Ok(vec![index])
                } else {
                    Err(Failure::test(format!(
                        "peer {}: finished without sending all",
                        test.control.peer()
                    )))
                };
            }
            monitor.idle()?;
        }
        monitor.busy()?;
        while !pingpong.is_ready()? {
            monitor.idle()?;
        }
        pingpong.send(index, false)?;
        index += 1;
    }
}

/// One end of the ping-pong, over the first queue pair.
pub(crate) fn pingpong<'a, T: TestTransport, O: ConnectOp + MessageOp<T>>(
    test: &Test<'_>,
    test_end: &'a mut TestEnd<T, UnconnectedMemory<O>>,
) -> Result<PingPong<'a, T, O>, Failure> {
    let TestEnd { end, memory } = test_end;
    match memory.first_mut() {
        Some(memory) => {
            let params = PingPongParams {
                sleeps: test.plan.events,
                ..PARAMS
            };
            Ok(PingPong::new(end, memory, params, test.len()))
        }
        None => Err(Failure::test(format!(
            "peer {}: no queue pair to test",
            test.control.peer()
        ))),
    }
}
