//! Each byte of unary and streaming calls of several clients at once, on a clean and on a lossy
//! network.

#![forbid(unsafe_code)]

use std::time::Duration;

use doorbell::tasks::{RdmaListener, StreamConfig};
use doorbell_peer_tonic::{Entry, Key, StoreClient, connect, serve};
use doorbell_test::Context;
use tokio::task::JoinSet;
use tonic::Code;
use tonic::transport::Channel;

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

/// Ends a test that stands still.
const LIMIT: Duration = Duration::from_secs(120);
const CLIENTS: u64 = 4;
const ENTRIES: u64 = 24;

/// A key of the client, and 0 bytes to 128 KiB: many messages of a stream and frames of HTTP/2.
fn entry(client: u64, number: u64, version: u64) -> Entry {
    let mut random = fastrand::Rng::with_seed((client * ENTRIES + number) << 8 | version);
    let bits = random.u32(0..18);
    let len = random.usize(..1 << bits);
    Entry {
        key: format!("client{client}/{number:03}"),
        value: std::iter::repeat_with(|| random.u8(..)).take(len).collect(),
    }
}

/// Puts entries twice, gets each and lists all.
async fn work(mut store: StoreClient<Channel>, client: u64) -> Result {
    for (version, number) in (0..2).flat_map(|version| (0..ENTRIES).map(move |number| (version, number))) {
        let put = entry(client, number, version);
        let key = put.key.clone();
        let stored = store.put(put.clone()).await?.into_inner();
        assert_eq!(stored.replaced, version == 1);
        let got = store.get(Key { key }).await?.into_inner();
        assert!(got == put, "{} has other bytes", put.key);
    }
    let key = format!("client{client}/");
    let mut entries = store.list(Key { key }).await?.into_inner();
    for number in 0..ENTRIES {
        let listed = entries.message().await?.ok_or("the list ends early")?;
        assert!(listed == entry(client, number, 1), "{} has other bytes", listed.key);
    }
    assert_eq!(entries.message().await?, None, "one entry too many");
    Ok(())
}

async fn calls(server: Context, client: Context) -> Result {
    let listener = RdmaListener::bind("127.0.0.1:0", server.protection_domain()?, StreamConfig::default()).await?;
    let address = listener.local_addr();
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = tokio::spawn(serve(listener, async { drop(stopped.await) }));
    let pd = client.protection_domain()?;
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        let store = connect(address, pd.clone());
        clients.spawn(async move { work(store.await?, number).await });
    }
    while let Some(done) = clients.join_next().await {
        done??;
    }
    let mut store = connect(address, pd).await?;
    let absent = store.get(Key { key: "absent".into() }).await.unwrap_err();
    assert_eq!((absent.code(), absent.message()), (Code::NotFound, "absent"));
    // All streams are closed in order: the server waits for the last.
    drop((store, stop));
    Ok(server.await??)
}

fn run(server: Context, client: Context) -> Result {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async { tokio::time::timeout(LIMIT, calls(server, client)).await? })
}

#[doorbell_test::test]
fn each_byte_of_concurrent_calls(server: Context, client: Context) -> Result {
    run(server, client)
}

#[doorbell_test::test(drop = 0.01, seed = 7)]
fn each_byte_of_concurrent_calls_under_loss(server: Context, client: Context) -> Result {
    run(server, client)
}
