//! The same through doorbell-cuda: its streams, memory and modules on the CPU stand-in for a GPU.

use doorbell_cuda::reduce::{DataType, Form, Operator, ReduceError, Reducer, Shape, Source, Unfit};
use doorbell_cuda::{Context, Memory as _};
use doorbell_tests::gpu::driven::Gpu;
use doorbell_tests::gpu::sweep::{self, Extent};

/// A context of a driver of its own, which stays loaded, as one does; none where that cannot be compiled.
fn context() -> Option<Context> {
    let driver = super::stand_in::driver()?.driver().unwrap();
    Some(driver.device(0).unwrap().context().unwrap())
}

#[test]
fn reductions_go_through_streams_and_memory_of_a_driver() {
    let Some(context) = context() else { return };
    let cases = sweep::run(&mut Gpu::new(&context).unwrap(), Extent::Quick).unwrap();
    assert_eq!(cases, 12 * 6 * 3 * 3 * 3 * 2);
}

#[test]
fn ranges_of_memory_are_reduced_and_must_be_equally_long() {
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

    // Into one of the sources, of which one is multiplied.
    reduce(
        &[Source::elements(first), Source::elements(second).times(0.5f32)],
        (Form::Element, first),
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
        (Form::Element, first),
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
    let refused = reduce(&[Source::elements(first)], (Form::Element, ragged));
    assert!(matches!(refused, Err(ReduceError::Length { .. })), "{refused:?}");
    let across = gpu.memory.span(4..12).unwrap();
    let refused = reduce(&[Source::elements(first)], (Form::Element, across));
    assert!(
        matches!(refused, Err(ReduceError::Unfit(Unfit::Overlap { .. }))),
        "{refused:?}"
    );
    let refused = reduce(&[], (Form::Element, first));
    assert!(
        matches!(refused, Err(ReduceError::Unfit(Unfit::Sources(0)))),
        "{refused:?}"
    );
}

#[test]
fn kernels_are_loaded_before_they_are_used_where_that_is_asked_for() {
    let Some(context) = context() else { return };
    let gpu = Gpu::new(&context).unwrap();
    gpu.reducer.prepare(DataType::Bf16, Operator::Avg { ranks: 2 }).unwrap();
    let other = Reducer::with_ptx(
        &context,
        ".visible .entry reduce_i8_sum(\n)\n{\n}\n".to_owned(),
        Shape::default(),
    );
    let missing = other.prepare(DataType::F32, Operator::Max).unwrap_err();
    assert_eq!(missing.to_string(), "the PTX has no kernel reduce_f32_max");
}
