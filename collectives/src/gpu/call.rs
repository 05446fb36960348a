//! A call of an operation, and its validation.

use doorbell_cuda::Span;

use super::error::GpuError;
use crate::communicator::Reduction;
use crate::kernel::Op;
use crate::plan::Collective;
use crate::reference::Case;
use crate::types::{DataType, Rank, ReduceOp};

/// An operation with its arguments.
#[derive(Clone, Debug)]
pub struct GpuCall<'a> {
    /// The collective.
    pub collective: Collective,
    /// The root, if the collective has one.
    pub root: Rank,
    /// The type of the elements.
    pub data: DataType,
    /// Elements of the whole for all-reduce, broadcast, reduce and send-receive; else of each part.
    pub count: usize,
    /// The reduction operator.
    pub reduction: Reduction,
    /// This rank's input, if any.
    pub input: Option<Span<'a>>,
    /// This rank's output, if any.
    pub output: Option<Span<'a>>,
}

pub(super) struct Checked<'a> {
    pub(super) op: ReduceOp,
    /// The bits of the scalar by which input is multiplied.
    pub(super) scalar: u64,
    pub(super) input: Option<Span<'a>>,
    pub(super) output: Option<Span<'a>>,
    pub(super) in_place: bool,
}

impl<'a> Checked<'a> {
    /// Without `allows_overlap`, input and output of what does not run in place must be apart.
    pub(super) fn new(call: &GpuCall<'a>, case: &Case, rank: Rank, allows_overlap: bool) -> Result<Self, GpuError> {
        let misuse = |what: String| GpuError::Misuse {
            collective: call.collective,
            what,
        };
        if call.collective == Collective::AllToAllV {
            return Err(misuse("it has a count for each part: call all_to_all_v".to_owned()));
        }
        if call.root.0 >= case.ranks {
            return Err(misuse(format!(
                "rank {} cannot be the root of {} ranks",
                call.root, case.ranks
            )));
        }
        let op = match (&call.reduction.op, call.collective.reduces()) {
            (Op::Builtin(op), true) => *op,
            (_, false) => ReduceOp::Sum,
            (Op::User(op), true) => {
                return Err(misuse(format!(
                    "{} runs on processors: it is for memory of the host",
                    op.name()
                )));
            }
        };
        let scalar = match (op, call.reduction.scale) {
            (ReduceOp::PreMulSum, Some(scalar)) if scalar.over() == call.data.accumulator() => scalar.bits(),
            (ReduceOp::PreMulSum, _) => return Err(GpuError::NoScalar { op, data: call.data }),
            _ => 0,
        };
        let fit = |what: &str, span: Option<Span<'a>>, elements: u64| {
            let bytes = elements
                .checked_mul(call.data.bytes() as u64)
                .and_then(|bytes| usize::try_from(bytes).ok());
            match (span, bytes) {
                (_, Some(0)) => Ok(None),
                (Some(span), Some(bytes)) if span.len() >= bytes => {
                    let span = span.span(..bytes)?;
                    if !span.device_ptr().0.is_multiple_of(call.data.bytes() as u64) {
                        return Err(misuse(format!(
                            "the {what} lies between the natural addresses of {}",
                            call.data
                        )));
                    }
                    Ok(Some(span))
                }
                (span, _) => Err(misuse(format!(
                    "the {what} has {} bytes, and {elements} elements of {} are required",
                    span.map_or(0, Span::len),
                    call.data
                ))),
            }
        };
        let input = fit("input", call.input, case.input(rank))?;
        let output = fit("output", call.output, case.output(rank))?;
        let in_place = match (input, output) {
            (Some(_), Some(_)) if allows_overlap && !call.collective.runs_in_place() => false,
            (Some(input), Some(output)) => is_in_place(call, case, rank, input, output).map_err(misuse)?,
            _ => false,
        };
        Ok(Self {
            op,
            scalar,
            input,
            output,
            in_place,
        })
    }
}

/// An error if input and output overlap otherwise than in place.
fn is_in_place(call: &GpuCall<'_>, case: &Case, rank: Rank, input: Span<'_>, output: Span<'_>) -> Result<bool, String> {
    let (from, into) = (input.device_ptr().0, output.device_ptr().0);
    let (from_end, into_end) = (from + input.len() as u64, into + output.len() as u64);
    if from >= into_end || into >= from_end {
        return Ok(false);
    }
    let own = u64::from(rank.0) * case.count * call.data.bytes() as u64;
    let wanted = match call.collective {
        Collective::AllGather | Collective::Gather => from == into + own,
        Collective::ReduceScatter | Collective::Scatter => into == from + own,
        collective if collective.runs_in_place() => from == into,
        _ => return Err("it does not run in place: input and output must be apart".to_owned()),
    };
    if wanted {
        Ok(true)
    } else {
        Err("input and output share memory, but not as they do in place".to_owned())
    }
}
