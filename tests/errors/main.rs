//! The most common failures of new users, each provoked by the safe API, and their messages:
//! reviewed texts, in `snapshots`. Each must name the problem, the object, and the remedy.
//!
//! Most are failures of soft devices. The others come from verbs tables that fail ([`altered`]), or
//! from another process with replaced system libraries ([`libraries`]).

mod altered;
mod libraries;

use std::error::Error;
use std::fmt::Write as _;
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};

use altered::Altered;
use doorbell_softroce_ibverbs::{DeviceConfig, api, configure};
use doorbell_verbs::exchange::{Exchange, ExchangeError, Listener};
use doorbell_verbs::{
    CompletionError, CompletionQueue, Context, Endpoint, GRH_BYTES, Gid, Library, Local, Mtu, PeerRead,
    PreparedQueuePair, Psn, QKey, Qpn, QueuePair, Remote, WriteAccess,
};

/// Longer than any step takes, on a busy machine too.
const TIMEOUT: Duration = Duration::from_secs(60);

#[test]
fn the_commonest_failures_say_what_is_wrong_on_which_object_and_what_to_do() {
    if libraries::is_child() {
        return;
    }
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let device = |n: u8| DeviceConfig {
        address: Some(IpAddr::V4(Ipv4Addr::new(127, 160 + high % 64, low, 1 + n))),
        ..DeviceConfig::new(format!("soft{n}"))
    };
    configure(vec![device(0), device(1)]).unwrap();
    let (here, there) = (open("soft0"), open("soft1"));
    let gids = here.gids(1).unwrap();
    let gids = [("<its link-local GID>", gids[0].gid), ("<its GID>", gids[3].gid)];

    let rows: [(&str, &dyn Fn() -> Vec<String>); 15] = [
        ("the limit on locked memory is reached", &locked_memory),
        ("no such device", &no_device),
        ("the port is down", &port_down),
        ("no such GID", &|| wrong_gid(&here)),
        ("MTUs that do not fit", &|| mtu(&here)),
        ("no receive posted", &|| no_receive(&here, &there)),
        ("no answer", &|| no_answer(&here)),
        ("memory that does not allow it", &|| access(&here, &there)),
        ("the completion queue is too small", &|| small_completion_queue(&here)),
        ("too many bytes inline", &|| inline(&here, &there)),
        ("the peer's queue pair is gone", &|| peer_gone(&here, &there)),
        ("a dma-buf on a device that has none", &dma_buf),
        ("no permission for the device's node", &permission),
        ("no librdmacm", &|| vec![libraries::without_librdmacm()]),
        ("another version", &|| another_version(&here)),
    ];
    let mut texts = String::new();
    for (failure, provoke) in rows {
        writeln!(texts, "{failure}").unwrap();
        for text in provoke() {
            assert!(!text.contains('\n'), "{failure}: not one line: {text}");
            let named = |text: String, (name, gid): (&str, Gid)| text.replace(&gid.to_string(), name);
            writeln!(texts, "    {}", gids.into_iter().fold(text, named)).unwrap();
        }
    }
    insta::assert_snapshot!(texts);
}

fn open(name: &str) -> Context {
    Library::new(api()).open(name).unwrap()
}

/// The message, with everything that the chain of sources would add once more.
fn text<T>(result: Result<T, impl Error>) -> String {
    match result {
        Ok(_) => panic!("it was to fail"),
        Err(error) => {
            assert!(error.source().is_none(), "not once: {error}: {:?}", error.source());
            error.to_string()
        }
    }
}

/// A timeout of 1 ms, for requests without an answer.
const SHORT_TIMEOUT: u8 = 8;
/// A timeout of 17 s, for requests that are answered as soon as the peer is scheduled.
const LONG_TIMEOUT: u8 = 22;

struct End {
    qp: PreparedQueuePair,
    cq: CompletionQueue,
}

impl End {
    fn new(context: &Context, timeout: u8) -> Self {
        let cq = context.completion_queue(16).unwrap();
        let pd = context.protection_domain().unwrap();
        let builder = pd.queue_pair(&cq).max_send_wr(4).max_recv_wr(4).max_inline_data(64);
        let builder = builder.rnr_retry(1).min_rnr_timer(1).timeout(timeout).retry_count(1);
        let qp = builder.allow_remote_read().allow_remote_write().rc().unwrap();
        Self { qp, cq }
    }

    fn connect(self, peer: &Endpoint) -> (QueuePair, CompletionQueue) {
        (self.qp.connect(peer).unwrap(), self.cq)
    }
}

type Connected = (QueuePair, CompletionQueue);

fn connected(here: &Context, there: &Context, timeout: u8) -> (Connected, Connected) {
    let (here, there) = (End::new(here, timeout), End::new(there, timeout));
    let (ours, theirs) = (here.qp.endpoint(), there.qp.endpoint());
    (here.connect(&theirs), there.connect(&ours))
}

/// The text without the queue pair's number, which varies.
fn without_number(text: String, qpn: Qpn) -> String {
    text.replace(&qpn.to_string(), "<its number>")
}

fn failure(qp: &QueuePair, cq: &mut CompletionQueue) -> String {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let failed: Option<CompletionError> = cq.poll().unwrap().next().map(|done| done.result().unwrap_err());
        if let Some(failure) = failed {
            return without_number(failure.to_string(), qp.qpn());
        }
        assert!(Instant::now() < deadline, "nothing completes");
    }
}

fn locked_memory() -> Vec<String> {
    let context = Altered::LOCKED_MEMORY.open("soft0");
    let pd = context.protection_domain().unwrap();
    let register = || text(pd.register(vec![0; 1 << 20], Local));
    let limited = libraries::with_locked_memory(64 << 10, register);
    vec![limited]
}

fn no_device() -> Vec<String> {
    vec![
        text(Library::new(api()).open("mlx5_0")),
        text(Altered::EMPTY.library().open("mlx5_0")),
    ]
}

fn port_down() -> Vec<String> {
    let refused = |altered: Altered| {
        let context = altered.open("soft0");
        let cq = context.completion_queue(256).unwrap();
        text(context.protection_domain().unwrap().queue_pair(&cq).rc())
    };
    vec![refused(Altered::PORT_DOWN), refused(Altered::PORT_INIT)]
}

fn wrong_gid(here: &Context) -> Vec<String> {
    let cq = here.completion_queue(256).unwrap();
    vec![text(
        here.protection_domain().unwrap().queue_pair(&cq).gid_index(9).rc(),
    )]
}

fn mtu(here: &Context) -> Vec<String> {
    let narrow = Altered::MTU_1024.open("soft0");
    let cq = narrow.completion_queue(256).unwrap();
    let pd = narrow.protection_domain().unwrap();
    let beyond = text(pd.queue_pair(&cq).mtu(Mtu::B4096).rc());

    let cq = here.completion_queue(256).unwrap();
    let pd = here.protection_domain().unwrap();
    let mut qp = pd.queue_pair(&cq).mtu(Mtu::B1024).ud().unwrap();
    let ah = pd.address_handle().to(&qp.endpoint()).unwrap();
    let long = pd.register(vec![0; 1025], Local).unwrap();
    let long = text(qp.send_to(long, &ah, qp.qpn(), QKey::DEFAULT));
    let short = text(qp.receive(pd.register(vec![0; GRH_BYTES - 1], Local).unwrap()));
    vec![beyond, without_number(long, qp.qpn()), without_number(short, qp.qpn())]
}

fn no_receive(here: &Context, there: &Context) -> Vec<String> {
    let ((mut qp, mut cq), _there) = connected(here, there, LONG_TIMEOUT);
    qp.send_inline(b"ready?").unwrap();
    vec![failure(&qp, &mut cq)]
}

fn no_answer(here: &Context) -> Vec<String> {
    let end = End::new(here, SHORT_TIMEOUT);
    let absent = Endpoint {
        // A device assigns the highest numbers last.
        qpn: Qpn::truncated(0x00ff_fffe),
        psn: Psn::truncated(0),
        ..end.qp.endpoint()
    };
    let (mut qp, mut cq) = end.connect(&absent);
    qp.send_inline(b"there?").unwrap();
    vec![failure(&qp, &mut cq)]
}

fn access(here: &Context, there: &Context) -> Vec<String> {
    let ((mut qp, mut cq), _there) = connected(here, there, LONG_TIMEOUT);
    let key = Remote::<WriteAccess>::from_raw(0x1000, 0x77, 64);
    qp.write_inline(b"by no key", key).unwrap();
    let by_no_key = failure(&qp, &mut cq);

    // A read key for memory that the peer believes writable.
    let pd = there.protection_domain().unwrap();
    let readable = pd.register(vec![0; 64], PeerRead).unwrap();
    let bytes = readable.remote().to_bytes();
    vec![by_no_key, text(Remote::<WriteAccess>::from_bytes(&bytes))]
}

fn small_completion_queue(here: &Context) -> Vec<String> {
    let cq = here.completion_queue(128).unwrap();
    let pd = here.protection_domain().unwrap();
    let depth = cq.capacity();
    vec![text(pd.queue_pair(&cq).max_send_wr(depth).max_recv_wr(8).rc())]
}

fn inline(here: &Context, there: &Context) -> Vec<String> {
    let ((mut qp, _cq), _there) = connected(here, there, LONG_TIMEOUT);
    let (most, long) = (qp.max_inline_data(), vec![0; qp.max_inline_data() as usize + 1]);
    assert!(most >= 64);
    let posted = without_number(text(qp.send_inline(&long)), qp.qpn());

    let cq = here.completion_queue(256).unwrap();
    let pd = here.protection_domain().unwrap();
    vec![posted, text(pd.queue_pair(&cq).max_inline_data(1 << 20).rc())]
}

fn peer_gone(here: &Context, there: &Context) -> Vec<String> {
    let ((mut qp, mut cq), there) = connected(here, there, SHORT_TIMEOUT);
    drop(there);
    qp.send_inline(b"are you still there?").unwrap();
    let first = failure(&qp, &mut cq);
    qp.send_inline(b"and now?").unwrap();
    vec![first, failure(&qp, &mut cq)]
}

fn dma_buf() -> Vec<String> {
    let context = Altered::NO_DMA_BUF.open("soft0");
    let pd = context.protection_domain().unwrap();
    let fd: OwnedFd = tempfile::tempfile().unwrap().into();
    vec![text(pd.register_dmabuf(fd, 0, 4096, 0, Local))]
}

fn permission() -> Vec<String> {
    vec![text(Altered::NO_PERMISSION.library().open("soft0"))]
}

fn another_version(here: &Context) -> Vec<String> {
    let end = End::new(here, SHORT_TIMEOUT);
    let mut endpoint = end.qp.endpoint().to_bytes();
    endpoint[0] = 2;
    let endpoint = text(Endpoint::from_bytes(&endpoint));

    // A peer with version 2 of the exchange.
    let listener = Listener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr();
    let other = thread::spawn(move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(b"DBELLXCH\0\x02\0\0").unwrap();
        stream.write_all(&[0; 32]).unwrap();
        stream
    });
    let mut exchange: Exchange = listener.accept(TIMEOUT).unwrap();
    let error = exchange.pair(end.qp, b"").unwrap_err();
    let ExchangeError::Version { peer, .. } = error else {
        panic!("{error}");
    };
    let exchanged = error.to_string().replace(&peer.to_string(), "<its address>");
    drop(other.join().unwrap());
    vec![endpoint, exchanged, libraries::old_libibverbs()]
}
