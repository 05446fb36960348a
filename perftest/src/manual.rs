//! `doorbell completions` and `doorbell man`: what packages install beside the command, made from
//! the definition of its command line.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use clap_complete::generate;
use clap_complete::shells::{Bash, Fish, Zsh};

use crate::cli::command_line;
use crate::failure::Failure;
use crate::report;

const NAME: &str = "doorbell";

/// The arguments of `doorbell completions`.
#[derive(Args, Debug)]
pub(crate) struct CompletionsArgs {
    /// The shell that reads them
    #[arg(value_enum)]
    shell: Shell,
}

#[derive(ValueEnum, Clone, Copy, Debug)]
enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// The arguments of `doorbell man`.
#[derive(Args, Debug)]
pub(crate) struct ManArgs {
    /// Where to write a page for each command, as doorbell-bw.1 [default: prints doorbell.1]
    folder: Option<PathBuf>,
}

/// # Errors
/// [`Failure::Test`] when stdout cannot be written.
pub(crate) fn completions(args: &CompletionsArgs) -> Result<(), Failure> {
    let mut command = command_line();
    let mut script = Vec::new();
    match args.shell {
        Shell::Bash => generate(Bash, &mut command, NAME, &mut script),
        Shell::Zsh => generate(Zsh, &mut command, NAME, &mut script),
        Shell::Fish => generate(Fish, &mut command, NAME, &mut script),
    }
    print(&script)
}

/// # Errors
/// [`Failure::Test`] when stdout or the folder cannot be written.
pub(crate) fn pages(args: &ManArgs) -> Result<(), Failure> {
    // As `generate_to` does: `help` needs no page.
    let command = command_line().disable_help_subcommand(true);
    let Some(folder) = &args.folder else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command)
            .render(&mut page)
            .map_err(|e| Failure::test(format!("cannot make the page: {e}")))?;
        return print(&page);
    };
    write(command, folder).map_err(|e| Failure::test(format!("cannot write {}: {e}", folder.display())))
}

fn write(command: clap::Command, folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    clap_mangen::generate_to(command, folder)
}

fn print(text: &[u8]) -> Result<(), Failure> {
    report::print_line(String::from_utf8_lossy(text).trim_end())
}
