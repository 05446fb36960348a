//! Rust's layout of the bindings, in tables that `build.rs` generates.

use core::mem::offset_of;

use doorbell_verbs_sys::rdmacm::*;
use doorbell_verbs_sys::*;

pub(crate) struct Type {
    /// With its keyword, as C writes it.
    pub(crate) c: &'static str,
    pub(crate) size: usize,
    pub(crate) align: usize,
    pub(crate) fields: &'static [Field],
}

/// A field of a [`Type`], or of an unnamed type within it.
pub(crate) struct Field {
    pub(crate) c: &'static str,
    pub(crate) offset: usize,
    pub(crate) size: usize,
}

include!(concat!(env!("OUT_DIR"), "/layout.rs"));
