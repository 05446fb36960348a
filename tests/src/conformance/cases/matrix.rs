//! The effect of every event on a queue pair in every state. `matrix.txt` is the standard's matrix,
//! reviewed line by line and printed by `conformance --matrix`; each cell is a case.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use doorbell_verbs_sys::*;

use crate::conformance::rig::states::{STATES, TRANSPORTS, state_name, transport_name};
use crate::conformance::rig::{Ah, Bench, Completions, Cq, End, Errno, QKEY, Recv, Send, Setup, named};
use crate::conformance::{Case, case};

const EXPECTED: &str = include_str!("matrix.txt");

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    PostReceive,
    PostSend,
    Modify(ibv_qp_state),
    /// A SEND arrives; a receive was posted where the state allows.
    Send,
    SendWithoutReceive,
    Write,
    Read,
    /// A send from memory beyond its region.
    LocalErrorOfSend,
    /// A SEND arrives for a receive into memory beyond its region.
    LocalErrorOfReceive,
    /// The acknowledgement of a request posted in RTS arrives.
    Acknowledgement,
    /// To ERR with work in the queues.
    Flush,
    /// To RESET with work in the queues.
    Reset,
    /// Destroyed, with work in the queues where the state allows.
    Destroy,
}

impl Event {
    fn all() -> impl Iterator<Item = Self> {
        use Event::*;
        let modify = STATES.into_iter().map(Modify);
        let others = [
            Send,
            SendWithoutReceive,
            Write,
            Read,
            LocalErrorOfSend,
            LocalErrorOfReceive,
            Acknowledgement,
            Flush,
            Reset,
            Destroy,
        ];
        [PostReceive, PostSend].into_iter().chain(modify).chain(others)
    }

    fn name(self) -> String {
        match self {
            Self::PostReceive => "post-receive".to_owned(),
            Self::PostSend => "post-send".to_owned(),
            Self::Modify(to) => format!("modify-to-{}", state_name(to)),
            Self::Send => "incoming-send".to_owned(),
            Self::SendWithoutReceive => "incoming-send-without-receive".to_owned(),
            Self::Write => "incoming-write".to_owned(),
            Self::Read => "incoming-read".to_owned(),
            Self::LocalErrorOfSend => "local-error-of-send".to_owned(),
            Self::LocalErrorOfReceive => "local-error-of-receive".to_owned(),
            Self::Acknowledgement => "incoming-acknowledgement".to_owned(),
            Self::Flush => "error-with-work-queued".to_owned(),
            Self::Reset => "reset-with-work-queued".to_owned(),
            Self::Destroy => "destroy".to_owned(),
        }
    }

    /// Whether the event can occur for a transport in a state.
    fn can_occur(self, transport: ibv_qp_type, state: ibv_qp_state) -> bool {
        if transport == IBV_QPT_RC && state == IBV_QPS_SQE {
            return false;
        }
        match self {
            Self::Write => transport != IBV_QPT_UD,
            Self::Read => transport == IBV_QPT_RC,
            Self::Acknowledgement => {
                transport == IBV_QPT_RC && matches!(state, IBV_QPS_RESET | IBV_QPS_RTS | IBV_QPS_SQD | IBV_QPS_ERR)
            }
            Self::LocalErrorOfReceive | Self::Flush | Self::Reset => !matches!(state, IBV_QPS_RESET | IBV_QPS_ERR),
            _ => true,
        }
    }
}

#[derive(Clone, Copy)]
struct Cell {
    transport: ibv_qp_type,
    state: ibv_qp_state,
    event: Event,
}

fn cells() -> impl Iterator<Item = Cell> {
    TRANSPORTS.into_iter().flat_map(|transport| {
        STATES.into_iter().flat_map(move |state| {
            Event::all()
                .filter(move |event| event.can_occur(transport, state))
                .map(move |event| Cell {
                    transport,
                    state,
                    event,
                })
        })
    })
}

impl Cell {
    fn section(&self) -> String {
        format!("{} {}", transport_name(self.transport), state_name(self.state))
    }

    fn expected(&self) -> Option<&'static str> {
        let mut section = "";
        let (wanted, event) = (self.section(), self.event.name());
        for line in EXPECTED.lines() {
            match line.strip_prefix("    ") {
                None => section = line,
                Some(cell) if section == wanted => match cell.split_once(' ') {
                    Some((name, outcome)) if name == event => return Some(outcome.trim()),
                    _ => {}
                },
                Some(_) => {}
            }
        }
        None
    }
}

pub(super) fn cases() -> Vec<Case> {
    cells()
        .map(|cell| {
            let name = format!(
                "state/{}-{}/{}",
                transport_name(cell.transport),
                state_name(cell.state),
                cell.event.name()
            );
            let expected = cell.expected();
            let rule = expected.unwrap_or("the matrix has no such cell");
            case(&name, "10.3.1, figure 124", rule, move |bench| {
                let expected = expected.context("the matrix has no such cell")?;
                let found = observe(bench, cell, expected)?;
                ensure!(found == expected, "{found}");
                Ok(())
            })
        })
        .collect()
}

/// The matrix of a device, in the format of `matrix.txt`.
pub(in crate::conformance) fn print(bench: impl Fn() -> Bench) -> String {
    let mut text = String::new();
    let mut section = String::new();
    for cell in cells() {
        if section != cell.section() {
            section = cell.section();
            let _ = writeln!(text, "{section}");
        }
        let found = observe(&bench(), cell, "").unwrap_or_else(|error| format!("{error:#}"));
        let _ = writeln!(text, "    {:30} {found}", cell.event.name());
    }
    text
}

/// The queue pair under test, and its peer, which is in RTS.
struct Scene<'a> {
    cell: Cell,
    target: End,
    peer: End,
    /// The peer's address handle for it, and its own for the peer, for datagrams.
    handle: Ah,
    back: Ah,
    /// How long to wait for events that must not occur.
    quiet: Duration,
    expected: &'a str,
}

fn observe(bench: &Bench, cell: Cell, expected: &str) -> Result<String> {
    let setup = Setup {
        rnr_retry: if matches!(cell.event, Event::SendWithoutReceive) {
            0
        } else {
            7
        },
        retry_cnt: 2,
        timeout: 14,
        ..Setup::of(cell.transport)
    };
    let pair = bench.unconnected_pair(&setup, &setup)?;
    let address = pair.a.device().address_of(pair.a.device().gid());
    let scene = Scene {
        cell,
        handle: pair.a.pd.ah(address)?,
        back: pair.b.pd.ah(address)?,
        peer: pair.a,
        target: pair.b,
        quiet: bench.quiet,
        expected,
    };
    scene.peer.qp.bring_to(IBV_QPS_RTS)?;
    scene.play()
}

impl Scene<'_> {
    fn play(&self) -> Result<String> {
        let target = &self.target;
        match self.cell.event {
            Event::PostReceive => {
                self.enter(None)?;
                let result = target.qp.receive_one(Recv::new(1).sge(target.mr.sge(0, 64)));
                Ok(format!("{}; {}", self.posted(result, &target.received)?, self.state()?))
            }
            Event::PostSend => {
                self.enter(None)?;
                self.peer.expect(9, 0, 64)?;
                let result = target.qp.post_one(self.send().inline(b"sent"));
                Ok(format!("{}; {}", self.posted(result, &target.sent)?, self.state()?))
            }
            Event::Modify(to) => {
                self.enter(None)?;
                let result = target.qp.step(self.cell.state, to);
                let word = if result == Errno(0) { "taken" } else { "refused" };
                Ok(format!("{word}; {}", self.state()?))
            }
            Event::Send => {
                self.enter(Some(target.mr.sge(0, 64)))?;
                self.incoming(self.incoming_send())
            }
            Event::SendWithoutReceive => {
                self.enter(None)?;
                self.incoming(self.incoming_send())
            }
            Event::LocalErrorOfReceive => {
                self.enter(Some(self.beyond()))?;
                self.incoming(self.incoming_send())
            }
            Event::Write => {
                self.enter(None)?;
                let write = Send::new(IBV_WR_RDMA_WRITE)
                    .id(5)
                    .inline(b"written")
                    .at(target.mr.at(0), target.mr.rkey());
                let ends = self.incoming(write)?;
                let memory = if target.bytes(0, 7) == b"written" {
                    "written"
                } else {
                    "unchanged"
                };
                Ok(format!("memory {memory}, {ends}"))
            }
            Event::Read => {
                self.enter(None)?;
                let read = Send::new(IBV_WR_RDMA_READ)
                    .id(5)
                    .sge(self.peer.mr.sge(0, 8))
                    .at(target.mr.at(0), target.mr.rkey());
                self.incoming(read)
            }
            Event::LocalErrorOfSend => {
                self.enter(None)?;
                let result = target.qp.post_one(self.send().sge(self.beyond()));
                Ok(format!("{}; {}", self.posted(result, &target.sent)?, self.state()?))
            }
            Event::Acknowledgement => self.answer(),
            Event::Flush => self.with_work(Some(IBV_QPS_ERR)),
            Event::Reset => self.with_work(Some(IBV_QPS_RESET)),
            Event::Destroy => self.with_work(None),
        }
    }

    /// Brings it into the state, with a receive where one can be posted.
    fn enter(&self, receive: Option<ibv_sge>) -> Result<()> {
        let (qp, state) = (&self.target.qp, self.cell.state);
        if state == IBV_QPS_RESET {
            return Ok(());
        }
        qp.modify_through(IBV_QPS_RESET, &[IBV_QPS_INIT])?;
        if let Some(sge) = receive.filter(|_| state != IBV_QPS_ERR) {
            let result = qp.receive_one(Recv::new(7).sge(sge));
            ensure!(result == Errno(0), "ibv_post_recv in INIT: {result}");
        }
        let path: &[ibv_qp_state] = match state {
            IBV_QPS_INIT => &[],
            IBV_QPS_RTR => &[IBV_QPS_RTR],
            IBV_QPS_RTS | IBV_QPS_SQE => &[IBV_QPS_RTR, IBV_QPS_RTS],
            IBV_QPS_SQD => &[IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD],
            _ => &[IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_ERR],
        };
        qp.modify_through(IBV_QPS_INIT, path)?;
        if state == IBV_QPS_SQE {
            qp.break_send_queue()?;
        }
        Ok(())
    }

    /// Memory that exceeds its region by all but one byte.
    fn beyond(&self) -> ibv_sge {
        let region = &self.target.mr;
        region.sge(region.length() - 1, 64)
    }

    fn send(&self) -> Send {
        let send = Send::new(IBV_WR_SEND).id(3);
        if self.cell.transport == IBV_QPT_UD {
            send.to(&self.back, self.peer.qp.qpn(), QKEY)
        } else {
            send
        }
    }

    fn incoming_send(&self) -> Send {
        let send = Send::new(IBV_WR_SEND).id(5).inline(b"came");
        if self.cell.transport == IBV_QPT_UD {
            send.to(&self.handle, self.target.qp.qpn(), QKEY)
        } else {
            send
        }
    }

    fn state(&self) -> Result<&'static str> {
        Ok(state_name(self.target.qp.state()?))
    }

    /// The next completion of a queue; the time limit depends on `expecting`, the result does not.
    fn next(&self, cq: &Cq, expecting: bool) -> Result<Option<ibv_wc>> {
        cq.next_within(if expecting {
            self.target.device().time_limit()
        } else {
            self.quiet
        })
    }

    fn posted(&self, result: Errno, cq: &Cq) -> Result<String> {
        if result != Errno(0) {
            return Ok("refused".to_owned());
        }
        let wc = self.next(cq, self.expected.starts_with("completes"))?;
        Ok(wc.map_or_else(
            || "waits".to_owned(),
            |wc| format!("completes with {}", named(wc.status)),
        ))
    }

    /// A request of the peer: its completion there, and its effect here.
    fn incoming(&self, request: Send) -> Result<String> {
        self.peer.post(request)?;
        let there = self.peer.sent.wait().context("at the peer")?;
        let here = self.next(&self.target.received, self.expected.contains("receive "))?;
        let receive = here.map_or_else(String::new, |wc| format!(", receive {}", named(wc.status)));
        Ok(format!("peer {}{receive}; {}", named(there.status), self.state()?))
    }

    /// A request in flight, whose acknowledgement arrives in the state.
    fn answer(&self) -> Result<String> {
        let (target, state) = (&self.target, self.cell.state);
        target.qp.bring_to(IBV_QPS_RTS)?;
        // Without a receive the peer answers with RNR NAKs.
        target.post(self.send().inline(b"sent"))?;
        target.sent.expect_nothing(self.quiet).context("before the answer")?;
        if state != IBV_QPS_RTS {
            target.qp.modify_through(IBV_QPS_RTS, &[state])?;
        }
        self.peer.expect(9, 0, 64)?;
        let wc = self.next(&target.sent, self.expected.starts_with("completes"))?;
        let end = wc.map_or_else(
            || "nothing".to_owned(),
            |wc| format!("completes with {}", named(wc.status)),
        );
        Ok(format!("{end}; {}", self.state()?))
    }

    /// With two receives and, where possible, two sends queued: to another state, or destroyed.
    fn with_work(&self, to: Option<ibv_qp_state>) -> Result<String> {
        let (target, state) = (&self.target, self.cell.state);
        self.enter(None)?;
        if !matches!(state, IBV_QPS_RESET | IBV_QPS_ERR) {
            target.expect(1, 0, 64)?;
            target.expect(2, 0, 64)?;
        }
        // Over RC the peer has no receive and never accepts them.
        let waits = state == IBV_QPS_SQD || state == IBV_QPS_RTS && self.cell.transport == IBV_QPT_RC;
        for id in 3..5 {
            if waits {
                target.post(self.send().id(id).inline(b"sent"))?;
            }
        }
        let expecting = self.expected.contains("FLUSH");
        let Some(to) = to else {
            let result = target.qp.destroy();
            ensure!(result == Errno(0), "destroying it: {result}");
            return self
                .completed(waits, expecting)
                .map(|completed| format!("{completed}; gone"));
        };
        target.qp.modify_through(state, &[to])?;
        let completed = self.completed(waits, expecting)?;
        Ok(format!("{completed}; {}", self.state()?))
    }

    fn completed(&self, sends: bool, expecting: bool) -> Result<String> {
        let mut found = Vec::new();
        for (cq, count) in [
            (&self.target.received, 2),
            (&self.target.sent, if sends { 2 } else { 0 }),
        ] {
            for _ in 0..count {
                found.extend(self.next(cq, expecting)?);
            }
            if let Some(wc) = cq.poll()? {
                bail!("request {} completed too", wc.wr_id);
            }
        }
        Ok(match &found[..] {
            [] => "nothing completes".to_owned(),
            found => Completions(found).to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{EXPECTED, cells};

    #[test]
    fn the_snapshot_has_each_cell_once_and_no_other() {
        let mut wanted = String::new();
        let mut section = String::new();
        for cell in cells() {
            if section != cell.section() {
                section = cell.section();
                wanted += &format!("{section}\n");
            }
            let outcome = cell.expected().expect("it is in the snapshot");
            wanted += &format!("    {:30} {outcome}\n", cell.event.name());
        }
        assert_eq!(wanted, EXPECTED);
    }
}
