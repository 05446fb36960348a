//! librdmacm's functions as a C program calls them, both ends in this process.

mod asynchronous;
mod common;
mod multicast;
mod refusals;
mod synchronous;
mod wildcards;
