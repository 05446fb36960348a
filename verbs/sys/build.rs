//! Refuses other targets in one sentence.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let is = |variable: &str, value: &str| std::env::var(variable).as_deref() == Ok(value);
    let serves = is("CARGO_CFG_TARGET_OS", "linux")
        && is("CARGO_CFG_TARGET_POINTER_WIDTH", "64")
        && is("CARGO_CFG_TARGET_ENDIAN", "little");
    if !serves {
        println!(
            "cargo::error=Doorbell is for 64-bit little-endian Linux; only its crate \
             doorbell-roce-proto builds for other targets"
        );
    }
}
