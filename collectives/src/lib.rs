//! Collectives built directly on RC queue pairs.
//!
//! An algorithm is a pure function from a [`Shape`](plan::Shape) to a [`Plan`](plan::Plan): the
//! sends, receives and reductions of each rank, in blocks and not in bytes, so that one plan serves
//! every count. A checker proves a plan by symbolic execution, a simulator runs it over modelled
//! fabrics, and one executor, independent of the algorithm, runs it on queue pairs.
//!
//! Programs use the [`Communicator`], on any device of `doorbell-verbs`: an adapter, the kernel's
//! rxe, or a soft device in this process, as here, where three ranks are threads of one program:
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
//!     // Any slice, in place, blocking.
//!     let mut sums = [1.0f32, comm.rank().0 as f32];
//!     comm.all_reduce(&mut sums, ReduceOp::Sum).wait()?;
//!     assert_eq!(sums, [3.0, 0.0 + 1.0 + 2.0]);
//!
//!     // Registered memory is used without a copy. A started operation owns its buffer until `wait`.
//!     let mut everybody = comm.alloc::<u32>(3)?;
//!     everybody[comm.rank().index()] = 100 + comm.rank().0;
//!     let request = comm.all_gather(everybody).start()?;
//!     // … other work …
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
//! If ranks are processes, mpirun, srun or torchrun starts them, and each calls
//! [`Communicator::from_env`]; a program that starts its own ranks passes them
//! [`Launch::variables`](bootstrap::Launch::variables). The examples `10_matrix_multiply`,
//! `11_data_parallel` and `12_sharded_optimiser` do both.
//!
//! - [`communicator`]: operations, buffers, requests, shrink; [`bootstrap`]: rendezvous of the
//!   ranks; [`failure`]: failure detection and agreement.
//! - [`algorithm`] and [`plan`]: schedules, with a text form, drawings and a checker; [`executor`]:
//!   runs plans; [`kernel`]: reductions by type and operator.
//! - [`moe`]: expert parallelism, dispatch of tokens to experts and combine with weights.
//! - `gpu`, with the feature of that name: the same collectives on GPU memory, stream-ordered.
//! - [`cost`], [`tune`], [`topology`]: the choice of algorithm and protocol, and its reasons;
//!   [`simulate`]: simulated fabrics.

/// Implements `Debug` by the named values, as the type has others that are long or have none.
macro_rules! debug_fields {
    ($name:ident, $self:ident, $($field:ident = $value:expr),*) => {
        impl core::fmt::Debug for $name {
            fn fmt(&$self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.debug_struct(stringify!($name))$(.field(stringify!($field), &$value))*.finish_non_exhaustive()
            }
        }
    };
}

pub mod algorithm;
pub mod bootstrap;
pub mod communicator;
pub mod cost;
pub mod executor;
pub mod failure;
#[cfg(feature = "gpu")]
pub mod gpu;
pub mod kernel;
mod memory;
pub mod moe;
pub mod plan;
mod protocol;
pub mod reference;
pub mod simulate;
#[cfg(test)]
mod test_ranks;
pub mod topology;
pub mod tune;
mod types;

pub use algorithm::{Algorithm, Unsupported};
pub use communicator::{CollectiveError, CommBuffer, Communicator, Options, PreMulSum, Request};
pub use kernel::{Element, UserOperator};
pub use memory::Segment;
pub use types::{DataType, Protocol, Rank, ReduceOp, UnknownName};
