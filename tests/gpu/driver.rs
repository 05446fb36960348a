//! The same through doorbell-cuda: its streams, memory and modules on the CPU stand-in.

use doorbell_cuda::reduce::{
    DataType, InvalidReduction, LaunchConfig, OperandKind, Operator, ReduceError, Reducer, Source,
};
use doorbell_cuda::{Context, Memory as _};
use doorbell_tests::gpu::driven::Gpu;
use doorbell_tests::gpu::sweep::{self, Extent};

/// A context of a driver of its own, which stays loaded; `None` if it cannot be compiled.
fn context() -> Option<Context> {
    let driver = super::stand_in::driver()?.driver().unwrap();
    Some(driver.device(0).unwrap().context().unwrap())
}

#[test]
fn reductions_run_through_driver_streams_and_memory() {
    let Some(context) = context() else { return };
    let cases = sweep::run(&mut Gpu::new(&context).unwrap(), Extent::Quick).unwrap();
    assert_eq!(cases, 12 * 6 * 3 * 3 * 3 * 2);
}

#[test]
fn ranges_are_reduced_and_lengths_checked() {
    let Some(context) = context() else { return };
    let gpu = Gpu::new(&context).unwrap();
    let numbers: Vec<u8> = [1.5f32, 2.5, 10.0, 20.0]
        .iter()
        .flat_map(|number| number.to_ne_bytes())
        .collect();
    gpu.host.copy_in(0, &numbers).unwrap();
    gpu.stream
        .copy(gpu.memory.span(..16).unwrap(), gpu.host.span(..16).unwrap())
        .unwrap();
    let (first, second) = (gpu.memory.span(..8).unwrap(), gpu.memory.span(8..16).unwrap());
    let reduce = |sources: &[Source<'_>], into| {
        gpu.reducer
            .reduce(&gpu.stream, DataType::F32, Operator::Sum, sources, into)
    };

    // Into one of the sources, of which one is scaled.
    reduce(
        &[Source::elements(first), Source::elements(second).times(0.5f32)],
        (OperandKind::Element, first),
    )
    .unwrap();
    gpu.stream
        .copy(gpu.host.span(..16).unwrap(), gpu.memory.span(..16).unwrap())
        .unwrap();
    gpu.stream.synchronize().unwrap();
    let mut result = [0; 8];
    gpu.host.copy_out(0, &mut result).unwrap();
    let result = result
        .as_chunks::<4>()
        .0
        .iter()
        .map(|number| f32::from_ne_bytes(*number));
    assert_eq!(result.collect::<Vec<_>>(), [6.5, 12.5]);

    let short = gpu.memory.span(8..12).unwrap();
    let refused = reduce(
        &[Source::elements(first), Source::elements(short)],
        (OperandKind::Element, first),
    );
    assert!(
        matches!(
            refused,
            Err(ReduceError::Length {
                len: 4,
                elements: 2,
                bytes: 4
            })
        ),
        "{refused:?}"
    );
    let ragged = gpu.memory.span(..7).unwrap();
    let refused = reduce(&[Source::elements(first)], (OperandKind::Element, ragged));
    assert!(matches!(refused, Err(ReduceError::Length { .. })), "{refused:?}");
    let across = gpu.memory.span(4..12).unwrap();
    let refused = reduce(&[Source::elements(first)], (OperandKind::Element, across));
    assert!(
        matches!(
            refused,
            Err(ReduceError::InvalidReduction(InvalidReduction::Overlap { .. }))
        ),
        "{refused:?}"
    );
    let refused = reduce(&[], (OperandKind::Element, first));
    assert!(
        matches!(
            refused,
            Err(ReduceError::InvalidReduction(InvalidReduction::Sources(0)))
        ),
        "{refused:?}"
    );
}

#[test]
fn prepare_loads_kernels_in_advance() {
    let Some(context) = context() else { return };
    let gpu = Gpu::new(&context).unwrap();
    gpu.reducer.prepare(DataType::Bf16, Operator::Avg { ranks: 2 }).unwrap();
    let other = Reducer::with_ptx(
        &context,
        ".visible .entry reduce_i8_sum(\n)\n{\n}\n".to_owned(),
        LaunchConfig::default(),
    );
    let missing = other.prepare(DataType::F32, Operator::Max).unwrap_err();
    assert_eq!(missing.to_string(), "the PTX has no kernel reduce_f32_max");
}
