//! What a guest may put into a folder, each beside a file that is told.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use crate::collect::MAX_SAID;

/// A file as it was told: its path, its permissions, its bytes, and whether it stayed the same.
type Told = (String, u32, Vec<u8>, bool);

/// An answer: what was told, and how it ended.
fn ask(top: &Path, folder: &str, globs: &[&str], bounds: Bounds) -> (Vec<Told>, Said) {
    let top = OwnedFd::from(File::open(top).unwrap());
    let globs = globs.iter().map(|&glob| glob.to_owned()).collect::<Vec<_>>().try_into().unwrap();
    let ask = Ask { folder: folder.into(), globs, bounds };
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || answer(&mut theirs, &top).unwrap());
        send(&mut ours, &serde_json::to_vec(&ask).unwrap()).unwrap();
        let mut files = Vec::new();
        loop {
            let said = serde_json::from_slice(&receive(&mut ours, MAX_SAID).unwrap()).unwrap();
            let Said::File { path, mode, .. } = said else { return (sorted(files), said) };
            let mut bytes = Vec::new();
            loop {
                let piece = receive(&mut ours, MAX_PIECE).unwrap();
                if piece.is_empty() {
                    break;
                }
                bytes.extend(piece);
            }
            let read = serde_json::from_slice(&receive(&mut ours, MAX_SAID).unwrap()).unwrap();
            let Said::Read { whole } = read else { panic!("{read:?}") };
            files.push((path, mode, bytes, whole));
        }
    })
}

fn sorted(mut files: Vec<Told>) -> Vec<Told> {
    files.sort();
    files
}

fn paths(told: &[Told]) -> Vec<&str> {
    told.iter().map(|(path, ..)| path.as_str()).collect()
}

fn done(said: &Said) -> LeftOut {
    let Said::Done(left_out) = *said else { panic!("{said:?}") };
    left_out
}

fn nothing() -> LeftOut {
    LeftOut::default()
}

#[test]
fn files_are_told_with_their_bytes_and_permissions() {
    let dir = tempfile::tempdir().unwrap();
    let project = dir.path().join("workspace/project");
    std::fs::create_dir_all(project.join("a/b")).unwrap();
    let long: Vec<u8> = (0..300_000_u32).map(|n| n.to_le_bytes()[0]).collect();
    std::fs::write(project.join("a/b/long"), &long).unwrap();
    std::fs::write(project.join("empty"), "").unwrap();
    std::fs::write(project.join("ü\n"), "x").unwrap();
    std::fs::write(dir.path().join("workspace/beside"), "not asked for").unwrap();
    std::fs::set_permissions(project.join("empty"), std::fs::Permissions::from_mode(0o6751)).unwrap();
    std::fs::set_permissions(project.join("ü\n"), std::fs::Permissions::from_mode(0o000)).unwrap();
    std::fs::set_permissions(project.join("a/b/long"), std::fs::Permissions::from_mode(0o644)).unwrap();
    let (told, said) = ask(dir.path(), "workspace/project", &[], Bounds::WIDEST);
    assert_eq!(done(&said), nothing());
    let wanted = [
        ("a/b/long".to_owned(), 0o644, long, true),
        // Without what would make it somebody else's.
        ("empty".to_owned(), 0o751, Vec::new(), true),
        ("ü\n".to_owned(), 0o000, b"x".to_vec(), true),
    ];
    assert!(told == wanted, "{:?}", paths(&told));
    let (told, said) = ask(dir.path(), "workspace/project", &["a", "*.none"], Bounds::WIDEST);
    assert_eq!((paths(&told), done(&said)), (vec!["a/b/long"], nothing()));
}

#[test]
fn nothing_but_regular_files_is_told() {
    let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(outside.path().join("secret"), "secret").unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::write(at("file"), "told").unwrap();
    symlink(outside.path().join("secret"), at("link-to-a-file")).unwrap();
    symlink(outside.path(), at("link-to-a-folder")).unwrap();
    symlink("..", at("link-up")).unwrap();
    symlink("/proc/self/root", at("magic")).unwrap();
    let make = |name: &str, kind, device| {
        rustix::fs::mknodat(rustix::fs::CWD, at(name), kind, Mode::from_raw_mode(0o666), device).unwrap();
    };
    // Which blocks whoever opens it, and never ends, in turn.
    make("pipe", FileType::Fifo, 0);
    make("zero", FileType::CharacterDevice, rustix::fs::makedev(1, 5));
    make("whiteout", FileType::CharacterDevice, 0);
    make("disk", FileType::BlockDevice, rustix::fs::makedev(7, 0));
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    let (told, said) = ask(dir.path(), "", &[], Bounds::WIDEST);
    assert_eq!(done(&said), LeftOut { symlinks: 4, special: 5, ..nothing() });
    assert_eq!(told, [("file".to_owned(), 0o644, b"told".to_vec(), true)]);
    // Of what nobody wants nothing is said.
    let (told, said) = ask(dir.path(), "", &["file"], Bounds::WIDEST);
    assert_eq!((told.len(), done(&said)), (1, nothing()));
}

#[test]
fn the_folder_itself_is_behind_no_link() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("real")).unwrap();
    std::fs::write(dir.path().join("real/file"), "x").unwrap();
    symlink("real", dir.path().join("link")).unwrap();
    symlink("/etc", dir.path().join("out")).unwrap();
    let (told, _) = ask(dir.path(), "real", &[], Bounds::WIDEST);
    assert_eq!(paths(&told), ["file"], "the control");
    for (folder, wanted) in [
        ("link", Why::Invalid),
        ("out", Why::Invalid),
        ("out/ssl", Why::Invalid),
        ("real/file", Why::Invalid),
        ("none", Why::NotFound),
        ("..", Why::Invalid),
        ("/etc", Why::Invalid),
        ("real/../..", Why::Invalid),
    ] {
        let (told, said) = ask(dir.path(), folder, &[], Bounds::WIDEST);
        assert!(told.is_empty());
        assert!(matches!(said, Said::Refused { why, .. } if why == wanted), "{folder} {said:?}");
    }
}

#[test]
fn no_mount_is_entered() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("volume")).unwrap();
    std::fs::write(dir.path().join("file"), "x").unwrap();
    let tmpfs = sandglass_linux::mount::Mount {
        source: c"none".into(),
        target: std::ffi::CString::new(dir.path().join("volume").as_os_str().as_bytes()).unwrap(),
        fstype: c"tmpfs".into(),
        flags: 0,
        data: c"size=64k".into(),
    };
    let mounts = sandglass_linux::mount::MountNamespace::furnish(
        sandglass_linux::mount::Propagation::Private,
        &[tmpfs],
    );
    let (told, said) = mounts
        .unwrap()
        .run(|| {
            std::fs::write(dir.path().join("volume/of-others"), "x").unwrap();
            ask(dir.path(), "", &[], Bounds::WIDEST)
        })
        .unwrap();
    assert_eq!((paths(&told), done(&said)), (vec!["file"], LeftOut { mounts: 1, ..nothing() }));
}

#[test]
fn bounds_hold_and_say_what_they_left_out() {
    let dir = tempfile::tempdir().unwrap();
    for n in 0..5 {
        std::fs::write(dir.path().join(format!("small-{n}")), "12345").unwrap();
    }
    // Hardly any blocks, and more bytes than anybody wants.
    let sparse = File::create(dir.path().join("sparse")).unwrap();
    sparse.set_len(1 << 40).unwrap();
    sparse.write_all_at(b"x", 1 << 39).unwrap();
    let bounds = Bounds { file_bytes: 5, ..Bounds::WIDEST };
    let (told, said) = ask(dir.path(), "", &[], bounds);
    assert_eq!((told.len(), done(&said)), (5, LeftOut { too_large: 1, ..nothing() }));
    let (told, said) = ask(dir.path(), "", &[], Bounds { bytes: 12, ..bounds });
    assert_eq!((told.len(), done(&said)), (2, LeftOut { too_large: 4, ..nothing() }));
    let (told, said) = ask(dir.path(), "", &[], Bounds { files: 3, ..bounds });
    assert_eq!((told.len(), done(&said)), (3, LeftOut { too_large: 1, too_many: 2, ..nothing() }));
    let (told, said) = ask(dir.path(), "", &[], Bounds { files: 0, ..bounds });
    assert_eq!((told.len(), done(&said)), (0, LeftOut { too_large: 1, too_many: 5, ..nothing() }));
}

#[test]
fn time_ends_a_walk_and_the_answer_says_so() {
    let dir = tempfile::tempdir().unwrap();
    for n in 0..LOOK_UP * 2 {
        std::fs::write(dir.path().join(n.to_string()), "").unwrap();
    }
    let (told, said) = ask(dir.path(), "", &[], Bounds { seconds: 0, ..Bounds::WIDEST });
    assert!(done(&said).cut_short);
    assert!(told.len() < usize::try_from(LOOK_UP).unwrap(), "{}", told.len());
    let (told, said) = ask(dir.path(), "", &[], Bounds::WIDEST);
    assert_eq!((told.len() as u64, done(&said)), (LOOK_UP * 2, nothing()));
}

#[test]
fn names_of_every_byte_and_deep_folders_are_told_or_counted() {
    let dir = tempfile::tempdir().unwrap();
    for byte in (1..=u8::MAX).filter(|byte| !matches!(byte, b'/' | b'.' | b'd')) {
        std::fs::write(dir.path().join(OsStr::from_bytes(&[byte])), "x").unwrap();
    }
    let mut deep = dir.path().to_owned();
    for _ in 0..MAX_DEPTH + 8 {
        deep.push("d");
        std::fs::create_dir(&deep).unwrap();
        std::fs::write(deep.join("f"), "x").unwrap();
    }
    let (told, said) = ask(dir.path(), "", &[], Bounds::WIDEST);
    let left_out = done(&said);
    assert_eq!((left_out.names, left_out.too_deep), (128, 1));
    assert_eq!(paths(&told).iter().filter(|path| path.ends_with("/f")).count(), MAX_DEPTH - 1);
    assert!(told.iter().all(|(path, ..)| is_inside(path)));
}

#[test]
fn a_hundred_thousand_files_are_looked_at_in_bounded_time() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    for n in 0..100_000 {
        File::create(dir.path().join(n.to_string())).unwrap();
    }
    std::fs::write(dir.path().join("wanted"), "x").unwrap();
    let began = Instant::now();
    let (told, said) = ask(dir.path(), "", &["wanted"], Bounds::WIDEST);
    assert_eq!((paths(&told), done(&said)), (vec!["wanted"], nothing()));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

/// While a guest swaps a file for a link to a secret, and a folder for a link to the folder of secrets, as fast as it can.
#[test]
fn what_is_swapped_meanwhile_leads_nowhere() {
    let (dir, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(outside.path().join("file"), "secret").unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::create_dir(at("folder")).unwrap();
    for path in ["file", "folder/file"] {
        std::fs::write(at(path), "public").unwrap();
    }
    symlink(outside.path(), at("folder-link")).unwrap();
    symlink(outside.path().join("file"), at("file-link")).unwrap();
    let stop = AtomicBool::new(false);
    let swap = |a: &str, b: &str| {
        let flags = rustix::fs::RenameFlags::EXCHANGE;
        rustix::fs::renameat_with(rustix::fs::CWD, at(a), rustix::fs::CWD, at(b), flags).unwrap();
    };
    let (mut told_public, mut counted_links) = (0, 0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                swap("folder", "folder-link");
                swap("file", "file-link");
            }
        });
        for _ in 0..2000 {
            let (told, said) = ask(dir.path(), "", &[], Bounds::WIDEST);
            for (path, _, bytes, _) in &told {
                assert_eq!(bytes, b"public", "{path}");
            }
            told_public += told.len();
            counted_links += done(&said).symlinks;
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(told_public > 0 && counted_links > 0, "both sides of the race were seen");
}

#[test]
fn a_file_that_is_written_meanwhile_is_said_not_to_be_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("growing");
    std::fs::write(&path, vec![b'x'; 1 << 20]).unwrap();
    let (told, _) = ask(dir.path(), "", &[], Bounds::WIDEST);
    assert!(told.iter().all(|(.., whole)| *whole), "the control");
    let stop = AtomicBool::new(false);
    let mut seen = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let file = File::options().write(true).open(&path).unwrap();
                file.set_len(1 << 10).unwrap();
                file.set_len(1 << 20).unwrap();
            }
        });
        for _ in 0..500 {
            let (told, _) = ask(dir.path(), "", &[], Bounds::WIDEST);
            seen += told.iter().filter(|(.., whole)| !whole).count();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(seen > 0);
}

#[test]
fn a_walk_ends_when_nobody_waits_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let file = File::create(dir.path().join("long")).unwrap();
    file.set_len(1 << 30).unwrap();
    let top = OwnedFd::from(File::open(dir.path()).unwrap());
    let (mut ours, mut theirs) = UnixStream::pair().unwrap();
    let ask = Ask { folder: String::new(), globs: Globs::default(), bounds: Bounds::WIDEST };
    send(&mut ours, &serde_json::to_vec(&ask).unwrap()).unwrap();
    let walk = std::thread::spawn(move || answer(&mut theirs, &top));
    receive(&mut ours, MAX_SAID).unwrap();
    drop(ours);
    assert!(walk.join().unwrap().is_err());
}
