//! `libibverbs.so.1`, `librdmacm.so.1` and a `libmlx5.so.1` without devices, in one file, over the
//! userspace RoCEv2 device; `doorbell run` substitutes it for the system's libraries.
//!
//! The lists in `exports/` name every symbol with its versions; `build.rs` and `export` generate
//! them. Most are entries of the [`Api`](doorbell_verbs_sys::Api) table of softroce/ibverbs or
//! functions of softroce/rdmacm.
//!
//! The library prints nothing by default; `DOORBELL_LOG` enables logging to stderr.

mod absent;
mod export;
mod fork;
mod library;
mod mlx5;
mod private;
mod query;
mod rate;
mod strings;
mod sysfs;

mod exports {
    use doorbell_softroce_rdmacm as rdmacm;

    use crate::export::{function, object, table};
    use crate::{absent, fork, library, mlx5, private, query, rate, strings, sysfs};

    include!(concat!(env!("OUT_DIR"), "/exports.rs"));
}
