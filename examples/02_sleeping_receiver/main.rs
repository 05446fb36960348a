//! A receiver that sleeps between two messages, where a busy-polling one uses a whole core.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 02_sleeping_receiver
//! ```
//!
//! [`CompletionQueue::wait`] sleeps on a completion channel until there are completions. In the end
//! the sender writes with an invalid rkey: the receiver gets an asynchronous event.

#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use doorbell::{
    AsyncEvent, Buffer, CompletionQueue, Context, Local, PreparedQueuePair, QueuePair, QueuePairEvent, Remote, Success,
    WriteAccess,
};
use doorbell_examples::{Error, report, soft_pair};

const TIMEOUT: Duration = Duration::from_secs(30);
const MESSAGES: u32 = 5;
const BYTES: usize = 64;

fn main() -> ExitCode {
    report(run())
}

fn prepare(context: &Context) -> Result<(PreparedQueuePair, CompletionQueue, Buffer), Error> {
    let pd = context.protection_domain()?;
    let channel = context.completion_channel()?;
    // The queue holds the channel, so the handle may be dropped.
    let cq = context.completion_queue_on(&channel, 16)?;
    let qp = pd
        .queue_pair(&cq)
        .max_send_wr(4)
        .max_recv_wr(4)
        .allow_remote_write()
        .rc()?;
    Ok((qp, cq, pd.register(vec![0; BYTES], Local)?))
}

fn run() -> Result<(), Error> {
    let (sending, receiving) = soft_pair()?;
    let (sender, sent, message) = prepare(&sending)?;
    let (mut receiver, mut received, inbox) = prepare(&receiving)?;
    let (to_sender, to_receiver) = (sender.endpoint(), receiver.endpoint());
    receiver.receive(inbox)?;
    let mut receiver = receiver.connect(&to_sender)?;
    let sender = sender.connect(&to_receiver)?;
    let mut events = receiving.events()?;

    thread::scope(|scope| {
        let sending = scope.spawn(|| send(sender, sent, message));
        receive(&mut receiver, &mut received)?;
        let refused = AsyncEvent::Qp {
            qpn: receiver.qpn(),
            event: QueuePairEvent::AccessError,
        };
        match events.wait(TIMEOUT)? {
            Some(event) if event == refused => println!("a write with an invalid key: refused"),
            other => return Err(format!("expected {refused:?}, got {other:?}").into()),
        }
        sending.join().map_err(|_| "the sender panicked")?
    })
}

fn receive(qp: &mut QueuePair, cq: &mut CompletionQueue) -> Result<(), Error> {
    let mut count = 0;
    while count < MESSAGES {
        let mut any = false;
        for mut done in cq.wait(TIMEOUT)? {
            any = true;
            let Success::Receive { len, imm: Some(number) } = done.result()? else {
                return Err(format!("expected a message, got {done:?}").into());
            };
            let inbox: Buffer = done.take().ok_or("a receive gives its buffer back")?;
            if number != count || inbox[..len as usize] != [number as u8; BYTES] {
                return Err(format!("message {number} in place of {count}, or not as it was sent").into());
            }
            println!("message {number}: {len} bytes");
            count += 1;
            qp.receive(inbox)?;
        }
        if !any {
            return Err("the sender stopped sending".into());
        }
    }
    Ok(())
}

/// In the end it writes with an invalid rkey. It also sleeps until each is acknowledged.
fn send(mut qp: QueuePair, mut cq: CompletionQueue, mut message: Buffer) -> Result<(), Error> {
    for number in 0..MESSAGES {
        thread::sleep(Duration::from_millis(50));
        message.fill(number as u8);
        qp.post(|batch| {
            batch.send(message).imm(number).signaled();
        })?;
        let mut done = cq.wait(TIMEOUT)?.next().ok_or("no acknowledgement")?;
        done.result()?;
        message = done.take().ok_or("a send gives its buffer back")?;
    }
    qp.post(|batch| {
        batch
            .write(message, Remote::<WriteAccess>::from_raw(0, 0, BYTES as u64))
            .signaled();
    })?;
    let done = cq.wait(TIMEOUT)?.next().ok_or("no refusal")?;
    match done.result() {
        Ok(success) => Err(format!("a write by no key succeeded: {success:?}").into()),
        Err(_) => Ok(()),
    }
}
