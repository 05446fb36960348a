//! The attributes that the processes of a test exchange, as hexadecimal text.

use std::io::{self, Write as _};

use anyhow::{Context, Result};
use doorbell_verbs::{Endpoint, KeyAccess, Remote};

/// An endpoint and a key as one word.
pub fn encode<K: KeyAccess>(endpoint: &Endpoint, key: &Remote<K>) -> String {
    let bytes = [&endpoint.to_bytes()[..], &key.to_bytes()[..]].concat();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Decodes what [`encode`] returned; fails when it is malformed.
pub fn decode<K: KeyAccess>(text: &str) -> Result<(Endpoint, Remote<K>)> {
    let digits = |at: usize| text.get(2 * at..2 * at + 2);
    let bytes: Vec<u8> = (0..text.len() / 2)
        .map(|at| digits(at).and_then(|digits| u8::from_str_radix(digits, 16).ok()))
        .collect::<Option<_>>()
        .context("attributes that are not hexadecimal")?;
    let (endpoint, key) = bytes.split_first_chunk().context("attributes too short")?;
    Ok((Endpoint::from_bytes(endpoint)?, Remote::from_bytes(key)?))
}

/// Prints a line and flushes stdout; fails when stdout is closed.
pub fn print_line(line: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}
