//! The messages of the control connection.

use std::io::{self, Read, Write};

use doorbell_rendezvous::frame;
use serde::{Deserialize, Serialize};

use crate::device::Gpu;
use crate::failure::one_line;
use crate::plan::Plan;
use crate::report::LinkKind;
use crate::stats::Bandwidth;

/// The most bytes of JSON in a frame. A thousand queue pairs need about a third of it.
const LIMIT: usize = 1 << 20;

/// What each side sends before its first frame.
pub(crate) const PREAMBLE: &[u8; 8] = b"DOORBELL";

/// The version of this protocol; ends of different versions do not test together.
pub(crate) const PROTOCOL: u32 = 2;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Message {
    Hello(Hello),
    Plan(Plan),
    Accepted(Accepted),
    /// One end's queue pairs and memory for the next size.
    Setup(Setup),
    /// The sender's queue pairs are connected and its receives posted.
    Ready,
    Finish(Finish),
    Outcome(Outcome),
    Bye,
    /// The sender aborts, with the reason.
    Failed(String),
}

impl Message {
    /// # Errors
    /// Those of the stream, and `InvalidInput` when the message is too long for a frame.
    pub(crate) fn write(&self, stream: &mut impl Write) -> io::Result<()> {
        frame::write(stream, &serde_json::to_vec(self)?, LIMIT)
    }

    /// # Errors
    /// Those of the stream, `UnexpectedEof` at its end, `InvalidData` when the frame is too long or
    /// is not a message.
    pub(crate) fn read(stream: &mut impl Read) -> io::Result<Self> {
        Self::decode(&frame::read(stream, LIMIT)?)
    }

    /// # Errors
    /// `InvalidData` when the bytes of a frame are not a message.
    pub(crate) fn decode(json: &[u8]) -> io::Result<Self> {
        serde_json::from_slice(json).map_err(|e| {
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("not a message of this protocol: {e}"),
            )
        })
    }

    /// Its name in an error message.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Message::Hello(_) => "hello",
            Message::Plan(_) => "plan",
            Message::Accepted(_) => "accepted",
            Message::Setup(_) => "setup",
            Message::Ready => "ready",
            Message::Finish(_) => "finish",
            Message::Outcome(_) => "outcome",
            Message::Bye => "bye",
            Message::Failed(_) => "failed",
        }
    }
}

/// Identifies the program. Later versions may add fields; these stay.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) protocol: u32,
    pub(crate) version: String,
    /// The secret of a server that serves only the process that started it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) token: Option<String>,
}

impl Hello {
    pub(crate) fn ours(token: Option<String>) -> Hello {
        Hello {
            protocol: PROTOCOL,
            version: env!("CARGO_PKG_VERSION").into(),
            token,
        }
    }
}

/// # Errors
/// One line that names both versions.
pub(crate) fn check_hello(theirs: &Hello) -> Result<(), String> {
    if theirs.protocol == PROTOCOL {
        return Ok(());
    }
    Err(format!(
        "this is doorbell {} with exchange version {PROTOCOL}, there is doorbell {} with exchange version {}: use the same doorbell on both ends",
        env!("CARGO_PKG_VERSION"),
        one_line(&theirs.version),
        theirs.protocol
    ))
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Accepted {
    pub(crate) device: String,
    pub(crate) link: LinkKind,
    /// The process group that it reaches by the shared-memory link.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) group: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) gpu: Option<GpuEnd>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GpuEnd {
    pub(crate) number: usize,
    pub(crate) uuid: String,
    pub(crate) name: String,
    /// How its memory is registered.
    pub(crate) memory: String,
}

impl GpuEnd {
    pub(crate) fn of(gpu: &Gpu) -> GpuEnd {
        GpuEnd {
            number: gpu.number,
            uuid: gpu.uuid.clone(),
            name: gpu.name.clone(),
            memory: gpu.path.name().to_owned(),
        }
    }
}

impl Accepted {
    /// What carries the packets between the server's device and ours.
    pub(crate) fn link_to(&self, link: LinkKind, group: Option<u64>) -> LinkKind {
        if group.is_some() && group == self.group {
            return LinkKind::SoftLocal;
        }
        // The result is attributed to the softer of the two links.
        link.max(self.link)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Setup {
    /// The size, to make sure that both ends measure the same.
    pub(crate) bytes: u64,
    /// One entry per queue pair.
    pub(crate) qps: Vec<QpSetup>,
    /// The port of the server's connection manager, where that connects them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cm_port: Option<u16>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct QpSetup {
    /// 32 bytes in hexadecimal.
    pub(crate) endpoint: String,
    /// Messages that fit in its memory, or receives posted.
    pub(crate) slots: u32,
    /// Key of the memory for messages, 24 bytes in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) data: Option<String>,
    /// Key of the word that the peer counts its credits in, 24 bytes in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) credit: Option<String>,
    /// Key of the word that the peer counts its messages in, 24 bytes in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) notice: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Finish {
    /// Messages per queue pair, warm-up included.
    pub(crate) messages: Vec<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Outcome {
    /// Messages per queue pair, where the operation lets the receiver see them.
    pub(crate) messages: Vec<u64>,
    /// Messages of which the receiver checked every byte.
    pub(crate) checked: u64,
    /// What the sender of this message has measured, where its figures count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) measured: Option<Bandwidth>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive() {
        let mut stream = Vec::new();
        Message::Ready.write(&mut stream).unwrap();
        Message::Failed("no".into()).write(&mut stream).unwrap();
        let mut stream = stream.as_slice();
        assert_eq!(Message::read(&mut stream).unwrap(), Message::Ready);
        assert_eq!(Message::read(&mut stream).unwrap(), Message::Failed("no".into()));
        assert_eq!(
            Message::read(&mut stream).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }

    #[test]
    fn hostile_bytes_are_errors() {
        for json in [&b"{}"[..], b"\xff\xff", b"", b"{\"ready\":7}"] {
            let kind = Message::decode(json).unwrap_err().kind();
            assert_eq!(kind, io::ErrorKind::InvalidData, "{json:?}");
        }
        let mut long = &b"\x7f\xff\xff\xff"[..];
        assert_eq!(Message::read(&mut long).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn deep_nesting_does_not_overflow_the_stack() {
        let json = "[".repeat(LIMIT);
        let kind = Message::decode(json.as_bytes()).unwrap_err().kind();
        assert_eq!(kind, io::ErrorKind::InvalidData);
    }

    #[test]
    fn only_the_same_protocol_passes() {
        assert_eq!(check_hello(&Hello::ours(None)), Ok(()));
        let other = Hello {
            protocol: 9,
            version: "9.9\n".into(),
            token: None,
        };
        let said = check_hello(&other).unwrap_err();
        assert!(
            said.contains("9.9") && said.contains("exchange version 9") && !said.contains('\n'),
            "{said}"
        );
    }

    #[test]
    fn the_link_is_local_within_one_group() {
        let accepted = |link, group| Accepted {
            device: "d".into(),
            link,
            group,
            gpu: None,
        };
        let soft = accepted(LinkKind::SoftUdp, Some(7));
        assert_eq!(soft.link_to(LinkKind::SoftUdp, Some(7)), LinkKind::SoftLocal);
        assert_eq!(soft.link_to(LinkKind::SoftUdp, Some(8)), LinkKind::SoftUdp);
        assert_eq!(soft.link_to(LinkKind::SoftUdp, None), LinkKind::SoftUdp);
        let hardware = accepted(LinkKind::Hardware, None);
        assert_eq!(hardware.link_to(LinkKind::Hardware, None), LinkKind::Hardware);
        assert_eq!(hardware.link_to(LinkKind::SoftUdp, Some(7)), LinkKind::SoftUdp);
    }

    #[test]
    fn a_newer_hello_is_still_read() {
        let text = r#"{"hello":{"protocol":7,"version":"3.0","features":["x"]}}"#;
        assert!(matches!(
            serde_json::from_str(text).unwrap(),
            Message::Hello(Hello { protocol: 7, .. })
        ));
    }
}
