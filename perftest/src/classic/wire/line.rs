//! Control messages over a queue pair connected by the connection manager, for `-R` and `-z`: each
//! is one SEND.
//!
//! Two receives are always posted: the peer sends one message, and no further one before it has
//! this end's. A message too long for a receive breaks the connection, as on any queue pair.

use std::thread;
use std::time::{Duration, Instant};

use doorbell_verbs::cm::{Connection, ConnectionEvent};
use doorbell_verbs::{Buffer, CompletionQueue, Context, Local, PreparedQueuePair, Queue, QueuePair, Success};

use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// Length of a receive; every message is shorter.
const LONGEST: usize = 64;
/// Receives posted at a time.
const RECEIVES: u32 = 2;
/// Busy-polls before a wait starts to sleep: a reply that is sent at once arrives within them.
const EAGER: u32 = 2_000;
/// Sleep between polls after that.
const NAP: Duration = Duration::from_micros(200);
/// RNR retry count: 7 is infinite.
const RNR_RETRY: u8 = 7;

/// Why nothing more arrives.
#[derive(Debug)]
pub(super) enum Broken {
    /// The peer or the connection is gone: the reason as text.
    Lost(String),
    /// The message did not arrive in time.
    Late,
    /// Ctrl-C.
    Interrupted,
}

impl Line {
    /// Creates a queue pair for messages, with its receives posted.
    ///
    /// # Errors
    /// [`Failure::Test`] when the device refuses.
    pub(crate) fn prepare(context: &Context, port: u8) -> Result<Prepared, Failure> {
        Prepared::new(context, port)
    }
}

/// The queue pair before it is connected.
#[derive(Debug)]
pub(crate) struct Prepared {
    qp: PreparedQueuePair,
    cq: CompletionQueue,
}

impl Prepared {
    fn new(context: &Context, port: u8) -> Result<Prepared, Failure> {
        let refused = |e: &dyn std::fmt::Display| {
            Failure::test(format!(
                "cannot make the queue pair to talk over: {}",
                one_line(&e.to_string())
            ))
        };
        let pd = context.protection_domain().map_err(|e| refused(&e))?;
        let cq = context.completion_queue(1 + RECEIVES).map_err(|e| refused(&e))?;
        let mut qp = pd
            .queue_pair(&cq)
            .port(port)
            .send_depth(1)
            .recv_depth(RECEIVES)
            .max_inline(LONGEST as u32)
            .rnr_retry(RNR_RETRY)
            .rc()
            .map_err(|e| refused(&e))?;
        for _ in 0..RECEIVES {
            let buffer = pd.register(vec![0; LONGEST], Local).map_err(|e| refused(&e))?;
            qp.receive(buffer).map_err(|e| refused(&e))?;
        }
        Ok(Prepared { qp, cq })
    }

    /// Connects the queue pair with `connect`.
    ///
    /// # Errors
    /// Those of `connect`.
    pub(crate) fn connect<E>(
        self,
        connect: impl FnOnce(PreparedQueuePair) -> Result<(QueuePair, Connection), E>,
    ) -> Result<Line, E> {
        let (qp, connection) = connect(self.qp)?;
        Ok(Line {
            qp,
            cq: self.cq,
            connection,
            heard: None,
            is_sending: false,
        })
    }
}

/// A connected channel.
#[derive(Debug)]
pub(crate) struct Line {
    qp: QueuePair,
    cq: CompletionQueue,
    connection: Connection,
    /// A received message that was not read yet, with its length.
    heard: Option<(Buffer<Local>, usize)>,
    is_sending: bool,
}

impl Line {
    /// Sends a message and waits for its completion.
    pub(super) fn say(&mut self, message: &[u8], within: Duration, interrupt: &Interrupt) -> Result<(), Broken> {
        self.qp
            .post(|batch| {
                batch.send_inline(message).signalled();
            })
            .map_err(|e| Broken::Lost(one_line(&e.to_string())))?;
        self.is_sending = true;
        self.wait(Some(within), interrupt, |line| !line.is_sending)
    }

    /// Receives a message of exactly the length of `into`.
    pub(super) fn hear(
        &mut self,
        into: &mut [u8],
        within: Option<Duration>,
        interrupt: &Interrupt,
    ) -> Result<(), Broken> {
        self.wait(within, interrupt, |line| line.heard.is_some())?;
        let Some((buffer, len)) = self.heard.take() else {
            return Ok(());
        };
        if len == into.len() {
            into.copy_from_slice(&buffer[..len]);
        }
        self.qp
            .receive(buffer)
            .map_err(|e| Broken::Lost(one_line(&e.to_string())))?;
        if len == into.len() {
            Ok(())
        } else {
            Err(Broken::Lost(format!(
                "it sent {len} B where {} belong: is it the same tool with the same options?",
                into.len()
            )))
        }
    }

    /// Whether a message has arrived.
    pub(super) fn has_heard(&mut self) -> Result<bool, Broken> {
        self.look()?;
        if self.heard.is_none() {
            self.is_there()?;
        }
        Ok(self.heard.is_some())
    }

    fn wait(
        &mut self,
        within: Option<Duration>,
        interrupt: &Interrupt,
        is_done: impl Fn(&Line) -> bool,
    ) -> Result<(), Broken> {
        let deadline = within.map(|within| Instant::now() + within);
        let mut turns = 0;
        loop {
            self.look()?;
            if is_done(self) {
                return Ok(());
            }
            turns += 1;
            if turns < EAGER {
                std::hint::spin_loop();
                continue;
            }
            turns = EAGER;
            if interrupt.requested() {
                return Err(Broken::Interrupted);
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(Broken::Late);
            }
            if let Err(gone) = self.is_there() {
                // The last message may have arrived together with the disconnect.
                self.look()?;
                return if is_done(self) { Ok(()) } else { Err(gone) };
            }
            thread::sleep(NAP);
        }
    }

    /// Polls the completion queue.
    fn look(&mut self) -> Result<(), Broken> {
        let completions = self.cq.poll().map_err(|e| Broken::Lost(one_line(&e.to_string())))?;
        for mut done in completions {
            let result = done.result().map_err(|e| Broken::Lost(one_line(&e.to_string())))?;
            match (done.queue(), result) {
                (Queue::Send, _) => self.is_sending = false,
                (_, Success::Receive { len, .. }) => {
                    if self.heard.is_some() {
                        return Err(Broken::Lost("it spoke out of turn".to_owned()));
                    }
                    self.heard = done.take().map(|buffer| (buffer, (len as usize).min(LONGEST)));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Checks whether the peer has disconnected.
    fn is_there(&mut self) -> Result<(), Broken> {
        let gone = "it closed the connection, or its process ended".to_owned();
        loop {
            match self.connection.next_event(Duration::ZERO) {
                Ok(None) => return Ok(()),
                Ok(Some(ConnectionEvent::Disconnected | ConnectionEvent::DeviceRemoved)) => {
                    return Err(Broken::Lost(gone));
                }
                Ok(Some(_)) => {}
                Err(e) => return Err(Broken::Lost(one_line(&e.to_string()))),
            }
        }
    }
}
