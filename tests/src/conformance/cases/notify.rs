//! Completion events: when there is one, and for whom.

use anyhow::{Context, Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::{Bench, Channel, Cq, End, Errno, Pair, Recv, Send, Setup};
use crate::conformance::{Case, case};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case(
            "notify/not-armed",
            "11.4.2.2",
            "without a request there is no event",
            not_armed,
        ),
        case(
            "notify/one-per-request",
            "11.4.2.2",
            "one event for each request, however many completions come",
            one_per_request,
        ),
        case(
            "notify/armed-again",
            "11.4.2.2",
            "armed again, there is an event again",
            armed_again,
        ),
        case(
            "notify/armed-after-completion",
            "11.4.2.2",
            "what was there when the queue was armed makes no event",
            armed_after,
        ),
        case(
            "notify/armed-twice",
            "11.4.2.2",
            "armed twice, there is one event",
            armed_twice,
        ),
        case(
            "notify/send-completion",
            "11.4.2.2",
            "completions of sends make events as those of receives do",
            send_completion,
        ),
        case(
            "notify/unsolicited",
            "11.4.2.2",
            "armed for solicited completions: others make no event",
            unsolicited,
        ),
        case(
            "notify/solicited-send",
            "9.2.3",
            "a SEND that solicits makes one",
            solicited_send,
        ),
        case(
            "notify/solicited-write",
            "9.2.3",
            "a WRITE with immediate data that solicits makes one",
            solicited_write,
        ),
        case(
            "notify/solicited-error",
            "11.4.2.2",
            "a completion in error makes one, solicited or not",
            solicited_error,
        ),
        case(
            "notify/any-wins",
            "11.4.2.2",
            "armed for any and then for solicited completions, any makes an event",
            any_wins,
        ),
        case(
            "notify/widened",
            "11.4.2.2",
            "armed for solicited and then for any completions, any makes an event",
            widened,
        ),
        case(
            "notify/which-queue",
            "ibv_get_cq_event(3)",
            "an event names its completion queue",
            which_queue,
        ),
        case(
            "notify/shared-channel",
            "ibv_create_comp_channel(3)",
            "queues of one channel have their events each",
            shared_channel,
        ),
        case(
            "notify/acknowledged-late",
            "ibv_get_cq_event(3)",
            "destroying a queue waits until its events are acknowledged",
            acknowledged_late,
        ),
    ]
}

/// Contexts of the two queues of `b`.
const SENT: usize = 0x51;
const RECEIVED: usize = 0x52;

/// A pair whose `b` has a channel for both of its queues.
struct Notified {
    pair: Pair,
    channel: Channel,
}

fn notified(bench: &Bench) -> Result<Notified> {
    let device = bench.open()?;
    let channel = device.channel()?;
    let setup = Setup::default();
    let a = End::new(&device, &setup, bench.psn(1))?;
    let queue = |context| device.cq_with(32, Some(&channel), context, 0);
    let b = End::with(&device.pd()?, queue(SENT)?, queue(RECEIVED)?, &setup, bench.psn(2))?;
    a.qp.set_peer(b.qp.as_peer());
    b.qp.set_peer(a.qp.as_peer());
    a.qp.bring_to(IBV_QPS_RTS)?;
    b.qp.bring_to(IBV_QPS_RTS)?;
    for id in 0..8 {
        ensure!(b.qp.receive_one(Recv::new(id)) == Errno(0), "a receive was refused");
    }
    Ok(Notified {
        pair: Pair { a, b },
        channel,
    })
}

impl Notified {
    fn queue(&self) -> &Cq {
        &self.pair.b.received
    }

    fn arm(&self, solicited_only: bool) -> Result<()> {
        let result = self.queue().arm(solicited_only);
        ensure!(result == Errno(0), "ibv_req_notify_cq: {result}");
        Ok(())
    }

    /// One message to `b`, with these flags, until its completion is there. It is left in the queue.
    fn message(&self, flags: u32) -> Result<()> {
        self.pair.a.post(Send::new(IBV_WR_SEND).id(1).with(flags))?;
        self.pair.a.sent.done(1)?;
        Ok(())
    }

    /// An event comes, of the receives, and is acknowledged.
    fn event(&self, bench: &Bench) -> Result<()> {
        let found = self.channel.event(bench.patience)?.context("no event came")?;
        ensure!(found == RECEIVED, "an event of {found:#x}");
        self.queue().acknowledge(1);
        Ok(())
    }

    fn no_event(&self, bench: &Bench) -> Result<()> {
        match self.channel.event(bench.quiet)? {
            None => Ok(()),
            Some(queue) => {
                let cq = if queue == RECEIVED {
                    &self.pair.b.received
                } else {
                    &self.pair.b.sent
                };
                cq.acknowledge(1);
                anyhow::bail!("an event came")
            }
        }
    }
}

fn not_armed(bench: &Bench) -> Result<()> {
    let it = notified(bench)?;
    it.message(0)?;
    it.no_event(bench)
}

fn one_per_request(bench: &Bench) -> Result<()> {
    let it = notified(bench)?;
    it.arm(false)?;
    for _ in 0..4 {
        it.message(0)?;
    }
    it.event(bench)?;
    it.no_event(bench)
}

fn armed_again(bench: &Bench) -> Result<()> {
    let it = notified(bench)?;
    for _ in 0..4 {
        it.arm(false)?;
        it.message(0)?;
        it.event(bench)?;
    }
    it.no_event(bench)
}

fn armed_after(bench: &Bench) -> Result<()> {
    let it = notified(bench)?;
    it.message(0)?;
    // Seen, so that it was surely there; and another that stays.
    it.queue().wait()?;
    it.message(0)?;
    it.no_event(bench)?;
    it.arm(false)?;
    it.no_event(bench)?;
    it.message(0)?;
    it.event(bench)
}

fn armed_twice(bench: &Bench) -> Result<()> {
    let it = notified(bench)?;
    it.arm(false)?;
    it.arm(false)?;
    it.message(0)?;
    it.message(0)?;
    it.event(bench)?;
    it.no_event(bench)
}

fn send_completion(bench: &Bench) -> Result<()> {
    let it = notified(bench)?;
    ensure!(it.pair.b.sent.arm(false) == Errno(0), "not armed");
    it.pair.a.expect(1, 0, 8)?;
    it.pair.b.post(Send::new(IBV_WR_SEND).id(2))?;
    let found = it.channel.event(bench.patience)?.context("no event came")?;
    ensure!(found == SENT, "an event of {found:#x}");
    it.pair.b.sent.acknowledge(1);
    it.pair.b.sent.done(2)?;
    Ok(())
}

fn unsolicited(bench: &Bench) -> Result<()> {
    let it = notified(bench)?;
    it.arm(true)?;
    it.message(0)?;
    it.message(0)?;
    it.no_event(bench)?;
    it.message(IBV_SEND_SOLICITED)?;
    it.event(bench)
}

fn solicited_send(bench: &Bench) -> Result<()> {
    let it = notified(bench)?;
    it.arm(true)?;
    // Of more than one packet: the last one's bit counts.
    it.pair.b.received.empty()?;
    it.message(IBV_SEND_SOLICITED)?;
    it.event(bench)?;
    it.message(IBV_SEND_SOLICITED)?;
    it.no_event(bench)
}

fn solicited_write(bench: &Bench) -> Result<()> {
    let it = notified(bench)?;
    it.arm(true)?;
    let write = |flags| {
        Send::new(IBV_WR_RDMA_WRITE_WITH_IMM)
            .id(1)
            .with(flags)
            .sge(it.pair.a.mr.sge(0, 3000))
            .at(it.pair.b.mr.at(0), it.pair.b.mr.rkey())
    };
    it.pair.a.post(write(0))?;
    it.pair.a.sent.done(1)?;
    it.no_event(bench)?;
    it.pair.a.post(write(IBV_SEND_SOLICITED))?;
    it.pair.a.sent.done(1)?;
    it.event(bench)
}

fn solicited_error(bench: &Bench) -> Result<()> {
    let it = notified(bench)?;
    it.arm(true)?;
    ensure!(it.pair.b.qp.step(IBV_QPS_RTS, IBV_QPS_ERR) == Errno(0), "RTS → ERR");
    it.event(bench)
}

fn any_wins(bench: &Bench) -> Result<()> {
    let it = notified(bench)?;
    it.arm(false)?;
    it.arm(true)?;
    it.message(0)?;
    it.event(bench)
}

fn widened(bench: &Bench) -> Result<()> {
    let it = notified(bench)?;
    it.arm(true)?;
    it.arm(false)?;
    it.message(0)?;
    it.event(bench)
}

fn which_queue(bench: &Bench) -> Result<()> {
    let it = notified(bench)?;
    it.arm(false)?;
    ensure!(it.pair.b.sent.arm(false) == Errno(0), "not armed");
    it.message(0)?;
    it.event(bench)?;
    it.no_event(bench)
}

fn shared_channel(bench: &Bench) -> Result<()> {
    let it = notified(bench)?;
    it.arm(false)?;
    ensure!(it.pair.b.sent.arm(false) == Errno(0), "not armed");
    it.pair.a.expect(1, 0, 8)?;
    it.message(0)?;
    it.pair.b.post(Send::new(IBV_WR_SEND).id(2))?;
    let mut found = Vec::new();
    for _ in 0..2 {
        found.push(it.channel.event(bench.patience)?.context("an event is missing")?);
    }
    it.pair.b.sent.acknowledge(1);
    it.pair.b.received.acknowledge(1);
    found.sort_unstable();
    ensure!(found == [SENT, RECEIVED], "events of {found:#x?}");
    it.no_event(bench)
}

fn acknowledged_late(bench: &Bench) -> Result<()> {
    let it = notified(bench)?;
    it.arm(false)?;
    it.message(0)?;
    it.channel.event(bench.patience)?.context("no event came")?;
    ensure!(it.pair.b.qp.destroy() == Errno(0), "destroying the queue pair");
    let (waited, result) = it.queue().destroy_in_parallel(bench.quiet);
    ensure!(waited, "it was destroyed though an event was not acknowledged");
    ensure!(result == Errno(0), "once it was acknowledged: {result}");
    Ok(())
}
