//! Devices and contexts.

use doorbell_cuda::{Attribute, Driver, Error, WritesOrdering};

use super::{Outcome, Setting, Verdict};

pub(super) fn devices(driver: Driver) -> Outcome {
    let devices = driver.devices()?;
    assert_eq!(devices.len(), driver.device_count());
    for device in &devices {
        assert!(!device.name()?.is_empty());
        let uuid = device.uuid()?.to_string();
        assert_eq!(uuid.len(), "GPU-00000000-0000-0000-0000-000000000000".len(), "{uuid}");
        let bus = device.pci_bus_id()?;
        assert!(
            bus.len() >= 12 && bus.ends_with(".0") && bus == bus.to_lowercase(),
            "{bus}"
        );
        assert!(device.compute_capability()?.major >= 5);
        assert!(device.total_memory()? >= 1 << 30);
        assert!(device.attribute(Attribute::MultiprocessorCount)? > 0);
        assert!(device.has(Attribute::VirtualMemoryManagementSupported));
        let (free, total) = device.context()?.memory_info()?;
        assert!(free <= total);
    }
    let uuids: std::collections::HashSet<_> = devices.iter().map(|device| device.uuid()).collect::<Result<_, _>>()?;
    assert_eq!(uuids.len(), devices.len());

    let beyond = driver.device(driver.device_count()).unwrap_err();
    assert!(matches!(beyond, Error::NoSuchDevice { .. }), "{beyond}");
    Ok(Verdict::Passed)
}

pub(super) fn peers(driver: Driver) -> Outcome {
    let devices = driver.devices()?;
    let [one, two, ..] = devices[..] else {
        return Ok(Verdict::Skipped("one GPU".to_owned()));
    };
    assert_eq!(one.peer(one)?, None, "a device is no peer of itself");
    assert_eq!(
        one.peer(two)?.map(|peer| peer.link),
        two.peer(one)?.map(|peer| peer.link)
    );
    Ok(Verdict::Passed)
}

pub(super) fn threads_keep_their_context(driver: Driver) -> Outcome {
    let devices = driver.devices()?;
    let [one, two, ..] = devices[..] else {
        return Ok(Verdict::Skipped("one GPU".to_owned()));
    };
    let (one, two) = (one.context()?, two.context()?);
    // Each device's own value, whichever context is current.
    for current in [&one, &two] {
        current.make_current()?;
        assert_eq!(driver.current_device()?, Some(current.device()));
        for context in [&one, &two] {
            let (_, total) = context.memory_info()?;
            assert!(total <= context.device().total_memory()?);
            context.synchronize()?;
        }
    }
    Ok(Verdict::Passed)
}

pub(super) fn ordering(driver: Driver) -> Outcome {
    let setting = Setting::new(driver)?;
    let device = setting.context.device();
    assert!(WritesOrdering::None < WritesOrdering::Owner && WritesOrdering::Owner < WritesOrdering::AllDevices);
    let ordering = device.writes_ordering()?;
    if device.flush_options()?.host {
        setting.context.flush_gpu_direct_rdma_writes(WritesOrdering::Owner)?;
        setting
            .context
            .flush_gpu_direct_rdma_writes(WritesOrdering::AllDevices)?;
    } else if ordering >= WritesOrdering::Owner {
        setting.context.flush_gpu_direct_rdma_writes(ordering)?;
    }
    setting.context.flush_gpu_direct_rdma_writes(WritesOrdering::None)?;
    setting.context.set_sync_memops()?;
    setting.finish()
}
