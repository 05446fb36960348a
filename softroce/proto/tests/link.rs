//! All transport tests over a lossless link, and tests of what is specific to it.
#![expect(
    clippy::duplicate_mod,
    reason = "each file of tests brings its own frame, which finds out by its path that it is here"
)]

#[path = "link/ack_suppression.rs"]
mod ack_suppression;
#[path = "link/direct.rs"]
mod direct;
#[path = "link/fast_path.rs"]
mod fast_path;
#[path = "flow.rs"]
mod flow;
#[path = "link/link_only.rs"]
mod link_only;
#[path = "operations.rs"]
mod operations;
#[path = "placement.rs"]
mod placement;
#[path = "random.rs"]
mod random;
#[path = "recovery.rs"]
mod recovery;
#[path = "refusals.rs"]
mod refusals;
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
#[path = "xrc.rs"]
mod xrc;
