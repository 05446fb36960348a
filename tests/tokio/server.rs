//! Servers of many clients.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use doorbell::Success;
use doorbell_test::Context;
use doorbell_tokio::{AsyncQueuePair, RdmaServer, ServerConfig};
use tokio::task::JoinSet;

use crate::{Result, cancelled, run};

const CLIENTS: u8 = 9;
const MESSAGES: u8 = 10;

/// They send at once when they are connected, and leave when all is acknowledged, not answered.
#[doorbell_test::test(drop = 0.01, seed = 7)]
fn clients_that_leave_make_room_and_lose_no_message(a: Context, b: Context) -> Result {
    run(async {
        let config = ServerConfig::default().message(64).receives(4).clients(3);
        let present = Arc::new(());
        let token = Arc::clone(&present);
        let welcome = move |_: &_| Ok((b"welcome".to_vec(), (Arc::clone(&token), 0)));
        let mut server = RdmaServer::bind("127.0.0.1:0", a.protection_domain()?, config, |qp| qp, welcome).await?;
        let address = server.local_addr();
        // Takes one of the three places, and delays no other.
        let silent = TcpStream::connect(address)?;
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS {
            let pd = b.protection_domain()?;
            clients.spawn(async move {
                let (qp, welcome) = AsyncQueuePair::connect(address, pd, |qp| qp, b"").await?;
                assert_eq!(welcome, b"welcome");
                let messages: Vec<_> = (0..MESSAGES)
                    .map(|number| Ok(qp.send(qp.register(message(number))?)))
                    .collect::<Result<_>>()?;
                for sent in messages {
                    sent.await?;
                }
                Result::Ok(())
            });
        }
        let (mut received, mut times) = (0, 0);
        while received < u32::from(CLIENTS) * u32::from(MESSAGES) {
            times = (times + 1) % 5;
            let Some(next) = cancelled(server.next(), times).await else {
                continue;
            };
            let next = next?;
            let (_, number) = &mut next.client.state;
            assert_eq!(next.bytes, message(*number));
            let len = next.bytes.len() as u32;
            assert_eq!(next.success, Success::Receive { len, imm: None });
            *number += 1;
            received += 1;
        }
        while let Some(client) = clients.join_next().await {
            client??;
        }
        drop(silent);
        // Its own, and the one of `welcome`.
        while Arc::strong_count(&present) > 2 {
            let more = tokio::time::timeout(Duration::from_millis(10), server.next()).await;
            assert!(more.is_err(), "{more:?}");
        }
        Ok(())
    })
}

fn message(number: u8) -> Vec<u8> {
    vec![number; 1 + usize::from(number) * 7]
}
