//! A client's handshake with a server: preamble, `hello` and `plan`, read as they arrive, so that
//! many connections can be in theirs.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};

use super::{Hello, Message, frame};
use crate::failure::one_line;
use crate::plan::Plan;

/// The most bytes of JSON before a client is served: 64 sizes take under 2 KiB.
const LIMIT: usize = 16 << 10;

/// Whom a server serves.
pub(crate) trait Admission {
    /// # Errors
    /// Why this program is not served.
    fn check_hello(&self, hello: &Hello) -> Result<(), String>;

    /// # Errors
    /// Why this test is not run.
    fn check_plan(&self, plan: &Plan) -> Result<(), String>;
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
pub(crate) struct Handshake {
    stage: Stage,
    received: Vec<u8>,
}

impl Handshake {
    /// Takes what has arrived. Returns the plan once it is admitted.
    ///
    /// # Errors
    /// Why the connection is refused; the client is informed.
    pub(crate) fn advance(
        &mut self,
        stream: &TcpStream,
        peer: SocketAddr,
        admission: &dyn Admission,
    ) -> Result<Option<Plan>, String> {
        self.step(stream, peer, admission).inspect_err(|reason| {
            if self.stage > Stage::Preamble {
                // Best effort: it may be gone, or not read.
                let _ = frame::write(&mut &*stream, &Message::Failed(reason.clone()));
            }
        })
    }

    fn step(
        &mut self,
        mut stream: &TcpStream,
        peer: SocketAddr,
        admission: &dyn Admission,
    ) -> Result<Option<Plan>, String> {
        let failed = |e: io::Error| one_line(&e.to_string());
        if self.stage == Stage::New {
            stream.set_nodelay(true).map_err(failed)?;
            stream.write_all(&frame::PREAMBLE).map_err(failed)?;
            self.stage = Stage::Preamble;
        }
        while self.read(stream)? {
            let received = std::mem::take(&mut self.received);
            if self.stage == Stage::Preamble {
                self.stage = Stage::Hello;
                continue;
            }
            match (self.stage, frame::read(&mut &received[..]).map_err(failed)?) {
                (Stage::Hello, Some(Message::Hello(hello))) => {
                    admission.check_hello(&hello)?;
                    frame::write(&mut stream, &Message::Hello(Hello::ours(None))).map_err(failed)?;
                    self.stage = Stage::Plan;
                }
                (Stage::Plan, Some(Message::Plan(plan))) => {
                    return admission.check_plan(&plan).map(|()| Some(plan));
                }
                (_, Some(Message::Failed(reason))) => return Err(format!("it failed: {}", one_line(&reason))),
                (stage, other) => {
                    let awaited = if stage == Stage::Hello { "hello" } else { "plan" };
                    let name = other.map_or("nothing", |message| message.name());
                    return Err(format!(
                        "peer {peer} sent '{name}' where '{awaited}' belongs: are both ends the same doorbell?"
                    ));
                }
            }
        }
        Ok(None)
    }

    /// Reads what has arrived. Returns whether that is the whole preamble or frame.
    fn read(&mut self, mut stream: &TcpStream) -> Result<bool, String> {
        while let missing @ 1.. = self.missing()? {
            let mut some = [0; 4096];
            let most = missing.min(some.len());
            match stream.read(&mut some[..most]) {
                Ok(0) => return Err("it closed the connection".into()),
                Ok(n) => self.received.extend_from_slice(&some[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(one_line(&e.to_string())),
            }
        }
        Ok(true)
    }

    /// Bytes up to the end of the preamble or the frame.
    fn missing(&self) -> Result<usize, String> {
        let have = self.received.len();
        if self.stage == Stage::Preamble {
            if !frame::PREAMBLE.starts_with(&self.received) {
                return Err(
                    "it does not speak the doorbell protocol: is it a doorbell of the same version?".to_owned(),
                );
            }
            return Ok(frame::PREAMBLE.len() - have);
        }
        let Some(length) = self.received.first_chunk() else {
            return Ok(4 - have);
        };
        match u32::from_be_bytes(*length) as usize {
            length if length <= LIMIT => Ok(4 + length - have),
            length => Err(format!("a frame of {length} bytes, where {LIMIT} are the most")),
        }
    }
}
