//! The table of libibverbs' functions, its loader, and the macro that defines such tables.

use core::ffi::{c_char, c_int, c_uint, c_void};
use std::error::Error as _;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::bindings::*;

/// Why the system's libibverbs could not be used.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LoadError {
    /// The dynamic loader found no usable library; its message follows.
    #[error("cannot load {library}: {reason}; {advice}")]
    NoLibrary {
        /// The file name.
        library: &'static str,
        /// The message of dlerror(3).
        reason: String,
        /// Advice.
        advice: &'static str,
    },
    /// The library lacks a function that every rdma-core since 2018 has.
    #[error("the {library} here is too old, it has no {symbol}: install a newer rdma-core")]
    NoSymbol {
        /// The file name of the library.
        library: &'static str,
        /// The function's name.
        symbol: &'static str,
    },
}

/// The promise that the functions of an [`Api`], or of a [`CmApi`](crate::rdmacm::CmApi), behave as
/// their man pages say. A table needs one, which needs `unsafe`: the safe API trusts the functions,
/// and any safe `extern "C" fn` coerces to an unsafe one.
#[derive(Debug)]
pub struct Promise(());

impl Promise {
    /// Makes the promise.
    ///
    /// # Safety
    /// Called by their man pages' rules, the functions of the table that it goes into, and those in
    /// the contexts and objects that they make, keep to these pages: what they return is live until
    /// the verb that destroys it, they touch no memory but what they are given, registered memory
    /// only while registered, and that of a request only until its completion has been polled or
    /// its queue pair destroyed. Each completion is of a request that was posted with its `wr_id`,
    /// and comes once; it is polled after that was posted, and after those of the same send queue
    /// that were posted before.
    #[must_use]
    pub const unsafe fn given() -> Self {
        Self(())
    }
}

/// Defines a table of a library's functions, and `fill`, which resolves each of them.
macro_rules! api {
    (
        $(#[$doc:meta])*
        struct $name:ident from $library:ident;
        required { $( $(#[$rdoc:meta])* fn $req:ident = $rsym:literal ( $($rarg:ident : $rty:ty),* ) $(-> $rret:ty)? ; )* }
        optional { $( $(#[$odoc:meta])* fn $opt:ident = $osym:literal ( $($oarg:ident : $oty:ty),* ) $(-> $oret:ty)? ; )* }
    ) => {
        $(#[$doc])*
        /// By its [`Promise`](crate::Promise) the functions do as their man pages say. Neither
        /// `Clone` nor `Copy`: safe code cannot change a table that other code vouches for.
        pub struct $name {
            /// Made by the code that fills the table.
            pub promise: $crate::Promise,
            $( $(#[$rdoc])* pub $req: unsafe extern "C" fn($($rarg: $rty),*) $(-> $rret)?, )*
            $( $(#[$odoc])* pub $opt: Option<unsafe extern "C" fn($($oarg: $oty),*) $(-> $oret)?>, )*
        }

        impl $name {
            fn fill(library: &Library) -> Result<Self, LoadError> {
                Ok(Self {
                    // SAFETY: the system library's own functions, as the man pages describe them.
                    promise: unsafe { $crate::Promise::given() },
                    $( $req: {
                        // SAFETY: a function of the ABI, whose C prototype is the field's type.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($rty),*) $(-> $rret)?>($rsym.as_bytes()) };
                        *symbol.map_err(|_| LoadError::NoSymbol { library: $library, symbol: $rsym })?
                    }, )*
                    $( $opt: {
                        // SAFETY: as above.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($oty),*) $(-> $oret)?>($osym.as_bytes()) };
                        symbol.ok().map(|f| *f)
                    }, )*
                })
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        }
    };
}
pub(crate) use api;

api! {
    /// The functions of libibverbs (man pages: `ibv_` before the field's name).
    ///
    /// Every supported rdma-core has the required ones; optional ones are `None` where missing.
    struct Api from LIBRARY;
    required {
        /// ibv_get_device_list(3).
        fn get_device_list = "ibv_get_device_list"(num_devices: *mut c_int) -> *mut *mut ibv_device;
        /// ibv_get_device_list(3).
        fn free_device_list = "ibv_free_device_list"(list: *mut *mut ibv_device);
        /// ibv_get_device_name(3).
        fn get_device_name = "ibv_get_device_name"(device: *mut ibv_device) -> *const c_char;
        /// ibv_get_device_guid(3): big-endian.
        fn get_device_guid = "ibv_get_device_guid"(device: *mut ibv_device) -> u64;
        /// ibv_open_device(3).
        fn open_device = "ibv_open_device"(device: *mut ibv_device) -> *mut ibv_context;
        /// ibv_open_device(3).
        fn close_device = "ibv_close_device"(context: *mut ibv_context) -> c_int;
        /// ibv_get_async_event(3): blocks unless `async_fd` is non-blocking.
        fn get_async_event = "ibv_get_async_event"(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int;
        /// ibv_get_async_event(3).
        fn ack_async_event = "ibv_ack_async_event"(event: *mut ibv_async_event);
        /// ibv_query_device(3).
        fn query_device = "ibv_query_device"(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
        /// ibv_query_port(3), the exported form, which fills the part of [`ibv_port_attr`] that
        /// `_compat_ibv_port_attr` holds; use [`inline::query_port`](crate::inline::query_port).
        fn query_port = "ibv_query_port"(context: *mut ibv_context, port: u8, attr: *mut _compat_ibv_port_attr) -> c_int;
        /// ibv_query_gid(3).
        fn query_gid = "ibv_query_gid"(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int;
        /// ibv_query_pkey(3): the key is big-endian.
        fn query_pkey = "ibv_query_pkey"(context: *mut ibv_context, port: u8, index: c_int, pkey: *mut u16) -> c_int;
        /// ibv_alloc_pd(3).
        fn alloc_pd = "ibv_alloc_pd"(context: *mut ibv_context) -> *mut ibv_pd;
        /// ibv_alloc_pd(3).
        fn dealloc_pd = "ibv_dealloc_pd"(pd: *mut ibv_pd) -> c_int;
        /// ibv_reg_mr(3).
        fn reg_mr = "ibv_reg_mr"(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr;
        /// ibv_reg_mr(3).
        fn dereg_mr = "ibv_dereg_mr"(mr: *mut ibv_mr) -> c_int;
        /// ibv_create_comp_channel(3).
        fn create_comp_channel = "ibv_create_comp_channel"(context: *mut ibv_context) -> *mut ibv_comp_channel;
        /// ibv_create_comp_channel(3).
        fn destroy_comp_channel = "ibv_destroy_comp_channel"(channel: *mut ibv_comp_channel) -> c_int;
        /// ibv_create_cq(3).
        fn create_cq = "ibv_create_cq"(context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void, channel: *mut ibv_comp_channel, comp_vector: c_int) -> *mut ibv_cq;
        /// ibv_resize_cq(3).
        fn resize_cq = "ibv_resize_cq"(cq: *mut ibv_cq, cqe: c_int) -> c_int;
        /// ibv_create_cq(3).
        fn destroy_cq = "ibv_destroy_cq"(cq: *mut ibv_cq) -> c_int;
        /// ibv_get_cq_event(3).
        fn get_cq_event = "ibv_get_cq_event"(channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, cq_context: *mut *mut c_void) -> c_int;
        /// ibv_get_cq_event(3).
        fn ack_cq_events = "ibv_ack_cq_events"(cq: *mut ibv_cq, nevents: c_uint);
        /// ibv_create_qp(3).
        fn create_qp = "ibv_create_qp"(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
        /// ibv_query_qp(3).
        fn query_qp = "ibv_query_qp"(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: c_int, init_attr: *mut ibv_qp_init_attr) -> c_int;
        /// ibv_modify_qp(3).
        fn modify_qp = "ibv_modify_qp"(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, attr_mask: c_int) -> c_int;
        /// ibv_create_qp(3).
        fn destroy_qp = "ibv_destroy_qp"(qp: *mut ibv_qp) -> c_int;
        /// ibv_fork_init(3).
        fn fork_init = "ibv_fork_init"() -> c_int;
    }
    optional {
        /// ibv_create_srq(3).
        fn create_srq = "ibv_create_srq"(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq;
        /// ibv_modify_srq(3).
        fn modify_srq = "ibv_modify_srq"(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int;
        /// ibv_query_srq(3).
        fn query_srq = "ibv_query_srq"(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int;
        /// ibv_create_srq(3).
        fn destroy_srq = "ibv_destroy_srq"(srq: *mut ibv_srq) -> c_int;
        /// ibv_create_ah(3).
        fn create_ah = "ibv_create_ah"(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah;
        /// ibv_create_ah_from_wc(3).
        fn create_ah_from_wc = "ibv_create_ah_from_wc"(pd: *mut ibv_pd, wc: *mut ibv_wc, grh: *mut ibv_grh, port: u8) -> *mut ibv_ah;
        /// ibv_create_ah(3).
        fn destroy_ah = "ibv_destroy_ah"(ah: *mut ibv_ah) -> c_int;
        /// ibv_attach_mcast(3).
        fn attach_mcast = "ibv_attach_mcast"(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
        /// ibv_attach_mcast(3).
        fn detach_mcast = "ibv_detach_mcast"(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int;
        /// ibv_rereg_mr(3).
        fn rereg_mr = "ibv_rereg_mr"(mr: *mut ibv_mr, flags: c_int, pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> c_int;
        /// ibv_reg_mr_iova(3), since rdma-core 25.
        fn reg_mr_iova = "ibv_reg_mr_iova"(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_int) -> *mut ibv_mr;
        /// ibv_reg_mr_iova2: the `ibv_reg_mr` macro's call for optional flags; since rdma-core 28.
        fn reg_mr_iova2 = "ibv_reg_mr_iova2"(pd: *mut ibv_pd, addr: *mut c_void, length: usize, iova: u64, access: c_uint) -> *mut ibv_mr;
        /// ibv_reg_dmabuf_mr(3), since rdma-core 34.
        fn reg_dmabuf_mr = "ibv_reg_dmabuf_mr"(pd: *mut ibv_pd, offset: u64, length: usize, iova: u64, fd: c_int, access: c_int) -> *mut ibv_mr;
        /// ibv_query_gid_ex(3), since rdma-core 32; `entry_size` is `size_of::<ibv_gid_entry>()`.
        fn query_gid_ex = "_ibv_query_gid_ex"(context: *mut ibv_context, port: u32, index: u32, entry: *mut ibv_gid_entry, flags: u32, entry_size: usize) -> c_int;
        /// ibv_query_gid_table(3), since rdma-core 32.
        fn query_gid_table = "_ibv_query_gid_table"(context: *mut ibv_context, entries: *mut ibv_gid_entry, max_entries: usize, flags: u32, entry_size: usize) -> isize;
        /// ibv_get_pkey_index(3).
        fn get_pkey_index = "ibv_get_pkey_index"(context: *mut ibv_context, port: u8, pkey: u16) -> c_int;
        /// ibv_get_device_index(3).
        fn get_device_index = "ibv_get_device_index"(device: *mut ibv_device) -> c_int;
        /// ibv_qp_to_qp_ex: see ibv_wr_post(3).
        fn qp_to_qp_ex = "ibv_qp_to_qp_ex"(qp: *mut ibv_qp) -> *mut ibv_qp_ex;
        /// ibv_query_ece(3).
        fn query_ece = "ibv_query_ece"(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int;
        /// ibv_set_ece(3).
        fn set_ece = "ibv_set_ece"(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int;
        /// ibv_query_qp_data_in_order(3).
        fn query_qp_data_in_order = "ibv_query_qp_data_in_order"(qp: *mut ibv_qp, op: ibv_wr_opcode, flags: u32) -> c_int;
    }
}

const LIBRARY: &str = "libibverbs.so.1";

impl Api {
    /// The functions of the system's `libibverbs.so.1`, loaded once for the life of the process.
    ///
    /// # Errors
    /// When the library or a required function is missing; the result of the first call is final.
    pub fn load() -> Result<&'static Self, LoadError> {
        static SYSTEM: OnceLock<Result<Api, LoadError>> = OnceLock::new();
        SYSTEM
            .get_or_init(|| {
                // SAFETY: libibverbs' initialisers have no requirements of their callers.
                let library = unsafe {
                    open(
                        LIBRARY,
                        "install rdma-core's libibverbs1, or use the soft device (soft0)",
                    )
                }?;
                Self::fill(library)
            })
            .as_ref()
            .map_err(Clone::clone)
    }
}

/// Loads `library` for good: function pointers, threads and exit handlers stay in use.
///
/// # Safety
/// The library's initialisers must have no requirements that the caller does not meet.
pub(crate) unsafe fn open(library: &'static str, advice: &'static str) -> Result<&'static Library, LoadError> {
    // SAFETY: the caller's promise.
    let opened =
        unsafe { Library::open(Some(library), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| LoadError::NoLibrary {
            library,
            reason: reason(library, &error),
            advice,
        })?;
    Ok(Box::leak(Box::new(opened)))
}

/// What dlerror(3) said, without the library's name, which is said already.
fn reason(library: &str, error: &libloading::Error) -> String {
    let said = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    match said.strip_prefix(library).and_then(|rest| rest.strip_prefix(": ")) {
        Some(rest) => rest.to_owned(),
        None => said,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri loads no libraries")]
    fn a_missing_library_is_an_error_that_says_what_to_do() {
        // SAFETY: there is no such library.
        let error = unsafe { open("libdoorbell-is-not-there.so.1", "install it") }.unwrap_err();
        let text = error.to_string();
        assert_eq!(
            text,
            "cannot load libdoorbell-is-not-there.so.1: cannot open shared object file: No such file or directory; install it"
        );
    }
}
