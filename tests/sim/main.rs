//! The protocol engine on a simulated network: virtual clock, real packets and ICRCs.

mod congestion;
mod conversation;
mod grid;
mod hostile;
mod memory;
mod monitor;
mod net;
mod overrun;
mod pair;
mod stalls;
mod trace;
