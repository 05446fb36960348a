//! Registered memory is owned: borrowed memory could be freed while the device uses it.
use doorbell_verbs::{Local, ProtectionDomain};

fn misuse(pd: &ProtectionDomain) {
    let mut bytes = [0_u8; 64];
    pd.register(&mut bytes[..], Local).unwrap();
}

fn main() {}
