//! A readable log of the wire, recorded only when a failing run is repeated.

use std::fmt::Write as _;

use doorbell_roce_proto::Instant;
use doorbell_roce_proto::wire::{Extension, Packet as Wire, Position};

use crate::net::Packet;

/// A log of packets, timeouts and notes; off by default, and then free.
#[derive(Default)]
pub(crate) struct Trace {
    lines: Option<String>,
}

impl Trace {
    pub(crate) fn on() -> Self {
        Self {
            lines: Some(String::new()),
        }
    }

    pub(crate) fn text(&self) -> &str {
        self.lines.as_deref().unwrap_or_default()
    }

    pub(crate) fn departure(&mut self, now: Instant, node: usize, payload: &[u8], copies: usize) {
        if self.lines.is_some() {
            let fate = ["LOST", "", "TWICE"][copies.min(2)];
            self.line(now, &format!("{node} →   {} {fate}", describe(payload)));
        }
    }

    pub(crate) fn arrival(&mut self, now: Instant, node: usize, packet: &Packet) {
        if self.lines.is_some() {
            let damaged = if packet.damaged { "DAMAGED" } else { "" };
            self.line(now, &format!("  → {node} {} {damaged}", describe(&packet.payload)));
        }
    }

    pub(crate) fn timeout(&mut self, now: Instant, node: usize) {
        if self.lines.is_some() {
            self.line(now, &format!("{node}     timeout"));
        }
    }

    /// A note by the application; `text` is only called when recording.
    pub(crate) fn remark(&mut self, now: Instant, node: usize, text: impl FnOnce() -> String) {
        if self.lines.is_some() {
            let text = text();
            self.line(now, &format!("{node}     {text}"));
        }
    }

    fn line(&mut self, now: Instant, text: &str) {
        if let Some(lines) = &mut self.lines {
            let _ = writeln!(lines, "{:>12.3} µs  {}", now.0 as f64 / 1e3, text.trim_end());
        }
    }
}

fn describe(payload: &[u8]) -> String {
    let packet = match Wire::parse(payload) {
        Ok(packet) => packet,
        Err(error) => return format!("{} bytes: {error}", payload.len()),
    };
    let bth = packet.bth;
    let mut text = format!("{:?} qp {} psn {:#08x}", bth.opcode, bth.dest_qp, bth.psn.get());
    if !packet.payload.is_empty() || bth.opcode.position() == Position::Middle {
        let _ = write!(text, " {} B", packet.payload.len());
    }
    if bth.ack_req {
        text.push_str(" ackreq");
    }
    if !matches!(packet.extension, Extension::Bare) {
        let _ = write!(text, " {:?}", packet.extension);
    }
    text
}
