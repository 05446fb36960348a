//! Checks and times one row, by turns with the all-to-all-v of the same bytes.

use std::time::{Duration, Instant};

use doorbell_collectives::kernel::bf16;
use doorbell_collectives::moe::{ExpertParallel, MoeError, Payload, Received, reference};
use doorbell_collectives::reference::input_element;
use doorbell_collectives::{CollectiveError, CommBuffer, Communicator, Rank};

use super::routing::Routings;
use super::table::MoeRow;
use super::{CollArgs, Layer, Part};
use crate::coll::measure::{TRIAL_OPERATIONS, all_values, iterations};

/// Turns of each of the two, one after the other: the machine changes while they run.
const TURNS: u32 = 5;
/// At least: each area of memory has been used then.
const WARMUPS: u32 = 3;

/// One rank's operations.
struct Job<'a> {
    part: Part,
    layer: &'a Layer,
    comm: &'a Communicator,
    routings: &'a Routings,
    of: ExpertParallel<'a>,
    tokens: Vec<bf16>,
    combined: Vec<bf16>,
    /// The same bytes for all-to-all-v.
    input: CommBuffer<u8>,
    output: CommBuffer<u8>,
    sent: Vec<usize>,
    received: Vec<usize>,
}

pub(super) fn row(args: &CollArgs, part: Part, layer: &Layer, comm: &Communicator) -> Result<MoeRow, MoeError> {
    let routings = Routings::draw(layer);
    let mut job = Job::new(part, layer, comm, &routings)?;
    let mut wrong = 0;
    for _ in 0..args.check {
        wrong += job.check()?;
    }
    let wrong = all_values(comm, wrong as f64)?.iter().sum::<f64>() as u64;
    for _ in 0..WARMUPS.max(args.warmup.unwrap_or(0)) {
        job.operation()?;
        job.all_to_all_v()?;
    }
    let iterations = iterations::<MoeError>(args, comm, || {
        let times = (0..TRIAL_OPERATIONS).map(|_| job.operation());
        Ok(times.sum::<Result<Duration, MoeError>>()?.as_secs_f64())
    })?;
    let (mut time, mut beside) = (Duration::ZERO, Duration::ZERO);
    let turn = iterations.div_ceil(TURNS);
    for _ in 0..TURNS {
        comm.barrier().wait()?;
        for _ in 0..turn {
            time += job.operation()?;
        }
        comm.barrier().wait()?;
        for _ in 0..turn {
            beside += job.all_to_all_v()?;
        }
    }
    let mean = |time: Duration| -> Result<f64, CollectiveError> {
        let mine = time.as_secs_f64() / f64::from(turn * TURNS);
        Ok(all_values(comm, mine)?.iter().sum::<f64>() / f64::from(comm.size()))
    };
    let (seconds, beside) = (mean(time)?.max(1e-9), mean(beside)?.max(1e-9));
    let bytes = job.row_bytes() as u64 * routings.all() as u64 / u64::from(comm.size());
    let shape = &layer.shape;
    Ok(MoeRow {
        tokens: shape.max_tokens(),
        hidden: shape.hidden(),
        top_k: shape.top_k(),
        experts: shape.experts(),
        mode: layer.mode.name(),
        dtype: layer.payload.name(),
        skew: layer.skew.name(),
        ranks: shape.ranks(),
        iterations: turn * TURNS,
        bytes,
        time_us: seconds * 1e6,
        tokens_per_s: f64::from(shape.max_tokens()) * f64::from(shape.ranks()) / seconds,
        bytes_per_s: bytes as f64 / seconds,
        alltoallv_time_us: beside * 1e6,
        alltoallv_bytes_per_s: bytes as f64 / beside,
        of_alltoallv: beside / seconds,
        wrong: (args.check > 0).then_some(wrong),
    })
}

impl<'a> Job<'a> {
    fn new(part: Part, layer: &'a Layer, comm: &'a Communicator, routings: &'a Routings) -> Result<Self, MoeError> {
        let rank = comm.rank();
        let row = match part {
            Part::Dispatch => layer.payload.row_bytes(layer.shape.hidden()),
            Part::Combine => Payload::Bf16.row_bytes(layer.shape.hidden()),
        };
        let bytes = |pairs: Vec<usize>| pairs.into_iter().map(|pairs| pairs * row).collect::<Vec<_>>();
        let (mut sent, mut received) = (bytes(routings.sent(rank)), bytes(routings.received(rank)));
        if part == Part::Combine {
            // What has come goes back.
            core::mem::swap(&mut sent, &mut received);
        }
        let mut input = comm.alloc(sent.iter().sum::<usize>().max(1))?;
        input.fill(1);
        let tokens = tokens(layer, rank);
        Ok(Self {
            of: comm.expert_parallel(layer.options(routings))?,
            combined: vec![bf16::ZERO; tokens.len()],
            tokens,
            input,
            output: comm.alloc(received.iter().sum::<usize>().max(1))?,
            sent,
            received,
            part,
            layer,
            comm,
            routings,
        })
    }

    /// The bytes of a row of what is measured.
    fn row_bytes(&self) -> usize {
        match self.part {
            Part::Dispatch => self.layer.payload.row_bytes(self.layer.shape.hidden()),
            Part::Combine => Payload::Bf16.row_bytes(self.layer.shape.hidden()),
        }
    }

    fn routing(&self) -> &doorbell_collectives::moe::Routing {
        self.routings.of(self.comm.rank())
    }

    /// One operation. Returns its time: of a combine, without the dispatch before it.
    fn operation(&mut self) -> Result<Duration, MoeError> {
        let began = Instant::now();
        let received = self.of.dispatch(&self.tokens, self.routings.of(self.comm.rank()))?;
        if self.part == Part::Dispatch {
            return Ok(began.elapsed());
        }
        let began = Instant::now();
        received.combine(&mut self.combined)?;
        Ok(began.elapsed())
    }

    fn all_to_all_v(&mut self) -> Result<Duration, MoeError> {
        let sent: usize = self.sent.iter().sum();
        let received: usize = self.received.iter().sum();
        let began = Instant::now();
        let (input, output) = (&self.input[..sent], &mut self.output[..received]);
        self.comm
            .all_to_all_v(input, &self.sent, output, &self.received)
            .wait()?;
        Ok(began.elapsed())
    }

    /// Runs the operation once and returns the number of wrong rows or elements.
    fn check(&mut self) -> Result<u64, MoeError> {
        let mut received = self.of.dispatch(&self.tokens, self.routing())?;
        if self.part == Part::Dispatch {
            return Ok(self.wrong_rows(&received));
        }
        self.write_outputs(&mut received);
        self.combined.fill(bf16::NAN);
        received.combine(&mut self.combined)?;
        let wanted = reference::combine(self.routing(), |expert, pair| {
            let token = self.routing().token_of(pair);
            output(expert, &token_of(self.layer, self.comm.rank(), token)).collect()
        });
        let bits = |(got, wanted): &(&bf16, &bf16)| got.to_bits() != wanted.to_bits();
        Ok(self.combined.iter().zip(&wanted).filter(bits).count() as u64)
    }

    /// The rows that a source has for a local expert, with the tokens that they are.
    fn rows_of(&self, received: &Received<'_>) -> Vec<(usize, u32, Rank, usize)> {
        let first = self.layer.shape.first_expert(self.comm.rank());
        let mut all = Vec::new();
        for local in 0..self.layer.shape.local_experts() {
            for source in (0..self.comm.size()).map(Rank) {
                let routing = self.routings.of(source);
                let before: u32 = routing.pairs_per_expert()[..(first + local) as usize].iter().sum();
                let order = &routing.order()[before as usize..];
                for (row, &pair) in received.rows().range(local, source).zip(order) {
                    all.push((row, first + local, source, routing.token_of(pair)));
                }
            }
        }
        all
    }

    fn wrong_rows(&self, received: &Received<'_>) -> u64 {
        let wanted: usize = self.routings.received(self.comm.rank()).iter().sum();
        let mut wrong = wanted.abs_diff(received.rows().len()) as u64;
        let mut right = vec![0; received.row_bytes()];
        for (row, _, source, token) in self.rows_of(received) {
            reference::write_row(self.layer.payload, &token_of(self.layer, source, token), &mut right);
            wrong += u64::from(received.bytes(row..row + 1) != right);
        }
        wrong
    }

    fn write_outputs(&self, received: &mut Received<'_>) {
        for (row, expert, source, token) in self.rows_of(received) {
            let (_, place) = received.with_outputs(row..row + 1);
            let token = token_of(self.layer, source, token);
            place
                .iter_mut()
                .zip(output(expert, &token))
                .for_each(|(place, element)| *place = element);
        }
    }
}

fn token_of(layer: &Layer, rank: Rank, token: usize) -> Vec<bf16> {
    let hidden = u64::from(layer.shape.hidden());
    let first = token as u64 * hidden;
    (first..first + hidden)
        .map(|index| input_element(layer.seed, rank, index))
        .collect()
}

fn tokens(layer: &Layer, rank: Rank) -> Vec<bf16> {
    (0..layer.shape.max_tokens() as usize)
        .flat_map(|token| token_of(layer, rank, token))
        .collect()
}

/// What an expert returns for a token: other elements for each.
fn output(expert: u32, token: &[bf16]) -> impl Iterator<Item = bf16> {
    let factor = 1.0 + (expert % 5) as f32;
    token
        .iter()
        .map(move |element| bf16::from_f32(element.to_f32() * factor))
}
