//! Symmetric heaps on the userspace device and the stand-in for a GPU.

mod gpu;
mod host;
mod kernels;
mod streams;
mod world;
