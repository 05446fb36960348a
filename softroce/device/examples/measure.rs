//! Bandwidth and latency of RDMA WRITE between two processes on soft devices, without the layers
//! above: for work on the device itself.
//!
//! `cargo run --release -p doorbell-softroce --example measure [BYTES [SECONDS]]`

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use doorbell_roce_proto::memory::Sge;
use doorbell_roce_proto::qp::{Modify, Path, RemoteAccess, State};
use doorbell_roce_proto::wire::Transport;
use doorbell_roce_proto::work::{Operation, Payload, SendRequest, Status};
use doorbell_roce_proto::{Gid, Psn, Qpn, RKey};
use doorbell_softroce::clock::TimestampClocks;
use doorbell_softroce::{
    Cq, CqConfig, Device, DeviceConfig, EventOwner, EventQueue, HostRange, Mr, Pd, Qp, QpConfig, Rights,
};

const DEPTH: u64 = 16;
const LATENCY_ROUNDS: usize = 10_000;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Side {
    device: Arc<Device>,
    qp: Qp,
    cq: Cq,
    mr: Mr,
    memory: &'static [AtomicU64],
    _pd: Pd,
}

impl Side {
    fn new(bytes: usize) -> Result<Self> {
        let device = Device::open(&DeviceConfig::new("soft0"))?;
        let pd = device.protection_domain()?;
        let owner = EventOwner {
            queue: Arc::new(EventQueue::new()?),
            token: 0,
        };
        let config = CqConfig {
            entries: 256,
            notify: None,
            timestamps: TimestampClocks::default(),
        };
        let cq = device.completion_queue(config, owner.clone())?;
        let config = QpConfig {
            transport: Transport::Rc,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            max_send_wr: 128,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 64,
            signal_all: true,
            srq: None,
        };
        let qp = pd.queue_pair(&config, owner)?;
        let memory: &'static [AtomicU64] = (0..bytes.div_ceil(8))
            .map(|_| AtomicU64::new(0))
            .collect::<Vec<_>>()
            .leak();
        let rights = Rights {
            local_write: true,
            remote_write: true,
            ..Rights::default()
        };
        let start = memory.as_ptr().cast::<u8>().cast_mut();
        let range = HostRange {
            addr: start,
            len: memory.len() * 8,
            iova: start.addr() as u64,
        };
        // SAFETY: leaked, thus mapped for ever; of atomics, so that the device's writes break no
        // reference's rules.
        let mr = unsafe { pd.register(range, rights) }?;
        Ok(Self {
            device,
            qp,
            cq,
            mr,
            memory,
            _pd: pd,
        })
    }

    fn key(&self) -> String {
        let (qpn, rkey, at) = (self.qp.number().get(), self.mr.rkey().0, self.memory.as_ptr().addr());
        format!("{} {qpn} {rkey} {at}", self.device.info().address.ip())
    }

    /// Connects to the peer of that line, and returns its key and address.
    fn connect(&self, key: &str) -> Result<(RKey, u64)> {
        let parts: Vec<&str> = key.split_whitespace().collect();
        let [ip, qpn, rkey, at] = parts[..] else {
            return Err(format!("not a key: {key}").into());
        };
        let local = self.device.info().gid;
        let modify = |modify: Modify| self.qp.modify(&modify).map_err(|error| format!("{error:?}"));
        modify(Modify {
            state: Some(State::Init),
            pkey_index: Some(0),
            port: Some(1),
            access: Some(RemoteAccess {
                write: true,
                ..RemoteAccess::default()
            }),
            ..Modify::default()
        })?;
        modify(Modify {
            state: Some(State::Rtr),
            path: Some(Path::new(
                local.to_ip(),
                Gid::from(ip.parse::<std::net::IpAddr>()?).to_ip(),
            )),
            path_mtu: Some(self.device.info().mtu),
            dest_qpn: Some(Qpn::new(qpn.parse()?)),
            rq_psn: Some(Psn::new(0)),
            max_dest_rd_atomic: Some(1),
            min_rnr_timer: Some(12),
            ..Modify::default()
        })?;
        modify(Modify {
            state: Some(State::Rts),
            timeout: Some(14),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            sq_psn: Some(Psn::new(0)),
            max_rd_atomic: Some(1),
            ..Modify::default()
        })?;
        Ok((RKey(rkey.parse()?), at.parse()?))
    }

    fn write(&self, payload: Payload<'_>, (rkey, addr): (RKey, u64)) -> Result<()> {
        let request = SendRequest {
            wr_id: 0,
            operation: Operation::Write { addr, rkey, imm: None },
            payload,
            signaled: true,
            fence: false,
            solicited: false,
        };
        self.qp
            .post_send(|posting| posting.send(&request))
            .map_err(|error| format!("{error:?}").into())
    }

    fn completed(&self) -> Result<u64> {
        let mut failed = None;
        let count = self.cq.poll(16, |done| {
            if done.status != Status::Success {
                failed = Some(done.status);
            }
        })?;
        failed.map_or(Ok(count as u64), |status| Err(format!("{status:?}").into()))
    }

    fn ping(&self, value: u64, peer: (RKey, u64)) -> Result<()> {
        let last = peer.1 + (self.memory.len() as u64 - 1) * 8;
        self.write(Payload::Inline(&value.to_ne_bytes()), (peer.0, last))?;
        while self.completed()? == 0 {}
        Ok(())
    }

    fn await_ping(&self, value: u64) {
        let last = &self.memory[self.memory.len() - 1];
        while last.load(Ordering::Acquire) != value {
            std::hint::spin_loop();
        }
    }
}

fn server(bytes: usize) -> Result<()> {
    let side = Side::new(bytes)?;
    println!("{}", side.key());
    let mut lines = std::io::stdin().lines();
    let peer = side.connect(&lines.next().ok_or("no peer")??)?;
    println!("ready");
    // During the bandwidth test the progress thread serves the peer. A line ends it.
    lines.next().ok_or("no peer")??;
    println!("ready");
    for round in 1..=LATENCY_ROUNDS as u64 {
        side.await_ping(round);
        side.ping(round, peer)?;
    }
    lines.next();
    eprintln!("server: {:?}", side.device.counters());
    Ok(())
}

fn client(bytes: usize, duration: Duration) -> Result<()> {
    let exe = std::env::current_exe()?;
    let mut child: Child = Command::new(exe)
        .args(["server", &bytes.to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let side = Side::new(bytes)?;
    let mut to_server = child.stdin.take().ok_or("no pipe")?;
    let mut from_server = BufReader::new(child.stdout.take().ok_or("no pipe")?).lines();
    let key = from_server.next().ok_or("the server ended")??;
    let peer = side.connect(&key)?;
    writeln!(to_server, "{}", side.key())?;
    from_server.next().ok_or("the server ended")??;

    let sge = [Sge {
        addr: side.memory.as_ptr().addr() as u64,
        len: bytes as u32,
        lkey: side.mr.lkey(),
    }];
    let (start, mut posted, mut done) = (Instant::now(), 0, 0);
    while start.elapsed() < duration {
        while posted - done < DEPTH {
            side.write(Payload::Gather(&sge), peer)?;
            posted += 1;
        }
        done += side.completed()?;
    }
    let rate = (done * bytes as u64) as f64 / start.elapsed().as_secs_f64();
    while done < posted {
        done += side.completed()?;
    }
    println!(
        "write_bw  {bytes} B: {:.2} GB/s = {:.1} Gb/s, {posted} WRITEs",
        rate / 1e9,
        rate * 8.0 / 1e9
    );
    eprintln!("client: {:?}", side.device.counters());

    writeln!(to_server)?;
    from_server.next().ok_or("the server ended")??;
    let mut rounds = Vec::with_capacity(LATENCY_ROUNDS);
    for round in 1..=LATENCY_ROUNDS as u64 {
        let start = Instant::now();
        side.ping(round, peer)?;
        side.await_ping(round);
        rounds.push(start.elapsed() / 2);
    }
    rounds.sort();
    let at = |fraction: f64| rounds[(fraction * (rounds.len() - 1) as f64) as usize];
    println!(
        "write_lat 8 B, half round trip: min {:?}, median {:?}, 99 % {:?}",
        at(0.0),
        at(0.5),
        at(0.99)
    );
    drop(to_server);
    child.wait()?;
    Ok(())
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().is_some_and(|arg| arg == "server") {
        return server(args[1].parse()?);
    }
    let bytes = args.first().map_or(Ok(1 << 20), |arg| arg.parse())?;
    let seconds = args.get(1).map_or(Ok(2.0), |arg| arg.parse())?;
    client(bytes, Duration::from_secs_f64(seconds))
}
