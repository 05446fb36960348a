//! A peer process on the same host that is stopped (SIGSTOP) and continued loses no connection. A
//! test program of its own, which decides who holds the UDP port of an address.

#[path = "api/common.rs"]
mod common;

use std::collections::HashMap;
use std::env;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use doorbell_softroce_rdmacm::*;
use doorbell_verbs_sys::rdmacm::*;
use doorbell_verbs_sys::*;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use common::*;

/// Marks a line as the child's, among the test harness's output.
const ANSWER: &str = "peer: ";
/// Messages in flight on a connection; `qp_init` has as many work requests.
const DEPTH: u64 = 4;
/// A continued peer answers within this time, on a machine however busy.
const LIMIT: Duration = Duration::from_secs(60);

/// A connected queue pair whose messages are numbers.
struct End {
    id: Id,
    mr: *mut ibv_mr,
    inbox: &'static mut [u64; DEPTH as usize],
    sent: u64,
    completed: u64,
    received: u64,
}

impl End {
    fn new(id: Id) -> Self {
        id.create_qp();
        let inbox = Box::leak(Box::new([0; DEPTH as usize]));
        let (memory, len) = (inbox.as_mut_ptr().cast(), size_of_val(inbox));
        let register = doorbell_softroce_ibverbs::api().reg_mr;
        // SAFETY: the domain is live, and the memory as long as the process.
        let mr = unsafe { register(id.get().pd, memory, len, IBV_ACCESS_LOCAL_WRITE as i32) };
        assert!(!mr.is_null());
        let end = Self {
            id,
            mr,
            inbox,
            sent: 0,
            completed: 0,
            received: 0,
        };
        (0..DEPTH).for_each(|slot| end.receive(slot));
        end
    }

    fn sge(&self, to: &u64) -> ibv_sge {
        ibv_sge {
            addr: ptr::from_ref(to) as u64,
            length: 8,
            // SAFETY: live until `destroy`, which consumes this.
            lkey: unsafe { (*self.mr).lkey },
        }
    }

    fn receive(&self, slot: u64) {
        let mut sge = self.sge(&self.inbox[slot as usize]);
        let mut request = ibv_recv_wr {
            wr_id: slot,
            next: ptr::null_mut(),
            sg_list: &mut sge,
            num_sge: 1,
        };
        // SAFETY: the queue pair is live, and the memory as long as the process.
        ok(unsafe { inline::post_recv(self.id.get().qp, &mut request, &mut ptr::null_mut()) });
    }

    fn send(&mut self, number: u64) {
        let mut sge = self.sge(&number);
        // SAFETY: integers and pointers; an inline message is copied as it is posted.
        unsafe {
            let mut request: ibv_send_wr = core::mem::zeroed();
            request.sg_list = &mut sge;
            request.num_sge = 1;
            request.opcode = IBV_WR_SEND;
            request.send_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
            ok(inline::post_send(self.id.get().qp, &mut request, &mut ptr::null_mut()));
        }
        self.sent += 1;
    }

    fn can_send(&mut self) -> bool {
        self.completed += u64::from(completion(self.id.get().send_cq).is_some());
        self.sent - self.completed < DEPTH
    }

    fn poll(&mut self) -> Option<u64> {
        let slot = completion(self.id.get().recv_cq)?;
        let number = self.inbox[slot as usize];
        self.receive(slot);
        self.received += 1;
        Some(number)
    }

    /// The active end: sends numbers, and expects each back in order.
    fn exchange(&mut self) {
        if self.sent - self.received < DEPTH && self.can_send() {
            self.send(self.sent);
        }
        let expected = self.received;
        assert!(self.poll().is_none_or(|number| number == expected));
    }

    fn exchange_more(&mut self) {
        let (until, since) = (self.received + 100, Instant::now());
        while self.received < until {
            self.exchange();
            assert!(since.elapsed() < LIMIT, "no answer");
        }
    }

    /// The passive end: sends back what it received.
    fn echo(&mut self) {
        if self.can_send()
            && let Some(number) = self.poll()
        {
            self.send(number);
        }
    }

    fn destroy(self) {
        self.id.destroy();
        // SAFETY: no queue pair uses it any more.
        ok(unsafe { (doorbell_softroce_ibverbs::api().dereg_mr)(self.mr) });
    }
}

/// The work request of a completion, which must have succeeded.
fn completion(cq: *mut ibv_cq) -> Option<u64> {
    // SAFETY: integers; the queue is live while its identifier is.
    unsafe {
        let mut wc: ibv_wc = core::mem::zeroed();
        let polled = inline::poll_cq(cq, 1, &mut wc);
        assert!(
            polled == 0 || polled == 1 && wc.status == IBV_WC_SUCCESS,
            "{polled} {}",
            wc.status
        );
        (polled == 1).then_some(wc.wr_id)
    }
}

struct Peer {
    process: Child,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    fn start(address: SocketAddr) -> Self {
        let mut process = Command::new(env::current_exe().unwrap())
            .args(["--exact", "peer", "--nocapture", "--include-ignored"])
            .env(CHILD, address.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let answers = BufReader::new(process.stdout.take().unwrap());
        let mut peer = Self { process, answers };
        assert_eq!(peer.answer(), "listening");
        peer
    }

    fn answer(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.answers.read_line(&mut line).unwrap(), 0, "the peer is gone");
            // The harness prints the test's name in front of the first.
            if let Some((_, answer)) = line.split_once(ANSWER) {
                return answer.trim().to_owned();
            }
        }
    }

    fn signal(&self, signal: Signal) -> Pid {
        let pid = Pid::from_raw(self.process.id().cast_signed());
        kill(pid, signal).unwrap();
        pid
    }

    /// Returns when all of its threads have stopped.
    fn stop(&self) {
        let status = waitpid(self.signal(Signal::SIGSTOP), Some(WaitPidFlag::WUNTRACED)).unwrap();
        assert!(matches!(status, WaitStatus::Stopped(..)), "{status:?}");
    }

    /// The number of connections that were disconnected, from its point of view.
    fn end(mut self) -> String {
        drop(self.process.stdin.take());
        self.answer()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The child: accepts every connection, and sends back what it receives until its stdin ends.
#[test]
#[ignore = "no test by itself, but the other process of the test in this file, which starts it and fails with it"]
fn peer() {
    let Ok(address) = env::var(CHILD) else {
        return;
    };
    let passive = channel();
    Id::listening(passive, RDMA_PS_TCP, address.parse().unwrap());
    println!("{ANSWER}listening");
    let end = thread::spawn(|| std::io::stdin().read_to_end(&mut Vec::new()));
    let (mut ends, mut disconnected) = (HashMap::new(), 0);
    while !end.is_finished() {
        if is_readable(passive, Duration::ZERO) {
            disconnected += handle_event(passive, &mut ends);
        }
        ends.values_mut().for_each(End::echo);
    }
    println!("{ANSWER}{disconnected}");
}

/// Whether a connection was disconnected, as a number.
fn handle_event(passive: *mut rdma_event_channel, ends: &mut HashMap<*mut rdma_cm_id, End>) -> u32 {
    let mut event = ptr::null_mut();
    // SAFETY: the channel is live, and so are the event and its identifier.
    unsafe {
        ok(rdma_get_cm_event(passive, &mut event));
        let (id, kind) = ((*event).id, (*event).event);
        if kind == RDMA_CM_EVENT_CONNECT_REQUEST {
            ends.insert(id, End::new(Id(id)));
            ok(rdma_accept(id, &mut param(b"")));
        }
        ok(rdma_ack_cm_event(event));
        match kind {
            RDMA_CM_EVENT_CONNECT_REQUEST | RDMA_CM_EVENT_ESTABLISHED | RDMA_CM_EVENT_TIMEWAIT_EXIT => 0,
            RDMA_CM_EVENT_DISCONNECTED => {
                ends.remove(&id).unwrap().destroy();
                1
            }
            kind => panic!("event {kind}"),
        }
    }
}

/// Sends the request of a connection whose queue pair is lost after `ack_timeout` by eight.
fn connecting(active: *mut rdma_event_channel, to: SocketAddr, ack_timeout: u8) -> End {
    let id = resolved(active, RDMA_PS_TCP, to);
    let mut value = ack_timeout;
    // SAFETY: live; the option is one byte.
    unsafe {
        let option = ptr::from_mut(&mut value).cast();
        ok(rdma_set_option(
            id.0,
            RDMA_OPTION_ID as i32,
            RDMA_OPTION_ID_ACK_TIMEOUT as i32,
            option,
            1,
        ));
    }
    let end = End::new(id);
    // SAFETY: live.
    ok(unsafe { rdma_connect(id.0, &mut param(b"")) });
    end
}

fn connected(active: *mut rdma_event_channel, to: SocketAddr, ack_timeout: u8) -> End {
    let end = connecting(active, to, ack_timeout);
    expect_event(active, RDMA_CM_EVENT_ESTABLISHED);
    end
}

/// An idle connection, one that sends, one that is being disconnected and one that is being
/// established, while the peer is stopped.
fn stop_peer(peer: Peer, to: SocketAddr, time: Duration, ack_timeout: u8) {
    let active = channel();
    let connect = || connected(active, to, ack_timeout);
    let (mut idle, mut sending, leaving) = (connect(), connect(), connect());
    sending.exchange_more();
    peer.stop();
    let since = Instant::now();
    // SAFETY: live.
    ok(unsafe { rdma_disconnect(leaving.id.0) });
    let mut arriving = connecting(active, to, ack_timeout);
    while since.elapsed() < time {
        sending.exchange();
        assert!(
            !is_readable(active, Duration::from_millis(1)),
            "an event of a stopped peer"
        );
    }
    peer.signal(Signal::SIGCONT);
    let mut events = HashMap::new();
    while events.len() < 2 {
        let mut event = ptr::null_mut();
        // SAFETY: the channel is live, and so is the event.
        unsafe {
            ok(rdma_get_cm_event(active, &mut event));
            events.insert((*event).id, (*event).event);
            ok(rdma_ack_cm_event(event));
        }
    }
    assert_eq!(events[&leaving.id.0], RDMA_CM_EVENT_DISCONNECTED);
    assert_eq!(events[&arriving.id.0], RDMA_CM_EVENT_ESTABLISHED);
    for end in [&mut idle, &mut sending, &mut arriving] {
        end.exchange_more();
    }
    assert_eq!(peer.end(), "1");
    [idle, sending, leaving, arriving].into_iter().for_each(End::destroy);
}

#[test]
fn a_stopped_peer_loses_no_connection() {
    // This process has opened no device yet: the child holds the UDP port, and the messages of the
    // connection manager wait in its socket.
    let (holder, here) = (fresh(2), fresh(1));
    let first = Peer::start(holder);
    let listener = Id::listening(channel(), RDMA_PS_TCP, fresh(1));
    // This process holds it, and forwards them through the ring.
    let second = Peer::start(here);
    thread::scope(|scope| {
        // With the default timeouts.
        scope.spawn(|| stop_peer(first, holder, Duration::from_secs(5), 16));
        // Longer than eight ACK timeouts of 134 ms.
        stop_peer(second, here, Duration::from_millis(1500), 10);
    });
    listener.destroy();
}
