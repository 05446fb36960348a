//! A Debian package: deb(5).

use super::{
    archive::{TIME, tar_gz},
    build::Built,
    content::{Debian, File, Installation, Kind, read},
    sbom,
};
use crate::workspace;
use anyhow::{Context, Result, bail, ensure};
use std::{
    fmt::Write as _,
    io::Write as _,
    process::{Command, Stdio},
};

/// The files of an installation, below /usr.
pub(super) fn make(version: &str, built: &Built, of: &Installation) -> Result<(String, Vec<u8>)> {
    let architecture = architecture(&built.target)?;
    let repository = sbom::repository()?;
    let package = of.debian.package;
    let mut files = of.files.clone();
    // Debian's place for the texts of licences.
    files.retain(|file| !file.path.starts_with(&format!("share/doc/{package}/LICENSE")));
    files.push(File::new(
        format!("share/doc/{package}/copyright"),
        copyright(&repository)?,
    ));
    files.sort_by(|a, b| a.path.cmp(&b.path));
    let kibibytes: usize = files.iter().map(|file| file.bytes.len().div_ceil(1024)).sum();
    let Debian {
        section,
        depends,
        suggests,
        description,
        ..
    } = of.debian;
    let depends = depends.map_or_else(String::new, |other| format!(", {other} (= {version})"));
    let suggests = suggests.map_or_else(String::new, |others| format!("Suggests: {others}\n"));
    let control = format!(
        "Package: {package}\nVersion: {version}\nArchitecture: {architecture}\nSection: {section}\nPriority: optional\n\
         Maintainer: Doorbell developers <doorbell@users.noreply.github.com>\nInstalled-Size: {kibibytes}\n\
         Depends: libc6 (>= {}){depends}\n{suggests}Homepage: {repository}\nDescription: {description}\n",
        built.glibc
    );
    let control = [File::new("control", control), File::new("md5sums", md5sums(&files)?)];
    let mut archive = ar::Builder::new(Vec::new());
    for (name, bytes) in [
        ("debian-binary", b"2.0\n".to_vec()),
        ("control.tar.gz", tar_gz("./", &control)?),
        ("data.tar.gz", tar_gz("./usr/", &files)?),
    ] {
        let mut header = ar::Header::new(name.into(), bytes.len() as u64);
        header.set_mode(0o100_644);
        header.set_mtime(TIME);
        archive.append(&header, &bytes[..])?;
    }
    Ok((format!("{package}_{version}_{architecture}.deb"), archive.into_inner()?))
}

/// In the form of <https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/>.
fn copyright(repository: &str) -> Result<String> {
    let text = String::from_utf8(read(&workspace().join("LICENSE-MIT"))?)?;
    let mut paragraphs = text.trim_end().split("\n\n").skip(1);
    let holder = paragraphs.next().and_then(|line| line.strip_prefix("Copyright (c) "));
    let holder = holder.context("LICENSE-MIT names no holder of the copyright")?;
    let mit = paragraphs.collect::<Vec<_>>().join("\n.\n").replace('\n', "\n ");
    Ok(format!(
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\nUpstream-Name: doorbell\n\
         Source: {repository}\n\
         Comment: The programs have code of other packages in them, whose licences are in the file\n \
         THIRD-PARTY beside this one.\n\n\
         Files: *\nCopyright: {holder}\nLicense: Expat or Apache-2.0\n\n\
         License: Expat\n {mit}\n\n\
         License: Apache-2.0\n The text is in /usr/share/common-licenses/Apache-2.0.\n"
    ))
}

/// What `dpkg --verify` compares.
fn md5sums(files: &[File]) -> Result<String> {
    let mut sums = String::new();
    for file in files.iter().filter(|file| !matches!(file.kind, Kind::Link(_))) {
        let mut command = Command::new("md5sum");
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot run md5sum")?;
        child
            .stdin
            .take()
            .context("md5sum has no stdin")?
            .write_all(&file.bytes)?;
        let output = child.wait_with_output()?;
        ensure!(output.status.success(), "md5sum: {}", output.status);
        let sum = String::from_utf8(output.stdout)?;
        let sum = sum.split_whitespace().next().context("md5sum prints nothing")?;
        let _ = writeln!(sums, "{sum}  usr/{}", file.path);
    }
    Ok(sums)
}

fn architecture(target: &str) -> Result<&'static str> {
    match target.split('-').next() {
        Some("x86_64") => Ok("amd64"),
        Some("aarch64") => Ok("arm64"),
        _ => bail!("Debian's name for {target} is unknown"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Paragraphs of fields, whose texts continue on lines that begin with a space.
    #[test]
    fn the_copyright_is_in_debians_form() {
        let text = copyright("https://example.org/doorbell").unwrap();
        let paragraphs: Vec<_> = text.split("\n\n").collect();
        let of = |name: &str| {
            let found = paragraphs.iter().find(|paragraph| paragraph.starts_with(name));
            found.unwrap_or_else(|| panic!("no {name} in {text}"))
        };
        assert_eq!(paragraphs.len(), 4, "{text}");
        assert!(of("Format: ").contains("\nSource: https://example.org/doorbell\n"));
        assert!(of("Files: *\nCopyright: 20").ends_with("\nLicense: Expat or Apache-2.0"));
        assert!(of("License: Expat\n Permission is hereby granted").contains("\n .\n THE SOFTWARE IS PROVIDED"));
        for line in text.lines().filter(|line| !line.is_empty()) {
            let is_field = line
                .split_once(": ")
                .is_some_and(|(name, _)| name.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b'-'));
            assert!(is_field || line.starts_with(' '), "{line}");
        }
    }

    #[test]
    fn sums_are_md5s() {
        let files = [File::new("share/a", "abc"), File::new("share/b", "")];
        assert_eq!(
            md5sums(&files).unwrap(),
            "900150983cd24fb0d6963f7d28e17f72  usr/share/a\nd41d8cd98f00b204e9800998ecf8427e  usr/share/b\n"
        );
    }
}
