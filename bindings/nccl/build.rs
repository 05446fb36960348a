//! Names the library as programs that link NCCL request it. What it exports follows from
//! `src/exports.rs` alone: rustc makes all other symbols local.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let arguments = [
        // The name by which glibc identifies a loaded library, whatever file it came from.
        "-soname,libnccl.so.2",
        // Threads run in this code: dlclose(3) must not unload it.
        "-z,nodelete",
    ];
    for argument in arguments {
        println!("cargo::rustc-cdylib-link-arg=-Wl,{argument}");
    }
}
