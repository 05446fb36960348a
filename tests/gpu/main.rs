//! The GPU's reduction kernels on the stand-in (gpudirect/standin), once directly and once through
//! doorbell-cuda: every case of `gpu-reduce`. Not covered: a GPU's own float conversions, minimum,
//! maximum, loads and stores.

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
