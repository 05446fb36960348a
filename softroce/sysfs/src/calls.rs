//! The functions of libc that take a path, under every name that binaries call them by: with 64-bit offsets, as fortified programs do, and as those built before glibc 2.33.

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::mem::transmute;
use core::ptr;

use libc::{DIR, FILE, mode_t, size_t, ssize_t};

use crate::next::{Next, name_outside, with_path};

/// A structure that is only passed on: stat, dirent, and functions of the program.
type Passed = *mut c_void;

/// Sets `errno` to say that libc has no such function.
fn no_function() {
    // SAFETY: it gives the calling thread's own errno, always valid to write.
    unsafe { *libc::__errno_location() = libc::ENOSYS };
}

/// Defines functions that pass their arguments on to the next of their name, but for the path, which may be another. What C declares as variable arguments, the mode of
/// open(2), comes in the next register on every processor this is built for, and is passed on whether it was given or not.
macro_rules! pass_on {
    ($( $name:ident [$($before:ident: $before_type:ty),*] path [$($after:ident: $after_type:ty),*] -> $result:ty = $failed:expr; )*) => { $(
        // SAFETY: the name is libc's, to be called in its place: with the same arguments, to the same effect.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($before: $before_type,)* path: *const c_char, $($after: $after_type),*) -> $result {
            static NEXT: Next = Next::new(concat!(stringify!($name), "\0"));
            let next = NEXT.find();
            if next.is_null() {
                no_function();
                return $failed;
            }
            // SAFETY: libc's function of this name has this type.
            let next = unsafe { transmute::<*mut c_void, unsafe extern "C" fn($($before_type,)* *const c_char, $($after_type),*) -> $result>(next) };
            // SAFETY: the caller's contract is that of the next function.
            unsafe { with_path(path, |path| next($($before,)* path, $($after),*)) }
        }
    )* };
}

pass_on! {
    open [] path [flags: c_int, mode: mode_t] -> c_int = -1;
    open64 [] path [flags: c_int, mode: mode_t] -> c_int = -1;
    __open_2 [] path [flags: c_int] -> c_int = -1;
    __open64_2 [] path [flags: c_int] -> c_int = -1;
    openat [dir: c_int] path [flags: c_int, mode: mode_t] -> c_int = -1;
    openat64 [dir: c_int] path [flags: c_int, mode: mode_t] -> c_int = -1;
    __openat_2 [dir: c_int] path [flags: c_int] -> c_int = -1;
    __openat64_2 [dir: c_int] path [flags: c_int] -> c_int = -1;
    fopen [] path [mode: *const c_char] -> *mut FILE = ptr::null_mut();
    fopen64 [] path [mode: *const c_char] -> *mut FILE = ptr::null_mut();
    freopen [] path [mode: *const c_char, file: *mut FILE] -> *mut FILE = ptr::null_mut();
    freopen64 [] path [mode: *const c_char, file: *mut FILE] -> *mut FILE = ptr::null_mut();
    opendir [] path [] -> *mut DIR = ptr::null_mut();
    scandir [] path [names: Passed, filter: Passed, compare: Passed] -> c_int = -1;
    scandir64 [] path [names: Passed, filter: Passed, compare: Passed] -> c_int = -1;
    stat [] path [about: Passed] -> c_int = -1;
    stat64 [] path [about: Passed] -> c_int = -1;
    lstat [] path [about: Passed] -> c_int = -1;
    lstat64 [] path [about: Passed] -> c_int = -1;
    fstatat [dir: c_int] path [about: Passed, flags: c_int] -> c_int = -1;
    fstatat64 [dir: c_int] path [about: Passed, flags: c_int] -> c_int = -1;
    statx [dir: c_int] path [flags: c_int, mask: c_uint, about: Passed] -> c_int = -1;
    __xstat [version: c_int] path [about: Passed] -> c_int = -1;
    __xstat64 [version: c_int] path [about: Passed] -> c_int = -1;
    __lxstat [version: c_int] path [about: Passed] -> c_int = -1;
    __lxstat64 [version: c_int] path [about: Passed] -> c_int = -1;
    __fxstatat [version: c_int, dir: c_int] path [about: Passed, flags: c_int] -> c_int = -1;
    __fxstatat64 [version: c_int, dir: c_int] path [about: Passed, flags: c_int] -> c_int = -1;
    access [] path [mode: c_int] -> c_int = -1;
    eaccess [] path [mode: c_int] -> c_int = -1;
    euidaccess [] path [mode: c_int] -> c_int = -1;
    faccessat [dir: c_int] path [mode: c_int, flags: c_int] -> c_int = -1;
    chdir [] path [] -> c_int = -1;
    getxattr [] path [name: *const c_char, value: Passed, size: size_t] -> ssize_t = -1;
    lgetxattr [] path [name: *const c_char, value: Passed, size: size_t] -> ssize_t = -1;
    listxattr [] path [list: Passed, size: size_t] -> ssize_t = -1;
    llistxattr [] path [list: Passed, size: size_t] -> ssize_t = -1;
}

/// Functions that resolve a link: what they give is a path too, without a zero after it.
macro_rules! resolve {
    ($( $name:ident [$($before:ident: $before_type:ty),*] path [$($after:ident: $after_type:ty),*]; )*) => { $(
        // SAFETY: as for those that pass on.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($before: $before_type,)* path: *const c_char, buffer: *mut c_char, size: size_t, $($after: $after_type),*) -> ssize_t {
            static NEXT: Next = Next::new(concat!(stringify!($name), "\0"));
            let next = NEXT.find();
            if next.is_null() {
                no_function();
                return -1;
            }
            type Resolve = unsafe extern "C" fn($($before_type,)* *const c_char, *mut c_char, size_t, $($after_type),*) -> ssize_t;
            // SAFETY: libc's function of this name has this type.
            let next = unsafe { transmute::<*mut c_void, Resolve>(next) };
            // SAFETY: the caller's contract is that of the next function, which has filled as many bytes as it says.
            unsafe {
                match with_path(path, |path| next($($before,)* path, buffer, size, $($after),*)) {
                    len @ 1.. => name_outside(buffer, len as usize) as ssize_t,
                    failed => failed,
                }
            }
        }
    )* };
}

resolve! {
    readlink [] path [];
    readlinkat [dir: c_int] path [];
    __readlink_chk [] path [room: size_t];
    __readlinkat_chk [dir: c_int] path [room: size_t];
}

/// Functions that resolve a whole path, into the caller's buffer or one from malloc(3), with a zero after it.
macro_rules! canonical {
    ($( $name:ident [$($after:ident: $after_type:ty),*]; )*) => { $(
        // SAFETY: as for those that pass on.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(path: *const c_char, $($after: $after_type),*) -> *mut c_char {
            static NEXT: Next = Next::new(concat!(stringify!($name), "\0"));
            let next = NEXT.find();
            if next.is_null() {
                no_function();
                return ptr::null_mut();
            }
            // SAFETY: libc's function of this name has this type.
            let next = unsafe { transmute::<*mut c_void, unsafe extern "C" fn(*const c_char, $($after_type),*) -> *mut c_char>(next) };
            // SAFETY: the caller's contract is that of the next function, which gives a string or null; the name outside is no longer than it.
            unsafe {
                let resolved = with_path(path, |path| next(path, $($after),*));
                if !resolved.is_null() {
                    let len = name_outside(resolved, libc::strlen(resolved));
                    *resolved.add(len) = 0;
                }
                resolved
            }
        }
    )* };
}

canonical! {
    realpath [resolved: *mut c_char];
    __realpath_chk [resolved: *mut c_char, room: size_t];
    canonicalize_file_name [];
}
