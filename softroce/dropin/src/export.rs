//! Symbol names and versions: an assembly label with `.symver` that jumps to the implementation. A
//! jump keeps every argument in place, so the functions need not be declared again.

/// A symbol that jumps to its entry of the [`Api`](doorbell_verbs_sys::Api) table.
macro_rules! table {
    ($label:literal, $symbol:literal, $field:ident) => {
        // An optional entry that is missing would be a jump to null.
        const _: () = {
            // SAFETY: an entry is a function pointer or an optional one: one representation.
            let entry: Option<unsafe extern "C" fn()> = unsafe { core::mem::transmute_copy(&doorbell_softroce_ibverbs::API.$field) };
            assert!(entry.is_some());
        };
        #[cfg(target_arch = "x86_64")]
        crate::export::code!($label, $symbol, "jmp qword ptr [rip + {table} + {entry}]",
            table = sym doorbell_softroce_ibverbs::API,
            entry = const core::mem::offset_of!(doorbell_verbs_sys::Api, $field));
        #[cfg(target_arch = "aarch64")]
        crate::export::code!($label, $symbol, "adrp x16, {table}\nadd x16, x16, :lo12:{table}\nldr x16, [x16, {entry}]\nbr x16",
            table = sym doorbell_softroce_ibverbs::API,
            entry = const core::mem::offset_of!(doorbell_verbs_sys::Api, $field));
    };
}

macro_rules! function {
    ($label:literal, $symbol:literal, $function:path) => {
        #[cfg(target_arch = "x86_64")]
        crate::export::code!($label, $symbol, "jmp {function}", function = sym $function);
        #[cfg(target_arch = "aarch64")]
        crate::export::code!($label, $symbol, "b {function}", function = sym $function);
    };
}

/// A symbol that is a zero-initialised object of this size.
macro_rules! object {
    ($label:literal, $symbol:literal, $size:literal) => {
        core::arch::global_asm!(
            concat!(".pushsection .bss.", $label, ", \"aw\", @nobits"),
            concat!(".globl ", $label),
            concat!(".type ", $label, ", @object"),
            concat!($label, ":"),
            concat!(".zero ", $size),
            concat!(".size ", $label, ", ", $size),
            concat!(".symver ", $label, ", ", $symbol),
            ".popsection",
        );
    };
}

macro_rules! code {
    ($label:literal, $symbol:literal, $code:literal, $($operands:tt)*) => {
        core::arch::global_asm!(
            concat!(".pushsection .text.", $label, ", \"ax\", @progbits"),
            concat!(".globl ", $label),
            concat!(".type ", $label, ", @function"),
            concat!($label, ":"),
            $code,
            concat!(".size ", $label, ", . - ", $label),
            concat!(".symver ", $label, ", ", $symbol),
            ".popsection",
            $($operands)*
        );
    };
}
pub(crate) use code;
pub(crate) use {function, object, table};
