use super::*;
use crate::receipt::{Chain, Kind, Outcome, Receipt, Text, verify};

fn sandbox() -> SandboxId {
    crate::fixture::sandbox()
}

fn receipt(rule: &str) -> Receipt {
    let enforcer = crate::fixture::fixture("[]", &[]).enforcer;
    let receipt = enforcer.refusal(Kind::Dns, rule);
    assert_eq!(receipt.outcome, Outcome::Denied);
    receipt
}

/// Lines of a chain that goes on after `head`.
fn lines(head: Option<Head>, count: usize) -> (Vec<String>, Head) {
    let mut chain = match head {
        Some(head) => Chain::resume(sandbox(), head),
        None => Chain::begin(sandbox()),
    };
    let receipt = receipt("always/name");
    let lines = (0..count).map(|_| chain.append(receipt.clone()).unwrap()).collect();
    (lines, chain.head().clone())
}

async fn open(folder: &Path) -> (FileLedger, Option<Head>, TaskTracker) {
    let tasks = TaskTracker::new();
    let (ledger, head) = FileLedger::open(folder.to_owned(), sandbox(), &tasks).await.unwrap();
    (ledger, head, tasks)
}

async fn close(ledger: FileLedger, tasks: TaskTracker) {
    drop(ledger);
    tasks.close();
    tasks.wait().await;
}

fn check(folder: &Path, start: Option<Head>, end: &Head) {
    let lines = newest(folder, usize::MAX).unwrap();
    let checked = verify(&sandbox(), start, lines.iter().map(String::as_str), Some(end));
    assert_eq!(checked, Ok(end.clone()));
}

#[tokio::test]
async fn a_chain_goes_on_where_the_file_ends() {
    let folder = tempfile::tempdir().unwrap();
    let (ledger, head, tasks) = open(folder.path()).await;
    assert_eq!(head, None);
    assert_eq!(newest(folder.path(), 10).unwrap(), [""; 0]);
    let (first, end) = lines(None, 3);
    for line in &first {
        ledger.append(line.clone()).unwrap();
    }
    ledger.flush().await;
    assert_eq!(newest(folder.path(), usize::MAX).unwrap(), first);
    assert_eq!(newest(folder.path(), 2).unwrap(), first[1..]);
    close(ledger, tasks).await;
    let (ledger, head, tasks) = open(folder.path()).await;
    assert_eq!(head.as_ref(), Some(&end));
    let (second, end) = lines(head, 2);
    for line in second {
        ledger.append(line).unwrap();
    }
    close(ledger, tasks).await;
    check(folder.path(), None, &end);
    let mode = fs::metadata(folder.path().join(FILE)).unwrap().permissions();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o600);
}

#[tokio::test]
async fn half_a_line_is_cut_off() {
    let folder = tempfile::tempdir().unwrap();
    let (first, end) = lines(None, 2);
    let torn = format!("{}\n{}\n{{\"number\":2,\"prev", first[0], first[1]);
    fs::write(folder.path().join(FILE), torn).unwrap();
    assert_eq!(newest(folder.path(), usize::MAX).unwrap(), first);
    let (ledger, head, tasks) = open(folder.path()).await;
    assert_eq!(head.as_ref(), Some(&end));
    let (second, end) = lines(head, 1);
    ledger.append(second[0].clone()).unwrap();
    close(ledger, tasks).await;
    check(folder.path(), None, &end);
}

#[tokio::test]
async fn a_broken_end_begins_a_chain_that_shows_it() {
    let folder = tempfile::tempdir().unwrap();
    let (first, _) = lines(None, 2);
    fs::write(folder.path().join(FILE), format!("{}\n{}\n", first[0], first[1].replace("name", "game")))
        .unwrap();
    let (ledger, head, tasks) = open(folder.path()).await;
    assert_eq!(head, None);
    close(ledger, tasks).await;
    fs::write(folder.path().join(FILE), [0xff, b'\n']).unwrap();
    let tasks = TaskTracker::new();
    assert!(FileLedger::open(folder.path().to_owned(), sandbox(), &tasks).await.is_err());
    fs::remove_file(folder.path().join(FILE)).unwrap();
    std::os::unix::fs::symlink("/dev/zero", folder.path().join(FILE)).unwrap();
    assert!(newest(folder.path(), 1).is_err(), "it has no end");
}

#[test]
fn of_a_long_chain_the_newest_part_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (mut file, head) = LogFile::take_up(folder.path().to_owned(), &sandbox()).unwrap();
    assert_eq!(head, None);
    let (mut chain, mut written) = (Chain::begin(sandbox()), 0);
    let long = Some(Text::new(&[b'"'; crate::receipt::MAX_TEXT]));
    let receipt = Receipt { name: long.clone(), shown: long, ..receipt("always/name") };
    while written < 3 * MAX_FILE {
        let text: String = (0..500).map(|_| chain.append(receipt.clone()).unwrap() + "\n").collect();
        written += text.len() as u64;
        file.append(&text).unwrap();
    }
    let end = chain.head().clone();
    let kept = newest(folder.path(), usize::MAX).unwrap();
    let size = |name| fs::metadata(folder.path().join(name)).unwrap().len();
    assert!(size(FILE) <= MAX_FILE && size(OLDER_FILE) <= MAX_FILE && size(OLDER_FILE) > MAX_FILE / 2);
    let start = Head::before(&kept[0]).unwrap();
    assert!(start.count > 0 && start.count + kept.len() as u64 == end.count);
    check(folder.path(), Some(start), &end);
    // The server may have ended just after the file was moved.
    fs::rename(folder.path().join(FILE), folder.path().join(OLDER_FILE)).unwrap();
    assert_eq!(LogFile::take_up(folder.path().to_owned(), &sandbox()).unwrap().1, Some(end));
}

#[test]
fn a_failure_in_the_middle_leaves_no_half_line() {
    let folder = tempfile::tempdir().unwrap();
    let (mut file, _) = LogFile::take_up(folder.path().to_owned(), &sandbox()).unwrap();
    file.append("first\n").unwrap();
    // What a failed write leaves: something of the lines in the file, and no open file.
    let mut raw = fs::OpenOptions::new().append(true).open(folder.path().join(FILE)).unwrap();
    raw.write_all(b"second\nthi").unwrap();
    file.file = None;
    file.append("second\nthird\n").unwrap();
    assert_eq!(newest(folder.path(), usize::MAX).unwrap(), ["first", "second", "third"]);
}

#[tokio::test(start_paused = true)]
async fn while_the_disk_is_full_lines_wait_and_then_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (ledger, _, tasks) = open(folder.path()).await;
    // Writing there fails as on a full disk.
    std::os::unix::fs::symlink("/dev/full", folder.path().join(FILE)).unwrap();
    let (all, _) = lines(None, 3 * MAX_QUEUE);
    let mut taken = Vec::new();
    for line in all {
        // Each pause lets the writer try.
        if ledger.append(line.clone()).is_ok() {
            taken.push(line);
        } else {
            break;
        }
        sleep(Duration::from_millis(10)).await;
    }
    assert!(ledger.append(String::new()).is_err(), "the queue is full");
    assert!(taken.len() >= MAX_QUEUE && taken.len() <= 2 * MAX_QUEUE);
    fs::remove_file(folder.path().join(FILE)).unwrap();
    ledger.flush().await;
    assert_eq!(newest(folder.path(), usize::MAX).unwrap(), taken, "none was lost and none came twice");
    close(ledger, tasks).await;
}

#[tokio::test(start_paused = true)]
async fn a_disk_that_stays_full_does_not_hold_up_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let (ledger, _, tasks) = open(folder.path()).await;
    std::os::unix::fs::symlink("/dev/full", folder.path().join(FILE)).unwrap();
    ledger.append("line".to_owned()).unwrap();
    close(ledger, tasks).await;
}

#[test]
fn texts_of_receipts_hold_no_line_feed() {
    let (lines, _) = lines(None, 1);
    assert!(!lines[0].contains('\n') && !Text::new(b"a\nb").to_string().contains('\n'));
}
