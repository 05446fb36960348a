//! Memory that is only borrowed may go while the device uses it: what is registered is owned.
use doorbell_verbs::{Local, ProtectionDomain};

fn misuse(pd: &ProtectionDomain) {
    let mut bytes = [0_u8; 64];
    pd.register(&mut bytes[..], Local).unwrap();
}

fn main() {}
