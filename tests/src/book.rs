//! The Rust examples of docs/book and of the READMEs of crates, compiled (and run, unless `no_run`)
//! as doctests of this crate.

macro_rules! pages {
    ($($name:ident = $path:literal;)*) => { $(
        #[cfg(doctest)]
        #[doc = include_str!(concat!("../../docs/book/src/", $path))]
        pub struct $name;
    )* };
}

pages! {
    GettingStarted = "getting-started.md";
    UserspaceDevice = "userspace-device.md";
    KeyValueStore = "key-value-store.md";
    Collectives = "collectives.md";
    Moe = "moe.md";
    Gpu = "gpu.md";
    Connect = "guide/connect.md";
    StreamWrites = "guide/stream-writes.md";
    ServeReads = "guide/serve-reads.md";
    Datagrams = "guide/datagrams.md";
    ShareReceives = "guide/share-receives.md";
    Sleep = "guide/sleep.md";
    Tasks = "guide/tasks.md";
    Recover = "guide/recover.md";
    GpuMemory = "guide/gpu-memory.md";
    Doorbell = "../../../bindings/doorbell/README.md";
    DoorbellTest = "../../../bindings/test/README.md";
}
