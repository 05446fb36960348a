//! Every function that the [`Api`] and [`CmApi`] tables name against the system's libraries.

use doorbell_verbs_sys::rdmacm::CmApi;
use doorbell_verbs_sys::{Api, LoadError};
use libloading::os::unix::Library;

use crate::layout::SYMBOLS;
use crate::missing;

#[test]
fn every_symbol_is_in_the_systems_libibverbs() {
    all_in("libibverbs.so.1", "libibverbs1", 40);
}

#[test]
fn every_symbol_is_in_the_systems_librdmacm() {
    all_in("librdmacm.so.1", "librdmacm1", 15);
}

/// Resolves all symbols of a library, of which there are more than `at_least`.
fn all_in(name: &str, package: &str, at_least: usize) {
    // SAFETY: rdma-core's initialisers require nothing of their callers; only symbols are resolved.
    let library = match unsafe { Library::new(name) } {
        Ok(library) => library,
        Err(error) => return missing(&format!("{name} ({package}): {error}")),
    };
    let named: Vec<_> = SYMBOLS.iter().filter(|(of, _)| *of == name).collect();
    let absent: Vec<_> = named
        .iter()
        .filter(|(_, symbol)| {
            // SAFETY: the address is not used, so its type does not matter.
            unsafe { library.get::<*const ()>(symbol.as_bytes()) }.is_err()
        })
        .collect();
    assert!(absent.is_empty(), "not in {name}: {absent:?}");
    assert!(
        named.len() > at_least,
        "only {} symbols were found for {name}",
        named.len()
    );
}

#[test]
fn the_table_of_librdmacm_fills_from_the_systems_library() {
    let cm = match CmApi::load() {
        Ok(cm) => cm,
        Err(LoadError::NoLibrary { reason, .. }) => return missing(&format!("librdmacm1: {reason}")),
        Err(error) => panic!("{error}"),
    };
    // SAFETY: no arguments; null where the kernel has no connection manager.
    let channel = unsafe { (cm.create_event_channel)() };
    if !channel.is_null() {
        // SAFETY: just made, and not used after.
        unsafe { (cm.destroy_event_channel)(channel) };
    }
}

#[test]
fn the_table_fills_from_the_systems_library() {
    let api = match Api::load() {
        Ok(api) => api,
        Err(LoadError::NoLibrary { reason, .. }) => return missing(&format!("libibverbs1: {reason}")),
        Err(error) => panic!("{error}"),
    };
    let mut count = -1;
    // SAFETY: `count` may be written. The list, if there is one, is freed once and not used after.
    unsafe {
        let list = (api.get_device_list)(&mut count);
        if !list.is_null() {
            assert!(count >= 0);
            (api.free_device_list)(list);
        }
    }
    // rdma-core 44 has every optional entry.
    assert!(api.reg_mr_iova2.is_some() && api.query_gid_ex.is_some() && api.qp_to_qp_ex.is_some());
}
