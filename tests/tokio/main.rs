//! Tasks: byte streams and awaited operations between devices of one process.

mod connecting;
mod framed;
mod leaks;
mod managed;
mod queue_pair;
mod server;
mod stream;

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

type Error = Box<dyn std::error::Error + Send + Sync>;
type Result<T = ()> = std::result::Result<T, Error>;

/// Ends a test that stands still.
const LIMIT: Duration = Duration::from_secs(60);

fn run<T>(test: impl Future<Output = Result<T>>) -> Result<T> {
    run_within(LIMIT, test)
}

fn run_within<T>(limit: Duration, test: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async { tokio::time::timeout(limit, test).await? })
}

/// Polls `future` `times` times, then drops it; its output if it was ready by then.
async fn cancelled<T>(future: impl Future<Output = T>, times: u32) -> Option<T> {
    let mut future = pin!(future);
    for _ in 0..times {
        let polled = poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await;
        if let Poll::Ready(output) = polled {
            return Some(output);
        }
        tokio::task::yield_now().await;
    }
    None
}

/// Polls `future`, each time that it is woken, until it has been pending `points` times, then drops
/// it; its output if it was ready before. 0 drops it before its first poll.
async fn dropped_at<T>(future: impl Future<Output = T>, points: u32) -> Option<T> {
    let mut future = pin!(future);
    let mut left = points;
    poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}
