//! `doorbell bw file --serve`: a process that serves files by queue pairs.

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use doorbell_gpudirect::storage::{FileServer, ServeError};
use doorbell_verbs::ProtectionDomain;
use doorbell_verbs::exchange::Exchange;
use serde::{Deserialize, Serialize};

use super::args::FileArgs;
use crate::device::{self, Device, Reach, Side};
use crate::exchange::tcp::Acceptor;
use crate::failure::{Failure, one_line, refused};
use crate::interrupt::Interrupt;
use crate::report::LinkKind;

/// Clients at once; each takes 24 MiB and a thread.
const MAX_CLIENTS: usize = 16;
/// Time for a client to connect its queue pair.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// What clients get when they connect: what carries the packets between the two.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Greeting {
    link: LinkKind,
    group: Option<u64>,
}

impl Greeting {
    pub(super) fn of(device: &Device) -> Self {
        Self {
            link: device.link,
            group: device.group,
        }
    }

    /// The link to a peer with this greeting; as it is attributed in all results to the softer one.
    pub(super) fn link_to(&self, peer: &Self) -> LinkKind {
        if self.group.is_some() && self.group == peer.group {
            return LinkKind::SoftLocal;
        }
        self.link.max(peer.link)
    }
}

/// Serves until it is interrupted. Each client is a thread, and a line on stderr when it leaves.
///
/// # Errors
/// [`Failure::Usage`] for a file that cannot be served; [`Failure::Test`] where it cannot listen;
/// [`Failure::Interrupted`].
pub(super) fn run(args: &FileArgs) -> Result<(), Failure> {
    let interrupt = Interrupt::catch()?;
    let remote = &args.remote;
    let device = device::open(remote.device.as_deref(), &args.soft, 0, Side::Single, Reach::Elsewhere)?;
    let server = if args.file.is_dir() {
        FileServer::new(&args.file)
    } else {
        FileServer::one_file(&args.file)
    };
    let greeting = serde_json::to_vec(&Greeting::of(&device)).map_err(refused)?;
    let server = Arc::new(server.map_err(super::usage)?.data(greeting));
    let address = SocketAddr::new(remote.bind, remote.port);
    let mut acceptor: Acceptor<()> = Acceptor::bind(address, "--port", "--bind needs an address of this machine")?;
    eprintln!(
        "doorbell: bw file on {} serves {} on {}",
        device.context.name(),
        one_line(&args.file.display().to_string()),
        acceptor.address()
    );
    let pd = device.context.protection_domain().map_err(refused)?;
    let clients = Arc::new(AtomicUsize::new(0));
    loop {
        let (stream, peer, ()) = acceptor.accept(None, &interrupt, |_, ()| Ok(Some(())))?;
        let client = Client {
            server: Arc::clone(&server),
            pd: pd.clone(),
            count: Arc::clone(&clients),
        };
        // Counted here, so that no two are the last.
        if clients.fetch_add(1, Ordering::Relaxed) >= MAX_CLIENTS {
            eprintln!("doorbell: refused {peer}: {MAX_CLIENTS} clients are served");
            continue;
        }
        thread::Builder::new()
            .name("client".into())
            .spawn(move || match client.serve(stream) {
                Ok(sent) => eprintln!("doorbell: {peer} has left: {sent} bytes were sent"),
                Err(error) => eprintln!("doorbell: {peer}: {}", one_line(&error.to_string())),
            })
            .map_err(refused)?;
    }
}

/// A client, counted until this is dropped.
struct Client {
    server: Arc<FileServer>,
    pd: ProtectionDomain,
    count: Arc<AtomicUsize>,
}

impl Client {
    fn serve(&self, stream: TcpStream) -> Result<u64, ServeError> {
        let exchange = Exchange::over(stream, CONNECT_TIMEOUT)?;
        self.server.serve(&self.pd, exchange)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}
