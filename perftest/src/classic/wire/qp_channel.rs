//! Control messages over a queue pair connected by the connection manager, for `-R` and `-z`: each
//! is one SEND.
//!
//! Two receives are always posted: the peer sends one message, and no further one before it has
//! this end's. A message too long for a receive breaks the connection, as on any queue pair.

use std::thread;
use std::time::{Duration, Instant};

use doorbell_verbs::cm::{Connection, ConnectionEvent};
use doorbell_verbs::{Buffer, CompletionQueue, Context, Local, PreparedQueuePair, QueueKind, QueuePair, Success};

use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// Length of a receive; every message is shorter.
const LONGEST: usize = 64;
const RECEIVES: u32 = 2;
/// Busy-polls before a wait starts to sleep: a reply that is sent at once arrives within them.
const BUSY_POLLS: u32 = 2_000;
/// Sleep between polls after that.
const SLEEP: Duration = Duration::from_micros(200);
/// RNR retry count: 7 is infinite.
const RNR_RETRY: u8 = 7;

#[derive(Debug)]
pub(super) enum ChannelError {
    Lost(String),
    TimedOut,
    Interrupted,
}

impl ChannelError {
    fn lost(error: impl std::fmt::Display) -> ChannelError {
        ChannelError::Lost(one_line(&error.to_string()))
    }
}

#[derive(Debug)]
pub(crate) struct PreparedChannel {
    qp: PreparedQueuePair,
    cq: CompletionQueue,
}

impl PreparedChannel {
    pub(crate) fn new(context: &Context, port: u8) -> Result<PreparedChannel, Failure> {
        let refused = |e: &dyn std::fmt::Display| {
            Failure::test(format!(
                "cannot make the queue pair of the control connection: {}",
                one_line(&e.to_string())
            ))
        };
        let pd = context.protection_domain().map_err(|e| refused(&e))?;
        let cq = context.completion_queue(1 + RECEIVES).map_err(|e| refused(&e))?;
        let mut qp = pd
            .queue_pair(&cq)
            .port(port)
            .max_send_wr(1)
            .max_recv_wr(RECEIVES)
            .max_inline_data(LONGEST as u32)
            .rnr_retry(RNR_RETRY)
            .rc()
            .map_err(|e| refused(&e))?;
        for _ in 0..RECEIVES {
            let buffer = pd.register(vec![0; LONGEST], Local).map_err(|e| refused(&e))?;
            qp.receive(buffer).map_err(|e| refused(&e))?;
        }
        Ok(PreparedChannel { qp, cq })
    }

    pub(crate) fn connect<E>(
        self,
        connect: impl FnOnce(PreparedQueuePair) -> Result<(QueuePair, Connection), E>,
    ) -> Result<QpChannel, E> {
        let (qp, connection) = connect(self.qp)?;
        Ok(QpChannel {
            qp,
            cq: self.cq,
            connection,
            received: None,
            send_pending: false,
        })
    }
}

#[derive(Debug)]
pub(crate) struct QpChannel {
    qp: QueuePair,
    cq: CompletionQueue,
    connection: Connection,
    /// A received message that was not read yet, with its length.
    received: Option<(Buffer<Local>, usize)>,
    send_pending: bool,
}

impl QpChannel {
    pub(super) fn send(&mut self, message: &[u8], within: Duration, interrupt: &Interrupt) -> Result<(), ChannelError> {
        self.qp
            .post(|batch| {
                batch.send_inline(message).signaled();
            })
            .map_err(ChannelError::lost)?;
        self.send_pending = true;
        self.wait(Some(within), interrupt, |channel| !channel.send_pending)
    }

    /// Receives a message of exactly the length of `into`.
    pub(super) fn receive(
        &mut self,
        into: &mut [u8],
        within: Option<Duration>,
        interrupt: &Interrupt,
    ) -> Result<(), ChannelError> {
        self.wait(within, interrupt, |channel| channel.received.is_some())?;
        let Some((buffer, len)) = self.received.take() else {
            return Ok(());
        };
        if len == into.len() {
            into.copy_from_slice(&buffer[..len]);
        }
        self.qp.receive(buffer).map_err(ChannelError::lost)?;
        if len == into.len() {
            Ok(())
        } else {
            Err(ChannelError::Lost(format!(
                "it sent {len} B instead of {}: is it the same tool with the same options?",
                into.len()
            )))
        }
    }

    pub(super) fn has_received(&mut self) -> Result<bool, ChannelError> {
        self.poll()?;
        if self.received.is_none() {
            self.check_connected()?;
        }
        Ok(self.received.is_some())
    }

    fn wait(
        &mut self,
        within: Option<Duration>,
        interrupt: &Interrupt,
        is_done: impl Fn(&QpChannel) -> bool,
    ) -> Result<(), ChannelError> {
        let deadline = within.map(|within| Instant::now() + within);
        let mut polls = 0;
        loop {
            self.poll()?;
            if is_done(self) {
                return Ok(());
            }
            polls += 1;
            if polls < BUSY_POLLS {
                std::hint::spin_loop();
                continue;
            }
            polls = BUSY_POLLS;
            if interrupt.requested() {
                return Err(ChannelError::Interrupted);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(ChannelError::TimedOut);
            }
            if let Err(gone) = self.check_connected() {
                // The last message may have arrived together with the disconnect.
                self.poll()?;
                return if is_done(self) { Ok(()) } else { Err(gone) };
            }
            thread::sleep(SLEEP);
        }
    }

    fn poll(&mut self) -> Result<(), ChannelError> {
        let completions = self.cq.poll().map_err(ChannelError::lost)?;
        for mut done in completions {
            let result = done.result().map_err(ChannelError::lost)?;
            match (done.queue(), result) {
                (QueueKind::Send, _) => self.send_pending = false,
                (_, Success::Receive { len, .. }) => {
                    if self.received.is_some() {
                        return Err(ChannelError::Lost("it sent a message out of turn".to_owned()));
                    }
                    self.received = done.take().map(|buffer| (buffer, (len as usize).min(LONGEST)));
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn check_connected(&mut self) -> Result<(), ChannelError> {
        let gone = "it closed the connection, or its process ended".to_owned();
        loop {
            match self.connection.next_event(Duration::ZERO) {
                Ok(None) => return Ok(()),
                Ok(Some(ConnectionEvent::Disconnected | ConnectionEvent::DeviceRemoved)) => {
                    return Err(ChannelError::Lost(gone));
                }
                Ok(Some(_)) => {}
                Err(e) => return Err(ChannelError::lost(e)),
            }
        }
    }
}
