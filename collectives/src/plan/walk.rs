//! Visits the steps of all ranks in a possible order.

use std::collections::{HashMap, VecDeque};

use super::{Schedule, Step};
use crate::types::Rank;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct StrandId {
    pub(crate) strand: u32,
    pub(crate) rank: Rank,
}

/// Steps of one strand of a rank are visited in order, and a receive after its send.
pub(crate) trait StepVisitor {
    /// State passed from the sender of a message to its receiver.
    type Message;

    fn send(&mut self, who: StrandId, step: &Step) -> Self::Message;

    fn receive(&mut self, who: StrandId, step: &Step, message: Self::Message);

    fn local(&mut self, who: StrandId, step: &Step);
}

/// Visits the steps of `schedule`, as far as possible if it has flaws.
pub(crate) fn visit_steps<W: StepVisitor>(schedule: &dyn Schedule, walker: &mut W) {
    let ranks = schedule.shape().ranks();
    let everybody = (0..schedule.strands()).flat_map(|strand| {
        (0..ranks).map(move |rank| {
            let rank = Rank(rank);
            StrandId { strand, rank }
        })
    });
    let mut ready: Vec<_> = everybody.clone().collect();
    ready.reverse();
    let mut steps: Vec<_> = everybody
        .map(|who| schedule.steps(who.strand, who.rank).peekable())
        .collect();
    let mut queues: HashMap<(u32, Rank, Rank), VecDeque<W::Message>> = HashMap::new();
    while let Some(who) = ready.pop() {
        let StrandId { strand, rank } = who;
        let steps = &mut steps[(strand * ranks + rank.0) as usize];
        while let Some(step) = steps.peek() {
            match step {
                Step::Send { to, .. } => {
                    let message = walker.send(who, step);
                    queues.entry((strand, rank, *to)).or_default().push_back(message);
                    if to.0 < ranks {
                        ready.push(StrandId { strand, rank: *to });
                    }
                }
                Step::Recv { from, .. } | Step::RecvReduce { from, .. } => {
                    match queues.get_mut(&(strand, *from, rank)).and_then(VecDeque::pop_front) {
                        Some(message) => walker.receive(who, step, message),
                        None => break,
                    }
                }
                Step::Reduce { .. } | Step::Copy { .. } => walker.local(who, step),
            }
            steps.next();
        }
    }
}
