//! The same through doorbell-cuda: its streams, memory and modules on the driver of its tests, which runs the kernels that it is lent when it is waited for.

use std::ffi::{c_char, c_void};
use std::process::Command;

use doorbell_cuda::reduce::{Arguments, DataType, Form, Operator, ReduceError, Reducer, Shape, Source, Unfit};
use doorbell_cuda::{Context, Driver, Memory as _};
use doorbell_tests::gpu::driven::Gpu;
use doorbell_tests::gpu::sweep::{self, Extent};
use libloading::Library;

use super::stand_in::{Kernels, Launch, repository};

/// Finds a kernel by its name.
type Find = extern "C" fn(*const c_char) -> *const c_void;

/// A context of the tests' driver; none where the kernels cannot be compiled. The driver stays loaded, as one does.
fn context() -> Option<Context> {
    let kernels = Kernels::compiled()?;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("libfake.so");
    let output = Command::new("cc")
        .args(["-std=gnu11", "-O1", "-shared", "-fPIC", "-pthread", "-o"])
        .arg(&path)
        .arg(repository("gpudirect/cuda/tests/fake/driver.c"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // SAFETY: the driver of the tests does as NVIDIA's, in what it is called for here; it has the function, of this type.
    unsafe {
        let library = Library::new(&path).unwrap();
        let lend = library
            .get::<unsafe extern "C" fn(Find, Launch, usize)>("fake_kernels")
            .unwrap();
        lend(Kernels::find_for_driver, kernels.launch(), size_of::<Arguments>());
        let driver = Driver::load_from(&path).unwrap();
        Some(driver.device(0).unwrap().context().unwrap())
    }
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
