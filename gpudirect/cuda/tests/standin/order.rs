//! Calls of the driver for operations that run one after another.

use doorbell_cuda::{Event, Follower, Stream, StreamOrder};
use doorbell_cuda_standin::{ExecutionMode, Standin};

const MANY: i32 = 1000;

#[test]
fn operations_in_one_borrowed_stream_do_not_wait_and_few_events_are_created() {
    let standin = Standin::load(ExecutionMode::Prompt);
    let context = standin.driver().unwrap().device(0).unwrap().context().unwrap();
    let count = |call: &str| standin.calls().get(call).copied().unwrap_or(0);
    let follower = Follower::new(&context);
    let mut order = StreamOrder::new(&context).unwrap();
    let mut operation = |stream: &Stream| -> Event {
        // SAFETY: the stream outlives the handle, and is not captured.
        let stream = unsafe { Stream::borrow_raw(stream.as_raw(), &follower).unwrap() };
        let turn = order.begin(&stream).unwrap();
        order.end(turn, &stream).unwrap().unwrap()
    };
    let (one, other) = (Stream::new(&context).unwrap(), Stream::new(&context).unwrap());
    let (waits, events) = (count("cuStreamWaitEvent"), count("cuEventCreate"));
    let held = operation(&one);
    for _ in 0..MANY {
        operation(&one);
    }
    assert_eq!(count("cuStreamWaitEvent"), waits);
    assert!(
        count("cuEventCreate") - events < 8,
        "{}",
        count("cuEventCreate") - events
    );
    // None is recorded again while it is held.
    let ends: Vec<_> = (0..MANY).map(|_| operation(&one)).collect();
    assert!(count("cuEventCreate") - events > MANY - 8);
    // The streams take turns, and so does one that has the place of another that is gone.
    operation(&other);
    drop(other);
    operation(&Stream::new(&context).unwrap());
    assert_eq!(count("cuStreamWaitEvent"), waits + 2);
    drop((ends, held, order, one));
}
