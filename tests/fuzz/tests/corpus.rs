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

#[test]
fn corpora_pass() {
    for (name, target) in TARGETS {
        let mut inputs: Vec<_> = fs::read_dir(corpora().join(name))
            .unwrap_or_else(|error| panic!("the corpus of {name}: {error}"))
            .map(|entry| entry.unwrap().path())
            .collect();
        inputs.sort();
        assert!(!inputs.is_empty(), "the corpus of {name} is empty");
        for input in inputs {
            println!("{}", input.display());
            target(&fs::read(&input).unwrap());
        }
    }
}

#[test]
fn corpora_are_small_and_of_targets_that_exist() {
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
    assert!(bytes <= MOST_BYTES, "{bytes} bytes");
}
