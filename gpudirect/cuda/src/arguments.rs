//! Kernel parameters, described once: [`kernel_arguments!`](crate::kernel_arguments) defines the
//! Rust struct, and the C++ header that declares it for kernels, with the offset of every field.
//!
//! The headers are committed as `kernels/NAME_arguments.cuh`. A test of each description compares
//! its header ([`Header::check`]); `DOORBELL_WRITE_HEADERS=1` writes it instead, and then `cargo
//! xtask kernels` builds the kernels.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use crate::memory::DevicePtr;

const FOLDER: &str = "gpudirect/cuda/kernels";

/// A type of fields and constants, as C++ declares it.
pub trait Field {
    /// The type of an element.
    const TYPE: &'static str;

    /// The lengths of an array, `[2][3]`, or nothing.
    #[must_use]
    fn lengths() -> String {
        String::new()
    }
}

impl Field for i32 {
    const TYPE: &'static str = "int";
}

impl Field for u32 {
    const TYPE: &'static str = "uint32_t";
}

impl Field for u64 {
    const TYPE: &'static str = "uint64_t";
}

impl Field for DevicePtr {
    const TYPE: &'static str = "uint64_t";
}

impl<T: Field, const N: usize> Field for [T; N] {
    const TYPE: &'static str = T::TYPE;

    fn lengths() -> String {
        format!("[{N}]{}", T::lengths())
    }
}

/// A struct described by [`kernel_arguments!`](crate::kernel_arguments).
pub trait Arguments {
    /// Its header.
    fn header() -> Header;
}

/// The C++ header of a parameter.
#[derive(Debug)]
pub struct Header {
    file: String,
    text: String,
    asserts: String,
    name: &'static str,
}

impl Header {
    /// `name` is the C++ struct, used by `kernels/FILE.cu`; `source` describes it.
    #[must_use]
    pub fn new(file: &str, name: &'static str, source: &str) -> Self {
        let text = format!(
            "// Written from {source}, which describes this (DOORBELL_WRITE_HEADERS=1 and its tests).\n#pragma \
             once\n\n#include <stddef.h>\n#include <stdint.h>\n\nnamespace doorbell {{\n\n"
        );
        Self {
            file: format!("{file}_arguments.cuh"),
            text,
            asserts: String::new(),
            name,
        }
    }

    fn comment(&mut self, indent: &str, about: &[&str]) {
        for line in about {
            let _ = writeln!(self.text, "{indent}//{line}");
        }
    }

    /// Adds a constant.
    #[must_use]
    pub fn constant<T: Field + core::fmt::Display>(mut self, about: &[&str], name: &str, value: T) -> Self {
        self.comment("", about);
        let _ = writeln!(self.text, "constexpr {} {name} = {value};", T::TYPE);
        self
    }

    /// Begins the struct, of this many bytes.
    #[must_use]
    pub fn begin(mut self, about: &[&str], bytes: usize) -> Self {
        if !self.text.ends_with("\n\n") {
            self.text.push('\n');
        }
        self.comment("", about);
        let name = self.name;
        let _ = writeln!(self.text, "struct {name} {{");
        let _ = writeln!(self.asserts, "static_assert(sizeof({name}) == {bytes}, \"{name}\");");
        self
    }

    /// Adds a field.
    #[must_use]
    pub fn field<T: Field>(mut self, about: &[&str], field: &str, offset: usize) -> Self {
        self.comment("    ", about);
        let _ = writeln!(self.text, "    {} {field}{};", T::TYPE, T::lengths());
        let name = self.name;
        let _ = writeln!(
            self.asserts,
            "static_assert(offsetof({name}, {field}) == {offset}, \"{field}\");"
        );
        self
    }

    /// The text.
    #[must_use]
    pub fn text(&self) -> String {
        format!("{}}};\n\n{}\n}}  // namespace doorbell\n", self.text, self.asserts)
    }

    /// Compares the committed header, or writes it if the environment has `DOORBELL_WRITE_HEADERS`.
    /// For tests: `inside` is a folder of the repository.
    ///
    /// # Panics
    /// If it differs, or cannot be written.
    pub fn check(&self, inside: &str) {
        let mut folders = Path::new(inside).ancestors().map(|folder| folder.join(FOLDER));
        let folder = folders.find(|folder| folder.is_dir()).expect("the kernels' folder");
        let path = folder.join(&self.file);
        let text = self.text();
        if doorbell_trust::text_variable("DOORBELL_WRITE_HEADERS").is_some() {
            fs::write(&path, text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        } else {
            let committed = fs::read_to_string(&path).unwrap_or_default();
            assert_eq!(committed, text, "{}: DOORBELL_WRITE_HEADERS=1 writes it", self.file);
        }
    }
}

/// Describes a kernel's parameter: constants of the header, and a struct in C's layout. Comments
/// are both Rust's documentation and the header's comments. `Name as CppName in "file"` is written
/// to `kernels/file_arguments.cuh`.
#[macro_export]
macro_rules! kernel_arguments {
    (
        constants {
            $(
                $(#[doc = $note:literal])*
                const $constant:ident: $number:ty = $value:expr;
            )*
        }
        $(#[doc = $about:literal])*
        #[derive($($derive:ident),*)]
        $visibility:vis struct $name:ident as $cpp:ident in $file:literal {
            $(
                $(#[doc = $doc:literal])*
                $access:vis $field:ident: $type:ty,
            )*
        }
    ) => {
        $(#[doc = $about])*
        // fields: the layout of the kernel's parameter.
        #[derive($($derive),*)]
        #[repr(C)]
        $visibility struct $name {
            $(
                $(#[doc = $doc])*
                $access $field: $type,
            )*
        }

        #[cfg(test)]
        impl $crate::arguments::Arguments for $name {
            fn header() -> $crate::arguments::Header {
                $crate::arguments::Header::new($file, stringify!($cpp), file!())
                    $(.constant::<$number>(&[$($note),*], stringify!($constant), $value))*
                    .begin(&[$($about),*], size_of::<Self>())
                    $(.field::<$type>(&[$($doc),*], stringify!($field), core::mem::offset_of!(Self, $field)))*
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    kernel_arguments! {
        constants {
            /// Of the table.
            const MOST: i32 = 3;
            const VERSION_OF_IT: u64 = 7;
        }
        /// The parameter.
        #[derive(Clone, Copy)]
        struct Example as Sample in "example" {
            first: u32,
            /// By rank, in two lines
            /// of text.
            table: [[u64; 2]; 3],
            pointer: DevicePtr,
        }
    }

    #[test]
    fn headers_declare_every_field_at_its_offset() {
        let example = Example {
            first: 1,
            table: [[2; 2]; 3],
            pointer: DevicePtr(3),
        };
        assert_eq!((example.first, example.table[2][1], example.pointer.0), (1, 2, 3));
        let text = Example::header().text();
        let (head, rest) = text.split_once('\n').unwrap();
        assert!(head.contains("gpudirect/cuda/src/arguments.rs"), "{head}");
        let wanted = "\
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace doorbell {

// Of the table.
constexpr int MOST = 3;
constexpr uint64_t VERSION_OF_IT = 7;

// The parameter.
struct Sample {
    uint32_t first;
    // By rank, in two lines
    // of text.
    uint64_t table[3][2];
    uint64_t pointer;
};

static_assert(sizeof(Sample) == 64, \"Sample\");
static_assert(offsetof(Sample, first) == 0, \"first\");
static_assert(offsetof(Sample, table) == 8, \"table\");
static_assert(offsetof(Sample, pointer) == 56, \"pointer\");

}  // namespace doorbell
";
        assert_eq!(rest, wanted);
    }

    #[test]
    #[should_panic(expected = "DOORBELL_WRITE_HEADERS=1 writes it")]
    fn missing_header_is_reported() {
        Example::header().check(env!("CARGO_MANIFEST_DIR"));
    }
}
