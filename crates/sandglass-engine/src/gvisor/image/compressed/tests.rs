use std::os::unix::fs::{FileExt as _, MetadataExt as _};

use sandglass_types::{Digest, Limits};

use super::super::super::record::Pinned;
use super::super::{Keep, Memory, Mismatch, mismatch, remove, sweep};
use super::*;

const MIB: u64 = 1 << 20;
const EVER: GoOn<'static> = &|| true;

fn pinned() -> Pinned {
    let digest = Digest::from_bytes([1; 32]);
    Pinned { rootfs: digest, agent: digest, runsc: "1".into() }
}

/// Folders of images, and an image that is like one of a sandbox: memory that compresses well, a little that is small, and a
/// sparse disk that holds what does not compress at all.
fn world() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let unfinished = Unfinished::begin(dir.path()).unwrap();
    let checkpoint = unfinished.begin_checkpoint().unwrap();
    std::fs::write(checkpoint.join("pages.img"), "memory ".repeat(300_000)).unwrap();
    std::fs::write(checkpoint.join("pages_meta.img"), "pages").unwrap();
    let disk = std::fs::File::create(unfinished.image().disk()).unwrap();
    disk.set_len(1 << 30).unwrap();
    let random: Vec<u8> = std::iter::repeat_with(rand::random).take(1 << 20).collect();
    disk.write_all_at(&random, 512 << 20).unwrap();
    unfinished.image().describe(pinned(), Limits::default(), Memory::With).unwrap();
    let target = dir.path().join("image");
    unfinished.finish(&target, Keep::Flushed).unwrap();
    (dir, target)
}

/// All that is in an image, by what comes out of it.
fn content(target: &Path) -> Vec<(u64, Vec<u8>)> {
    let image = Image::at(target.to_owned());
    let disk = std::fs::File::open(image.disk()).unwrap();
    let mut some = vec![0; 2 << 20];
    disk.read_exact_at(&mut some, 511 << 20).unwrap();
    let small =
        ["pages.img", "pages_meta.img"].map(|name| std::fs::read(image.checkpoint().join(name)).unwrap());
    let mut all = vec![(disk.metadata().unwrap().len(), some)];
    all.extend(small.map(|bytes| (0, bytes)));
    all
}

fn alone(dir: &Path) -> bool {
    std::fs::read_dir(dir).unwrap().count() == 1
}

fn taken(target: &Path) -> u64 {
    let image = Image::at(target.to_owned());
    let disk = std::fs::metadata(image.disk()).unwrap().blocks() * 512;
    let rest =
        std::fs::read_dir(target).unwrap().map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512);
    disk + rest.sum::<u64>()
}

#[test]
fn only_what_saves_something_is_compressed() {
    let file = |bytes, unique_bytes| Footprint { bytes, unique_bytes, exact: true, compressed: false };
    for (file, expected) in [
        (file(100 * MIB, 100 * MIB), true),
        (file(100 * MIB, 50 * MIB), true),
        // A disk that it shares with the sandbox that it is of: nothing of that would be free.
        (file(100 * MIB, 49 * MIB), false),
        (file(4096 * MIB, 100 * MIB), false),
        (file(100 * MIB, 0), false),
        (file(LEAST, LEAST), true),
        (file(LEAST - 1, LEAST - 1), false),
        (file(0, 0), false),
        (file(u64::MAX, u64::MAX), true),
    ] {
        assert_eq!(worth_trying(&file), expected, "{file:?}");
        assert!(most(&file) <= file.unique_bytes);
    }
    assert_eq!(most(&file(80, 80)), 70);
}

#[test]
fn it_is_the_same_image_afterwards_with_the_holes_of_its_disk() {
    let (dir, target) = world();
    let (before, bytes) = (content(&target), taken(&target));
    assert_eq!(compress(dir.path(), &target, EVER).unwrap(), Compression::Compressed);
    assert!(alone(dir.path()), "something is left aside");
    let image = Image::at(target.clone());
    assert!(image.looks_compressed() && image.meta().unwrap().is_compressed());
    let list = image.list().unwrap();
    let parts: Vec<_> = list.iter().map(|one| one.part.clone()).collect();
    assert_eq!(parts, [Part::Checkpoint("pages.img".into())], "the rest stays as it is");
    assert!(!image.checkpoint().join("pages.img").exists() && image.disk().exists());
    assert_eq!(std::fs::metadata(image.disk()).unwrap().nlink(), 1, "the other form is gone");
    assert!(taken(&target) + MIB < bytes + 2 * MIB);
    assert_eq!(compress(dir.path(), &target, EVER).unwrap(), Compression::Already);
    // Those who know only the other form refuse it, and know what it needs all the same.
    let meta = image.meta().unwrap();
    assert_eq!(mismatch(&meta, &pinned(), Limits::default(), Memory::With), Some(Mismatch::Other("format")));
    assert_eq!(meta.pinned, pinned());

    expand(dir.path(), &target).unwrap();
    assert!(alone(dir.path()) && !image.looks_compressed());
    assert!(content(&target) == before, "something else came out of it");
    assert!(std::fs::metadata(image.disk()).unwrap().blocks() * 512 <= 2 * MIB);
    assert_eq!(mismatch(&image.meta().unwrap(), &pinned(), Limits::default(), Memory::With), None);
    // And once more.
    assert_eq!(compress(dir.path(), &target, EVER).unwrap(), Compression::Compressed);
    remove(dir.path(), &target).unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_sparse_disk_is_compressed_and_stays_sparse() {
    let (dir, target) = world();
    let image = Image::at(target.clone());
    let disk = std::fs::OpenOptions::new().write(true).open(image.disk()).unwrap();
    for at in [0, 100 << 20, 512 << 20, 1000 << 20] {
        disk.write_all_at(&b"text ".repeat(100_000), at).unwrap();
    }
    disk.write_all_at(&vec![0; 1 << 20], 512 << 20).unwrap();
    disk.sync_all().unwrap();
    let before = content(&target);
    assert_eq!(compress(dir.path(), &target, EVER).unwrap(), Compression::Compressed);
    assert!(!image.disk().exists() && image.list().unwrap().len() == 2);
    expand(dir.path(), &target).unwrap();
    assert!(content(&target) == before);
    let meta = std::fs::metadata(image.disk()).unwrap();
    assert!(meta.len() == 1 << 30 && meta.blocks() * 512 < 4 * MIB, "{meta:?}");
}

#[test]
fn what_saves_nothing_stays_as_it_is() {
    let (dir, target) = world();
    std::fs::write(target.join("checkpoint/pages.img"), "little").unwrap();
    let before = content(&target);
    assert_eq!(compress(dir.path(), &target, EVER).unwrap(), Compression::NotWorth);
    assert!(alone(dir.path()) && content(&target) == before);
}

#[test]
fn who_wants_it_finds_it_as_it_was() {
    let (dir, target) = world();
    let before = content(&target);
    for after in [0, 1, 3, 9] {
        let asked = std::sync::atomic::AtomicU32::new(0);
        let go_on = || asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < after;
        assert_eq!(compress(dir.path(), &target, &go_on).unwrap(), Compression::GivenUp);
        assert!(alone(dir.path()) && content(&target) == before, "after {after}");
    }
}

#[test]
fn one_that_is_removed_meanwhile_is_not_back() {
    let (dir, target) = world();
    let asked = std::sync::atomic::AtomicBool::new(false);
    let go_on = || {
        if !asked.swap(true, std::sync::atomic::Ordering::Relaxed) {
            remove(dir.path(), &target).unwrap();
        }
        true
    };
    let outcome = compress(dir.path(), &target, &go_on);
    assert!(matches!(outcome, Ok(Compression::GivenUp) | Err(_)), "{outcome:?}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn damage_is_refused_and_changes_nothing() {
    let (dir, target) = world();
    assert_eq!(compress(dir.path(), &target, EVER).unwrap(), Compression::Compressed);
    let (stream, list) = (target.join("0.zst"), target.join("packed.json"));
    let (sound, text) = (std::fs::read(&stream).unwrap(), std::fs::read_to_string(&list).unwrap());
    let refused = |why: &str| {
        let refused = expand(dir.path(), &target);
        let Err(EngineError::Damaged { what }) = refused else { panic!("{why}: {refused:?}") };
        assert!(alone(dir.path()), "{why}: something is left aside");
        what
    };
    let mut flipped = sound.clone();
    flipped[sound.len() / 2] ^= 1;
    for (why, bytes) in [("flipped", &flipped[..]), ("cut", &sound[..sound.len() / 2]), ("empty", &[])] {
        std::fs::write(&stream, bytes).unwrap();
        assert!(refused(why).starts_with("0.zst: "));
    }
    std::fs::remove_file(&stream).unwrap();
    assert_eq!(refused("gone"), "0.zst: it is not there");
    std::fs::write(&stream, &sound).unwrap();
    let long = format!("[{}]", vec![&text[1..text.len() - 1]; 20].join(","));
    for (why, wrong) in [
        ("no list", "{}".into()),
        ("cut", text[..text.len() / 2].to_owned()),
        ("a path", text.replace("pages.img", "../../disk")),
        ("hidden", text.replace("pages.img", ".pages")),
        ("twice", format!("[{0},{0}]", &text[1..text.len() - 1])),
        ("too many", long),
        ("a field of another program", text.replacen("\"part\"", "\"mode\":1,\"part\"", 1)),
    ] {
        assert_ne!(wrong, text);
        std::fs::write(&list, wrong).unwrap();
        assert_eq!(refused(why), "packed.json: it can't be read");
    }
    std::fs::remove_file(&list).unwrap();
    assert_eq!(refused("no list"), "packed.json: it can't be read");
    std::fs::write(&list, text).unwrap();
    // The positive control.
    expand(dir.path(), &target).unwrap();
}

#[test]
fn what_a_dead_host_left_aside_is_swept_and_the_image_is_whole() {
    let (dir, target) = world();
    let before = content(&target);
    std::mem::forget(Unfinished::begin(dir.path()).unwrap());
    assert_eq!(compress(dir.path(), &target, EVER).unwrap(), Compression::Compressed);
    // Right after the swap: the other form is aside.
    let mut unfinished = Unfinished::begin(dir.path()).unwrap();
    std::fs::write(unfinished.image().0.join("new"), "").unwrap();
    unfinished.swap(&target).unwrap();
    unfinished.swap(&target).unwrap();
    std::mem::forget(unfinished);
    sweep(dir.path()).unwrap();
    assert!(alone(dir.path()));
    expand(dir.path(), &target).unwrap();
    assert!(content(&target) == before);
}
