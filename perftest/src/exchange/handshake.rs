//! The handshake: preamble, `hello` and `plan`. The server reads them as they arrive, so that many
//! connections can be in theirs.

use std::io::{self, Write};
use std::net::TcpStream;

use doorbell_rendezvous::describe;
use doorbell_rendezvous::frame::FrameReader;

use super::message::{PREAMBLE, check_hello};
use super::{Control, Hello, Message, REPLY_TIMEOUT};
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

/// The server's side of one connection.
#[derive(Debug, Default)]
pub(super) struct Handshake {
    /// Once the preamble was sent.
    reader: Option<FrameReader>,
    has_hello: bool,
}

impl Handshake {
    /// Reads what has arrived. Returns the client's plan once it is accepted.
    ///
    /// # Errors
    /// Why the connection is refused; the client is informed.
    pub(super) fn advance(
        &mut self,
        mut stream: &TcpStream,
        expected: &ExpectedTest<'_>,
    ) -> Result<Option<Plan>, String> {
        self.step(stream, expected).inspect_err(|reason| {
            if self.reader.as_ref().is_some_and(FrameReader::has_preamble) {
                // Best effort: it may be gone, or not read.
                let _ = Message::Failed(reason.clone()).write(&mut stream);
            }
        })
    }

    fn step(&mut self, mut stream: &TcpStream, expected: &ExpectedTest<'_>) -> Result<Option<Plan>, String> {
        let failed = |e: io::Error| describe(&e);
        // What is sent here fits in the buffer of a new connection.
        let reader = match &mut self.reader {
            Some(reader) => reader,
            none => {
                stream.write_all(PREAMBLE).map_err(failed)?;
                none.insert(FrameReader::behind(PREAMBLE))
            }
        };
        while let Some(json) = reader.read(&mut stream, LIMIT).map_err(failed)? {
            match Message::decode(&json).map_err(failed)? {
                Message::Hello(hello) if !self.has_hello => {
                    expected.check_hello(&hello)?;
                    Message::Hello(Hello::ours(None)).write(&mut stream).map_err(failed)?;
                    self.has_hello = true;
                }
                Message::Plan(plan) if self.has_hello => return expected.check_plan(&plan).map(|()| Some(plan)),
                Message::Failed(reason) => return Err(format!("the client failed: {reason}")),
                other => {
                    return Err(format!(
                        "the client sent '{}' where '{}' belongs: are both ends the same doorbell?",
                        other.name(),
                        if self.has_hello { "plan" } else { "hello" }
                    ));
                }
            }
        }
        Ok(None)
    }
}
