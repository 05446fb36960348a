//! A packet-level simulation of fabrics: the real protocol engine at the hosts, links with a rate
//! and a propagation delay, shared-buffer switches with ECN marking and PFC, ECMP, one virtual
//! clock. Every run is a function of its seed.
//!
//! [`topology`] has the nodes and links, [`switch`] the buffer, [`host`] an endpoint and its port,
//! [`traffic`] the flows, [`fabric`] the events, [`events`] their queue. [`measure`] has the
//! statistics, [`fluid`] the model of DCQCN that its authors published, [`open_loop`] the engine's
//! controller at a constant probability of marks, [`scenario`] the experiments of the command.
#![forbid(unsafe_code)]

pub mod events;
pub mod fabric;
pub mod fluid;
pub mod host;
pub mod measure;
mod memory;
pub mod open_loop;
pub mod packet;
pub mod port;
pub mod scenario;
pub mod switch;
pub mod topology;
pub mod traffic;
