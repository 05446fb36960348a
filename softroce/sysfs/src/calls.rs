//! libc's functions that take a path, under every name that binaries use: with 64-bit offsets,
//! fortified, and from before glibc 2.33.

use core::ffi::{c_char, c_int, c_uint, c_void};
use core::mem::transmute;
use core::ptr;

use libc::{DIR, FILE, mode_t, size_t, ssize_t};

use crate::next::{Next, restore_name, with_path};

/// A structure that is only passed on: stat, dirent, and functions of the program.
type Passed = *mut c_void;

/// Sets `errno` to ENOSYS: libc has no such function.
fn no_function() {
    // SAFETY: returns the calling thread's own errno, always valid to write.
    unsafe { *libc::__errno_location() = libc::ENOSYS };
}

/// Passes all arguments on, the path redirected. C's variadic one, the mode of open(2), is in the
/// next register on every supported processor, and is passed on whether given or not.
macro_rules! pass_on {
    ($( $name:ident [$($before:ident: $before_type:ty),*] path [$($after:ident: $after_type:ty),*] -> $result:ty = $failed:expr; )*) => { $(
        // SAFETY: replaces libc's function of this name, with the same arguments and effect.
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
    stat [] path [result: Passed] -> c_int = -1;
    stat64 [] path [result: Passed] -> c_int = -1;
    lstat [] path [result: Passed] -> c_int = -1;
    lstat64 [] path [result: Passed] -> c_int = -1;
    fstatat [dir: c_int] path [result: Passed, flags: c_int] -> c_int = -1;
    fstatat64 [dir: c_int] path [result: Passed, flags: c_int] -> c_int = -1;
    statx [dir: c_int] path [flags: c_int, mask: c_uint, result: Passed] -> c_int = -1;
    __xstat [version: c_int] path [result: Passed] -> c_int = -1;
    __xstat64 [version: c_int] path [result: Passed] -> c_int = -1;
    __lxstat [version: c_int] path [result: Passed] -> c_int = -1;
    __lxstat64 [version: c_int] path [result: Passed] -> c_int = -1;
    __fxstatat [version: c_int, dir: c_int] path [result: Passed, flags: c_int] -> c_int = -1;
    __fxstatat64 [version: c_int, dir: c_int] path [result: Passed, flags: c_int] -> c_int = -1;
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

/// Functions that resolve a link: their result is a path too, not NUL-terminated.
macro_rules! resolve {
    ($( $name:ident [$($before:ident: $before_type:ty),*] path [$($after:ident: $after_type:ty),*]; )*) => { $(
        // SAFETY: as above.
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
            // SAFETY: by the caller's contract; as many bytes are filled as `next` returns.
            unsafe {
                match with_path(path, |path| next($($before,)* path, buffer, size, $($after),*)) {
                    len @ 1.. => restore_name(buffer, len as usize) as ssize_t,
                    failed => failed,
                }
            }
        }
    )* };
}

resolve! {
    readlink [] path [];
    readlinkat [dir: c_int] path [];
    __readlink_chk [] path [buffer_size: size_t];
    __readlinkat_chk [dir: c_int] path [buffer_size: size_t];
}

/// Functions that resolve a whole path, NUL-terminated, into the caller's buffer or malloc(3)'s.
macro_rules! canonical {
    ($( $name:ident [$($after:ident: $after_type:ty),*]; )*) => { $(
        // SAFETY: as above.
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
            // SAFETY: by the caller's contract; a string or null, the restored name no longer.
            unsafe {
                let resolved = with_path(path, |path| next(path, $($after),*));
                if !resolved.is_null() {
                    let len = restore_name(resolved, libc::strlen(resolved));
                    *resolved.add(len) = 0;
                }
                resolved
            }
        }
    )* };
}

canonical! {
    realpath [resolved: *mut c_char];
    __realpath_chk [resolved: *mut c_char, buffer_size: size_t];
    canonicalize_file_name [];
}
