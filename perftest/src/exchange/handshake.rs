//! The handshake: preamble, `hello` and `plan`. The server reads them as they arrive, so that many
//! connections can be in theirs.

use std::io::{self, Read, Write};
use std::mem;
use std::net::TcpStream;

use super::message::check_hello;
use super::{Control, Hello, Message, REPLY_TIMEOUT, frame};
use crate::cli::LimitArgs;
use crate::failure::Failure;
use crate::plan::{Kind, Plan};

/// The most bytes of JSON in `hello` and in `plan`: 64 sizes take under 2 KiB.
const LIMIT: usize = 16 << 10;

/// The client's side, after the preambles.
///
/// # Errors
/// As [`Control::receive`], and [`Failure::Test`] when the server is another version.
pub(crate) fn introduce(control: &Control, plan: &Plan, token: Option<String>) -> Result<(), Failure> {
    control.send(&Message::Hello(Hello::ours(token)))?;
    match control.receive(Some(REPLY_TIMEOUT), "its hello")? {
        Message::Hello(server) => check_hello(&server).map_err(Failure::Test)?,
        other => return Err(control.unexpected(&other, "hello")),
    }
    control.send(&Message::Plan(plan.clone()))
}

/// What a server expects of its clients.
#[derive(Debug)]
pub(crate) struct ExpectedTest<'a> {
    pub(crate) kind: Kind,
    pub(crate) verb: &'static str,
    /// Whether the server's messages are in GPU memory.
    pub(crate) gpu: bool,
    /// The token that the client must send, if any.
    pub(crate) token: Option<&'a str>,
    /// The limits of its plan, beside those of every plan.
    pub(crate) limits: Option<&'a LimitArgs>,
}

impl ExpectedTest<'_> {
    fn check_hello(&self, hello: &Hello) -> Result<(), String> {
        if self.token.is_some_and(|token| hello.token.as_deref() != Some(token)) {
            return Err("the client is not the process that started this one".to_owned());
        }
        check_hello(hello)
    }

    fn check_plan(&self, plan: &Plan) -> Result<(), String> {
        if plan.kind != self.kind || plan.verb.name() != self.verb {
            return Err(format!(
                "the server runs 'doorbell {}', the client 'doorbell {}': start the same on both ends",
                Plan::command(self.kind, self.verb),
                plan.command_name()
            ));
        }
        plan.check()
            .and_then(|()| self.limits.map_or(Ok(()), |limits| plan.check_limits(limits)))
            .map_err(|reason| format!("the client's test is refused: {reason}"))?;
        if self.gpu && !plan.gpu {
            return Err(
                "the server's messages are in GPU memory: the client needs --gpu too, with a GPU or host".into(),
            );
        }
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Debug, Default)]
enum Stage {
    #[default]
    New,
    Preamble,
    Hello,
    Plan,
}

/// The server's side of one connection.
#[derive(Debug, Default)]
pub(super) struct Handshake {
    stage: Stage,
    received: Vec<u8>,
}

impl Handshake {
    /// Reads what has arrived. Returns the client's plan once it is accepted.
    ///
    /// # Errors
    /// Why the connection is refused; the client is informed.
    pub(super) fn advance(&mut self, stream: &TcpStream, expected: &ExpectedTest<'_>) -> Result<Option<Plan>, String> {
        self.step(stream, expected).inspect_err(|reason| {
            if self.stage > Stage::Preamble {
                // Best effort: it may be gone, or not read.
                let _ = frame::write(&mut &*stream, &Message::Failed(reason.clone()));
            }
        })
    }

    fn step(&mut self, mut stream: &TcpStream, expected: &ExpectedTest<'_>) -> Result<Option<Plan>, String> {
        let failed = |e: io::Error| e.to_string();
        // What is sent here fits in the buffer of a new connection.
        if self.stage == Stage::New {
            stream.write_all(&frame::PREAMBLE).map_err(failed)?;
            self.stage = Stage::Preamble;
        }
        while self.read(stream).map_err(failed)? {
            let received = mem::take(&mut self.received);
            if self.stage == Stage::Preamble {
                self.stage = Stage::Hello;
                continue;
            }
            match (self.stage, frame::read(&mut &received[..]).map_err(failed)?) {
                (Stage::Hello, Some(Message::Hello(hello))) => {
                    expected.check_hello(&hello)?;
                    frame::write(&mut stream, &Message::Hello(Hello::ours(None))).map_err(failed)?;
                    self.stage = Stage::Plan;
                }
                (Stage::Plan, Some(Message::Plan(plan))) => return expected.check_plan(&plan).map(|()| Some(plan)),
                (_, Some(Message::Failed(reason))) => return Err(format!("the client failed: {reason}")),
                (stage, other) => {
                    return Err(format!(
                        "the client sent '{}' where '{}' belongs: are both ends the same doorbell?",
                        other.map_or("nothing", |message| message.name()),
                        if stage == Stage::Hello { "hello" } else { "plan" }
                    ));
                }
            }
        }
        Ok(None)
    }

    /// Reads what has arrived, and nothing behind the preamble or frame. Returns whether that is
    /// complete.
    fn read(&mut self, mut stream: &TcpStream) -> io::Result<bool> {
        while let missing @ 1.. = self.missing()? {
            let mut buffer = [0; 4096];
            let most = missing.min(buffer.len());
            match stream.read(&mut buffer[..most]) {
                Ok(0) => return Err(io::Error::other("the client closed the connection")),
                Ok(count) => self.received.extend_from_slice(&buffer[..count]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(true)
    }

    /// Bytes up to the end of the preamble, or of the frame as far as its length is known.
    fn missing(&self) -> io::Result<usize> {
        let have = self.received.len();
        if self.stage == Stage::Preamble {
            if !frame::PREAMBLE.starts_with(&self.received) {
                return Err(io::Error::other(
                    "it does not speak the doorbell protocol: is it a doorbell of the same version?",
                ));
            }
            return Ok(frame::PREAMBLE.len() - have);
        }
        let Some(length) = self.received.first_chunk() else {
            return Ok(4 - have);
        };
        match u32::from_be_bytes(*length) as usize {
            length if length <= LIMIT => Ok(4 + length - have),
            length => Err(io::Error::other(format!(
                "a frame of {length} bytes: {LIMIT} are the most in a handshake"
            ))),
        }
    }
}
