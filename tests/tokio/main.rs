//! Tasks: byte streams and awaited operations between devices of one process.

mod queue_pair;
mod stream;

use std::future::Future;
use std::time::Duration;

type Error = Box<dyn std::error::Error + Send + Sync>;
type Result<T = ()> = std::result::Result<T, Error>;

/// Ends a test that stands still.
const LIMIT: Duration = Duration::from_secs(60);

fn run<T>(test: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    runtime.block_on(async { tokio::time::timeout(LIMIT, test).await? })
}
