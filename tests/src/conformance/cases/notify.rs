//! Completion events: when they are raised, and on which channel.

use anyhow::{Context, Result, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::{Bench, Channel, Cq, End, Errno, Pair, Recv, Send, Setup};
use crate::conformance::{Case, case};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case(
            "notify/not-armed",
            "11.4.2.2",
            "without ibv_req_notify_cq there is no event",
            not_armed,
        ),
        case(
            "notify/one-per-request",
            "11.4.2.2",
            "one event per ibv_req_notify_cq, for any number of completions",
            one_per_request,
        ),
        case(
            "notify/armed-again",
            "11.4.2.2",
            "rearmed, there is another event",
            armed_again,
        ),
        case(
            "notify/armed-after-completion",
            "11.4.2.2",
            "completions present when the queue is armed raise no event",
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
            "completions of sends raise events, as those of receives",
            send_completion,
        ),
        case(
            "notify/unsolicited",
            "11.4.2.2",
            "armed for solicited completions: others raise no event",
            unsolicited,
        ),
        case(
            "notify/solicited-send",
            "9.2.3",
            "a solicited SEND raises one",
            solicited_send,
        ),
        case(
            "notify/solicited-write",
            "9.2.3",
            "a solicited WRITE with immediate data raises one",
            solicited_write,
        ),
        case(
            "notify/solicited-error",
            "11.4.2.2",
            "a completion in error raises one, solicited or not",
            solicited_error,
        ),
        case(
            "notify/any-wins",
            "11.4.2.2",
            "armed for any and then for solicited completions, any raises an event",
            any_wins,
        ),
        case(
            "notify/widened",
            "11.4.2.2",
            "armed for solicited and then for any completions, any raises an event",
            widened,
        ),
        case(
            "notify/which-queue",
            "ibv_get_cq_event(3)",
            "an event carries its completion queue",
            which_queue,
        ),
        case(
            "notify/shared-channel",
            "ibv_create_comp_channel(3)",
            "each queue on a channel has its own events",
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

/// The cq_context values of `b`'s two queues.
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

    /// Waits until it has arrived; its completion stays in the queue.
    fn message(&self, flags: u32) -> Result<()> {
        self.pair.a.post(Send::new(IBV_WR_SEND).id(1).with(flags))?;
        self.pair.a.sent.done(1)?;
        Ok(())
    }

    /// Expects and acknowledges an event of the receive queue.
    fn event(&self, bench: &Bench) -> Result<()> {
        let found = self.channel.event(bench.time_limit)?.context("no event was raised")?;
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
    let notified = notified(bench)?;
    notified.message(0)?;
    notified.no_event(bench)
}

fn one_per_request(bench: &Bench) -> Result<()> {
    let notified = notified(bench)?;
    notified.arm(false)?;
    for _ in 0..4 {
        notified.message(0)?;
    }
    notified.event(bench)?;
    notified.no_event(bench)
}

fn armed_again(bench: &Bench) -> Result<()> {
    let notified = notified(bench)?;
    for _ in 0..4 {
        notified.arm(false)?;
        notified.message(0)?;
        notified.event(bench)?;
    }
    notified.no_event(bench)
}

fn armed_after(bench: &Bench) -> Result<()> {
    let notified = notified(bench)?;
    notified.message(0)?;
    // Polled, so that it surely arrived; and another that stays.
    notified.queue().wait()?;
    notified.message(0)?;
    notified.no_event(bench)?;
    notified.arm(false)?;
    notified.no_event(bench)?;
    notified.message(0)?;
    notified.event(bench)
}

fn armed_twice(bench: &Bench) -> Result<()> {
    let notified = notified(bench)?;
    notified.arm(false)?;
    notified.arm(false)?;
    notified.message(0)?;
    notified.message(0)?;
    notified.event(bench)?;
    notified.no_event(bench)
}

fn send_completion(bench: &Bench) -> Result<()> {
    let notified = notified(bench)?;
    ensure!(notified.pair.b.sent.arm(false) == Errno(0), "not armed");
    notified.pair.a.expect(1, 0, 8)?;
    notified.pair.b.post(Send::new(IBV_WR_SEND).id(2))?;
    let found = notified
        .channel
        .event(bench.time_limit)?
        .context("no event was raised")?;
    ensure!(found == SENT, "an event of {found:#x}");
    notified.pair.b.sent.acknowledge(1);
    notified.pair.b.sent.done(2)?;
    Ok(())
}

fn unsolicited(bench: &Bench) -> Result<()> {
    let notified = notified(bench)?;
    notified.arm(true)?;
    notified.message(0)?;
    notified.message(0)?;
    notified.no_event(bench)?;
    notified.message(IBV_SEND_SOLICITED)?;
    notified.event(bench)
}

fn solicited_send(bench: &Bench) -> Result<()> {
    let notified = notified(bench)?;
    notified.arm(true)?;
    // Several packets: the last one's bit counts.
    notified.pair.b.received.empty()?;
    notified.message(IBV_SEND_SOLICITED)?;
    notified.event(bench)?;
    notified.message(IBV_SEND_SOLICITED)?;
    notified.no_event(bench)
}

fn solicited_write(bench: &Bench) -> Result<()> {
    let notified = notified(bench)?;
    notified.arm(true)?;
    let write = |flags| {
        Send::new(IBV_WR_RDMA_WRITE_WITH_IMM)
            .id(1)
            .with(flags)
            .sge(notified.pair.a.mr.sge(0, 3000))
            .at(notified.pair.b.mr.at(0), notified.pair.b.mr.rkey())
    };
    notified.pair.a.post(write(0))?;
    notified.pair.a.sent.done(1)?;
    notified.no_event(bench)?;
    notified.pair.a.post(write(IBV_SEND_SOLICITED))?;
    notified.pair.a.sent.done(1)?;
    notified.event(bench)
}

fn solicited_error(bench: &Bench) -> Result<()> {
    let notified = notified(bench)?;
    notified.arm(true)?;
    ensure!(
        notified.pair.b.qp.step(IBV_QPS_RTS, IBV_QPS_ERR) == Errno(0),
        "RTS → ERR"
    );
    notified.event(bench)
}

fn any_wins(bench: &Bench) -> Result<()> {
    let notified = notified(bench)?;
    notified.arm(false)?;
    notified.arm(true)?;
    notified.message(0)?;
    notified.event(bench)
}

fn widened(bench: &Bench) -> Result<()> {
    let notified = notified(bench)?;
    notified.arm(true)?;
    notified.arm(false)?;
    notified.message(0)?;
    notified.event(bench)
}

fn which_queue(bench: &Bench) -> Result<()> {
    let notified = notified(bench)?;
    notified.arm(false)?;
    ensure!(notified.pair.b.sent.arm(false) == Errno(0), "not armed");
    notified.message(0)?;
    notified.event(bench)?;
    notified.no_event(bench)
}

fn shared_channel(bench: &Bench) -> Result<()> {
    let notified = notified(bench)?;
    notified.arm(false)?;
    ensure!(notified.pair.b.sent.arm(false) == Errno(0), "not armed");
    notified.pair.a.expect(1, 0, 8)?;
    notified.message(0)?;
    notified.pair.b.post(Send::new(IBV_WR_SEND).id(2))?;
    let mut found = Vec::new();
    for _ in 0..2 {
        found.push(
            notified
                .channel
                .event(bench.time_limit)?
                .context("an event is missing")?,
        );
    }
    notified.pair.b.sent.acknowledge(1);
    notified.pair.b.received.acknowledge(1);
    found.sort_unstable();
    ensure!(found == [SENT, RECEIVED], "events of {found:#x?}");
    notified.no_event(bench)
}

fn acknowledged_late(bench: &Bench) -> Result<()> {
    let notified = notified(bench)?;
    notified.arm(false)?;
    notified.message(0)?;
    notified
        .channel
        .event(bench.time_limit)?
        .context("no event was raised")?;
    ensure!(notified.pair.b.qp.destroy() == Errno(0), "destroying the queue pair");
    let (waited, result) = notified.queue().destroy_in_parallel(bench.quiet);
    ensure!(waited, "it was destroyed though an event was not acknowledged");
    ensure!(result == Errno(0), "once it was acknowledged: {result}");
    Ok(())
}
