//! A member process with a device, which reports what it sees.

use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;
use std::{env, thread};

use doorbell_roce_proto::QpnBlock;
use doorbell_softroce::host::{MemberId, SLOTS};
use doorbell_softroce::{Device, DeviceConfig};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{ForkResult, Uid, fork, setresuid};

/// Set for member processes: the address and the user.
const ROLE: &str = "DOORBELL_TEST_MEMBER";

/// Marks a line as a reply, among the test harness's output.
const ANSWER: &str = "member: ";

#[derive(Clone, Copy)]
pub(crate) struct Start {
    /// 0.0.0.0 for the default.
    address: IpAddr,
    uid: u32,
    is_unmapped: bool,
}

impl Start {
    pub(crate) fn at(address: IpAddr) -> Self {
        Self {
            address,
            uid: nix::unistd::geteuid().as_raw(),
            is_unmapped: false,
        }
    }

    pub(crate) fn anywhere() -> Self {
        Self::at(IpAddr::V4(Ipv4Addr::UNSPECIFIED))
    }

    pub(crate) fn by(self, uid: u32) -> Self {
        Self { uid, ..self }
    }

    /// In a user namespace that maps no user.
    pub(crate) fn unmapped(self) -> Self {
        Self {
            is_unmapped: true,
            ..self
        }
    }
}

pub(crate) fn at_port(port: u16) -> DeviceConfig {
    DeviceConfig {
        port,
        ..DeviceConfig::new("soft0")
    }
}

/// A process that has joined, killed when dropped.
#[derive(Debug)]
pub(crate) struct Member {
    process: Child,
    commands: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    pub(crate) slot: u16,
    pub(crate) port: u16,
}

impl Member {
    pub(crate) fn start(start: Start) -> Result<Self, String> {
        Self::launch(start).joined()
    }

    pub(crate) fn launch(start: Start) -> Self {
        let role = format!("{} {}", start.address, start.uid);
        let mut command = Command::new(env::current_exe().unwrap());
        if start.is_unmapped {
            enter_user_namespace(&mut command, start.uid);
        }
        let mut process = command
            .args(["--exact", "member::is_a_member", "--nocapture", "--test-threads", "1"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self {
            commands: process.stdin.take(),
            answers: BufReader::new(process.stdout.take().unwrap()),
            process,
            slot: 0,
            port: 0,
        }
    }

    pub(crate) fn joined(mut self) -> Result<Self, String> {
        let reply = self.answer();
        let [slot, port] = numbers(&reply)[..] else {
            return Err(reply);
        };
        (self.slot, self.port) = (slot as u16, port as u16);
        Ok(self)
    }

    fn answer(&mut self) -> String {
        let mut line = String::new();
        while self.answers.read_line(&mut line).unwrap() > 0 {
            // The harness begins its line with the test's name, and ends it later.
            if let Some((_, answer)) = line.split_once(ANSWER) {
                return answer.trim_end().to_owned();
            }
            line.clear();
        }
        panic!("the member ended without an answer");
    }

    pub(crate) fn query(&mut self, command: &str) -> Vec<u64> {
        let commands = self.commands.as_mut().unwrap();
        writeln!(commands, "{command}").unwrap();
        let reply = self.answer();
        numbers(&reply)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    pub(crate) fn leave(mut self) {
        self.commands = None;
        assert!(self.process.wait().unwrap().success());
    }
}

/// Starts a command as this user in a user namespace that maps none.
fn enter_user_namespace(command: &mut Command, uid: u32) {
    let uid = Uid::from_raw(uid);
    // SAFETY: setresuid(2) and unshare(2) are async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            setresuid(uid, uid, uid)?;
            unshare(CloneFlags::CLONE_NEWUSER)?;
            Ok(())
        });
    }
}

/// Whether an unmapped member can be started.
pub(crate) fn try_user_namespace() -> std::io::Result<()> {
    let mut command = Command::new(env::current_exe().unwrap());
    command.arg("--list").stdout(Stdio::null());
    enter_user_namespace(&mut command, 1001);
    command.status().map(drop)
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn numbers(reply: &str) -> Vec<u64> {
    reply.split_whitespace().map_while(|word| word.parse().ok()).collect()
}

/// Not a test of its own: the member process.
#[test]
fn is_a_member() {
    let Ok(role) = env::var(ROLE) else {
        return;
    };
    let (address, uid) = role.split_once(' ').unwrap();
    let uid = Uid::from_raw(uid.parse().unwrap());
    if nix::unistd::geteuid().is_root() && !uid.is_root() {
        setresuid(uid, uid, uid).unwrap();
    }
    let config = DeviceConfig {
        address: Some(address.parse().unwrap()).filter(|address: &IpAddr| !address.is_unspecified()),
        ..DeviceConfig::new("soft0")
    };
    let device = match Device::open(&config) {
        Ok(device) => device,
        Err(error) => return println!("{ANSWER}{error}"),
    };
    let host = device.host();
    let port = host.udp_port(host.me()).unwrap();
    println!("{ANSWER}{} {port}", host.me().slot());
    for command in std::io::stdin().lines() {
        let lives = || (0..SLOTS as u16).filter_map(|slot| host.member(slot));
        // A member may be dead and not detected yet: connecting detects it.
        let is_there = |member: &MemberId| *member == host.me() || host.connect(*member).is_ok();
        let reply = match command.unwrap().as_str() {
            "members" => lives().filter(is_there).count().to_string(),
            "seen" => lives().count().to_string(),
            "holder" => host
                .port_holder()
                .map_or(String::new(), |holder| holder.slot().to_string()),
            "block" => host.claim(QpnBlock::new(0).unwrap()).unwrap().index().to_string(),
            "fork" => {
                // SAFETY: the child takes no lock that another thread may have held: the device's
                // threads hold none while it is idle, and the allocator handles forks itself.
                match unsafe { fork() }.unwrap() {
                    ForkResult::Parent { child } => child.to_string(),
                    ForkResult::Child => {
                        drop(device);
                        thread::sleep(Duration::from_secs(120));
                        // SAFETY: ends the process without running any of its code.
                        unsafe { libc::_exit(0) }
                    }
                }
            }
            other => panic!("{other}"),
        };
        println!("{ANSWER}{reply}");
    }
}
