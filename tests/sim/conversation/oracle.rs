//! Checks results: every completion against the plan, and every byte of memory at the end.

use doorbell_roce_proto::Qpn;
use doorbell_roce_proto::qp::State;
use doorbell_roce_proto::work::{Completion, CompletionOpcode, Status};

use super::plan::{Action, Area, Areas, End, Op, Range};
use super::run::{Outcome, RunningEnd};
use doorbell_roce_proto::memory::AtomicOp;

/// Its methods take a completion and return the next state, or the violated rule.
#[derive(Clone, Debug, Default)]
pub(super) struct EndState {
    pub(super) posted: usize,
    /// Requests known to have completed or failed: all before this one.
    pub(super) retired: usize,
    /// The request whose failure moved the queue pair to ERR, and its status.
    pub(super) failed: Option<(usize, Status)>,
    pub(super) receives_posted: usize,
    pub(super) receives_done: usize,
    /// Of those, the ones with a message.
    pub(super) received: usize,
    /// The test itself moved the queue pair to ERR.
    pub(super) closed: bool,
}

impl EndState {
    /// A completion of a send request. `read` returns the current bytes of its own memory.
    pub(super) fn sent(mut self, end: &End, c: &Completion, read: impl Fn(&Range) -> Vec<u8>) -> Result<Self, String> {
        let index = c.wr_id as usize;
        if index < self.retired || index >= self.posted {
            return Err(format!("out of order: {} of {} are retired", self.retired, self.posted));
        }
        if c.status == Status::Flushed {
            if self.failed.is_none() || index != self.retired {
                return Err("flushed without cause, or not in order".into());
            }
            self.retired += 1;
            return Ok(self);
        }
        if self.failed.is_some() {
            return Err("not flushed, although the queue pair failed before".into());
        }
        let is_signaled = |op: &Op| op.signaled || end.signal_all;
        if end.ops[self.retired..index].iter().any(is_signaled) {
            return Err(format!("request {} was signaled, and has not completed", self.retired));
        }
        let op = &end.ops[index];
        // A completion confirms all requests before it.
        let confirmed = if c.status == Status::Success { index + 1 } else { index };
        for op in end.ops[self.retired..confirmed].iter().filter(|op| op.fetches()) {
            let bytes: Vec<u8> = op.local.iter().flat_map(&read).collect();
            if bytes != op.data {
                return Err(format!(
                    "a READ or atomic before or at it brought wrong bytes: {:?}",
                    op.action
                ));
            }
        }
        self.retired = index + 1;
        match c.status {
            Status::Success if !is_signaled(op) => return Err("completes, unsignaled".into()),
            Status::Success => check_success(op, c)?,
            Status::RetryExceeded => self.failed = Some((index, c.status)),
            Status::RnrRetryExceeded if end.rnr_retry < 7 && op.receive.is_some() => {
                self.failed = Some((index, c.status))
            }
            _ => return Err("a status that nothing here can cause".into()),
        }
        Ok(self)
    }

    /// A completion of a receive; `ops` are those the peer has posted.
    pub(super) fn received(
        mut self,
        end: &End,
        ops: &[Op],
        peer: Qpn,
        c: &Completion,
        read: impl Fn(&Range) -> Vec<u8>,
    ) -> Result<Self, String> {
        if c.wr_id as usize != self.receives_done || self.receives_done >= self.receives_posted {
            return Err(format!(
                "out of order: {} of {} are done",
                self.receives_done, self.receives_posted
            ));
        }
        self.receives_done += 1;
        if c.status == Status::Flushed {
            return if self.failed.is_some() || self.closed {
                Ok(self)
            } else {
                Err("flushed without cause".into())
            };
        }
        if c.status != Status::Success || self.received + 1 != self.receives_done {
            return Err("neither a message nor flushed, or a message after a flush".into());
        }
        let Some(op) = ops.iter().find(|op| op.receive == Some(self.received)) else {
            return Err("a message that the peer has not sent".into());
        };
        self.received += 1;
        let (opcode, ranges): (_, &[Range]) = match &op.action {
            Action::Write { target, .. } => (CompletionOpcode::ReceiveWriteImm, std::slice::from_ref(target)),
            _ => (CompletionOpcode::Receive, &end.receives[self.received - 1].local),
        };
        let actual = (c.opcode, c.byte_len as usize, c.imm, c.src_qpn, c.solicited);
        let expected = (opcode, op.data.len(), op.imm(), peer, op.solicited);
        if actual != expected {
            return Err(format!("{actual:?} instead of {expected:?}"));
        }
        let bytes: Vec<u8> = ranges.iter().flat_map(read).collect();
        // A receive may exceed its message; only a later request may overwrite a WRITE's target.
        if !bytes.starts_with(&op.data) && !overwritten(ops, op) {
            return Err("wrong bytes".into());
        }
        Ok(self)
    }

    /// The queue pair is in ERR if and only if a request failed.
    pub(super) fn check_state(&self, state: Option<State>) -> Result<(), String> {
        let expected = if self.failed.is_some() { State::Err } else { State::Rts };
        if state == Some(expected) {
            Ok(())
        } else {
            Err(format!("state {state:?} instead of {expected:?}"))
        }
    }

    pub(super) fn check_finished(&self, end: &End) -> Result<(), String> {
        if self.retired < self.posted {
            return Err(format!("request {} of {} never completes", self.retired, self.posted));
        }
        match self.failed {
            None if self.posted < end.ops.len() => Err("not everything was posted".into()),
            Some(_) if self.receives_done < self.receives_posted => Err("receives were not flushed".into()),
            _ => Ok(()),
        }
    }

    pub(super) fn count(&self, outcome: &mut Outcome) {
        outcome.done += self.confirmed() as u64;
        match self.failed {
            Some((_, Status::RetryExceeded)) => outcome.retry_exceeded += 1,
            Some(_) => outcome.rnr_exceeded += 1,
            None => {}
        }
    }

    fn confirmed(&self) -> usize {
        self.failed.map_or(self.retired, |(index, _)| index)
    }
}

fn check_success(op: &Op, c: &Completion) -> Result<(), String> {
    let opcode = match op.action {
        Action::Send { .. } => CompletionOpcode::Send,
        Action::Write { .. } => CompletionOpcode::Write,
        Action::Read { .. } => CompletionOpcode::Read,
        Action::Atomic {
            op: AtomicOp::FetchAdd { .. },
            ..
        } => CompletionOpcode::FetchAdd,
        Action::Atomic {
            op: AtomicOp::CompareSwap { .. },
            ..
        } => CompletionOpcode::CompareSwap,
    };
    if c.opcode != opcode || op.fetches() && c.byte_len as usize != op.data.len() {
        return Err(format!("instead of {opcode:?} with {} bytes", op.data.len()));
    }
    Ok(())
}

fn overwritten(ops: &[Op], op: &Op) -> bool {
    let target = |op: &Op| match op.action {
        Action::Write { target, .. } => Some(target.offset),
        _ => None,
    };
    let later = ops.iter().skip_while(|other| !std::ptr::eq(*other, op)).skip(1);
    target(op).is_some() && later.into_iter().any(|other| target(other) == target(op))
}

/// The peer must have executed all confirmed requests, perhaps some unconfirmed ones and a prefix
/// of one more; each once, and nothing else.
pub(super) fn check_memory(
    from: &RunningEnd<'_>,
    to: &RunningEnd<'_>,
    mtu: usize,
    memory: impl Fn(&RunningEnd<'_>, Area) -> Vec<u8>,
) -> Result<(), String> {
    check_requester(from, mtu, &memory)?;
    let found = [Area::Receive, Area::Exposed, Area::Words].map(|area| memory(to, area));
    let matches = |areas: &Areas| {
        [Area::Receive, Area::Exposed, Area::Words].map(|area| &areas.0[area as usize]) == found.each_ref()
    };
    let mut expected = to.end.areas.clone();
    let ops = &from.end.ops[..from.state.posted];
    for (done, op) in ops.iter().map(Some).chain([None]).enumerate() {
        let received = ops[..done].iter().filter(|op| op.receive.is_some()).count();
        if done >= from.state.confirmed() && received == to.state.received {
            let begun = op.filter(|_| from.state.failed.is_some());
            let parts = begun.map_or(0, |op| op.data.len()).div_ceil(mtu);
            for part in 0..=parts {
                let mut partly = expected.clone();
                if let Some(op) = begun {
                    execute(&mut partly, to, op, (part * mtu).min(op.data.len()));
                }
                if matches(&partly) {
                    return Ok(());
                }
            }
        }
        if let Some(op) = op {
            execute(&mut expected, to, op, op.data.len());
            if let Action::Atomic { word, op } = op.action {
                let before = u64::from_ne_bytes(word.of(&expected).try_into().expect("words have 8 bytes"));
                expected.write(&word, &crate::memory::apply(op, before).to_ne_bytes());
            }
        }
    }
    Err("the peer's memory holds what no prefix of the requests gives".into())
}

fn execute(areas: &mut Areas, to: &RunningEnd<'_>, op: &Op, len: usize) {
    match (&op.action, op.receive) {
        (Action::Send { .. }, Some(receive)) if receive < to.state.receives_posted => {
            areas.scatter(&to.end.receives[receive].local, &op.data[..len]);
        }
        (Action::Write { target, .. }, _) => areas.write(target, &op.data[..len]),
        _ => {}
    }
}

/// Sources are unchanged; landings hold confirmed data, or a prefix of unconfirmed data.
fn check_requester(
    from: &RunningEnd<'_>,
    mtu: usize,
    memory: impl Fn(&RunningEnd<'_>, Area) -> Vec<u8>,
) -> Result<(), String> {
    if memory(from, Area::Source) != from.end.areas.0[Area::Source as usize] {
        return Err("a source buffer changed".into());
    }
    let found = {
        let mut areas = Areas::default();
        areas.0[Area::Landing as usize] = memory(from, Area::Landing);
        areas
    };
    let mut expected = from.end.areas.clone();
    for (i, op) in from.end.ops[..from.state.posted]
        .iter()
        .enumerate()
        .filter(|(_, op)| op.fetches())
    {
        let brought = found.gather(&op.local);
        let len = if i < from.state.confirmed() {
            op.data.len()
        } else {
            let same = brought.iter().zip(&op.data).take_while(|(a, b)| a == b).count();
            if same == op.data.len() { same } else { same / mtu * mtu }
        };
        expected.scatter(&op.local, &op.data[..len]);
    }
    if found.0[Area::Landing as usize] == expected.0[Area::Landing as usize] {
        Ok(())
    } else {
        Err("a READ or atomic brought wrong bytes, or wrote outside its buffer".into())
    }
}
