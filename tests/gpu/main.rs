//! The GPU's reduction kernels on the stand-in (gpudirect/standin), once directly and once through
//! doorbell-cuda: every case of `gpu-reduce`. Not covered: a GPU's own float conversions, minimum,
//! maximum, loads and stores.

mod collective;
mod driver;
mod stand_in;

use doorbell_tests::environment::is_whole;
use doorbell_tests::gpu::sweep::{self, Extent};
use stand_in::Processor;

#[test]
fn kernels_on_the_host_match_the_collectives_bit_for_bit() {
    let Some(driver) = stand_in::driver() else { return };
    let extent = if is_whole() { Extent::Full } else { Extent::Quick };
    let cases = sweep::run(&mut Processor::new(driver), extent).unwrap();
    let (sources, lengths) = if extent == Extent::Full { (8, 17) } else { (3, 3) };
    assert_eq!(cases, 12 * 6 * sources * lengths * 3 * 2);
}
