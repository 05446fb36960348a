//! Decoders of text and messages.

use std::str;

use doorbell_collectives::bootstrap::fuzzing as control;
use doorbell_collectives::plan::Plan;
use doorbell_collectives::plan::check::prove;
use doorbell_perftest::fuzzing as perftest;

/// Longer plans take the checker milliseconds.
const MAX_PLAN: usize = 2048;

/// Messages of the rendezvous, and frames of the control mesh in pieces.
pub fn bootstrap(data: &[u8]) {
    match data.split_first() {
        Some((0, message)) => control::message(message),
        Some((&size, frames)) => control::frames(frames, size.into()),
        None => {}
    }
}

/// Messages of the classic tools, and frames of `doorbell bw`.
pub fn classic(data: &[u8]) {
    match data.split_first() {
        Some((0, frames)) => perftest::exchange(frames),
        Some((_, message)) => perftest::classic(message),
        None => {}
    }
}

/// The text of a plan: what is parsed survives being written, and the checker judges it.
pub fn plan(data: &[u8]) {
    let Some(text) = str::from_utf8(data).ok().filter(|text| text.len() <= MAX_PLAN) else {
        return;
    };
    let Ok(plan) = text.parse::<Plan>() else { return };
    let again = plan.to_string().parse::<Plan>();
    assert_eq!(again.as_ref().ok(), Some(&plan));
    let _ = prove(&plan);
}

/// A result in JSON.
pub fn result(data: &[u8]) {
    perftest::result(data);
}
