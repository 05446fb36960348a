//! A process that is a rank, executes commands, and reports their results.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, thread};

use doorbell_collectives::Rank;
use doorbell_collectives::bootstrap::{Exchange, Group, Launch, Rendezvous, RendezvousServer};
use doorbell_collectives::failure::{Awaited, Failure, Wait};
use doorbell_collectives::plan::Collective;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Marks a line as a reply, among the test harness's output.
const ANSWER: &str = "member: ";
const ROLE: &str = "DOORBELL_TEST_MEMBER";

#[derive(Debug)]
pub(crate) struct Member {
    process: Child,
    commands: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Member {
    pub(crate) fn start(variables: &[(&str, String)]) -> Self {
        let mut process = Command::new(env::current_exe().unwrap())
            .args(["--exact", "member::is_a_member", "--nocapture", "--test-threads", "1"])
            .env(ROLE, "1")
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            commands: process.stdin.take(),
            answers: BufReader::new(process.stdout.take().unwrap()),
            process,
        }
    }

    pub(crate) fn send_command(&mut self, command: &str) {
        writeln!(self.commands.as_mut().unwrap(), "{command}").unwrap();
    }

    pub(crate) fn read_reply(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(
                self.answers.read_line(&mut line).unwrap() > 0,
                "process {} is gone",
                self.pid()
            );
            // The harness prints "test … ..." before the first.
            if let Some((_, answer)) = line.trim_end().split_once(ANSWER) {
                return answer.to_owned();
            }
        }
    }

    pub(crate) fn command(&mut self, command: &str) -> String {
        self.send_command(command);
        self.read_reply()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid() as i32), signal).unwrap();
    }

    pub(crate) fn end(mut self) {
        self.commands = None;
        assert!(self.process.wait().unwrap().success());
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub(crate) fn processes(ranks: u32) -> Vec<Member> {
    let serving: RendezvousServer = Rendezvous::open("127.0.0.1".parse().unwrap(), ranks)
        .unwrap()
        .spawn(super::TIMEOUT)
        .unwrap();
    let start = |rank| Member::start(&Launch::variables(serving.id(), Rank(rank), ranks));
    let mut members: Vec<_> = (0..ranks).map(start).collect();
    serving.wait().unwrap();
    for (rank, member) in members.iter_mut().enumerate() {
        assert_eq!(member.read_reply(), format!("rank {rank} of {ranks}"));
    }
    members
}

/// An operation in which this rank waits for `peer` until a failure.
fn operate(group: &Group, peer: u32, deadline: Duration) -> Failure {
    let control = group.control();
    let monitor: Arc<_> = control.monitor();
    let since = Instant::now();
    let wait = Wait {
        operation: 1,
        connection: 0,
        slice: 0,
        step: 4,
        peer: Rank(peer),
        qpn: 17,
        awaited: Awaited::Message,
    };
    monitor.begin(1, Collective::AllReduce);
    let (mut investigated, mut gave_up) = (false, false);
    loop {
        if monitor.report_requested() {
            monitor.report(vec![wait]);
        }
        if monitor.failed()
            && let Some(failure) = control.failure()
        {
            return failure;
        }
        if !investigated && since.elapsed() > deadline / 2 {
            investigated = true;
            control.investigate(deadline / 4);
        }
        if !gave_up && since.elapsed() > deadline {
            gave_up = true;
            control.give_up("an operation took too long");
        }
        thread::sleep(Duration::from_millis(1));
    }
}

fn serve(group: Group) {
    println!("{ANSWER}rank {} of {}", group.rank(), group.ranks());
    let mut groups = vec![group];
    for command in std::io::stdin().lines() {
        let command = command.unwrap();
        let words: Vec<_> = command.split(' ').collect();
        let group = groups.last_mut().unwrap();
        let answer = match words.as_slice() {
            ["exchange"] => {
                let mine = group.rank().0.to_le_bytes();
                match group.control_mut().all_gather(&mine) {
                    Ok(all) => format!("{:?}", all.iter().map(|bytes| bytes[0]).collect::<Vec<_>>()),
                    Err(e) => e.to_string(),
                }
            }
            ["operate", peer, ms] => {
                operate(group, peer.parse().unwrap(), Duration::from_millis(ms.parse().unwrap())).to_string()
            }
            ["failure"] => loop {
                if let Some(failure) = group.control().failure() {
                    break failure.to_string();
                }
                thread::sleep(Duration::from_millis(1));
            },
            ["shrink", ms] => match group.shrink(Duration::from_millis(ms.parse().unwrap())) {
                Ok(smaller) => {
                    let said = format!("rank {} of {}", smaller.rank(), smaller.ranks());
                    groups.push(smaller);
                    groups.remove(0);
                    said
                }
                Err(e) => e.to_string(),
            },
            other => panic!("{other:?}"),
        };
        println!("{ANSWER}{answer}");
    }
}

/// A rank, but only in a process that was started for it.
#[test]
fn is_a_member() {
    if env::var_os(ROLE).is_some() {
        match Group::from_env() {
            Ok(group) => serve(group),
            Err(e) => println!("{ANSWER}{e}"),
        }
    }
}
