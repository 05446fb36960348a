//! Symmetric heaps on the soft device: ranks as threads, as processes, and with kernels and streams
//! of the stand-in for a GPU.

mod gpu;
mod host;
mod kernels;
mod streams;
mod world;
