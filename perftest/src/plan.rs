//! The test parameters: the operation, its sizes and depths, as one value that both ends share.
//!
//! The client sends its [`Plan`] to the server, which needs no options. To a server it is untrusted
//! input: [`Plan::check`] validates it before anything is allocated.

mod mode;

use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::cli::{AtomicOperation, BwArgs, LatArgs, LimitArgs, Operation, TestArgs, Transport};
use crate::failure::Failure;
use crate::units::show_bytes;

pub(crate) use mode::Mode;

const MAX_SIZE: u64 = 1 << 30;
/// The most data per size that a default number of iterations moves.
const DEFAULT_VOLUME: u64 = 4 << 30;
/// Memory for the messages of one size at one end, over all queue pairs; at least two messages
/// each.
pub(crate) const MEMORY_BUDGET: u64 = 256 << 20;
/// The most memory of a test at one end, whatever the plan requests.
const MEMORY_LIMIT: u64 = 8 << 30;
/// Memory of a work request in a queue, about.
const WORK_REQUEST_BYTES: u64 = 128;
/// The most queue pairs with messages in shared memory: each takes a file descriptor.
const MAX_SHARED_QPS: u32 = 64;
const MAX_INLINE: u32 = 4096;
/// The largest MTU, and so the longest datagram.
const MAX_MTU: u64 = 4096;
/// Default inline size of latency tests of write and send.
const DEFAULT_LATENCY_INLINE: u32 = 220;

/// The kind of test: many messages in flight and bytes per second, or one and its time.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Kind {
    /// Bandwidth, as doorbell bw measures it
    #[default]
    Bw,
    /// Latency, as doorbell lat measures it
    Lat,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Bw => "bw",
            Kind::Lat => "lat",
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Verb {
    Write,
    Read,
    Send,
    Atomic(AtomicOperation),
}

impl Verb {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Verb::Write => "write",
            Verb::Read => "read",
            Verb::Send => "send",
            Verb::Atomic(_) => "atomic",
        }
    }
}

/// How long a size is measured.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum TestLength {
    /// Iterations per queue pair, the same for every size.
    Iterations(u64),
    /// Iterations per queue pair, limited to 4 GiB in total.
    DefaultIterations(u64),
    /// Seconds per size.
    Seconds(f64),
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
// fields: the keys of the plan message, one per option
pub(crate) struct Plan {
    pub(crate) kind: Kind,
    pub(crate) verb: Verb,
    #[serde(default)]
    pub(crate) mode: Mode,
    /// Message sizes in bytes, in the order they run.
    pub(crate) sizes: Vec<u64>,
    pub(crate) extent: TestLength,
    /// Warm-up messages per queue pair; `None` for the default of [`Plan::warmup`].
    pub(crate) warmup: Option<u64>,
    pub(crate) qps: u32,
    /// tx depth: requests in flight per queue pair.
    pub(crate) tx_depth: u32,
    /// rx depth: receives posted per queue pair.
    pub(crate) rx_depth: u32,
    /// Requests per doorbell.
    pub(crate) post_list: u32,
    /// CQ moderation: one request in so many is signaled.
    pub(crate) cq_mod: u32,
    /// Messages of up to so many bytes are sent inline.
    pub(crate) inline: u32,
    /// Whether the inline size was given; a default is dropped where a device has no inline.
    pub(crate) inline_required: bool,
    /// Path MTU in bytes; `None` for the smaller of the ports'.
    pub(crate) mtu: Option<u32>,
    /// Whether messages are in private memory, which no other process can map.
    #[serde(default)]
    pub(crate) private_memory: bool,
    /// Whether messages are in GPU memory at either end: then none is sent inline, and the WRITEs
    /// of a ping-pong carry immediate data.
    #[serde(default)]
    pub(crate) gpu: bool,
    pub(crate) verify: bool,
    /// Whether the ends sleep until a completion event instead of polling.
    #[serde(default)]
    pub(crate) events: bool,
    pub(crate) seed: u64,
    pub(crate) timeout: u8,
    pub(crate) retry: u8,
    /// DSCP of the packets.
    #[serde(default)]
    pub(crate) dscp: u8,
    /// Rate limit of an open loop, in messages per second over all queue pairs; `None` without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rate_per_s: Option<f64>,
    /// Seconds between two lines of the client while a size runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) interval_s: Option<f64>,
    /// Repeats of each size, each on new queue pairs.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    pub(crate) repeat: u32,
}

fn once() -> u32 {
    1
}

fn is_once(repeat: &u32) -> bool {
    *repeat == 1
}

impl Plan {
    /// # Errors
    /// [`Failure::Usage`] when values contradict each other.
    pub(crate) fn bw(args: &BwArgs) -> Result<Plan, Failure> {
        let tx_depth = args.tx_depth.unwrap_or_else(|| 128.max(args.post_list));
        if args.post_list > tx_depth {
            return Err(Failure::usage(format!(
                "--post-list {} does not fit in --tx-depth {tx_depth}: raise the depth or shorten the list",
                args.post_list
            )));
        }
        if args.rx_depth.is_some() && args.test.operation != Operation::Send {
            return Err(Failure::usage(
                "--rx-depth is for send: the other operations post no receives",
            ));
        }
        let cq_mod = match args.cq_mod {
            Some(requested) if requested > tx_depth => {
                return Err(Failure::usage(format!(
                    "--cq-mod {requested} is more than --tx-depth {tx_depth}: the queue would fill with nothing to wait for"
                )));
            }
            Some(requested) => requested,
            None => 100.min(tx_depth / 2).max(1),
        };
        let base = Plan::of(&args.test, Kind::Bw)?;
        let plan = Plan {
            mode: Mode {
                bidirectional: args.bidirectional,
                ..base.mode
            },
            qps: args.qps,
            tx_depth,
            rx_depth: args.rx_depth.unwrap_or_else(|| base.default_rx_depth()),
            post_list: args.post_list,
            cq_mod,
            private_memory: base.private_memory || args.qps > MAX_SHARED_QPS,
            ..base
        };
        plan.checked()
    }

    /// # Errors
    /// [`Failure::Usage`] when values contradict each other.
    pub(crate) fn lat(args: &LatArgs) -> Result<Plan, Failure> {
        Plan::of(&args.test, Kind::Lat)?.checked()
    }

    /// What both command lines have in common; the depths are those of a latency test.
    fn of(args: &TestArgs, kind: Kind) -> Result<Plan, Failure> {
        let verb = match args.operation {
            Operation::Write => Verb::Write,
            Operation::Read => Verb::Read,
            Operation::Send => Verb::Send,
            Operation::Atomic => Verb::Atomic(args.atomic_op.unwrap_or_default()),
        };
        let atomic = matches!(verb, Verb::Atomic(_));
        if !atomic && args.atomic_op.is_some() {
            return Err(Failure::usage(format!(
                "--atomic-op is for atomic, not for {}",
                verb.name()
            )));
        }
        if atomic && (args.all || args.size.is_some_and(|size| size != 8)) {
            return Err(Failure::usage(
                "an atomic always moves 8 bytes: leave --size and --all out",
            ));
        }
        if !args.gpu.is_empty() {
            check_gpu(args)?;
        }
        let carries_inline = matches!(verb, Verb::Write | Verb::Send);
        if !carries_inline && args.inline.is_some_and(|bytes| bytes > 0) {
            return Err(Failure::usage(format!(
                "--inline is for write and send: {} carries no payload to the peer",
                verb.name()
            )));
        }
        let datagrams = args.connection.transport == Transport::Ud;
        let sizes = match (args.all, args.size) {
            (true, _) if datagrams => (1..=12).map(|power| 1 << power).collect(),
            (true, _) => (1..=23).map(|power| 1 << power).collect(),
            (false, Some(size)) => vec![size],
            (false, None) if atomic => vec![8],
            (false, None) if kind == Kind::Bw && datagrams => vec![MAX_MTU],
            (false, None) if kind == Kind::Bw => vec![65536],
            (false, None) => vec![2],
        };
        let extent = match (args.iterations, args.duration) {
            (Some(iterations), _) => TestLength::Iterations(iterations),
            (None, Some(seconds)) => TestLength::Seconds(seconds),
            (None, None) if kind == Kind::Bw && verb == Verb::Write => TestLength::DefaultIterations(5000),
            (None, None) => TestLength::DefaultIterations(1000),
        };
        let default_inline = if kind == Kind::Lat && carries_inline && args.gpu.is_empty() {
            DEFAULT_LATENCY_INLINE
        } else {
            0
        };
        Ok(Plan {
            kind,
            verb,
            mode: Mode {
                transport: args.connection.transport,
                bidirectional: false,
                rdma_cm: args.connection.rdma_cm,
            },
            sizes,
            extent,
            warmup: args.warmup,
            qps: 1,
            tx_depth: 8,
            rx_depth: 8,
            post_list: 1,
            cq_mod: 1,
            inline: args.inline.unwrap_or(default_inline),
            inline_required: args.inline.is_some(),
            mtu: args.connection.mtu,
            private_memory: args.private_memory,
            gpu: !args.gpu.is_empty(),
            verify: args.verify,
            events: args.events,
            seed: args.seed,
            timeout: args.connection.timeout,
            retry: args.connection.retry,
            dscp: args.connection.dscp,
            rate_per_s: args.rate,
            interval_s: args.interval,
            repeat: args.repeat,
        })
    }

    /// As many receives as messages where those are lost for want of one, within bounds; else what
    /// credits need.
    fn default_rx_depth(&self) -> u32 {
        match self.extent {
            TestLength::Iterations(n) | TestLength::DefaultIterations(n)
                if self.verb == Verb::Send && !self.mode.is_reliable() =>
            {
                let messages = n.saturating_add(self.warmup.unwrap_or(100));
                u32::try_from(messages).unwrap_or(u32::MAX).clamp(512, 4096)
            }
            _ => 512,
        }
    }

    fn checked(self) -> Result<Plan, Failure> {
        self.check().map_err(Failure::Usage)?;
        Ok(self)
    }

    /// # Errors
    /// One line with the value that is out of range.
    pub(crate) fn check(&self) -> Result<(), String> {
        let in_range = |what: &str, value: u64, low: u64, high: u64| {
            if (low..=high).contains(&value) {
                Ok(())
            } else {
                Err(format!("{what} is {value}: it must be {low} to {high}"))
            }
        };
        self.mode.check(self.kind, self.verb)?;
        if self.gpu && self.mode.transport == Transport::Ud {
            return Err("--gpu is for rc and uc: a datagram's header would lie in the GPU's memory".into());
        }
        if self.sizes.is_empty() || self.sizes.len() > 64 {
            return Err(format!("{} message sizes: a test has 1 to 64", self.sizes.len()));
        }
        for &size in &self.sizes {
            if !(1..=MAX_SIZE).contains(&size) {
                return Err(format!(
                    "a message of {size} bytes: sizes go from 1 to {}",
                    show_bytes(MAX_SIZE)
                ));
            }
            if self.mode.transport == Transport::Ud && size > MAX_MTU {
                return Err(format!(
                    "a datagram of {size} bytes: it carries at most the MTU, {MAX_MTU}"
                ));
            }
            if matches!(self.verb, Verb::Atomic(_)) && size != 8 {
                return Err(format!("an atomic of {size} bytes: it always moves 8"));
            }
            if self.memory(size) > MEMORY_LIMIT {
                return Err(format!(
                    "{} queue pairs with messages of {} take over {} of memory: use fewer or smaller ones",
                    self.qps,
                    show_bytes(size),
                    show_bytes(MEMORY_LIMIT)
                ));
            }
        }
        match self.extent {
            TestLength::Iterations(n) | TestLength::DefaultIterations(n) => {
                in_range("the number of iterations", n, 1, 1 << 48)?
            }
            TestLength::Seconds(seconds) if (0.001..=86_400.0).contains(&seconds) => {}
            TestLength::Seconds(seconds) => {
                return Err(format!("a running time of {seconds} s: it must be 0.001 to 86400"));
            }
        }
        in_range("the number of warm-up messages", self.warmup.unwrap_or(0), 0, 1 << 40)?;
        in_range("the number of queue pairs", self.qps.into(), 1, 1024)?;
        in_range("the send depth", self.tx_depth.into(), 1, 16384)?;
        in_range("the receive depth", self.rx_depth.into(), 2, 16384)?;
        in_range("the post list", self.post_list.into(), 1, self.tx_depth.into())?;
        in_range("the completion interval", self.cq_mod.into(), 1, self.tx_depth.into())?;
        in_range("the inline size", self.inline.into(), 0, MAX_INLINE.into())?;
        in_range("the timeout code", self.timeout.into(), 0, 31)?;
        in_range("the retry count", self.retry.into(), 0, 7)?;
        in_range("the DSCP", self.dscp.into(), 0, 63)?;
        in_range("the number of repeats", self.repeat.into(), 1, 1000)?;
        if let Some(rate) = self.rate_per_s
            && !(1.0..=1e9).contains(&rate)
        {
            return Err(format!(
                "a rate of {rate} messages per second: it must be 1 to 1000000000"
            ));
        }
        if self.mtu.is_some_and(|mtu| ![256, 512, 1024, 2048, 4096].contains(&mtu)) {
            return Err("the path MTU must be 256, 512, 1024, 2048 or 4096".into());
        }
        if let Some(interval) = self.interval_s {
            if !(0.001..=86_400.0).contains(&interval) {
                return Err(format!("an interval of {interval} s: it must be 0.001 to 86400"));
            }
            if self.repeat > 1 {
                return Err("--interval shows the course of one run: leave --repeat out".into());
            }
        }
        if self.events && self.kind == Kind::Lat && self.verb == Verb::Write && !self.gpu {
            return Err("lat write polls memory for the answer, which raises no event: use lat send".into());
        }
        if self.kind == Kind::Lat && self.qps != 1 {
            return Err("a latency test has one queue pair".into());
        }
        Ok(())
    }

    /// The plan for a port of this active MTU: datagrams are no longer than that. Sizes that are
    /// only defaults are shortened.
    ///
    /// # Errors
    /// [`Failure::Usage`] when a size that was given is longer.
    pub(crate) fn fitted(&self, active_mtu: u32, are_given: bool) -> Result<Plan, Failure> {
        let mut plan = self.clone();
        let mtu = u64::from(self.mtu.unwrap_or(active_mtu).min(active_mtu));
        let too_long = plan.sizes.iter().copied().find(|size| *size > mtu);
        match too_long.filter(|_| self.mode.transport == Transport::Ud) {
            None => {}
            Some(size) if are_given => {
                return Err(Failure::usage(format!(
                    "a datagram of {size} bytes: it carries at most the MTU, here {mtu}"
                )));
            }
            Some(_) => {
                plan.sizes.retain(|size| *size < mtu);
                plan.sizes.push(mtu);
            }
        }
        Ok(plan)
    }

    /// # Errors
    /// One line with the server's option whose limit the plan exceeds.
    pub(crate) fn check_limits(&self, limits: &LimitArgs) -> Result<(), String> {
        let requests = u64::from(self.qps) * (u64::from(self.tx_depth) + u64::from(self.rx_depth));
        let memory = self.registers_bytes().saturating_add(requests * WORK_REQUEST_BYTES);
        // A test of a number of iterations ends when its time is up.
        let seconds = self.duration().unwrap_or_default().as_secs_f64();
        let seconds = seconds * self.sizes.len() as f64 * f64::from(self.repeat);
        let over = |wanted, option, limit| Err(format!("{wanted}, over the server's {option} of {limit}"));
        if self.qps > limits.client_qps {
            over(
                format!("{} queue pairs", self.qps),
                "--client-qps",
                limits.client_qps.to_string(),
            )
        } else if memory > limits.client_memory {
            let limit = show_bytes(limits.client_memory);
            over(format!("{} of memory", show_bytes(memory)), "--client-memory", limit)
        } else if seconds > limits.client_time {
            over(
                format!("{seconds} s"),
                "--client-time",
                format!("{} s", limits.client_time),
            )
        } else {
            Ok(())
        }
    }

    /// The test's name in results: `write_bw`.
    pub(crate) fn test_name(&self) -> String {
        format!("{}_{}", self.verb.name(), self.kind.name())
    }

    pub(crate) fn command_name(&self) -> String {
        Plan::command(self.kind, self.verb.name())
    }

    pub(crate) fn command(kind: Kind, verb: &str) -> String {
        format!("{} {verb}", kind.name())
    }

    /// Iterations per queue pair, or `None` for a timed test.
    pub(crate) fn iterations(&self, size: u64) -> Option<u64> {
        match self.extent {
            TestLength::Iterations(n) => Some(n),
            TestLength::DefaultIterations(n) => Some(n.min((DEFAULT_VOLUME / size / u64::from(self.qps)).max(16))),
            TestLength::Seconds(_) => None,
        }
    }

    /// Duration of a size, or `None` without a timed test.
    pub(crate) fn duration(&self) -> Option<Duration> {
        match self.extent {
            TestLength::Seconds(seconds) => Duration::try_from_secs_f64(seconds).ok(),
            TestLength::Iterations(_) | TestLength::DefaultIterations(_) => None,
        }
    }

    /// Time between two lines of the client.
    pub(crate) fn interval(&self) -> Option<Duration> {
        Duration::try_from_secs_f64(self.interval_s?).ok()
    }

    /// Warm-up messages per queue pair: as given, or 100 but at most a tenth of the iterations.
    pub(crate) fn warmup(&self, size: u64) -> u64 {
        self.warmup.unwrap_or_else(|| match self.iterations(size) {
            Some(iterations) => 100.min(iterations / 10),
            None => 100,
        })
    }

    /// The most messages of this size in flight on one queue pair: the tx depth, or what fits in
    /// its share of the memory budget. At least two where the depth allows it, so that one can be
    /// in flight while the other is checked.
    pub(crate) fn window(&self, size: u64) -> u32 {
        self.slots(size, self.tx_depth)
    }

    /// Receives of this size that one queue pair keeps posted.
    pub(crate) fn receives(&self, size: u64) -> u32 {
        self.slots(size, self.rx_depth)
    }

    fn slots(&self, size: u64, depth: u32) -> u32 {
        let fit = MEMORY_BUDGET / u64::from(self.qps.max(1)) / size.max(1);
        u32::try_from(fit.max(2)).unwrap_or(u32::MAX).min(depth)
    }

    pub(crate) fn registers_bytes(&self) -> u64 {
        self.sizes.iter().map(|&size| self.memory(size)).max().unwrap_or(0)
    }

    fn memory(&self, size: u64) -> u64 {
        let slots = self.slots(size, self.tx_depth.max(self.rx_depth));
        let directions = if self.mode.bidirectional { 2 } else { 1 };
        let one_way = size.saturating_mul(slots.into()).saturating_mul(self.qps.into());
        one_way.saturating_mul(directions)
    }
}

fn check_gpu(args: &TestArgs) -> Result<(), Failure> {
    let both = args.peer.is_none() && !args.server;
    let most = if both { 2 } else { 1 };
    if args.gpu.len() > most {
        return Err(Failure::usage(if both {
            "--gpu takes one GPU, or one for each of the two ends"
        } else {
            "--gpu takes a second GPU only when both ends run here"
        }));
    }
    if args.operation == Operation::Atomic {
        return Err(Failure::usage(
            "--gpu is for write, read and send: atomics are measured in host memory",
        ));
    }
    if args.inline.is_some_and(|bytes| bytes > 0) {
        return Err(Failure::usage(
            "--inline is for messages in host memory: the processor copies them into the request",
        ));
    }
    Ok(())
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
