//! The classic tools: `ib_write_bw` and its seven relatives, with their names, flags and layout,
//! interoperable with the C tools (perftest) as the peer.
//!
//! `tool` has the names, `flags` the options, `settings` the parameters; `wire` is the C tools'
//! protocol, `test_end` connects the queue pairs, `requester` has the memory of operations, `bw`
//! and `lat` measure by the loops of the engine, `printer` prints: `layout` as text, `json` as a
//! report. Results are computed by `stats`; docs/book/src/classic.md lists the differences.

mod bw;
mod control;
#[cfg(test)]
mod documented;
mod flags;
mod getopt;
mod help;
mod json;
mod lat;
pub(crate) mod layout;
#[cfg(test)]
mod layout_tests;
mod options;
#[cfg(test)]
mod options_tests;
pub(crate) mod printer;
mod requester;
mod run;
pub(crate) mod settings;
mod spin_wait;
pub(crate) mod test_end;
pub(crate) mod tool;
pub(crate) mod wire;

pub(crate) use run::main;
