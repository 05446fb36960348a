//! The GPU's reduction kernels without a GPU: the stand-in (gpudirect/standin) compiles their
//! source for the CPU, and runs every case that `gpu-reduce` runs on a GPU. Not covered is what
//! only a GPU has: its float conversions, minimum and maximum, and the loads and stores themselves.
//!
//! Kernels run once directly, and once through all of doorbell-cuda, on the stand-in.

mod collective;
mod driver;
mod stand_in;

use doorbell_tests::gpu::sweep::{self, Extent};
use stand_in::Processor;

#[test]
fn kernels_on_the_host_match_the_collectives_bit_for_bit() {
    let Some(driver) = stand_in::driver() else { return };
    let cases = sweep::run(&mut Processor::new(driver), Extent::Full).unwrap();
    assert_eq!(cases, 12 * 6 * 8 * 17 * 3 * 2);
}
