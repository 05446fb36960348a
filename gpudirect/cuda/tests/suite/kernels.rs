//! Kernels.

use doorbell_cuda::{Argument, DeviceMemory, Driver, Error, KernelAttribute, Launch, MAX_ARGUMENTS, Memory, Module};

use super::{Outcome, PTX, Setting, add_one};

pub(super) fn run(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let words: Vec<u8> = (0..1000u32).flat_map(u32::to_ne_bytes).collect();
    let memory = setting.device(&words)?;
    let kernel = setting.kernel("add_one")?;
    assert_eq!(kernel.name(), "add_one");
    assert!(kernel.attribute(KernelAttribute::MaxThreadsPerBlock)? >= 256);
    assert!(kernel.attribute(KernelAttribute::Registers)? > 0);
    assert_eq!(kernel.attribute(KernelAttribute::LocalBytes)?, 0);

    // The module is dropped already, and the kernel before its second run is done.
    add_one(&setting.stream, &kernel, &memory, 900)?;
    add_one(&setting.stream, &kernel, &memory, 900)?;
    let cooperative = Launch {
        cooperative: true,
        ..Launch::linear(4, 256)
    };
    // SAFETY: the memory has 1000 words.
    unsafe { kernel.launch(&setting.stream, cooperative, &[&memory.device_ptr(), &1000u32], &[])? };
    drop(kernel);
    let got = setting.read(&memory)?;
    for (at, word) in got.as_chunks::<4>().0.iter().enumerate() {
        let added = if at < 900 { 3 } else { 1 };
        assert_eq!(u32::from_ne_bytes(*word), at as u32 + added, "word {at}");
    }

    // Resources of a launch are kept, few or many.
    let kernel = setting.kernel("add_one")?;
    let mut all = Vec::new();
    for others in [0, 40] {
        let others: Vec<_> = (0..others)
            .map(|_| DeviceMemory::alloc(&setting.context, 4))
            .collect::<Result<_, _>>()?;
        all.push((setting.device(&words)?, others));
    }
    setting.keep_busy(200)?;
    for (memory, others) in all {
        let mut uses: Vec<_> = others.iter().map(Memory::all).collect();
        uses.push(memory.all());
        let arguments: [&dyn Argument; 2] = [&memory.device_ptr(), &1000u32];
        // SAFETY: the memory has 1000 words.
        unsafe {
            kernel.launch(
                &setting.stream,
                Launch {
                    cluster: 2,
                    ..Launch::linear(4, 256)
                },
                &arguments,
                &uses,
            )?
        };
    }
    assert!(
        setting.context.reap() >= 42,
        "memory was freed before the kernel that uses it has run"
    );
    setting.finish()
}

pub(super) fn refused(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let error = Module::from_ptx(&setting.context, "nonsense").unwrap_err();
    let Error::Compile { log, .. } = &error else {
        panic!("{error}")
    };
    assert!(!log.is_empty());
    assert!(!error.to_string().contains('\n'), "{error}");
    assert!(matches!(Module::from_ptx(&setting.context, "a\0b"), Err(Error::Nul(_))));

    let module = Module::from_ptx(&setting.context, PTX)?;
    let missing = module.kernel("of_no_such_name").unwrap_err();
    assert!(missing.to_string().contains("of_no_such_name"), "{missing}");
    assert!(matches!(module.kernel("a\0b"), Err(Error::Nul(_))));

    let kernel = module.kernel("spin")?;
    let time = 1u64;
    // SAFETY: refused before anything runs.
    let none = unsafe { kernel.launch(&setting.stream, Launch::linear(0, 1), &[&time], &[]) };
    assert!(matches!(none, Err(Error::Driver { .. })), "{none:?}");
    // SAFETY: as above.
    let wide = unsafe { kernel.launch(&setting.stream, Launch::linear(1, 4096), &[&time], &[]) };
    assert!(wide.is_err());
    let uneven = Launch {
        cluster: 4,
        ..Launch::linear(6, 32)
    };
    // SAFETY: as above.
    let uneven = unsafe { kernel.launch(&setting.stream, uneven, &[&time], &[]) };
    assert!(matches!(uneven, Err(Error::Driver { .. })), "{uneven:?}");
    let many: Vec<&dyn Argument> = vec![&time; MAX_ARGUMENTS + 1];
    // SAFETY: as above.
    let many = unsafe { kernel.launch(&setting.stream, Launch::linear(1, 1), &many, &[]) };
    assert!(matches!(many, Err(Error::Arguments(_))));
    kernel.allow_shared_bytes(64 << 10)?;
    assert!(kernel.allow_shared_bytes(1 << 30).is_err());
    setting.finish()
}
