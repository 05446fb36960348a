//! Replays the committed corpora: what fuzzing has found stays fixed, in plain tests.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use doorbell_fuzz::TARGETS;

/// Of all corpora: more is no seed but the whole run.
const MOST_BYTES: u64 = 200 << 10;

fn corpora() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/corpus"))
}

/// Runs a target on each input of its corpus; the last one printed is the one that failed.
fn replay(name: &str) {
    let (_, target) = TARGETS.iter().find(|(other, _)| *other == name).unwrap();
    let mut inputs: Vec<_> = fs::read_dir(corpora().join(name))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    inputs.sort();
    assert!(!inputs.is_empty(), "no corpus");
    for input in inputs {
        println!("{}", input.display());
        target(&fs::read(&input).unwrap());
    }
}

macro_rules! replays {
    ($($name:ident)*) => {
        $(#[test]
        fn $name() {
            replay(stringify!($name));
        })*

        const REPLAYED: &[&str] = &[$(stringify!($name)),*];
    };
}

replays!(endpoint connection_manager shm_ring shared_tables bootstrap classic plan result verbs);

#[test]
fn corpora_are_small_and_every_target_has_one() {
    let mut bytes = 0;
    let mut found = BTreeSet::new();
    for corpus in fs::read_dir(corpora()).unwrap() {
        let corpus = corpus.unwrap();
        found.insert(corpus.file_name().into_string().unwrap());
        for input in fs::read_dir(corpus.path()).unwrap() {
            bytes += input.unwrap().metadata().unwrap().len();
        }
    }
    assert_eq!(found, TARGETS.map(|(name, _)| name.to_owned()).into());
    assert_eq!(REPLAYED, TARGETS.map(|(name, _)| name));
    assert!(bytes <= MOST_BYTES, "{bytes} bytes");
}
