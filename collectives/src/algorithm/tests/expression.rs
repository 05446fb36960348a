//! In which order a plan reduces: the expression that each block of each rank's output is in the
//! end.

use std::collections::{HashMap, VecDeque};

use crate::plan::{Plan, PlanMemory, Span, Step};
use crate::types::Rank;

/// Runs `plan` with expressions for data, and gives the expression of every block of every output.
/// The operands of an addition of two are written in one order, since addition is commutative.
pub(super) fn of_results(plan: &Plan) -> Vec<String> {
    let mut memories: Vec<HashMap<(PlanMemory, u32), String>> = (0..plan.shape.ranks())
        .map(|rank| {
            let input = plan.shape.input(Rank(rank));
            input
                .iter()
                .zip(0..)
                .map(|(_, block)| ((PlanMemory::Input, block), rank.to_string()))
                .collect()
        })
        .collect();
    let mut queues: HashMap<(usize, usize, usize), VecDeque<Vec<String>>> = HashMap::new();
    let mut next = vec![vec![0; plan.programs[0].strands.len()]; memories.len()];
    let mut goes_on = true;
    while goes_on {
        goes_on = false;
        for (rank, program) in plan.programs.iter().enumerate() {
            for (strand, steps) in program.strands.iter().enumerate() {
                let memory = &mut memories[rank];
                while let Some(step) = steps.get(next[rank][strand]) {
                    match step {
                        Step::Send { to, span } => queues
                            .entry((strand, rank, to.index()))
                            .or_default()
                            .push_back(read(memory, *span)),
                        Step::Recv { from, into } => {
                            let Some(message) = take(&mut queues, (strand, from.index(), rank)) else {
                                break;
                            };
                            write(memory, *into, message);
                        }
                        Step::RecvReduce { from, with, into, .. } => {
                            let Some(message) = take(&mut queues, (strand, from.index(), rank)) else {
                                break;
                            };
                            let sums = message
                                .into_iter()
                                .zip(read(memory, *with))
                                .map(|(a, b)| sum(a, b))
                                .collect();
                            write(memory, *into, sums);
                        }
                        Step::Reduce { sources, into } => {
                            let operands = sources.iter().map(|source| read(memory, *source));
                            let sums = operands
                                .reduce(|sums, more| sums.into_iter().zip(more).map(|(a, b)| sum(a, b)).collect());
                            write(memory, *into, sums.expect("sources"));
                        }
                        Step::Copy { from, into } => {
                            let values = read(memory, *from);
                            write(memory, *into, values);
                        }
                    }
                    next[rank][strand] += 1;
                    goes_on = true;
                }
            }
        }
    }
    let outputs = memories
        .into_iter()
        .flatten()
        .filter(|((place, _), _)| *place == PlanMemory::Output);
    outputs.map(|(_, expression)| expression).collect()
}

fn take(
    queues: &mut HashMap<(usize, usize, usize), VecDeque<Vec<String>>>,
    queue: (usize, usize, usize),
) -> Option<Vec<String>> {
    queues.get_mut(&queue)?.pop_front()
}

fn read(memory: &HashMap<(PlanMemory, u32), String>, span: Span) -> Vec<String> {
    span.range().map(|block| memory[&(span.place, block)].clone()).collect()
}

fn write(memory: &mut HashMap<(PlanMemory, u32), String>, span: Span, values: Vec<String>) {
    memory.extend(span.range().map(|block| (span.place, block)).zip(values));
}

fn sum(a: String, b: String) -> String {
    let (a, b) = if a < b { (a, b) } else { (b, a) };
    format!("({a} {b})")
}
