//! Running a test: one [`session`] with the other end, in it one [`station`] per message size, in that one of the tests of [`bw`] or
//! [`lat`].

mod bw;
pub(crate) mod gpu;
mod lat;
mod meter;
mod pattern;
pub(crate) mod raw;
pub(crate) mod session;
mod station;
mod watch;

#[cfg(test)]
mod wrong_data_tests;
