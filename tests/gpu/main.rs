//! The GPU's reduction kernels without a GPU: their source is compiled for the processor (`stand_in.cpp`) and put through every case that `gpu-reduce` puts them through on one. What that leaves out is what only a GPU has: its
//! conversions between floats, its minimum and maximum, and the loads and stores themselves.
//!
//! Once they are run as they are, and once by all of doorbell-cuda, on the driver of its tests.

mod driver;
mod stand_in;

use doorbell_tests::gpu::sweep::{self, Extent};
use stand_in::{Kernels, StandIn};

#[test]
fn kernels_on_the_processor_give_the_collectives_bits() {
    let Some(kernels) = Kernels::compiled() else { return };
    let cases = sweep::run(&mut StandIn::new(kernels), Extent::Full).unwrap();
    assert_eq!(cases, 12 * 6 * 8 * 17 * 3 * 2);
}
