//! Names the library as its ABI: before 1.0 a change of the second number may break.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let number = |part| std::env::var(format!("CARGO_PKG_VERSION_{part}")).expect("cargo sets it");
    let (major, minor) = (number("MAJOR"), number("MINOR"));
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libdoorbell.so.{major}.{minor}");
    // Devices and communicators have threads in this code: dlclose(3) must not unload it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
