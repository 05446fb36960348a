//! Entry points of `tests/fuzz`: what peers and files say, decoded. Not a part of the API.

use std::io::{self, Read};

use crate::document::Document;
use crate::exchange::Message;
use crate::html;

/// Messages of the classic control connection.
pub fn classic(bytes: &[u8]) {
    crate::classic::wire::fuzzing::decode(bytes);
}

/// A result file, as `doorbell compare` and `doorbell report` read it, and the report of it.
pub fn result(bytes: &[u8]) {
    if let Ok(document) = Document::parse(String::new(), bytes) {
        for row in &document.rows {
            let _ = (row.samples("bw_samples_bytes_per_s"), row.cdf());
        }
        html::page_of(&[document]);
    }
}

/// Frames of the control connection of `doorbell bw`, up to the first that is none. A plan that
/// the server would accept is within its limits.
///
/// # Panics
/// When a message does not survive being written and read, or a plan's memory overflows.
pub fn exchange(bytes: &[u8]) {
    let mut stream = Interrupted(bytes, false);
    while let Ok(message) = Message::read(&mut stream) {
        let mut written = Vec::new();
        // Text with many escapes may be longer than it was.
        if message.write(&mut written).is_ok() {
            let again = Message::read(&mut &written[..]).ok();
            assert_eq!(again.map(|again| again.name()), Some(message.name()));
        }
        if let Message::Plan(plan) = message
            && plan.check().is_ok()
        {
            for &size in &plan.sizes {
                assert!(plan.window(size) > 0 && plan.receives(size) > 0 && plan.warmup(size) <= 1 << 40);
                assert!(size <= plan.registers_bytes());
            }
        }
    }
}

/// A stream of which every other read(2) is interrupted by a signal.
struct Interrupted<'a>(&'a [u8], bool);

impl Read for Interrupted<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.1 = !self.1;
        if self.1 {
            return Err(io::ErrorKind::Interrupted.into());
        }
        self.0.read(to)
    }
}
