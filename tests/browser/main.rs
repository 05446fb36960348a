//! Opens reports of `doorbell report` in a headless browser, on a desktop and on a phone, in light
//! and dark mode: nothing is loaded or logged, nothing overflows the page, and the charts hold the
//! numbers of the JSON, in their attributes and at their position on the axis.

mod chromium;
mod page;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use chromium::{Browser, Screen};

const HELP: &str = "\
Open reports in a headless browser, and read their charts back

Usage: browser [--keep FOLDER]

Options:
      --keep FOLDER  leave the results, pages and screenshots there
";

const SCREENS: [Screen; 4] = [
    Screen {
        name: "desktop",
        width: 1280,
        height: 900,
        scale: 1,
        mobile: false,
        dark: false,
    },
    Screen {
        name: "desktop-dark",
        width: 1280,
        height: 900,
        scale: 1,
        mobile: false,
        dark: true,
    },
    Screen {
        name: "phone",
        width: 390,
        height: 844,
        scale: 2,
        mobile: true,
        dark: false,
    },
    Screen {
        name: "phone-dark",
        width: 390,
        height: 844,
        scale: 2,
        mobile: true,
        dark: true,
    },
];

fn main() -> ExitCode {
    let arguments: Vec<_> = env::args().skip(1).collect();
    let keep = match arguments.as_slice() {
        [] => None,
        [flag, folder] if flag == "--keep" => Some(PathBuf::from(folder)),
        _ => {
            eprint!("{HELP}");
            return ExitCode::from(2);
        }
    };
    match run(keep.as_deref()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("browser: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(keep: Option<&Path>) -> Result<()> {
    let temporary = tempfile::tempdir()?;
    let folder = keep.unwrap_or(temporary.path());
    fs::create_dir_all(folder)?;
    let started = Instant::now();
    let results = [
        doorbell(
            folder,
            "bw.json",
            "sweep bw write --sizes 64,1K,16K,256K --qps 1,2 --tx-depth 1,16 --repeat 2 -n 200",
        )?,
        doorbell(
            folder,
            "lat.json",
            "sweep lat send --sizes 2,64,1K --inline 0,64 -n 2000",
        )?,
    ];
    evil(folder, &results[0])?;
    for (page, from) in [
        ("bw.html", "bw.json"),
        ("lat.html", "lat.json"),
        ("both.html", "bw.json lat.json"),
        ("evil.html", "evil.json"),
        ("cdf.svg", "lat.json --chart cdf"),
        ("rate.svg", "bw.json --chart rate"),
    ] {
        doorbell(folder, page, &format!("report {from}"))?;
    }
    println!("results and pages: {:.1} s", started.elapsed().as_secs_f64());

    let mut browser = Browser::start(&temporary.path().join("profile"))?;
    for screen in &SCREENS {
        for (name, documents) in [
            ("bw", vec![0]),
            ("lat", vec![1]),
            ("both", vec![0, 1]),
            ("evil", vec![0]),
        ] {
            let documents: Vec<_> = documents.into_iter().map(|index: usize| &results[index]).collect();
            let at = format!("{name}.html on {}", screen.name);
            let page = browser
                .open(&folder.join(format!("{name}.html")), screen)
                .with_context(|| at.clone())?;
            let points = page::check(&page, screen, &documents).with_context(|| at.clone())?;
            let file = folder.join(format!("{name}-{}.png", screen.name));
            fs::write(&file, &page.screenshot).with_context(|| format!("cannot write {}", file.display()))?;
            println!(
                "{at}: {points} points read back, {} KiB of pixels",
                page.screenshot.len() >> 10
            );
        }
    }
    // A chart alone is a document, too.
    let page = browser
        .open(&folder.join("rate.svg"), &SCREENS[0])
        .context("rate.svg")?;
    page::check_quiet(&page).context("rate.svg")?;
    browser.close()?;
    println!("together: {:.1} s", started.elapsed().as_secs_f64());
    Ok(())
}

/// Runs the command beside this program, writing to a file; returns the file's JSON, if it is JSON.
fn doorbell(folder: &Path, file: &str, line: &str) -> Result<Value> {
    let program = env::current_exe()?.with_file_name("doorbell");
    let mut command = Command::new(&program);
    for word in line.split(' ') {
        if word.ends_with(".json") {
            command.arg(folder.join(word));
        } else {
            command.arg(word);
        }
    }
    let output = command
        .arg("-o")
        .arg(folder.join(file))
        .output()
        .with_context(|| format!("cannot run {}", program.display()))?;
    if !output.status.success() {
        bail!(
            "doorbell {line}: {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    if !file.ends_with(".json") {
        return Ok(Value::Null);
    }
    Ok(serde_json::from_slice(&fs::read(folder.join(file))?)?)
}

/// The same result, with names that attempt script injection.
fn evil(folder: &Path, result: &Value) -> Result<()> {
    let attack = "\"><script>console.error(1)</script><img src=x onerror=console.error(2)>'</title></svg></style>";
    let mut result = result.clone();
    for key in ["device", "version", "memory", "peer"] {
        result[key] = attack.into();
    }
    result["warnings"] = serde_json::json!([{"code": attack, "message": attack}]);
    result["sweep"] = serde_json::json!({attack: [attack, attack]});
    result["limits"] = serde_json::json!([{"name": attack, "bytes_per_s": 1e9}]);
    fs::write(folder.join("evil.json"), result.to_string())?;
    Ok(())
}
