//! Every function the [`Api`] table names against the system's library.

use doorbell_verbs_sys::{Api, LoadError};
use libloading::os::unix::Library;

use crate::layout::SYMBOLS;
use crate::missing;

const LIBRARY: &str = "libibverbs.so.1";

#[test]
fn every_symbol_is_in_the_systems_library() {
    // SAFETY: libibverbs' initialisers ask nothing of their callers, and the library is only looked up in.
    let library = match unsafe { Library::new(LIBRARY) } {
        Ok(library) => library,
        Err(error) => return missing(&format!("{LIBRARY} (libibverbs1): {error}")),
    };
    let absent: Vec<_> = SYMBOLS
        .iter()
        .filter(|symbol| {
            // SAFETY: the address is not used, so its type does not matter.
            unsafe { library.get::<*const ()>(symbol.as_bytes()) }.is_err()
        })
        .collect();
    assert!(absent.is_empty(), "not in {LIBRARY}: {absent:?}");
    assert!(
        SYMBOLS.len() > 40,
        "only {} symbols were found in api.rs",
        SYMBOLS.len()
    );
}

#[test]
fn the_table_fills_from_the_systems_library() {
    let api = match Api::load() {
        Ok(api) => api,
        Err(LoadError::NoLibrary { reason, .. }) => return missing(&format!("{LIBRARY} (libibverbs1): {reason}")),
        Err(error) => panic!("{error}"),
    };
    let mut count = -1;
    // SAFETY: `count` may be written. The list, if there is one, is given back once and not used after.
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
