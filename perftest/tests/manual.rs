//! What packages install beside the command: completions and manual pages, and `doorbell help`.

#![forbid(unsafe_code)]

mod common;

use std::fs;
use std::process::Command;

use self::common::{doorbell, run, stderr};

fn stdout(line: &str) -> String {
    let output = run(line);
    assert!(output.status.success(), "doorbell {line}: {}", stderr(&output));
    String::from_utf8(output.stdout).expect("text")
}

/// The names of the commands, as `doorbell help` lists them.
fn commands() -> Vec<String> {
    let help = stdout("help");
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let names = listed
        .take_while(|line| !line.is_empty())
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names
        .filter_map(|line| line.split_whitespace().next().map(str::to_owned))
        .collect()
}

#[test]
fn help_of_a_command_is_its_long_help() {
    assert_eq!(stdout("help bw"), stdout("bw --help"));
    assert_eq!(stdout("help run"), stdout("run --help"));
}

#[test]
fn bash_completes_commands_and_options() {
    let complete = |words: &str| {
        let script = format!(
            "source <(\"$0\" completions bash); COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _doorbell doorbell \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD - 1]}}\"; echo \"${{COMPREPLY[@]}}\""
        );
        let output = Command::new("bash")
            .args(["--norc", "-c", &script, env!("CARGO_BIN_EXE_doorbell")])
            .output()
            .expect("there is a bash");
        let replies = String::from_utf8(output.stdout).expect("text");
        assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        replies.trim().to_owned()
    };
    assert_eq!(complete("doorbell diag"), "diagnose");
    assert_eq!(complete("doorbell bw --post"), "--post-list");
}

#[test]
fn every_shell_has_every_command() {
    for (shell, first) in [("zsh", "#compdef doorbell"), ("fish", "#")] {
        let script = stdout(&format!("completions {shell}"));
        assert!(script.starts_with(first), "{script}");
        for command in commands() {
            assert!(script.contains(&command), "{shell}: {command}");
        }
    }
}

#[test]
fn every_command_has_a_manual_page_and_the_same_bytes_each_time() {
    let made = || {
        let folder = tempfile::tempdir().expect("a folder");
        let into = folder.path().join("man1");
        let status = doorbell("man").arg(&into).status().expect("it runs");
        assert!(status.success(), "{status}");
        let mut pages: Vec<_> = fs::read_dir(&into)
            .expect("the folder")
            .map(|page| page.expect("an entry"))
            .map(|page| {
                let text = fs::read_to_string(page.path()).expect("a page");
                (page.file_name().into_string().expect("text"), text)
            })
            .collect();
        pages.sort();
        pages
    };
    let pages = made();
    let page = |name: &str| &pages.iter().find(|(page, _)| page == name).expect(name).1;
    assert_eq!(page("doorbell.1").trim_end(), stdout("man").trim_end());
    let commands = commands();
    assert!(commands.len() > 12, "{commands:?}");
    for command in commands.iter().filter(|command| *command != "help") {
        assert!(
            page(&format!("doorbell-{command}.1")).contains("\n.SH OPTIONS"),
            "{command}"
        );
    }
    assert!(page("doorbell-bw.1").contains("post\\-list"));
    assert_eq!(pages, made());
}
