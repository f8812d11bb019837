use std::fs;
use std::fs::File;
use std::path::Path;

use http::{HeaderName, HeaderValue};

use super::*;
use crate::path::open_root;

fn headers(pairs: &[(&str, &[u8])]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in pairs {
        headers.append(
            HeaderName::from_bytes(name.as_bytes()).unwrap(),
            HeaderValue::from_bytes(value).unwrap(),
        );
    }
    headers
}

fn parse(pairs: &[(&str, &[u8])]) -> Result<Metadata, MetadataError> {
    Metadata::parse(&headers(pairs))
}

fn metadata(key: &str, value: &str) -> Metadata {
    parse(&[(&format!("X-Metadata-{key}"), value.as_bytes())]).unwrap()
}

#[test]
fn headers_are_metadata_within_bounds() {
    let found = parse(&[("X-Metadata-Key", b"v 1"), ("x-metadata-key", b"second"), ("X-Other", b"\xff")]);
    assert_eq!(found.unwrap().into_map(), BTreeMap::from([("key".into(), "v 1".into())]));
    assert!(matches!(parse(&[("x-metadata-", b"v")]), Err(MetadataError::Key(_))));
    let long = |len| format!("x-metadata-{}", "k".repeat(len));
    assert!(parse(&[(&long(246), b"v")]).is_ok());
    assert!(matches!(parse(&[(&long(247), b"v")]), Err(MetadataError::Key(_))));
    for value in [&b"\xc3\xa4"[..], b"a\tb", b"\xff"] {
        assert!(matches!(parse(&[("x-metadata-k", value)]), Err(MetadataError::Value(_))), "{value:?}");
    }
    let full = vec![b'v'; MAX_TOTAL - NAMESPACE.len() - 1];
    assert!(parse(&[("x-metadata-k", &full)]).is_ok());
    assert!(matches!(parse(&[("x-metadata-k", &full), ("x-metadata-l", b"")]), Err(MetadataError::TooMuch)));
}

fn stat(dir: &OwnedFd, name: &CStr) -> Option<Stat> {
    rustix::fs::statat(dir, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW).ok()
}

/// Where it is kept.
trait Keeper {
    fn replace(&mut self, file: &OwnedFd, metadata: &Metadata);
    fn of(&mut self, dir: &OwnedFd, name: &CStr) -> Metadata;
}

impl Keeper for Labels {
    fn replace(&mut self, file: &OwnedFd, metadata: &Metadata) {
        Self::replace(self, file, metadata).unwrap();
        assert!(self.0.lock().unwrap().is_unused(), "the file system keeps it");
    }
    fn of(&mut self, dir: &OwnedFd, name: &CStr) -> Metadata {
        stat(dir, name).map_or_else(Metadata::default, |stat| Self::of(self, dir, name, &stat))
    }
}

impl Keeper for Table {
    fn replace(&mut self, file: &OwnedFd, metadata: &Metadata) {
        Self::replace(self, file, metadata).unwrap();
    }
    fn of(&mut self, dir: &OwnedFd, name: &CStr) -> Metadata {
        stat(dir, name)
            .map_or_else(Metadata::default, |stat| Self::of(self, &path_of(dir, name), number(&stat)))
    }
}

fn follows_its_file(keeper: &mut dyn Keeper, at: &Path) {
    let dir = open_root(at).unwrap();
    let write = |name: &str| -> OwnedFd { File::create(at.join(name)).unwrap().into() };
    let none = Metadata::default();
    write("other");
    keeper.replace(&write("a"), &metadata("k", "1"));
    assert_eq!(keeper.of(&dir, c"a"), metadata("k", "1"));
    assert_eq!((keeper.of(&dir, c"other"), keeper.of(&dir, c"missing")), (none.clone(), none.clone()));
    fs::write(at.join("a"), "changed by a program").unwrap();
    fs::rename(at.join("a"), at.join("b")).unwrap();
    assert_eq!((keeper.of(&dir, c"a"), keeper.of(&dir, c"b")), (none.clone(), metadata("k", "1")));
    // All of it is replaced.
    keeper.replace(&write("b"), &metadata("l", "2"));
    assert_eq!(keeper.of(&dir, c"b"), metadata("l", "2"));
    keeper.replace(&write("b"), &none);
    assert_eq!(keeper.of(&dir, c"b"), none);
    // What takes a file's name, or its number, does not take that.
    for _ in 0..50 {
        keeper.replace(&write("b"), &metadata("l", "2"));
        fs::remove_file(at.join("b")).unwrap();
        drop(write("b"));
        assert_eq!(keeper.of(&dir, c"b"), none);
        keeper.replace(&write("b"), &metadata("l", "2"));
        write("c");
        fs::rename(at.join("c"), at.join("b")).unwrap();
        assert_eq!(keeper.of(&dir, c"b"), none);
    }
    // A link is none of its target.
    keeper.replace(&write("target"), &metadata("k", "1"));
    std::os::unix::fs::symlink("target", at.join("link")).unwrap();
    assert_eq!(keeper.of(&dir, c"link"), none);
}

#[test]
fn attributes_follow_their_file() {
    // Files in memory have them, whatever the disk has.
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    follows_its_file(&mut Labels::default(), dir.path());
}

#[test]
fn what_the_agent_keeps_follows_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let mut table = Table::default();
    follows_its_file(&mut table, dir.path());
    fs::remove_file(dir.path().join("target")).unwrap();
    let other = File::open(dir.path().join("other")).unwrap().into();
    table.replace(&other, &Metadata::default()).unwrap();
    assert!(table.is_unused(), "{table:?}");
}

#[test]
fn what_the_agent_keeps_is_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let mut table = Table::default();
    let large = metadata("k", &"v".repeat(4000));
    let mut full = 0;
    let refused = loop {
        let file = File::create(dir.path().join(full.to_string())).unwrap().into();
        match Table::replace(&mut table, &file, &large) {
            Ok(()) => full += 1,
            Err(errno) => break errno,
        }
    };
    assert_eq!((refused, full), (Errno::NOSPC, (4 << 20) / large.size()));
    // Room is for who has some already, and for whom others make it.
    let again = File::create(dir.path().join("0")).unwrap().into();
    Table::replace(&mut table, &again, &large).unwrap();
    fs::remove_file(dir.path().join("1")).unwrap();
    let file = File::create(dir.path().join("new")).unwrap().into();
    Table::replace(&mut table, &file, &large).unwrap();
}

#[test]
fn what_others_attach_is_told_if_it_is_text() {
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    let file: OwnedFd = File::create(dir.path().join("f")).unwrap().into();
    for (name, value) in [("user.e2b.a", &b"1"[..]), ("user.e2b.b", b"\xff"), ("user.other", b"2")] {
        rustix::fs::fsetxattr(&file, name, value, XattrFlags::empty()).unwrap();
    }
    let root = open_root(dir.path()).unwrap();
    let stat = stat(&root, c"f").unwrap();
    assert_eq!(Labels::default().of(&root, c"f", &stat), metadata("a", "1"));
    Labels::default().replace(&file, &metadata("c", "3")).unwrap();
    assert_eq!(Labels::default().of(&root, c"f", &stat), metadata("c", "3"));
    let mut value = [0; 8];
    assert!(rustix::fs::fgetxattr(&file, "user.other", &mut value).is_ok());
}
