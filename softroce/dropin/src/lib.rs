//! `libibverbs.so.1` and `librdmacm.so.1` over the userspace RoCEv2 device, which `doorbell run`
//! substitutes for the system's libraries. One file is both.
//!
//! The lists in `exports/` name every symbol with its versions. Most are entries of the
//! [`Api`](doorbell_verbs_sys::Api) table of softroce/ibverbs, or functions of softroce/rdmacm; the
//! rest is here: names and rates, unsupported verbs, and symbols that only rdma-core's drivers
//! import. `build.rs` and `export` generate the symbols.
//!
//! The library prints nothing by default; `DOORBELL_LOG` enables logging to stderr.

mod absent;
mod export;
mod fork;
mod library;
mod private;
mod query;
mod rate;
mod strings;
mod sysfs;

mod exports {
    use doorbell_softroce_rdmacm as rdmacm;

    use crate::export::{function, object, table};
    use crate::{absent, fork, library, private, query, rate, strings, sysfs};

    include!(concat!(env!("OUT_DIR"), "/exports.rs"));
}
