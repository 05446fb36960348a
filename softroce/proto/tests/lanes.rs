//! The tests of the transports once more, with both ends on one host and a lane between them; and what only lanes have.
#![expect(
    clippy::duplicate_mod,
    reason = "each file of tests brings its own frame, which finds out by its path that it is here"
)]

#[path = "flow.rs"]
mod flow;
#[path = "lanes/only.rs"]
mod only;
#[path = "operations.rs"]
mod operations;
#[path = "lanes/quiet.rs"]
mod quiet;
#[path = "random.rs"]
mod random;
#[path = "recovery.rs"]
mod recovery;
#[path = "refusals.rs"]
mod refusals;
#[path = "lanes/short.rs"]
mod short;
#[path = "srq.rs"]
mod srq;
#[path = "states.rs"]
mod states;
#[path = "uc.rs"]
mod uc;
#[path = "ud.rs"]
mod ud;
#[path = "windows.rs"]
mod windows;
