//! The functions of librdmacm as a C program calls them, on soft devices with addresses unique to
//! this process. Both ends are in this process.

mod asynchronous;
mod common;
mod refusals;
mod synchronous;
