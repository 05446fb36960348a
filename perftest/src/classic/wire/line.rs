//! Messages over a queue pair that the connection manager has connected, for `-R` and `-z`: each is a SEND of its own.
//!
//! Two receives are posted at any time: the other end says one thing, and then nothing before it has heard this end's. What does not fit into one breaks the connection, as on any queue pair.

use std::thread;
use std::time::{Duration, Instant};

use doorbell_verbs::cm::{Connection, ConnectionEvent};
use doorbell_verbs::{Buffer, CompletionQueue, Context, Local, PreparedQueuePair, Queue, QueuePair, Success};

use crate::failure::{Failure, one_line};
use crate::interrupt::Interrupt;

/// The longest message is shorter.
const LONGEST: usize = 64;
/// Receives that are posted at once.
const RECEIVES: u32 = 2;
/// Polls before a wait lets others have the processor: an answer that is at hand comes within them.
const EAGER: u32 = 2_000;
/// How long it then sleeps at a time.
const NAP: Duration = Duration::from_micros(200);
/// How often a receiver that has no receive posted is asked again: for ever.
const RNR_RETRY: u8 = 7;

/// Why nothing more comes.
#[derive(Debug)]
pub(super) enum Broken {
    /// The other end is gone, or the connection: why, in words.
    Lost(String),
    /// It did not come in time.
    Late,
    /// Ctrl-C.
    Interrupted,
}

impl Line {
    /// Makes what becomes one, with its receives posted.
    ///
    /// # Errors
    /// [`Failure::Test`] when the device refuses.
    pub(crate) fn prepare(context: &Context, port: u8) -> Result<Prepared, Failure> {
        Prepared::new(context, port)
    }
}

/// A queue pair for messages, before it is connected.
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

    /// What it is when `connect` has connected its queue pair.
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

/// A connected one.
#[derive(Debug)]
pub(crate) struct Line {
    qp: QueuePair,
    cq: CompletionQueue,
    connection: Connection,
    /// A message that has come and was not asked for yet, with its length.
    heard: Option<(Buffer<Local>, usize)>,
    is_sending: bool,
}

impl Line {
    /// Says something, and waits until the other end has it.
    pub(super) fn say(&mut self, message: &[u8], within: Duration, interrupt: &Interrupt) -> Result<(), Broken> {
        self.qp
            .post(|batch| {
                batch.send_inline(message).signalled();
            })
            .map_err(|e| Broken::Lost(one_line(&e.to_string())))?;
        self.is_sending = true;
        self.wait(Some(within), interrupt, |line| !line.is_sending)
    }

    /// Hears something, as long as `into`.
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

    /// Whether something has come.
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
                // What it said last may have come with its goodbye.
                self.look()?;
                return if is_done(self) { Ok(()) } else { Err(gone) };
            }
            thread::sleep(NAP);
        }
    }

    /// Takes what has completed.
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

    /// Looks whether the other end has hung up.
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
