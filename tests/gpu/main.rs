//! The GPU's reduction kernels without a GPU: their source is compiled for the processor by the stand-in (gpudirect/standin) and put through every case that `gpu-reduce` puts them through on one. What that leaves out is what only a GPU has: its
//! conversions between floats, its minimum and maximum, and the loads and stores themselves.
//!
//! Once they are run as they are, and once by all of doorbell-cuda, on the stand-in.

mod collective;
mod driver;
mod stand_in;

use doorbell_tests::gpu::sweep::{self, Extent};
use stand_in::Processor;

#[test]
fn kernels_on_the_processor_give_the_collectives_bits() {
    let Some(driver) = stand_in::driver() else { return };
    let cases = sweep::run(&mut Processor::new(driver), Extent::Full).unwrap();
    assert_eq!(cases, 12 * 6 * 8 * 17 * 3 * 2);
}
