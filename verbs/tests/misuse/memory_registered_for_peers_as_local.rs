//! What may be done with a buffer is in its type: one that peers write does not pass for one that they don't.
use doorbell_verbs::{Buffer, Local, ProtectionDomain, RemoteWrite};

fn misuse(pd: &ProtectionDomain) -> Buffer<Local> {
    pd.register(vec![0; 64], RemoteWrite).unwrap()
}

fn main() {}
