//! The protocol engine on a simulated network: virtual clock, real packets with real ICRCs, memory
//! that is compared byte by byte.

mod conversation;
mod grid;
mod hostile;
mod memory;
mod monitor;
mod net;
mod overrun;
mod pair;
mod trace;
