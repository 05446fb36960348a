//! A peer for `rdma_client`, `rdma_server`, `ucmatose` and `udaddy` on any other device: a
//! connection by the soft device's own connection manager, without librdmacm. As many messages are
//! sent as receives are posted; they go into the null MR, and their lengths are checked.

#![forbid(unsafe_code)]

use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use doorbell_roce_proto::memory::Sge;
use doorbell_roce_proto::qp::{Modify, Path, RemoteAccess, State};
use doorbell_roce_proto::wire::{GRH_LEN, Transport};
use doorbell_roce_proto::work::{
    Completion, CompletionOpcode, Destination, Operation, Payload, ReceiveRequest, SendRequest, Status,
};
use doorbell_roce_proto::{Psn, Qpn};
use doorbell_softroce::clock::TimestampClocks;
use doorbell_softroce::cm::protocol::{
    Accept, CmEvent, ConnectRequest, ConnectionId, Ece, IpHeader, Parameters, PortSpace, RejectReason, ServiceId,
    SidrReply, SidrRequest, SidrStatus,
};
use doorbell_softroce::cm::{CmOwner, ConnectionManager};
use doorbell_softroce::{Cq, CqConfig, Device, DeviceConfig, EventOwner, EventQueue, Mr, Qp, QpConfig, Token};

const USAGE: &str = "usage: connect ADDRESS COMMAND PORT [PEER] [COUNT SIZE]
commands: client, server, hang-up (a server that disconnects), reject, refused (a client without a server), ud-client, ud-server";
const TIMEOUT: Duration = Duration::from_secs(20);
/// The Q_Key of datagram services that are resolved by port (RDMA_UDP_QKEY of rdma_cma.h).
const QKEY: u32 = 0x0123_4567;
/// A client's source port; any will do.
const SOURCE_PORT: u16 = 40_000;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("connect {}: {error:#}", args.join(" "));
            ExitCode::FAILURE
        }
    }
}

fn run(args: &[String]) -> Result<()> {
    let [address, command, port, rest @ ..] = args else {
        bail!("{USAGE}");
    };
    let (peer, rest) = match rest {
        [peer, rest @ ..] if peer.parse::<IpAddr>().is_ok() => (Some(peer.parse()?), rest),
        rest => (None, rest),
    };
    let (count, size) = match rest {
        [count, size] => (count.parse()?, size.parse()?),
        [] => (1, 16),
        _ => bail!("{USAGE}"),
    };
    let end = End::new(address.parse()?, port.parse()?, count, size)?;
    let peer = || peer.context(USAGE);
    match command.as_str() {
        "client" => end.client(peer()?),
        "refused" => end.refused(peer()?),
        "server" => end.server(false),
        "hang-up" => end.server(true),
        "reject" => end.reject(),
        "ud-client" => end.ud_client(peer()?),
        "ud-server" => end.ud_server(),
        _ => bail!("{USAGE}"),
    }
}

/// An event on one line, without most of its private data.
fn brief(event: &CmEvent) -> String {
    format!("{event:?}").chars().take(200).collect()
}

struct End {
    device: Arc<Device>,
    cm: ConnectionManager,
    events: Arc<EventQueue<(Token, CmEvent)>>,
    address: IpAddr,
    port: u16,
    count: usize,
    size: u32,
}

struct Channel {
    qp: Qp,
    cq: Cq,
    null_mr: Mr,
    max_message: u32,
}

impl End {
    fn new(address: IpAddr, port: u16, count: usize, size: u32) -> Result<Self> {
        let config = DeviceConfig {
            address: Some(address),
            ..DeviceConfig::new("soft0")
        };
        let device = Device::open(&config)?;
        Ok(Self {
            cm: device.cm(),
            device,
            events: Arc::new(EventQueue::new()?),
            address,
            port,
            count,
            size,
        })
    }

    fn owner(&self) -> CmOwner {
        CmOwner {
            sink: self.events.clone(),
            token: 0,
        }
    }

    fn next(&self) -> Result<CmEvent> {
        let (_, event) = self.events.wait(|_| {})?;
        println!("{}", brief(&event));
        Ok(event)
    }

    fn expect_disconnect(&self, id: ConnectionId) -> Result<()> {
        match self.next()? {
            CmEvent::Disconnected { id: ended } if ended == id => Ok(()),
            other => bail!("{}", brief(&other)),
        }
    }

    fn header(&self, peer: IpAddr) -> Vec<u8> {
        let header = IpHeader {
            source: SocketAddr::new(self.address, SOURCE_PORT),
            destination: peer,
        };
        header.to_bytes().to_vec()
    }

    /// Checks the addresses in the IP header before the private data.
    fn check_header(&self, peer: IpAddr, private_data: &[u8]) -> Result<()> {
        let (header, _) = IpHeader::split(private_data).context("no IP header in the private data")?;
        ensure!(
            header.source.ip() == peer && header.destination == self.address,
            "{header:?}, from {peer}"
        );
        Ok(())
    }

    fn channel(&self, transport: Transport) -> Result<Channel> {
        let pd = self.device.protection_domain()?;
        let owner = EventOwner {
            queue: Arc::new(EventQueue::new()?),
            token: 0,
        };
        let config = CqConfig {
            entries: 256,
            notify: None,
            timestamps: TimestampClocks::default(),
        };
        let cq = self.device.completion_queue(config, owner.clone())?;
        let config = QpConfig {
            transport,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            max_send_wr: 64,
            max_recv_wr: 64,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 512,
            signal_all: true,
            srq: None,
        };
        let qp = pd.queue_pair(&config, owner)?;
        let grh = if transport == Transport::Ud { GRH_LEN as u32 } else { 0 };
        let channel = Channel {
            qp,
            cq,
            null_mr: pd.null_region()?,
            max_message: self.size + grh,
        };
        channel.modify(Modify {
            state: Some(State::Init),
            pkey_index: Some(0),
            port: Some(1),
            access: (transport != Transport::Ud).then(RemoteAccess::default),
            qkey: (transport == Transport::Ud).then_some(QKEY),
            ..Modify::default()
        })?;
        channel.post_receives(self.count)?;
        Ok(channel)
    }

    fn request(&self, peer: IpAddr, qpn: Qpn) -> ConnectRequest {
        let service = ServiceId::of_port(PortSpace::Tcp, self.port);
        let mut private_data = self.header(peer);
        private_data.extend(b"doorbell requests");
        ConnectRequest {
            responder_resources: 1,
            initiator_depth: 1,
            private_data,
            ..ConnectRequest::new(peer, service, qpn, Psn::new(0x00ab_cdef), self.device.info().mtu)
        }
    }

    fn client(&self, peer: IpAddr) -> Result<()> {
        let channel = self.channel(Transport::Rc)?;
        let request = self.request(peer, channel.qp.number());
        // A server that does not listen yet refuses.
        let begun = Instant::now();
        let id = loop {
            let id = self.cm.connect(&request, self.owner())?;
            match self.next()? {
                CmEvent::Reply { .. } => break id,
                CmEvent::Rejected {
                    reason: RejectReason::INVALID_SERVICE_ID,
                    ..
                } if begun.elapsed() < TIMEOUT => {
                    self.cm.destroy(id)?;
                    std::thread::sleep(Duration::from_millis(200));
                }
                other => bail!("{}", brief(&other)),
            }
        };
        channel.connect(&self.cm.parameters(id).context("no parameters")?)?;
        self.cm.establish(id, b"")?;
        channel.exchange(self.count, self.size, None)?;
        self.cm.disconnect(id, b"")?;
        self.expect_disconnect(id)
    }

    fn refused(&self, peer: IpAddr) -> Result<()> {
        let channel = self.channel(Transport::Rc)?;
        let id = self
            .cm
            .connect(&self.request(peer, channel.qp.number()), self.owner())?;
        match self.next()? {
            CmEvent::Rejected {
                id: at,
                reason: RejectReason::INVALID_SERVICE_ID,
                ..
            } if at == id => Ok(()),
            other => bail!("{}", brief(&other)),
        }
    }

    /// Listens, and reports so: stock clients fail at once without a listener.
    fn listen(&self, space: PortSpace) -> Result<()> {
        let service = ServiceId::of_port(space, self.port);
        self.cm.listen(service, 4, self.owner())?;
        println!("listening");
        Ok(())
    }

    fn accept_request(&self) -> Result<(ConnectionId, Qpn)> {
        self.listen(PortSpace::Tcp)?;
        match self.next()? {
            CmEvent::Request { id, request, .. } => {
                self.check_header(request.peer, &request.private_data)?;
                Ok((id, request.qpn))
            }
            other => bail!("{}", brief(&other)),
        }
    }

    fn server(&self, hangs_up: bool) -> Result<()> {
        let (id, _) = self.accept_request()?;
        let channel = self.channel(Transport::Rc)?;
        channel.connect(&self.cm.parameters(id).context("no parameters")?)?;
        let accept = Accept {
            qpn: channel.qp.number(),
            responder_resources: 1,
            initiator_depth: 1,
            flow_control: true,
            rnr_retry_count: 7,
            srq: false,
            ece: Ece::default(),
            private_data: b"doorbell accepts".to_vec(),
        };
        self.cm.accept(id, &accept)?;
        match self.next()? {
            CmEvent::Established { .. } => {}
            other => bail!("{}", brief(&other)),
        }
        channel.exchange(self.count, self.size, None)?;
        if hangs_up {
            self.cm.disconnect(id, b"")?;
        }
        self.expect_disconnect(id)
    }

    fn reject(&self) -> Result<()> {
        let (id, _) = self.accept_request()?;
        self.cm.reject(id, RejectReason::CONSUMER, b"doorbell refuses")?;
        self.cm.destroy(id)?;
        Ok(())
    }

    fn ud_client(&self, peer: IpAddr) -> Result<()> {
        let channel = self.channel(Transport::Ud)?;
        channel.activate()?;
        let request = SidrRequest {
            private_data: self.header(peer),
            ..SidrRequest::new(peer, ServiceId::of_port(PortSpace::Udp, self.port))
        };
        let begun = Instant::now();
        let (qpn, qkey) = loop {
            let id = self.cm.sidr_request(&request, self.owner())?;
            match self.next()? {
                CmEvent::SidrReply { reply, .. } if reply.status == SidrStatus::SUCCESS => {
                    break (reply.qpn, reply.qkey);
                }
                CmEvent::SidrReply { reply, .. }
                    if reply.status == SidrStatus::UNSUPPORTED && begun.elapsed() < TIMEOUT =>
                {
                    self.cm.destroy(id)?;
                    std::thread::sleep(Duration::from_millis(200));
                }
                other => bail!("{}", brief(&other)),
            }
        };
        ensure!(qkey == QKEY, "Q_Key {qkey:#x}");
        channel.exchange(self.count, self.size, Some(self.destination(peer, qpn)))
    }

    fn ud_server(&self) -> Result<()> {
        self.listen(PortSpace::Udp)?;
        let (id, peer) = match self.next()? {
            CmEvent::SidrRequest {
                id, peer, private_data, ..
            } => {
                self.check_header(peer, &private_data)?;
                (id, peer)
            }
            other => bail!("{}", brief(&other)),
        };
        let channel = self.channel(Transport::Ud)?;
        channel.activate()?;
        let reply = SidrReply {
            status: SidrStatus::SUCCESS,
            qpn: channel.qp.number(),
            qkey: QKEY,
            private_data: Vec::new(),
        };
        self.cm.sidr_reply(id, &reply)?;
        // The client's QPN is in the immediate data.
        let qpn = channel
            .receive(self.count)?
            .context("no queue pair in the immediate data")?;
        channel.send(self.count, self.size, Some(self.destination(peer, qpn)))?;
        channel.complete(self.count, |_| Ok(()))
    }

    fn destination(&self, peer: IpAddr, qpn: Qpn) -> Destination {
        Destination {
            path: Path::new(self.address, peer),
            qpn,
            qkey: QKEY,
        }
    }
}

impl Channel {
    fn modify(&self, modify: Modify) -> Result<()> {
        self.qp
            .modify(&modify)
            .map_err(|error| anyhow!("{error:?} in {modify:?}"))
    }

    fn connect(&self, set: &Parameters) -> Result<()> {
        self.modify(Modify {
            state: Some(State::Rtr),
            path: Some(set.path),
            path_mtu: Some(set.mtu),
            dest_qpn: Some(set.dest_qpn),
            rq_psn: Some(set.rq_psn),
            max_dest_rd_atomic: Some(set.responder_resources),
            min_rnr_timer: Some(12),
            ..Modify::default()
        })?;
        self.modify(Modify {
            state: Some(State::Rts),
            timeout: Some(set.ack_timeout),
            retry_cnt: Some(set.retry_count),
            rnr_retry: Some(set.rnr_retry_count),
            sq_psn: Some(set.sq_psn),
            max_rd_atomic: Some(set.initiator_depth),
            ..Modify::default()
        })
    }

    /// A UD queue pair needs no peer to be ready.
    fn activate(&self) -> Result<()> {
        self.modify(Modify {
            state: Some(State::Rtr),
            ..Modify::default()
        })?;
        self.modify(Modify {
            state: Some(State::Rts),
            sq_psn: Some(Psn::new(0)),
            ..Modify::default()
        })
    }

    fn post_receives(&self, count: usize) -> Result<()> {
        let sges = [Sge {
            addr: 0,
            len: self.max_message,
            lkey: self.null_mr.lkey(),
        }];
        for _ in 0..count {
            let receive = ReceiveRequest { wr_id: 0, sges: &sges };
            self.qp
                .post_receive(|posting| posting.receive(&receive))
                .map_err(|error| anyhow!("receive: {error:?}"))?;
        }
        Ok(())
    }

    /// Sends messages; datagrams carry our QPN as immediate data, like udaddy's.
    fn send(&self, count: usize, size: u32, to: Option<Destination>) -> Result<()> {
        let message = vec![0xdb; size as usize];
        for _ in 0..count {
            let request = SendRequest {
                wr_id: 0,
                operation: Operation::Send {
                    imm: to.map(|_| self.qp.number().get()),
                },
                payload: Payload::Inline(&message),
                signaled: true,
                fence: false,
                solicited: false,
            };
            self.qp
                .post_send(|posting| match &to {
                    Some(to) => posting.send_datagram(&request, to),
                    None => posting.send(&request),
                })
                .map_err(|error| anyhow!("send: {error:?}"))?;
        }
        Ok(())
    }

    fn complete(&self, count: usize, mut check: impl FnMut(&Completion) -> Result<()>) -> Result<()> {
        let (begun, mut done) = (Instant::now(), 0);
        while done < count {
            let mut result = Ok(());
            done += self.cq.poll(1, |completion| {
                result = match completion.status {
                    Status::Success => check(&completion),
                    status => Err(anyhow!("{status:?}")),
                };
            })?;
            result?;
            ensure!(
                begun.elapsed() < TIMEOUT,
                "{done} of {count} completions in {TIMEOUT:?}"
            );
        }
        Ok(())
    }

    /// Waits for messages, and returns the QPN in their immediate data.
    fn receive(&self, count: usize) -> Result<Option<Qpn>> {
        let mut imm = None;
        self.complete(count, |completion| {
            imm = completion.imm.or(imm);
            self.check(completion)
        })?;
        Ok(imm.map(Qpn::new))
    }

    fn check(&self, completion: &Completion) -> Result<()> {
        let len = completion.byte_len;
        let received = completion.opcode == CompletionOpcode::Receive;
        ensure!(
            !received || len == self.max_message,
            "{len} bytes, not {}",
            self.max_message
        );
        Ok(())
    }

    fn exchange(&self, count: usize, size: u32, to: Option<Destination>) -> Result<()> {
        self.send(count, size, to)?;
        self.complete(2 * count, |completion| self.check(completion))
    }
}
