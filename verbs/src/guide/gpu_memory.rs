//! Register the memory of a GPU.
//!
//! What holds memory that the processor cannot reach exports it as a *dma-buf*, a file descriptor; an adapter that knows these moves data to and from it
//! without a copy through the host. Its buffers are of a kind of their own, [`Opaque`](crate::Opaque): posted as any other, and without a way to look into
//! them.
//!
//! ```no_run
//! use std::os::fd::OwnedFd;
//! use doorbell_verbs::{Buffer, Opaque, ProtectionDomain, QueuePair, Remote, PeerWrite, WriteAccess};
//!
//! /// `fd` is what the GPU's driver exports of the `len` bytes at `address`, such as cuMemGetHandleForAddressRange of CUDA.
//! fn inbox(pd: &ProtectionDomain, fd: OwnedFd, address: u64, len: usize) -> Result<Buffer<Opaque<PeerWrite>>, Box<dyn std::error::Error>> {
//!     if !pd.supports_dmabuf() {
//!         return Err("no dma-bufs here: copy through host memory".into());
//!     }
//!     // Known to peers by the addresses that the GPU knows it by. Offset and address have to agree modulo a page, so export whole pages.
//!     Ok(pd.register_dmabuf(fd, 0, len, address, PeerWrite)?)
//! }
//!
//! /// From one GPU's memory into another's.
//! fn copy(qp: &mut QueuePair, from: Buffer<Opaque<PeerWrite>>, to: Remote<WriteAccess>) -> Result<(), Box<dyn std::error::Error>> {
//!     qp.post(|batch| {
//!         batch.write(from, to).signaled();
//!     })?;
//!     Ok(())
//! }
//! ```
//!
//! The crate doorbell-gpudirect does all of this for CUDA's GPUs, and finds out by which path an adapter reaches their memory where dma-bufs are not to be had;
//! `examples/13_gpu_write` is written with it.
//!
//! # Units
//!
//! Offset, length and address are bytes; the export begins and ends at page boundaries of the host (4 KiB on x86-64, up to 64 KiB on arm64), and of the GPU
//! where that asks for more (64 KiB or 2 MiB).
//!
//! # What goes wrong
//!
//! - *[`NoDmaBuf`](crate::MemoryError::NoDmaBuf).* Device, kernel (5.12) or rdma-core (34) are without it. mlx5, efa, irdma, bnxt_re and mana have it.
//! - *The GPU sees old bytes.* A completion says that the data has left the adapter, not that a kernel running on the GPU sees it: begin the kernel after the
//!   completion, or flush, by a READ of a byte of the same memory, where the GPU's driver asks for it.
//! - *The memory is freed while registered.* The kernel holds the dma-buf as long as the region is there; the driver of the GPU may nonetheless invalidate it.
//!   Drop the buffers first.
//! - *Slow.* GPU and adapter are not under the same PCIe switch, or ACS sends their traffic by the root complex.
//!
//! # Where the rules are
//!
//! ibv_reg_dmabuf_mr(3); the kernel's `Documentation/driver-api/dma-buf.rst`; memory regions: IBTA vol 1, 10.6.
