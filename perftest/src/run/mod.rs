//! Running a test: one [`session`] with the peer; in it one [`test_end`] per message size, which
//! runs a test of [`bw`] or [`lat`].

mod bw;
pub(crate) mod gpu;
mod lat;
mod meter;
mod monitor;
mod pattern;
pub(crate) mod raw;
pub(crate) mod session;
mod test_end;

#[cfg(test)]
mod wrong_data_tests;
