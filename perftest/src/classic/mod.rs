//! The classic tools: `ib_write_bw` and its seven relatives, by those names, with their flags and their layout, and interchangeable with the C tools at the other end.
//!
//! `tool` knows the names, `flags` the options of each, `settings` is what they come to; `wire` is the C tools' conversation over TCP, `station` sets up and connects
//! queue pairs by what it brought, `bw` and `lat` are the loops, and `printer` prints what they found: `layout` as text, `json` as a report. What is measured is measured as `doorbell bw` and `doorbell lat` do (`stats`), so none of the C tools'
//! figures that are known to be wrong is reproduced; docs/CLASSIC.md names each.

mod begin;
mod bw;
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
mod run;
pub(crate) mod settings;
mod spin;
pub(crate) mod station;
pub(crate) mod tool;
pub(crate) mod wire;

pub(crate) use run::main;
