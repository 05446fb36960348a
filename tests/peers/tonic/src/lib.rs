//! A service and its client by tonic (gRPC over HTTP/2) on the streams of tasks, without generated
//! code. What a call carries is checked by the end that gets it.

#![forbid(unsafe_code)]

use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use doorbell::tasks::{RdmaListener, RdmaStream, StreamConfig};
use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_stream::{Stream, StreamExt};
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::transport::server::Connected;
use tonic::transport::{Channel, Endpoint, Server, Uri};
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;
use tower::service_fn;

pub type Error = Box<dyn std::error::Error + Send + Sync>;
pub type Result<T = (), E = Error> = std::result::Result<T, E>;

/// Answers a block with the next one.
pub const UNARY: &str = "/doorbell.Blocks/Next";
/// Likewise, each of a stream.
pub const STREAMING: &str = "/doorbell.Blocks/NextOfEach";
/// Answers nothing.
pub const ENDLESS: &str = "/doorbell.Blocks/Never";

/// Random bytes, by which the receiver makes them again.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Block {
    #[prost(uint64, tag = "1")]
    pub seed: u64,
    #[prost(bytes = "vec", tag = "2")]
    pub bytes: Vec<u8>,
}

impl Block {
    /// Of 0 bytes to 200 KB, thus also of several messages of a stream and frames of HTTP/2.
    pub fn new(seed: u64) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let len = random.usize(..1 << random.u32(0..18));
        let bytes = std::iter::repeat_with(|| random.u8(..)).take(len).collect();
        Self { seed, bytes }
    }

    fn next(&self) -> Self {
        Self::new(self.seed + 1)
    }

    pub fn check(&self) -> Result<(), Status> {
        match *self == Self::new(self.seed) {
            true => Ok(()),
            false => Err(Status::data_loss(format!("block {} has other bytes", self.seed))),
        }
    }
}

/// A stream, as a server of tonic takes it.
struct Io(RdmaStream);

impl Connected for Io {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Io {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, into)
    }
}

impl AsyncWrite for Io {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

#[derive(Clone)]
struct Blocks;

impl NamedService for Blocks {
    const NAME: &'static str = "doorbell.Blocks";
}

impl tower::Service<http::Request<Body>> for Blocks {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(ProstCodec::<Block, Block>::default());
            Ok(match request.uri().path() {
                UNARY => grpc.unary(service_fn(next), request).await,
                STREAMING => grpc.streaming(service_fn(next_of_each), request).await,
                ENDLESS => grpc.unary(service_fn(never), request).await,
                other => Status::unimplemented(other.to_owned()).into_http(),
            })
        })
    }
}

async fn next(request: Request<Block>) -> Result<Response<Block>, Status> {
    let block = request.into_inner();
    block.check()?;
    Ok(Response::new(block.next()))
}

async fn next_of_each(
    request: Request<Streaming<Block>>,
) -> Result<Response<impl Stream<Item = Result<Block, Status>>>, Status> {
    let answers = request.into_inner().map(|block| {
        let block = block?;
        block.check()?;
        Ok(block.next())
    });
    Ok(Response::new(answers))
}

async fn never(_: Request<Block>) -> Result<Response<Block>, Status> {
    std::future::pending().await
}

/// Binds to any free port, and serves until it is dropped.
pub async fn serve(device: &str) -> Result<(SocketAddr, impl Future<Output = Result> + Send + use<>)> {
    let pd = doorbell::open(device)?.protection_domain()?;
    let mut listener = RdmaListener::bind("127.0.0.1:0", pd, StreamConfig::default()).await?;
    let address = listener.local_addr();
    let (connected, streams) = tokio::sync::mpsc::channel(16);
    let accept = async move { while connected.send(listener.accept().await.map(Io)).await.is_ok() {} };
    let streams = tokio_stream::wrappers::ReceiverStream::new(streams);
    let served = Server::builder().add_service(Blocks).serve_with_incoming(streams);
    Ok((address, async move {
        tokio::select! {
            served = served => Ok(served?),
            () = accept => Ok(()),
        }
    }))
}

pub struct Client {
    grpc: tonic::client::Grpc<Channel>,
}

impl Client {
    pub async fn connect(device: &str, address: SocketAddr) -> Result<Self> {
        let pd = doorbell::open(device)?.protection_domain()?;
        let connector = service_fn(move |_: Uri| {
            let stream = RdmaStream::connect(address, pd.clone(), StreamConfig::default());
            async move { Ok::<_, Error>(TokioIo::new(stream.await?)) }
        });
        let endpoint = Endpoint::from_shared(format!("http://{address}"))?;
        let channel = endpoint.connect_with_connector(connector).await?;
        Ok(Self {
            grpc: tonic::client::Grpc::new(channel),
        })
    }

    pub async fn unary(&mut self, path: &'static str, block: Block) -> Result<Block, Status> {
        self.ready().await?;
        let path = PathAndQuery::from_static(path);
        let answer = self.grpc.unary(Request::new(block), path, codec()).await?;
        Ok(answer.into_inner())
    }

    pub async fn streaming(
        &mut self,
        blocks: impl Stream<Item = Block> + Send + 'static,
    ) -> Result<Streaming<Block>, Status> {
        self.ready().await?;
        let path = PathAndQuery::from_static(STREAMING);
        let answers = self.grpc.streaming(Request::new(blocks), path, codec()).await?;
        Ok(answers.into_inner())
    }

    async fn ready(&mut self) -> Result<(), Status> {
        self.grpc
            .ready()
            .await
            .map_err(|error| Status::unavailable(error.to_string()))
    }
}

fn codec() -> ProstCodec<Block, Block> {
    ProstCodec::default()
}
