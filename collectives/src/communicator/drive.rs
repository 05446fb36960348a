//! Driving operations to completion, deadlines, and failure handling.
//!
//! A waiting thread drives the engine under the lock, which it releases before it sleeps. After
//! half of its timeout an operation has all members queried; shortly before its deadline it fails
//! the group with the finding, on all ranks, so that all return in time with the same verdict.
//!
//! No model: the count of waiting threads is a hint to yield; the stop flag guards no data and is
//! read again under the lock.

mod detached;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::call::{CacheKey, CallSettings, OperationSpec};
use super::error::{CollectiveError, GroupFailed};
use super::state::{Stall, State};
use crate::algorithm::Algorithm;
use crate::bootstrap::{Group, GroupControl};
use crate::executor::{Backoff, CachedProgram, Direction, EngineError, Failed, Message, Operation, Ticket};
use crate::failure::{AGREEMENT_TIMEOUT, ProgressMonitor, Wait};
use crate::kernel::Function;
use crate::memory::Segment;
use crate::plan::Collective;
use crate::tune::Overrides;
use crate::types::{Protocol, Rank};

/// Idle steps between two deadline checks.
const CLOCK_CHECK_INTERVAL: u32 = 64;
/// Maximum wait for a member's reply before it counts as stopped, where the deadline allows.
const REPLY_TIMEOUT: Duration = Duration::from_millis(500);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Delay after which the progress thread retries a contended lock.
const LOCK_YIELD: Duration = Duration::from_micros(20);

pub(super) struct Shared {
    state: Mutex<State>,
    /// For exchanges.
    group: Mutex<Group>,
    /// Without a lock, so that the group can be aborted while a thread waits or exchanges.
    pub(super) control: Arc<GroupControl>,
    pub(super) monitor: Arc<ProgressMonitor>,
    rank: Rank,
    backoff: Backoff,
    /// Whether a progress thread drives started operations; and the number of other threads that
    /// wait for or hold the lock.
    background: bool,
    lock_waiters: AtomicUsize,
    shutdown: AtomicBool,
    /// Notified when an operation was started.
    started: Condvar,
}

pub(super) struct StateLock<'s> {
    pub(super) state: MutexGuard<'s, State>,
    shared: &'s Shared,
}

impl Drop for StateLock<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.shared.background {
            self.shared.lock_waiters.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Fails the engine if driving it panics, as a user-defined operator may: its queue pairs are
/// destroyed, so nothing accesses borrowed buffers any more.
struct AbortOnPanic<'a>(&'a mut State);

impl Drop for AbortOnPanic<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.engine.abort("an operator panicked");
        }
    }
}

/// The same for a panic of what a waiting thread calls, without the lock.
struct AbortWaitOnPanic<'s>(&'s Shared);

impl Drop for AbortWaitOnPanic<'_> {
    #[inline]
    fn drop(&mut self) {
        if thread::panicking() {
            self.0
                .abort_local("a thread panicked while it waited for an operation of its own");
        }
    }
}

/// Time before a deadline that is reserved for the agreement on the cause.
fn agreement_margin(deadline: Duration) -> Duration {
    (AGREEMENT_TIMEOUT + AGREEMENT_TIMEOUT / 4).min(deadline / 8)
}

impl Shared {
    pub(super) fn new(state: State, group: Group, background: bool) -> Self {
        Self {
            monitor: group.control().monitor(),
            control: group.control().shared(),
            rank: group.rank(),
            backoff: state.engine.backoff().clone(),
            state: Mutex::new(state),
            group: Mutex::new(group),
            background,
            lock_waiters: AtomicUsize::new(0),
            shutdown: AtomicBool::new(false),
            started: Condvar::new(),
        }
    }

    /// A panic of a lock holder has failed the engine and left the other state consistent.
    #[inline]
    pub(super) fn lock(&self) -> StateLock<'_> {
        if self.background {
            self.lock_waiters.fetch_add(1, Ordering::Relaxed);
        }
        StateLock {
            state: self.state.lock().unwrap_or_else(PoisonError::into_inner),
            shared: self,
        }
    }

    pub(super) fn group(&self) -> MutexGuard<'_, Group> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn with<R>(&self, act: impl FnOnce(&mut State) -> R) -> R {
        act(&mut self.lock().state)
    }

    pub(super) fn begin(&self, spec: OperationSpec, settings: &CallSettings) -> Result<Ticket, CollectiveError> {
        self.submit(&mut self.lock().state, spec, settings)
    }

    #[inline]
    pub(super) fn run(
        &self,
        spec: OperationSpec,
        settings: &CallSettings,
        between: impl FnMut(),
    ) -> Result<(), CollectiveError> {
        let nothing = spec.is_empty() && settings.forced.algorithm.is_none();
        let cache_key = (!nothing).then(|| CacheKey::of(&spec, settings)).flatten();
        let mut lock = self.lock();
        let state = &mut *lock.state;
        if nothing && !self.monitor.needs_attention() && state.failed.is_none() {
            return Ok(());
        }
        let cached = cache_key.as_ref().and_then(|cache_key| state.cached(cache_key));
        if let Some(cached) = cached.filter(|_| !self.monitor.needs_attention()) {
            return match self.run_cached(state, cached, &spec) {
                Some(ticket) => self.finish(lock, ticket, between),
                None => Ok(()),
            };
        }
        let ticket = self.submit(state, spec, settings)?;
        if ticket == Ticket::NO_OP {
            return Ok(());
        }
        if let Some(cache_key) = cache_key {
            state.cache_program(cache_key, ticket);
        }
        self.finish(lock, ticket, between)
    }

    /// Returns the ticket if the operation is not complete in a few microseconds.
    #[inline]
    fn run_cached(&self, state: &mut State, cached: CachedProgram, spec: &OperationSpec) -> Option<Ticket> {
        let number = state.engine.next_number();
        self.monitor.begin(number, spec.collective);
        let data = (spec.input.start(), spec.output.start());
        // SAFETY: as of `submit`; the cache key has been compared.
        let ticket = unsafe { state.engine.run_cached(cached, data, || self.monitor.needs_attention()) };
        if ticket.is_none() {
            self.monitor.finish(number);
            state.stall = Stall::None;
        }
        ticket
    }

    pub(super) fn wait(&self, ticket: Ticket) -> Result<(), CollectiveError> {
        self.finish(self.lock(), ticket, || ())
    }

    fn submit(
        &self,
        state: &mut State,
        spec: OperationSpec,
        settings: &CallSettings,
    ) -> Result<Ticket, CollectiveError> {
        if self.monitor.failed() || state.failed.is_some() {
            return Err(self.record_failure(state));
        }
        if !state.abandoned.is_empty() {
            state.drop_completed();
        }
        if spec.is_empty() && settings.forced.algorithm.is_none() {
            return Ok(Ticket::NO_OP);
        }
        if let Some((peer, direction)) = spec.message {
            return self.submit_message(state, spec, settings, (peer, direction));
        }
        let varied = spec.parts.is_some() && spec.collective == Collective::ReduceScatter;
        if varied && settings.forced.algorithm != Some(Algorithm::FullMesh) {
            return Err(CollectiveError::Misuse {
                collective: spec.collective,
                what: "parts that have lengths of their own go by full-mesh alone".to_owned(),
            });
        }
        let (plan, tuning) = state.plan_for(spec.collective, spec.root, spec.data, spec.bytes, settings)?;
        let function = Function::new(spec.data, spec.reduction.op, state.engine.ranks())?;
        let [input, output] = [spec.input, spec.output].map(|buffer| state.engine.memory_at(buffer.start()));
        let operation = Operation {
            plan,
            function,
            count: spec.count,
            parts: spec.parts,
            input,
            output,
            scale: spec.reduction.scale,
            tuning,
            deadline: Some(settings.deadline),
        };
        // SAFETY: `Source` and `Target` return the address and length of their elements. They are
        // borrowed, or owned by the request, until the operation is done or the engine has failed,
        // as `Call::wait`, `Batch` and `Request` ensure.
        match unsafe { state.engine.submit(operation) } {
            Ok(ticket) => {
                self.monitor.begin(ticket.number(), spec.collective);
                Ok(ticket)
            }
            Err(EngineError::Failed(_)) => Err(self.record_failure(state)),
            Err(error) => Err(error.into()),
        }
    }

    fn submit_message(
        &self,
        state: &mut State,
        spec: OperationSpec,
        settings: &CallSettings,
        (peer, direction): (Rank, Direction),
    ) -> Result<Ticket, CollectiveError> {
        let Overrides {
            algorithm, protocol, ..
        } = settings.forced;
        if algorithm.is_some() || protocol.is_some_and(|protocol| protocol != Protocol::Simple) {
            return Err(CollectiveError::Misuse {
                collective: spec.collective,
                what: "a message between two ranks goes by no algorithm, and by the protocol simple".to_owned(),
            });
        }
        let buffer = match direction {
            Direction::Send => spec.input,
            Direction::Receive => spec.output,
        };
        let data = state.engine.memory_at(buffer.start());
        let bytes = usize::try_from(spec.bytes).unwrap_or(usize::MAX);
        let message = Message {
            peer,
            direction,
            data,
            bytes,
            deadline: Some(settings.deadline),
        };
        // SAFETY: as of `submit`.
        match unsafe { state.engine.submit_message(message) } {
            Ok(ticket) => {
                self.monitor.set_messages_in_flight(true);
                Ok(ticket)
            }
            Err(EngineError::Failed(_)) => Err(self.record_failure(state)),
            Err(error) => Err(error.into()),
        }
    }

    /// Calls `between` without the lock, before this thread yields the CPU or sleeps.
    #[inline]
    fn finish<'s>(
        &'s self,
        mut lock: StateLock<'s>,
        ticket: Ticket,
        mut between: impl FnMut(),
    ) -> Result<(), CollectiveError> {
        let mut backoff = self.backoff.clone();
        let mut idle = 0u32;
        loop {
            let state = &mut *lock.state;
            if let Some(result) = state.engine.take(ticket) {
                return self.finish_result(state, ticket, result);
            }
            if !state.engine.has(ticket) {
                return Ok(());
            }
            while !self.poll_once(state, &mut idle) && backoff.is_spinning() {
                backoff.idle();
            }
            if idle == 0 {
                backoff.reset();
            } else {
                drop(lock);
                let waiting = AbortWaitOnPanic(self);
                between();
                drop(waiting);
                backoff.idle();
                lock = self.lock();
            }
        }
    }

    #[inline]
    fn finish_result(
        &self,
        state: &mut State,
        ticket: Ticket,
        result: Result<(), Failed>,
    ) -> Result<(), CollectiveError> {
        match result {
            Ok(()) if ticket.is_message() => {
                self.monitor.set_messages_in_flight(state.engine.exchanges());
                state.stall = Stall::None;
                Ok(())
            }
            Ok(()) => {
                self.monitor.finish(state.engine.finished());
                state.stall = Stall::None;
                Ok(())
            }
            Err(_) => Err(self.record_failure(state)),
        }
    }

    /// Drives the engine one step. Returns whether there was progress.
    #[inline]
    pub(super) fn poll_once(&self, state: &mut State, idle: &mut u32) -> bool {
        let driven = AbortOnPanic(state);
        let moved = driven.0.engine.progress();
        drop(driven);
        let needs_attention = self.monitor.needs_attention() || state.engine.failed().is_some();
        if needs_attention {
            self.handle_attention(state);
        }
        if moved || needs_attention {
            *idle = 0;
            true
        } else {
            *idle = idle.wrapping_add(1);
            if idle.is_multiple_of(CLOCK_CHECK_INTERVAL) {
                self.check_deadlines(state);
            }
            false
        }
    }

    pub(super) fn test(&self, ticket: Ticket) -> Result<bool, CollectiveError> {
        let mut lock = self.lock();
        let state = &mut *lock.state;
        // The clock is read each time, as calls may be rare.
        let mut idle = CLOCK_CHECK_INTERVAL - 1;
        self.poll_once(state, &mut idle);
        match state.engine.take(ticket) {
            Some(result) => self.finish_result(state, ticket, result).map(|()| true),
            None => Ok(!state.engine.has(ticket)),
        }
    }

    pub(super) fn abandon(&self, ticket: Ticket, keep: [Option<Arc<Segment>>; 2]) {
        self.with(|state| {
            state.abandoned.push((ticket, keep));
            state.drop_completed();
        });
    }

    /// Fails everything in flight on this rank at once, without agreement.
    pub(super) fn abort_local(&self, why: &str) {
        self.with(|state| {
            let waiting = state.engine.waiting();
            state.engine.abort(why);
            state.failed.get_or_insert_with(|| {
                Box::new(GroupFailed {
                    rank: self.rank,
                    failure: None,
                    engine: state.engine.failed().cloned(),
                    waiting,
                    peer: None,
                })
            });
        });
    }

    pub(super) fn why(&self) -> CollectiveError {
        self.with(|state| self.record_failure(state))
    }

    pub(super) fn drain(&self, until: Instant) {
        let mut backoff = self.backoff.clone();
        let mut idle = 0;
        loop {
            let mut lock = self.lock();
            let state = &mut *lock.state;
            let open = state.failed.is_none() && !state.engine.is_idle();
            if !open || Instant::now() >= until {
                return;
            }
            if self.poll_once(state, &mut idle) {
                backoff.reset();
            } else {
                drop(lock);
                backoff.idle();
            }
        }
    }

    #[cold]
    fn handle_attention(&self, state: &mut State) {
        if self.monitor.failed() || state.engine.failed().is_some() {
            self.record_failure(state);
        } else if self.monitor.report_requested() {
            let waits = state.engine.report();
            self.report_waits(state, waits);
        }
    }

    fn report_waits(&self, state: &mut State, waits: Vec<Wait>) {
        if let Some(timeout) = self.monitor.requested_link_test().filter(|_| state.engine.has_links()) {
            let Some(reached) = state.engine.probe_links(timeout) else {
                return;
            };
            self.monitor.report_reachable(reached);
        }
        self.monitor.report(waits);
    }

    /// Investigates an operation that takes long, and fails the group shortly before a deadline.
    #[cold]
    fn check_deadlines(&self, state: &mut State) {
        let Some((began, deadline)) = state.engine.expiring() else {
            return;
        };
        let since = began.elapsed();
        match state.stall {
            _ if since < deadline / 2 => state.stall = Stall::None,
            Stall::None => {
                state.stall = Stall::Investigated;
                self.control.investigate(REPLY_TIMEOUT.min(deadline / 4));
            }
            Stall::Investigated if since >= deadline - agreement_margin(deadline) => {
                let reason = format!("an operation has not finished within {deadline:?}");
                self.control.give_up(&reason);
                self.record_failure(state);
            }
            Stall::Investigated => {}
        }
    }

    /// Stops the engine, waits for the members' agreement on the cause, and records it.
    #[cold]
    pub(super) fn record_failure(&self, state: &mut State) -> CollectiveError {
        if let Some(failed) = &state.failed {
            return failed.clone().into();
        }
        let own = state.engine.failed().cloned();
        let waiting = state.engine.waiting();
        if let Some(own) = own.as_ref().filter(|_| !self.monitor.failed()) {
            self.handle_engine_failure(state, own);
        }
        state.engine.abort("the group has failed");
        let until = Instant::now() + 2 * AGREEMENT_TIMEOUT;
        let failure = loop {
            let failure = self.control.failure();
            if failure.is_some() || Instant::now() >= until {
                break failure;
            }
            thread::sleep(POLL_INTERVAL);
        };
        state.engine.release_queue_pairs();
        let peer = waiting.and_then(|waiting| self.control.members().get(waiting.peer.index()).cloned());
        let failed = Box::new(GroupFailed {
            rank: self.rank,
            failure,
            engine: own,
            waiting,
            peer,
        });
        state.failed = Some(failed.clone());
        failed.into()
    }

    fn handle_engine_failure(&self, state: &mut State, own: &Failed) {
        let left = state.engine.expiring().map_or(REPLY_TIMEOUT, |(began, deadline)| {
            deadline.saturating_sub(began.elapsed())
        });
        let reason = own.to_string();
        if matches!(own, Failed::Length { .. } | Failed::Parts { .. }) {
            // The cause is known.
            return self.control.give_up(&reason);
        }
        let broken = state.engine.report();
        let window = REPLY_TIMEOUT.min(left / 4);
        if state.stall == Stall::None {
            self.control.investigate_links(window);
        }
        // An unresponsive member shows only at the end of the window, and a busy machine delays it.
        let until = Instant::now() + window + left / 4;
        while Instant::now() < until && !self.monitor.failed() {
            if self.monitor.report_requested() {
                self.report_waits(state, broken.clone());
            }
            if self.control.finding().is_some() {
                break;
            }
            thread::sleep(POLL_INTERVAL);
        }
        self.control.give_up(&reason);
    }

    pub(super) fn wake(&self) {
        self.started.notify_one();
    }

    pub(super) fn end(&self) {
        self.shutdown.store(true, Ordering::Relaxed);
        // Under the lock: the thread cannot miss it between its check of the flag and its sleep.
        self.with(|_| self.started.notify_all());
    }

    pub(super) fn drive_in_background(&self) {
        let mut backoff = self.backoff.clone();
        let mut idle = 0;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        while !self.shutdown.load(Ordering::Relaxed) {
            if state.failed.is_some() || state.engine.is_idle() {
                backoff.reset();
                state = self.started.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let moved = self.poll_once(&mut state, &mut idle);
            if moved {
                backoff.reset();
            }
            let lock_waiters = || self.lock_waiters.load(Ordering::Relaxed) > 0;
            if !lock_waiters() && (moved || backoff.is_spinning()) {
                if !moved {
                    backoff.idle();
                }
                continue;
            }
            drop(state);
            while lock_waiters() && !self.shutdown.load(Ordering::Relaxed) {
                thread::sleep(LOCK_YIELD);
            }
            if !moved {
                backoff.idle();
            }
            state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        }
    }
}
