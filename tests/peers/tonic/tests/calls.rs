//! Each byte of unary and streaming calls of several clients at once, on a clean and on a lossy
//! network; and a server that is killed.

#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use doorbell_peer_tonic::{Block, Client, ENDLESS, Result, UNARY, serve};
use tokio::task::JoinSet;
use tonic::Code;

/// Ends a test that stands still.
const LIMIT: Duration = Duration::from_secs(120);
const CLIENTS: u64 = 6;

/// Calls of both kinds, with blocks of its own.
async fn work(mut client: Client, number: u64) -> Result {
    let first = number * 1000;
    for seed in first..first + 20 {
        let answer = client.unary(UNARY, Block::new(seed)).await?;
        assert_eq!(answer.seed, seed + 1);
        answer.check()?;
    }
    let seeds = first + 100..first + 150;
    let mut answers = client
        .streaming(tokio_stream::iter(seeds.clone().map(Block::new)))
        .await?;
    for seed in seeds {
        let answer = answers.message().await?.ok_or("the answers end early")?;
        assert_eq!(answer.seed, seed + 1);
        answer.check()?;
    }
    assert!(answers.message().await?.is_none(), "one answer too many");
    Ok(())
}

async fn calls(device: &'static str) -> Result {
    let (address, server) = serve(device).await?;
    let server = tokio::spawn(server);
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        clients.spawn(async move { work(Client::connect(device, address).await?, number).await });
    }
    while let Some(done) = clients.join_next().await {
        done??;
    }
    // A call of which the server refuses the bytes; and one that it does not know.
    let mut client = Client::connect(device, address).await?;
    let mut wrong = Block::new(5);
    wrong.seed = 6;
    let refused = client.unary(UNARY, wrong).await.unwrap_err();
    assert_eq!(refused.code(), Code::DataLoss);
    let unknown = client.unary("/doorbell.Blocks/Other", Block::new(5)).await.unwrap_err();
    assert_eq!(unknown.code(), Code::Unimplemented);
    server.abort();
    Ok(())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_byte_of_concurrent_calls() -> Result {
    tokio::time::timeout(LIMIT, calls("soft")).await?
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_byte_of_concurrent_calls_under_loss() -> Result {
    tokio::time::timeout(LIMIT, calls("soft?drop=0.01")).await?
}

/// Ends its process with the test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_killed_server_ends_its_calls() -> Result {
    let server = Command::new(std::env::current_exe()?)
        .args([
            "--exact",
            "a_server_in_a_process_of_its_own",
            "--ignored",
            "--nocapture",
        ])
        .stdout(Stdio::piped())
        .spawn()?;
    let mut server = Killed(server);
    let output = server.0.stdout.take().ok_or("no output")?;
    let address = BufReader::new(output)
        .lines()
        .map_while(|line| line.ok())
        .find_map(|line| line.split_once("listens on ")?.1.parse().ok())
        .ok_or("the server names no address")?;
    let mut client = Client::connect("soft", address).await?;
    client.unary(UNARY, Block::new(1)).await?.check()?;
    let call = tokio::spawn(async move { client.unary(ENDLESS, Block::new(2)).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!call.is_finished());
    let killed = Instant::now();
    drop(server);
    let ended = tokio::time::timeout(LIMIT, call).await??;
    assert!(ended.is_err(), "{ended:?}");
    assert!(killed.elapsed() < Duration::from_secs(5), "{:?}", killed.elapsed());
    Ok(())
}

#[tokio::test]
#[ignore = "the server of another test"]
async fn a_server_in_a_process_of_its_own() -> Result {
    let (address, server) = serve("soft").await?;
    println!("listens on {address}");
    server.await
}
