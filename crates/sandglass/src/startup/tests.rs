use std::collections::BTreeSet;

use super::*;

fn document(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap();
    std::fs::read_to_string(root.join(path)).unwrap()
}

/// The reasons that a person must do something about.
fn lasting() -> impl Iterator<Item = Reason> {
    Reason::ALL.into_iter().filter(|reason| reason.code() < 30)
}

#[test]
fn codes_are_distinct_and_free() {
    let codes: BTreeSet<u8> = Reason::ALL.into_iter().map(Reason::code).collect();
    assert_eq!(codes.len(), Reason::ALL.len());
    assert!(codes.iter().all(|code| (10..50).contains(code)), "{codes:?}");
    for reason in Reason::ALL {
        assert_eq!(Reason::of_code(reason.code().into()), Some(reason));
        assert!(!reason.remedy().is_empty());
    }
    assert_eq!([0, 1, 2, 101, 137].map(Reason::of_code), [None; 5]);
}

#[test]
fn the_manual_lists_every_code() {
    let manual = document("docs/operations.md");
    let listed: BTreeSet<u8> = manual
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split(' ').next()?.parse().ok())
        .filter(|code| *code >= 10)
        .collect();
    assert_eq!(listed, Reason::ALL.into_iter().map(Reason::code).collect());
}

#[test]
fn the_service_is_not_started_again_where_that_is_no_cure() {
    let unit = document("packaging/sandglass.service");
    let listed = unit.lines().find_map(|line| line.strip_prefix("RestartPreventExitStatus=")).unwrap();
    let listed: BTreeSet<u8> = listed.split(' ').map(|code| code.parse().unwrap()).collect();
    // 2 is a command line that makes no sense.
    assert_eq!(listed, lasting().map(Reason::code).chain([2]).collect());
}

#[test]
fn a_failure_is_one_line_with_its_remedy() {
    let error = StartupError::new(Reason::ForeignFolder, "/a\nb\x1b[2J is foreign");
    assert_eq!(one_line(&error.to_string()), "/a b [2J is foreign: choose another --data-dir");
    assert_eq!(one_line("x\n"), "x");
}

#[test]
fn a_full_disk_is_told_from_one_that_can_not_be_used() {
    let reason = |folder, kind: io::ErrorKind| {
        StartupError::folder(folder, Path::new("/d"), &io::Error::from(kind)).reason()
    };
    assert_eq!(reason(Folder::Data, io::ErrorKind::StorageFull), Reason::DataFull);
    assert_eq!(reason(Folder::Cache, io::ErrorKind::QuotaExceeded), Reason::CacheFull);
    assert_eq!(reason(Folder::Data, io::ErrorKind::PermissionDenied), Reason::UnusableFolder);
    assert_eq!(reason(Folder::Cache, io::ErrorKind::ReadOnlyFilesystem), Reason::UnusableFolder);
}

#[test]
fn failures_of_the_libraries_keep_their_kind() {
    let store = |error| StartupError::from(error).reason();
    assert_eq!(store(StoreError::NewerSchema { found: 9, known: 1 }), Reason::NewerSchema);
    assert_eq!(store(StoreError::Full), Reason::DataFull);
    assert_eq!(store(StoreError::NotOurs { path: "x".into() }), Reason::DamagedStore);
    assert_eq!(StartupError::from(PrivilegeError::NoLandlock).reason(), Reason::NoLandlock);
    let lacking =
        |lack| StartupError::from(EngineError::NoRoom { lack, step: "x", source: "x".into() }).reason();
    assert_eq!(lacking(Lack::Memory), Reason::NoRoom);
    assert_eq!(lacking(Lack::Disk), Reason::DataFull);
    let seal = NetworkError::Seal(sandglass_linux::nft::NftError::NotInstalled);
    assert_eq!(StartupError::from(seal).reason(), Reason::NoPacketFilter);
    let record = serde_json::from_str::<u8>("x").unwrap_err();
    let template = TemplateError::Record { path: "x".into(), source: record };
    assert_eq!(StartupError::from(template).reason(), Reason::Template);
}
