//! A protocol of length-delimited frames over a stream.

use std::io;

use bytes::Bytes;
use doorbell_test::Context;
use doorbell_tokio::RdmaStream;
use futures_util::{SinkExt, StreamExt};
use tokio_util::codec::{Framed, LengthDelimitedCodec};

use crate::stream::{pair, random_bytes, small};
use crate::{Result, run};

/// Of no bytes, of those that fill a message of 512 bytes with the length before them, and of many
/// messages.
fn frames(seed: u64) -> Vec<Vec<u8>> {
    let mut random = fastrand::Rng::with_seed(seed);
    let longer = (0..60).map(|_| random.usize(..6000));
    let lengths = [0, 1, 507, 508, 509, 512].into_iter().chain(longer);
    lengths.zip(seed..).map(|(len, seed)| random_bytes(seed, len)).collect()
}

/// Sends `frames`, ends this direction, then receives until the peer has ended its own.
async fn exchange(stream: RdmaStream, frames: Vec<Vec<u8>>) -> io::Result<Vec<Vec<u8>>> {
    let (mut to, mut from) = Framed::new(stream, LengthDelimitedCodec::new()).split();
    let send = async {
        for frame in frames {
            to.send(Bytes::from(frame)).await?;
        }
        to.close().await
    };
    let receive = async {
        let mut received = Vec::new();
        while let Some(frame) = from.next().await {
            received.push(frame?.to_vec());
        }
        Ok(received)
    };
    let ((), received) = tokio::try_join!(send, receive)?;
    Ok(received)
}

async fn both_ways(a: Context, b: Context) -> Result {
    let (left, right) = pair(&a, &b, small()).await?;
    let (to_right, to_left) = (frames(1000), frames(2000));
    let other = tokio::spawn(exchange(right, to_left.clone()));
    assert!(
        exchange(left, to_right.clone()).await? == to_left,
        "left has other frames"
    );
    assert!(other.await?? == to_right, "right has other frames");
    Ok(())
}

#[doorbell_test::test]
fn frames_arrive_whole_both_ways(a: Context, b: Context) -> Result {
    run(both_ways(a, b))
}

#[doorbell_test::test(drop = 0.01, seed = 7)]
fn frames_arrive_whole_both_ways_under_loss(a: Context, b: Context) -> Result {
    run(both_ways(a, b))
}

/// A request of frames that ends before its answer begins.
#[doorbell_test::test(drop = 0.01, seed = 7)]
fn an_answer_follows_the_end_of_its_request(a: Context, b: Context) -> Result {
    run(async {
        let (left, right) = pair(&a, &b, small()).await?;
        let server = tokio::spawn(async move {
            let mut framed = Framed::new(right, LengthDelimitedCodec::new());
            let mut kept = Vec::new();
            while let Some(frame) = framed.next().await {
                kept.push(frame?.freeze());
            }
            for frame in kept.into_iter().rev() {
                framed.send(frame).await?;
            }
            SinkExt::<Bytes>::close(&mut framed).await
        });
        let mut expected = frames(3000);
        let answer = exchange(left, expected.clone()).await?;
        expected.reverse();
        assert!(answer == expected, "other frames");
        Ok(server.await??)
    })
}
