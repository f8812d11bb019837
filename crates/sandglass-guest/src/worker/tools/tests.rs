use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::worker::tests::Heard;

struct Bench {
    dir: TempDir,
    heard: Heard,
    job: Job,
    events: Events,
}

fn bench(shell: bool) -> Bench {
    let dir = tempfile::tempdir().unwrap();
    let job = json!({
        "prompt": "p", "model": "m", "dialect": "chat", "folder": dir.path(), "seconds": 60,
        "tools": {"shell": shell, "web": false},
    });
    let heard = Heard::default();
    let events = Events::to(Box::new(heard.clone()));
    Bench { dir, job: Job::parse(job.to_string().as_bytes()).unwrap(), events, heard }
}

impl Bench {
    async fn apply(&self, name: &str, input: Value) -> (String, bool) {
        let one = Use { id: "c".into(), name: name.into(), input: input.to_string() };
        let outcome = Tools::new(&self.job, &self.events).apply(&one).await;
        (outcome.text, outcome.failed)
    }

    async fn shell(&self, command: &str, timeout: u64) -> (String, bool) {
        self.apply("shell", json!({"command": command, "timeout": timeout})).await
    }
}

#[tokio::test]
async fn files_are_written_read_edited_and_listed() {
    let bench = bench(false);
    let text = "one\ntwo\ntwo\n";
    assert!(!bench.apply("write_file", json!({"path": "deep/er/a.txt", "content": text})).await.1);
    assert_eq!(fs::read_to_string(bench.dir.path().join("deep/er/a.txt")).unwrap(), text);
    assert_eq!(bench.apply("read_file", json!({"path": "deep/er/a.txt"})).await, (text.into(), false));
    let lines = json!({"path": "deep/er/a.txt", "from": 2, "lines": 1});
    assert_eq!(bench.apply("read_file", lines).await, ("two\n".into(), false));
    let edit =
        |old: &str| bench.apply("edit_file", json!({"path": "deep/er/a.txt", "old": old, "new": "three"}));
    for (old, why) in [("two", "2 times"), ("four", "not in the file"), ("", "not in the file")] {
        let (said, failed) = edit(old).await;
        assert!(failed && said.contains(why), "{said}");
    }
    assert!(!edit("one").await.1);
    let absolute = json!({"path": bench.dir.path().join("deep/er/a.txt")});
    assert_eq!(bench.apply("read_file", absolute).await.0, "three\ntwo\ntwo\n");
    fs::create_dir(bench.dir.path().join("node_modules")).unwrap();
    fs::write(bench.dir.path().join("node_modules/x"), "").unwrap();
    std::os::unix::fs::symlink("/", bench.dir.path().join("root")).unwrap();
    let listed = bench.apply("list_files", json!({})).await.0;
    assert_eq!(listed, "deep/\ndeep/er/\ndeep/er/a.txt (14 bytes)\nnode_modules/\nroot (1 bytes)");
    let written = bench.heard.of("file.written");
    assert_eq!(written.iter().map(|data| data["bytes"].as_u64().unwrap()).collect::<Vec<_>>(), [12, 14]);
}

#[tokio::test]
async fn what_is_no_file_keeps_nobody_waiting() {
    let bench = bench(false);
    rustix::fs::mknodat(
        rustix::fs::CWD,
        bench.dir.path().join("pipe"),
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .unwrap();
    fs::write(bench.dir.path().join("binary"), [0xff, 0xfe, 0]).unwrap();
    let huge = fs::File::create(bench.dir.path().join("huge")).unwrap();
    huge.set_len(1 << 40).unwrap();
    for (path, why) in [
        ("pipe", "no file"),
        (".", "a folder"),
        ("binary", "no text"),
        ("huge", "more than"),
        ("none", "No such"),
    ] {
        let (said, failed) = bench.apply("read_file", json!({"path": path})).await;
        assert!(failed && said.contains(why), "{path}: {said}");
    }
    for path in ["pipe", "."] {
        assert!(bench.apply("write_file", json!({"path": path, "content": "x"})).await.1, "{path}");
    }
}

#[tokio::test]
async fn a_command_tells_what_it_says_and_how_it_ends() {
    let bench = bench(true);
    assert_eq!(
        bench.shell("pwd; echo err >&2", 10).await,
        (format!("{}\nerr\n[exit status: 0]", bench.dir.path().display()), false)
    );
    assert_eq!(bench.shell("printf no; exit 3", 10).await, ("no\n[exit status: 3]".into(), true));
    let (said, failed) = bench.shell("cat; kill -9 $$", 10).await;
    assert!(failed && said.contains("signal: 9"), "{said}");
    let [started, ..] = &bench.heard.of("shell.started")[..] else { panic!() };
    assert_eq!(started["command"], "pwd; echo err >&2");
    let ended: Vec<_> = bench.heard.of("shell.exited").iter().map(|data| data["exit_code"].clone()).collect();
    assert_eq!(ended, [json!(0), json!(3), json!(null)]);
    assert!(bench.heard.of("shell.output")[0]["text"].as_str().unwrap().ends_with("err\n"));
}

#[tokio::test]
async fn a_command_that_takes_too_long_ends_with_all_that_it_started() {
    let bench = bench(true);
    let (said, failed) = bench.shell("sleep 300 & echo $! > pid; echo begun; wait", 1).await;
    assert!(failed && said.contains("begun") && said.contains("took too long"), "{said}");
    assert_eq!(bench.heard.of("shell.exited")[0]["timed_out"], true);
    let pid = fs::read_to_string(bench.dir.path().join("pid")).unwrap();
    let ended = || match fs::read_to_string(format!("/proc/{}/stat", pid.trim())) {
        Err(_) => true,
        Ok(stat) => stat.contains(") Z "),
    };
    for _ in 0..100 {
        if ended() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    panic!("{} is still there", pid.trim());
}

#[tokio::test]
async fn what_is_left_running_keeps_nobody_waiting() {
    let bench = bench(true);
    let started = std::time::Instant::now();
    let (said, failed) = bench.shell("sleep 300 & echo $!", 60).await;
    assert!(!failed && started.elapsed().as_secs() < 20, "{said}");
    let pid = said.lines().next().unwrap();
    assert!(fs::exists(format!("/proc/{pid}")).unwrap());
    let pid = rustix::process::Pid::from_raw(pid.parse().unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
}

#[tokio::test]
async fn of_a_flood_both_ends_are_told() {
    let bench = bench(true);
    let (said, failed) =
        bench.shell("echo first; head -c 30000000 /dev/zero | tr '\\0' x; echo; echo last", 60).await;
    assert!(!failed && said.starts_with("first\n") && said.contains("last\n[exit status: 0]"));
    let most = usize::try_from(MAX_RESULT).unwrap();
    assert!((most..most + 200).contains(&said.len()), "{}", said.len());
    let told: usize =
        bench.heard.of("shell.output").iter().map(|data| data["text"].as_str().unwrap().len()).sum();
    assert_eq!(told, 64 << 10);
    let ended = &bench.heard.of("shell.exited")[0];
    assert_eq!((&ended["truncated"], &ended["output_bytes"]), (&json!(true), &json!(30_000_012)));
    assert!(bench.heard.longest() < 16 << 10);
}

#[tokio::test]
async fn what_is_off_is_not_there() {
    let bench = bench(false);
    let names: Vec<_> = Tools::new(&bench.job, &bench.events).list().iter().map(|tool| tool.name).collect();
    assert_eq!(names, ["read_file", "write_file", "edit_file", "list_files"]);
    for name in ["shell", "fetch_url", "nonsense"] {
        let (said, failed) =
            bench.apply(name, json!({"command": "touch x", "url": "http://127.0.0.1/"})).await;
        assert!(failed && said.contains("no tool"), "{said}");
    }
    assert!(!bench.dir.path().join("x").exists());
    let (said, failed) = bench.apply("write_file", json!({"path": "x"})).await;
    assert!(failed && said.contains("content"), "{said}");
    fs::set_permissions(bench.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
}
