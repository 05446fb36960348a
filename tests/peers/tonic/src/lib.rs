//! A key-value store as a service of tonic (gRPC over HTTP/2) on streams of tasks.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::future::Future;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use doorbell::ProtectionDomain;
use doorbell::tasks::{ConnectError, RdmaListener, RdmaStream, StreamConfig};
use futures_util::stream;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint, Error, Server, Uri};
use tonic::{Request, Response, Status};
use tower::service_fn;

#[cfg(doctest)]
#[doc = include_str!("../../../../docs/book/src/guide/protocols.md")]
pub struct Protocols;

mod generated {
    include!(concat!(env!("OUT_DIR"), "/doorbell.Store.rs"));
}

pub use generated::store_client::StoreClient;
use generated::store_server::{self, StoreServer};

#[derive(Clone, PartialEq, prost::Message)]
pub struct Key {
    #[prost(string, tag = "1")]
    pub key: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Entry {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub struct Stored {
    /// There was an entry of this key.
    #[prost(bool, tag = "1")]
    pub replaced: bool,
}

#[derive(Default)]
struct Store {
    entries: Mutex<BTreeMap<String, Vec<u8>>>,
}

impl Store {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Vec<u8>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[tonic::async_trait]
impl store_server::Store for Store {
    async fn put(&self, request: Request<Entry>) -> Result<Response<Stored>, Status> {
        let Entry { key, value } = request.into_inner();
        let replaced = self.lock().insert(key, value).is_some();
        Ok(Response::new(Stored { replaced }))
    }

    async fn get(&self, request: Request<Key>) -> Result<Response<Entry>, Status> {
        let key = request.into_inner().key;
        match self.lock().get(&key).cloned() {
            Some(value) => Ok(Response::new(Entry { key, value })),
            None => Err(Status::not_found(key)),
        }
    }

    type ListStream = stream::Iter<std::vec::IntoIter<Result<Entry, Status>>>;

    /// The entries whose keys begin with the request's, in the order of keys.
    async fn list(&self, request: Request<Key>) -> Result<Response<Self::ListStream>, Status> {
        let prefix = request.into_inner().key;
        let entries = self.lock();
        let entries = entries
            .range(prefix.clone()..)
            .take_while(|(key, _)| key.starts_with(&prefix));
        let entries: Vec<_> = entries
            .map(|(key, value)| {
                let (key, value) = (key.clone(), value.clone());
                Ok(Entry { key, value })
            })
            .collect();
        Ok(Response::new(stream::iter(entries)))
    }
}

/// Serves a store of its own to the clients of `listener` until `shutdown`, then until their calls
/// have ended.
///
/// # Errors
/// As of tonic.
pub async fn serve(listener: RdmaListener, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    let streams = stream::unfold(listener, async |mut listener| {
        let accepted = listener.accept().await;
        Some((accepted.map(ServerStream), listener))
    });
    Server::builder()
        .add_service(StoreServer::new(Store::default()))
        .serve_with_incoming_shutdown(streams, shutdown)
        .await
}

/// Connects to a store, and again whenever the connection has ended.
///
/// # Errors
/// When the first connection cannot be made.
pub async fn connect(address: SocketAddr, pd: ProtectionDomain) -> Result<StoreClient<Channel>, Error> {
    let connector = service_fn(move |_: Uri| {
        let stream = RdmaStream::connect(address, pd.clone(), StreamConfig::default());
        async { Ok::<_, ConnectError>(TokioIo::new(stream.await?)) }
    });
    let endpoint = Endpoint::from_static("http://store");
    Ok(StoreClient::new(endpoint.connect_with_connector(connector).await?))
}

/// A stream with what services learn of its connection: nothing here.
pub struct ServerStream(pub RdmaStream);

impl Connected for ServerStream {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for ServerStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, into)
    }
}

impl AsyncWrite for ServerStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
