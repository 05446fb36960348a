//! The functions of librdmacm as a C program calls them, on soft devices with addresses of this
//! process' own. Both ends are in this process.

mod asynchronous;
mod common;
mod refusals;
mod synchronous;
