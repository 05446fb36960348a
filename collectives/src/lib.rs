//! Collectives built directly on RC queue pairs.
//!
//! An algorithm is a pure function from a [`Shape`](plan::Shape) to a [`Plan`](plan::Plan): what each rank sends, receives and reduces, in blocks and not in bytes, so that one plan serves every
//! count. A checker proves a plan by running it symbolically; a simulator runs it over modelled fabrics; one executor runs it on queue pairs, and knows no algorithm.
//!
//! What programs use of it is the [`Communicator`]. It runs on any device of `doorbell-verbs`: an adapter, the kernel's rxe, or a device in this process, as here, where three ranks are threads of one program:
//!
//! ```
//! use std::thread;
//!
//! use doorbell_collectives::bootstrap::Group;
//! use doorbell_collectives::{CollectiveError, Communicator, Options, ReduceOp};
//! use doorbell_verbs::{Context, Library};
//!
//! fn rank(device: Context, group: Group) -> Result<(), CollectiveError> {
//!     let comm = Communicator::new(&[device], group, Options::default())?;
//!
//!     // Any slice, in place, waited for.
//!     let mut sums = [1.0f32, comm.rank().0 as f32];
//!     comm.all_reduce(&mut sums, ReduceOp::Sum).wait()?;
//!     assert_eq!(sums, [3.0, 0.0 + 1.0 + 2.0]);
//!
//!     // Memory of the communicator's is sent from and written to where it lies. An operation on it can be started: it has the buffer until it gives it back.
//!     let mut everybody = comm.alloc::<u32>(3)?;
//!     everybody[comm.rank().index()] = 100 + comm.rank().0;
//!     let request = comm.all_gather(everybody).start()?;
//!     // … something else …
//!     let everybody = request.wait()?;
//!     assert_eq!(everybody[..], [100, 101, 102]);
//!
//!     comm.destroy()
//! }
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let library = Library::new(doorbell_softroce_ibverbs::api());
//!     thread::scope(|scope| {
//!         let mut ranks = Vec::new();
//!         for group in Group::local(3)? {
//!             let device = library.open("soft0")?;
//!             ranks.push(scope.spawn(|| rank(device, group)));
//!         }
//!         for rank in ranks {
//!             rank.join().map_err(|_| "a rank has panicked")??;
//!         }
//!         Ok(())
//!     })
//! }
//! ```
//!
//! Where ranks are processes, mpirun, srun or torchrun starts them, and each calls [`Communicator::from_env`]; a program that starts its own ranks gives them [`Launch::variables`](bootstrap::Launch::variables). The examples
//! `10_matrix_multiply`, `11_data_parallel` and `12_sharded_optimiser` do either.
//!
//! - [`communicator`]: operations, buffers, requests, and what is left after a failure; [`bootstrap`]: how ranks meet; [`failure`]: who is to blame when one goes.
//! - [`algorithm`] and [`plan`]: what is done in which order, with a text form, drawings and a checker; [`executor`]: doing it; [`kernel`]: types and operators.
//! - [`gpu`]: the same collectives on the memory of GPUs, in the order of their streams.
//! - [`cost`], [`tune`], [`topology`]: which algorithm when, and why; [`simulate`]: how long it would take where there is no such machine.

pub mod algorithm;
pub mod bootstrap;
pub mod communicator;
pub mod cost;
pub mod executor;
pub mod failure;
pub mod gpu;
pub mod kernel;
mod memory;
pub mod plan;
mod protocol;
pub mod reference;
pub mod simulate;
pub mod topology;
pub mod tune;
mod types;

pub use algorithm::{Algorithm, Unsupported};
pub use communicator::{CollectiveError, CommBuffer, Communicator, Options, PreMulSum, Request};
pub use kernel::{Element, UserOperator};
pub use memory::Segment;
pub use types::{DataType, Protocol, Rank, ReduceOp, UnknownName};
