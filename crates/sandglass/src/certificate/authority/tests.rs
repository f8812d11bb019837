use super::*;

const DOMAIN: &str = "Sbx.test:3000";

fn texts(files: &Files) -> [Vec<u8>; 3] {
    [files.authority(), files.server(), files.bundle()].map(|path| contents(&path).unwrap())
}

#[test]
fn an_authority_is_made_once_and_lasts() {
    let data = tempfile::tempdir().unwrap();
    certify(data.path(), DOMAIN).unwrap();
    let files = Files::of(data.path(), DOMAIN);
    let first = texts(&files);
    certify(data.path(), DOMAIN).unwrap();
    assert_eq!(texts(&files), first);
    assert!(first[2].ends_with(&first[0]));
    for (path, mode) in [(files.authority_key(), 0o600), (files.server_key(), 0o600), (files.bundle(), 0o644)]
    {
        assert_eq!(std::fs::metadata(path).unwrap().permissions().mode() & 0o777, mode);
    }
    // Another domain has another authority, because this one can't vouch for it.
    certify(data.path(), "other.test").unwrap();
    let other = Files::of(data.path(), "other.test");
    assert_ne!(texts(&other)[0], first[0]);
    let wrong = read(&other.server(), &other.server_key(), DOMAIN).unwrap_err();
    assert!(wrong.to_string().contains("it is not for api.sbx.test"), "{wrong}");
}

#[test]
fn what_is_missing_or_broken_is_made_again() {
    let data = tempfile::tempdir().unwrap();
    certify(data.path(), DOMAIN).unwrap();
    let files = Files::of(data.path(), DOMAIN);
    let [authority, server, _] = texts(&files);
    for path in [files.server(), files.server_key()] {
        std::fs::write(path, "").unwrap();
        certify(data.path(), DOMAIN).unwrap();
        let [same, new, _] = texts(&files);
        assert_eq!(same, authority);
        assert_ne!(new, server);
        read(&files.server(), &files.server_key(), DOMAIN).unwrap();
    }
    // One that another authority of the same name made.
    let elsewhere = tempfile::tempdir().unwrap();
    certify(elsewhere.path(), DOMAIN).unwrap();
    let other = Files::of(elsewhere.path(), DOMAIN);
    for (from, to) in [(other.server(), files.server()), (other.server_key(), files.server_key())] {
        std::fs::copy(from, to).unwrap();
    }
    certify(data.path(), DOMAIN).unwrap();
    let found = read(&files.server(), &files.server_key(), DOMAIN).unwrap();
    assert!(found.is_vouched_for(&authority, "sbx.test"));
    // A start that was cut off.
    std::fs::write(files.0.join("server.new"), "x").unwrap();
    std::fs::remove_file(files.server()).unwrap();
    certify(data.path(), DOMAIN).unwrap();
    // Of an authority without its key there is nothing to make, and clients trust it: somebody has to decide.
    std::fs::remove_file(files.authority_key()).unwrap();
    std::fs::remove_file(files.server()).unwrap();
    assert!(certify(data.path(), DOMAIN).is_err());
}
