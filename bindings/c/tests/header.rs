//! The header is the one that cbindgen makes of the sources.

use std::fs;
use std::path::Path;

/// In the order of the header.
const SOURCES: [&str; 5] = ["status", "device", "memory", "connection", "communicator"];

#[test]
fn the_header_is_made_of_the_sources() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(here.join("cbindgen.toml")).unwrap();
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES {
        builder = builder.with_src(here.join("src").join(source).with_extension("rs"));
    }
    let mut header = Vec::new();
    builder.generate().unwrap().write(&mut header);
    let committed = fs::read(here.join("doorbell.h")).unwrap_or_default();
    if header != committed {
        let made = Path::new(env!("CARGO_TARGET_TMPDIR")).join("doorbell.h");
        fs::write(&made, header).unwrap();
        panic!(
            "doorbell.h is not of these sources: cp {} {}",
            made.display(),
            here.display()
        );
    }
}
