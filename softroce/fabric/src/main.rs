//! `cargo xtask fabric`: runs experiments and prints their tables.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use doorbell_fabric::scenario::{ALL, Scenario};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("fabric: {message}");
            ExitCode::from(2)
        }
    }
}

fn run() -> Result<(), String> {
    use lexopt::prelude::*;
    let mut arguments = lexopt::Parser::from_env();
    let (mut chosen, mut folder) = (Vec::new(), None::<PathBuf>);
    while let Some(argument) = arguments.next().map_err(|error| error.to_string())? {
        match argument {
            Short('o') => folder = Some(arguments.value().map_err(|error| error.to_string())?.into()),
            Short('h') | Long("help") => {
                print!("{}", help());
                return Ok(());
            }
            Value(name) => chosen.push(find(&name.to_string_lossy())?),
            other => return Err(other.unexpected().to_string()),
        }
    }
    if chosen.is_empty() {
        chosen = ALL.to_vec();
    }
    for (name, _, tables) in chosen {
        for (index, table) in tables().iter().enumerate() {
            println!("{table}");
            if let Some(folder) = &folder {
                let file = folder.join(format!("{name}-{index}.csv"));
                fs::create_dir_all(folder)
                    .and_then(|()| fs::write(&file, table.csv()))
                    .map_err(|error| format!("{}: {error}", file.display()))?;
            }
        }
    }
    Ok(())
}

fn find(name: &str) -> Result<Scenario, String> {
    let scenario = ALL.iter().find(|(listed, ..)| *listed == name);
    scenario.copied().ok_or_else(|| {
        let names: Vec<&str> = ALL.iter().map(|(name, ..)| *name).collect();
        format!("no scenario {name:?}; there are {}", names.join(", "))
    })
}

fn help() -> String {
    let mut help = String::from(
        "Simulates fabrics over the protocol engine\n\nUsage: cargo xtask fabric [SCENARIO]... [-o DIR]\n\n  -o DIR  also write each table as CSV\n\nScenarios:\n",
    );
    for (name, about, _) in ALL {
        help += &format!("  {name:12} {about}\n");
    }
    help
}
