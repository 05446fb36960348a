//! Dispatch and combine on the memory of hosts, and what is measured beside them.

use std::time::{Duration, Instant};

use doorbell_collectives::communicator::RepeatedPut;
use doorbell_collectives::kernel::bf16;
use doorbell_collectives::moe::{ExpertParallel, Received};
use doorbell_collectives::{CommBuffer, Communicator};

use super::Part;
use super::job::Job;
use super::measure::Bench;
use crate::coll::gpu::Stop;

/// One rank's memory.
pub(super) struct OnHost<'a> {
    job: Job<'a>,
    comm: &'a Communicator,
    of: ExpertParallel<'a>,
    tokens: Vec<bf16>,
    combined: Vec<bf16>,
    /// The same bytes for all-to-all-v.
    input: CommBuffer<u8>,
    output: CommBuffer<u8>,
    sent: Vec<usize>,
    received: Vec<usize>,
    put: RepeatedPut<'a>,
}

impl<'a> OnHost<'a> {
    pub(super) fn new(job: Job<'a>, comm: &'a Communicator) -> Result<Self, Stop> {
        let (sent, received) = job.bytes();
        let mut input = comm.alloc(sent.iter().sum::<usize>().max(1))?;
        input.fill(1);
        let tokens = job.tokens();
        Ok(Self {
            of: comm.expert_parallel(job.layer.options(job.routings))?,
            combined: vec![bf16::ZERO; tokens.len()],
            tokens,
            input,
            output: comm.alloc(received.iter().sum::<usize>().max(1))?,
            put: comm.repeated_put(&sent, 1)?,
            sent,
            received,
            job,
            comm,
        })
    }

    fn operation(&mut self) -> Result<Duration, Stop> {
        let began = Instant::now();
        let received = self.of.dispatch(&self.tokens, self.job.routing())?;
        if self.job.part == Part::Dispatch {
            return Ok(began.elapsed());
        }
        let began = Instant::now();
        received.combine(&mut self.combined)?;
        Ok(began.elapsed())
    }

    fn write_outputs(&self, received: &mut Received<'_>) {
        for place in self.job.places(received.rows()) {
            let (_, into) = received.with_outputs(place.row..place.row + 1);
            into.iter_mut()
                .zip(self.job.output(&place))
                .for_each(|(into, element)| *into = element);
        }
    }
}

impl Bench for OnHost<'_> {
    fn operations(&mut self, times: u32) -> Result<Duration, Stop> {
        (0..times).map(|_| self.operation()).sum()
    }

    fn all_to_all_v(&mut self, times: u32) -> Result<Duration, Stop> {
        let sent: usize = self.sent.iter().sum();
        let received: usize = self.received.iter().sum();
        let began = Instant::now();
        for _ in 0..times {
            let (input, output) = (&self.input[..sent], &mut self.output[..received]);
            self.comm
                .all_to_all_v(input, &self.sent, output, &self.received)
                .wait()?;
        }
        Ok(began.elapsed())
    }

    fn put(&mut self, times: u32) -> Result<Option<Duration>, Stop> {
        let began = Instant::now();
        for _ in 0..times {
            self.put.put()?;
        }
        Ok(Some(began.elapsed()))
    }

    fn check(&mut self) -> Result<u64, Stop> {
        let mut received = self.of.dispatch(&self.tokens, self.job.routing())?;
        if self.job.part == Part::Dispatch {
            let bytes_of = |row| received.bytes(row..row + 1);
            return Ok(self.job.wrong_rows(received.rows(), bytes_of));
        }
        self.write_outputs(&mut received);
        self.combined.fill(bf16::NAN);
        received.combine(&mut self.combined)?;
        Ok(self.job.wrong_elements(&self.combined))
    }
}
