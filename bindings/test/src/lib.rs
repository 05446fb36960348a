//! Lossy RDMA in `cargo test`: each test has userspace devices of its own.
//!
//! ```
//! use doorbell_test::Context;
//!
//! #[doorbell_test::test(drop = 0.01, seed = 7)]
//! fn two_ends(a: Context, b: Context) {
//!     assert_ne!(a.default_gid(1).unwrap().gid, b.default_gid(1).unwrap().gid);
//! }
//! # fn main() {}
//! ```
//!
//! The test has as many devices as arguments, each on a loopback address that no other device has,
//! so that tests run in parallel, in one process or in several (cargo-nextest). It may return a
//! `Result`; `#[should_panic]`, `#[ignore]` and `#[cfg]` are as in any test. [`Devices`] is for
//! tests without the attribute.
//!
//! # Options
//!
//! Those of the variable `DOORBELL_FAULTS`, which act on what a device sends: the fractions `drop`,
//! `duplicate`, `reorder`, `corrupt` and `mark`; `delay = "100us"`; `rate = "1Gb"`;
//! `down = "3s+1s"`; and `seed`. A value is any expression that displays as the text.
//! `pcap = "file"` keeps the captures of the packets, the devices' numbers added to the name.
//!
//! Without `pcap` the captures are in the folder `doorbell-test` of the target folder, and stay
//! there if the test fails. It then prints its faults and seed, its devices and the captures, in
//! one line.
//!
//! # What is deterministic
//!
//! Device *n*, from 0, has the seed of the test plus *n*. What happens to the *n*-th packet that a
//! device sends depends on its seed and *n* alone: whether it is lost, duplicated, held back or
//! changed, and in which byte. So datagrams, and anything that sends the same packets in the same
//! order, meet the same faults in each run.
//!
//! Times are real, and so is what follows from them. Which request or acknowledgement the *n*-th
//! packet is, may differ between runs of a reliable connection: acknowledgements are merged, and
//! retransmissions sent, by timers. Of two tests with one seed one may retransmit more. Queue pair
//! numbers and addresses are random. (Decision 098 says why there is no virtual clock.)
//!
//! # Several processes
//!
//! [`TestDevices::child`] is the environment of a child process whose device is one more of the
//! test's; the child opens it by [`doorbell::open_from_env`], or as `soft0` if it is not in Rust.
//! They meet as any two processes do, by [`doorbell::exchange`] for instance.
//!
//! The connection manager (rdma_cm) serves a process's configured devices alone, thus the child's
//! `soft0` and not the devices of a test (decision 097).

#![forbid(unsafe_code)]

mod captures;
mod devices;
mod run;

pub use devices::{Devices, Error, TestDevices};
pub use doorbell::Context;
pub use doorbell_test_macros::test;
pub use run::Outcome;
