//! Files that end early, change, cannot be read, or find no space.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use doorbell_gpudirect::storage::{File, Save, Storage, StorageError, StorageOptions};

use super::{file_with, folder, options, pattern, storages};

#[test]
fn the_end_of_the_file_is_the_count_or_an_error() {
    let folder = folder();
    let file = file_with(folder.path(), &pattern(100_001));
    for mut storage in storages() {
        let mut memory = vec![0; 200_000];
        assert_eq!(storage.read_at(&file, 99_999, &mut memory).expect("read"), 2);
        assert_eq!(storage.read_at(&file, 100_001, &mut memory).expect("read"), 0);
        assert_eq!(storage.read_at(&file, 1 << 40, &mut memory).expect("read"), 0);
        let error = storage
            .read_exact_at(&file, 1, &mut memory)
            .expect_err("it ends before");
        assert!(
            error
                .to_string()
                .ends_with("data: ends at offset 100001, before 200001"),
            "{error}"
        );
        let far = storage
            .read_at(&file, u64::MAX - 5, &mut memory)
            .expect_err("no offset of a file");
        assert!(matches!(far, StorageError::Offset { .. }), "{far}");
    }
}

/// Each block that is reported as read has bytes that the file had, and none from before.
#[test]
fn a_file_truncated_while_it_is_read_gives_the_right_count() {
    const LEN: usize = 2 << 20;
    let folder = folder();
    let file = file_with(folder.path(), &vec![1; LEN]);
    let writer = OpenOptions::new().write(true).open(file.path()).expect("opened");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            for turn in 0u64.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                writer.set_len(turn * 7919 % LEN as u64).expect("truncated");
                writer.write_all_at(&vec![1; LEN], 0).expect("written");
            }
        });
        for mut storage in storages() {
            for _ in 0..20 {
                let mut memory = vec![7; LEN];
                let count = storage.read_at(&file, 0, &mut memory).expect("read");
                // A hole between an end and bytes written behind it reads as zeros.
                assert!(
                    memory[..count].iter().all(|byte| *byte <= 1),
                    "garbage in {count} bytes"
                );
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_change_is_detected_by_the_stamp() {
    let folder = folder();
    let file = file_with(folder.path(), b"weights");
    let stamp = file.stamp().expect("stamped");
    file.check_unchanged(&stamp).expect("nothing has changed");
    let mut other = OpenOptions::new().append(true).open(file.path()).expect("opened");
    other.write_all(b"!").expect("written");
    let error = file.check_unchanged(&stamp).expect_err("it has changed");
    assert!(
        error
            .to_string()
            .ends_with("has changed while it was read: it had 7 bytes, and has 8"),
        "{error}"
    );
}

#[test]
fn errors_have_the_file_the_offset_and_the_errno() {
    let folder = folder();
    let missing = File::open(folder.path().join("missing")).expect_err("there is none");
    assert!(
        missing
            .to_string()
            .ends_with("missing: cannot open: No such file or directory (os error 2)"),
        "{missing}"
    );
    let not_a_file = File::open(folder.path()).expect_err("a folder");
    assert!(
        not_a_file
            .to_string()
            .contains("neither a regular file nor a block device"),
        "{not_a_file}"
    );
    let path = file_with(folder.path(), &pattern(300_000)).path().to_owned();
    let read_only = File::open(&path).expect("opened");
    for mut storage in storages() {
        let error = storage
            .write_at(&read_only, 65_536, &vec![1; 70_000])
            .expect_err("opened for reading");
        let StorageError::Io { offset, error, .. } = error else {
            panic!("{error}");
        };
        assert!((65_536..135_536).contains(&offset), "{offset}");
        assert_eq!(error.raw_os_error(), Some(libc::EBADF));
        // The requests in flight are over, and the next ones are carried out.
        let mut memory = vec![0; 300_000];
        storage.read_exact_at(&read_only, 0, &mut memory).expect("read");
        assert!(memory == pattern(300_000));
    }
}

#[test]
fn a_save_is_whole_or_nothing() {
    let folder = folder();
    let target = folder.path().join("weights");
    fs::write(&target, b"old").expect("a file");
    let entries = || fs::read_dir(folder.path()).expect("a folder").count();
    let mut storage = StorageOptions::new().host().expect("opened");
    let save = Save::new(&target, 70_000).expect("begun");
    storage
        .write_at(save.file(), 0, &pattern(70_000)[..10_000])
        .expect("written");
    assert_eq!((fs::read(&target).expect("read"), entries()), (b"old".to_vec(), 2));
    drop(save);
    assert_eq!((fs::read(&target).expect("read"), entries()), (b"old".to_vec(), 1));

    let save = Save::new(&target, 70_000).expect("begun");
    storage.write_at(save.file(), 0, &pattern(70_000)).expect("written");
    save.commit().expect("renamed");
    assert!(fs::read(&target).expect("read") == pattern(70_000));
    assert_eq!(entries(), 1);

    let save = Save::new(folder.path(), 1).expect("begun beside it");
    let error = save.commit().expect_err("a folder is in its place");
    assert!(error.to_string().contains(": cannot rename: "), "{error}");
}

#[test]
fn options_out_of_range_are_refused() {
    for bad in [
        options().block(0),
        options().block(4096),
        options().depth(0),
        options().block(64 << 20).depth(17),
    ] {
        assert!(matches!(bad.host(), Err(StorageError::Option { .. })), "{bad:?}");
    }
}

/// On a tmpfs of one megabyte, and on ext4 of two, which a loop device holds: root mounts them in a
/// mount namespace of its own thread.
#[test]
fn no_space_is_an_error_at_its_offset() {
    for mount in [small_tmpfs, small_ext4] {
        let (folder, images) = (folder(), folder());
        let path = folder.path().to_owned();
        let image = images.path().join("image");
        let mounted = thread::spawn(move || {
            own_mounts()?;
            mount(&path, &image)?;
            without_space(&path);
            Ok::<_, String>(())
        });
        match mounted.join().expect("the thread ends") {
            Ok(()) => {}
            Err(reason) => eprintln!("left out: {reason}"),
        }
    }
}

#[expect(unsafe_code, reason = "namespaces")]
fn own_mounts() -> Result<(), String> {
    let last = |what: &str| format!("{what}: {}", std::io::Error::last_os_error());
    // SAFETY: the strings are C strings, and the namespace is this thread's alone.
    unsafe {
        if libc::unshare(libc::CLONE_NEWNS) != 0 {
            return Err(last("unshare"));
        }
        let private = libc::MS_REC | libc::MS_PRIVATE;
        if libc::mount(
            c"none".as_ptr(),
            c"/".as_ptr(),
            std::ptr::null(),
            private,
            std::ptr::null(),
        ) != 0
        {
            return Err(last("mount as private"));
        }
    }
    Ok(())
}

fn small_tmpfs(target: &Path, _: &Path) -> Result<(), String> {
    command(
        Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=1m", "none"])
            .arg(target),
    )
}

fn small_ext4(target: &Path, image: &Path) -> Result<(), String> {
    let file = fs::File::create(image).and_then(|file| file.set_len(2 << 20));
    file.map_err(|e| e.to_string())?;
    let features = ["-q", "-O", "^has_journal", "-m", "0", "-b", "4096"];
    command(Command::new("mkfs.ext4").args(features).arg(image))?;
    command(Command::new("mount").args(["-o", "loop"]).arg(image).arg(target))
}

fn command(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr))),
    }
}

fn without_space(folder: &Path) {
    let allocated = File::create_new(folder.join("allocated")).expect("created");
    let error = allocated.allocate(4 << 20).expect_err("more than there is");
    assert!(
        error
            .to_string()
            .contains("allocated: cannot allocate: No space left on device"),
        "{error}"
    );
    fs::remove_file(allocated.path()).expect("removed");
    drop(allocated);
    for (at, mut storage) in storages_here().into_iter().enumerate() {
        let path = folder.join(at.to_string());
        let file = File::create_new(&path).expect("created");
        let error = storage
            .write_at(&file, 0, &vec![1; 3 << 20])
            .expect_err("more than there is");
        let StorageError::Io {
            offset, error: errno, ..
        } = &error
        else {
            panic!("{error}");
        };
        assert_eq!(errno.raw_os_error(), Some(libc::ENOSPC));
        assert!(
            *offset <= 3 << 20 && error.to_string().contains("the file is incomplete"),
            "{error}"
        );
        fs::remove_file(&path).expect("removed");
        drop(file);
        let file = File::create_new(folder.join("small")).expect("created");
        storage
            .write_at(&file, 0, &pattern(70_000))
            .expect("there is space again");
        assert!(fs::read(file.path()).expect("read") == pattern(70_000));
        fs::remove_file(file.path()).expect("removed");
    }
}

/// One request in flight, too, as the order of errors differs.
fn storages_here() -> Vec<Storage> {
    let mut all = storages();
    all.extend(StorageOptions::new().block(64 << 10).depth(1).host().ok());
    all
}
