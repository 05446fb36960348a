//! Saves a checkpoint of tensors from a GPU's memory as a safetensors file, and loads it again.
//!
//! ```text
//! cargo run --release -p doorbell-examples --bin 14_checkpoint        both, in the temporary folder
//! 14_checkpoint save FILE                                             45 MiB of tensors
//! 14_checkpoint load FILE                                             of any program: prints its tensors
//! ```
//!
//! The tensors are in memory of GPU 0, or of the host where there is no GPU. A checkpoint saved
//! here has the CRC-32 of each tensor in its metadata, which loading checks. It prints by which
//! path the bytes went, and how fast.

#![forbid(unsafe_code)]

mod format;
mod weights;

use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};
use std::time::Instant;
use std::{env, fs};

use doorbell::gpudirect::storage::{File, Save, Storage};
use doorbell_examples::{Error, report};

use format::{Header, Tensor};
use weights::Weights;

/// Name, type and shape of what is saved: the last is no multiple of a page.
const TENSORS: [(&str, &str, &[usize]); 4] = [
    ("embedding", "BF16", &[4096, 4096]),
    ("layers.0.attention", "BF16", &[2048, 2048]),
    ("layers.0.experts", "F8_E4M3", &[8, 512, 1280]),
    ("norm", "F32", &[4097]),
];

fn main() -> ExitCode {
    let args: Vec<String> = env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    report(match *args {
        [] => both(),
        ["save", file] => save(Path::new(file)),
        ["load", file] => load(Path::new(file)),
        _ => {
            eprintln!("usage: 14_checkpoint [save FILE | load FILE]");
            return ExitCode::from(2);
        }
    })
}

fn both() -> Result<(), Error> {
    let file: PathBuf = env::temp_dir().join(format!("doorbell-checkpoint-{}.safetensors", process::id()));
    let outcome = save(&file).and_then(|()| load(&file));
    // Also after an error, which may have left it.
    drop(fs::remove_file(&file));
    outcome
}

fn save(path: &Path) -> Result<(), Error> {
    let mut header = Header::of(&TENSORS)?;
    let (mut weights, mut storage) = Weights::new(header.data_len())?;
    weights.fill()?;
    for at in 0..header.tensors.len() {
        let Tensor { start, len, .. } = header.tensors[at];
        header.tensors[at].crc = Some(weights.crc(start, len)?);
    }
    let start = Instant::now();
    let head = header.to_bytes()?;
    let save = Save::new(path, (head.len() + header.data_len()) as u64)?;
    storage.write_at(save.file(), 0, &head)?;
    weights.write(&mut storage, save.file(), head.len() as u64)?;
    let path_used = storage.path_of(save.file());
    save.commit()?;
    print("saved", path_used.name(), &header, start);
    Ok(())
}

fn load(path: &Path) -> Result<(), Error> {
    let file = File::open(path)?;
    let stamp = file.stamp()?;
    let mut small = Storage::host()?;
    let (header, data) = Header::read(&mut small, &file)?;
    let (mut weights, mut storage) = Weights::new(header.data_len())?;
    let start = Instant::now();
    weights.read(&mut storage, &file, data)?;
    file.check_unchanged(&stamp)?;
    print("loaded", storage.path_of(&file).name(), &header, start);
    for tensor in &header.tensors {
        let crc = weights.crc(tensor.start, tensor.len)?;
        match tensor.crc {
            Some(expected) if expected != crc => {
                return Err(format!("{}: tensor {}: wrong sum", path.display(), tensor.name.escape_debug()).into());
            }
            _ => println!(
                "{:<24} {:<8} {:?} {crc:08x}",
                tensor.name.escape_debug(),
                tensor.dtype,
                tensor.shape
            ),
        }
    }
    Ok(())
}

fn print(what: &str, path: &str, header: &Header, start: Instant) {
    let bytes = header.data_len();
    let rate = bytes as f64 / start.elapsed().as_secs_f64() / 1e9;
    println!("{what} {} tensors, {bytes} bytes, by {path}", header.tensors.len());
    eprintln!("{rate:.2} GB/s");
}
