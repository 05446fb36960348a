//! Running a test: one [`session`] with the peer; in it one [`test_end`] per message size, which
//! runs a test of [`bw`] or [`lat`].

mod bw;
mod cm;
mod lat;
mod meter;
mod monitor;
pub(crate) mod raw;
pub(crate) mod session;
mod test_end;

#[cfg(test)]
mod wrong_data_tests;
