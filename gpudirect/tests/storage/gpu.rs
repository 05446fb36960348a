//! GPU memory: blocks between the disk and the copy engines, on the CUDA stand-in. Its lazy mode
//! copies as late as it may, so a block that is used again too early is seen.

use std::fs;

use doorbell_cuda::{HostMemory, Memory, Stream};
use doorbell_cuda_standin::{ExecutionMode, Standin};
use doorbell_gpudirect::GpuMemory;
use doorbell_gpudirect::storage::{File, Read, StorageError, StoragePath, Write};
use proptest::prelude::*;

use super::{file_with, folder, options, pattern};

const LEN: usize = 600_000;

fn contents(memory: &GpuMemory, stream: &Stream) -> Vec<u8> {
    let host = HostMemory::alloc(memory.context(), memory.len()).expect("pinned");
    stream.copy(host.all(), memory.all()).expect("copied");
    stream.synchronize().expect("done");
    let mut bytes = vec![0; memory.len()];
    host.copy_out(0, &mut bytes).expect("within");
    bytes
}

fn parts() -> impl Strategy<Value = Vec<(usize, usize, usize)>> {
    prop::collection::vec((0..LEN + 9000, 0..LEN, 0..5000usize), 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn gpu_memory_equals_the_file(len in 1..LEN, parts in parts(), prompt: bool) {
        let mode = if prompt { ExecutionMode::Prompt } else { ExecutionMode::Lazy };
        let standin = Standin::load(mode);
        let context = standin.driver().expect("a driver").device(0).expect("a GPU").context().expect("a context");
        let stream = Stream::new(&context).expect("a stream");
        let folder = folder();
        let bytes = pattern(len);
        let file = file_with(folder.path(), &bytes);
        for path in [StoragePath::IoUring, StoragePath::Pread] {
            let Ok(mut storage) = options().path(path).on_stream(&stream) else { continue };
            let memories: Vec<GpuMemory> = parts
                .iter()
                .map(|(_, size, at)| GpuMemory::alloc(&context, at + size + 1).expect("GPU memory"))
                .collect();
            for memory in &memories {
                stream.fill(memory.all(), 0xa5).expect("filled");
            }
            let mut reads: Vec<Read<'_>> = parts
                .iter()
                .zip(&memories)
                .map(|((offset, size, at), memory)| Read {
                    file: &file,
                    offset: *offset as u64,
                    into: memory.span(*at..at + size).expect("within").into(),
                })
                .collect();
            let counts = storage.read_batch(&mut reads).expect("read");
            for (((offset, size, at), memory), count) in parts.iter().zip(&memories).zip(counts) {
                let expected = &bytes[(*offset).min(len)..(offset + size).min(len)];
                prop_assert_eq!(count, expected.len());
                let got = contents(memory, &stream);
                prop_assert!(got[*at..at + count] == *expected);
                prop_assert!(got[..*at].iter().all(|byte| *byte == 0xa5) && got[at + size] == 0xa5);
            }

            let mut written = bytes.clone();
            let copy = folder.path().join(path.name());
            fs::write(&copy, &bytes).expect("a file");
            let target = File::open_for_writing(&copy).expect("opened");
            for ((offset, size, at), memory) in parts.iter().zip(&memories) {
                let from = memory.span(*at..at + size).expect("within").into();
                storage.write_batch(&[Write { file: &target, offset: *offset as u64, from }]).expect("written");
                if *size > 0 {
                    written.resize(written.len().max(offset + size), 0);
                    written[*offset..offset + size].copy_from_slice(&contents(memory, &stream)[*at..at + size]);
                }
            }
            prop_assert!(fs::read(&copy).expect("read") == written);
        }
        drop((stream, context));
        standin.assert_nothing_left("reads and writes");
    }
}

#[test]
fn gpu_memory_needs_a_stream_and_a_lost_gpu_is_an_error() {
    let standin = Standin::load(ExecutionMode::Prompt);
    let context = standin
        .driver()
        .expect("a driver")
        .device(0)
        .expect("a GPU")
        .context()
        .expect("a context");
    let memory = GpuMemory::alloc(&context, LEN).expect("GPU memory");
    let folder = folder();
    let file = file_with(folder.path(), &pattern(LEN));
    let mut host = options().host().expect("opened");
    let refused = host.read_at(&file, 0, memory.all()).expect_err("it has no GPU");
    assert!(matches!(refused, StorageError::NoGpu));

    let stream = Stream::new(&context).expect("a stream");
    let mut storage = options().on_stream(&stream).expect("opened");
    standin.fail_nth("cuMemcpyHtoDAsync_v2", 3, 700);
    let lost = storage
        .read_at(&file, 0, memory.all())
        .expect_err("the third copy fails");
    assert!(matches!(lost, StorageError::Cuda(_)), "{lost}");
}
