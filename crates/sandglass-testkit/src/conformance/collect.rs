//! Files of a sandbox that are read from outside.
//!
//! The agent of the suite begins in the folder that counts as `/` there.

use std::collections::BTreeMap;
use std::os::unix::net::UnixStream;

use sandglass_engine::collect::{
    Ask, Bounds, Globs, LeftOut, MAX_PIECE, MAX_SAID, Place, Said, receive, send,
};
use sandglass_engine::engine::{EngineError, Keep, Presence, SandboxSpec};
use sandglass_types::{SandboxId, VolumeId, VolumeMount};

use super::agent::PATIENCE;
use super::{Fixture, LineAgent};

/// What is told: the files by path, each with its permissions and bytes, and what was left out.
type Told = (BTreeMap<String, (u32, Vec<u8>)>, LeftOut);

fn collect(fixture: &Fixture<'_>, id: &SandboxId, place: &str) -> Result<Told, Said> {
    let place: Place = place.parse().unwrap();
    let mut line = UnixStream::from(fixture.engine().collect(id, place.tree()).unwrap());
    line.set_read_timeout(Some(PATIENCE)).unwrap();
    let folder = place.below().to_owned();
    let ask = Ask { folder, globs: Globs::default(), bounds: Bounds::WIDEST };
    send(&mut line, &serde_json::to_vec(&ask).unwrap()).unwrap();
    let mut files = BTreeMap::new();
    let hear = |line: &mut UnixStream| serde_json::from_slice(&receive(line, MAX_SAID).unwrap()).unwrap();
    loop {
        match hear(&mut line) {
            Said::File { path, mode, .. } => {
                let mut bytes = Vec::new();
                loop {
                    let piece = receive(&mut line, MAX_PIECE).unwrap();
                    if piece.is_empty() {
                        break;
                    }
                    bytes.extend(piece);
                }
                assert!(matches!(hear(&mut line), Said::Read { whole: true }), "{path}");
                assert!(files.insert(path, (mode, bytes)).is_none());
            }
            Said::Done(left_out) => return Ok((files, left_out)),
            refused => return Err(refused),
        }
    }
}

fn paths(told: &Told) -> Vec<&str> {
    told.0.keys().map(String::as_str).collect()
}

fn text<'a>(told: &'a Told, path: &str) -> &'a str {
    std::str::from_utf8(&told.0[path].1).unwrap()
}

fn run(fixture: &Fixture<'_>) -> (SandboxSpec, LineAgent) {
    let (spec, mut agent) = fixture.run();
    assert_eq!(agent.sh("busybox mkdir -p work/a; echo one > work/a/f; busybox chmod 640 work/a/f"), "<0>");
    (spec, agent)
}

pub(super) fn what_a_sandbox_wrote_is_told_in_every_state(fixture: &mut Fixture<'_>) {
    let (spec, mut agent) = run(fixture);
    let id = &spec.id;
    let told = collect(fixture, id, "/work").unwrap();
    assert_eq!((told.0["a/f"].clone(), told.1), ((0o640, b"one\n".to_vec()), LeftOut::default()));
    // What a program has open, and has not closed.
    assert_eq!(
        agent.sh("exec 7>work/open; echo more >&7; echo gone > work/gone; busybox rm work/gone"),
        "<0>"
    );
    let told = collect(fixture, id, "/work").unwrap();
    assert_eq!((paths(&told), text(&told, "open")), (vec!["a/f", "open"], "more\n"));
    fixture.engine().pause(id).unwrap();
    assert_eq!(paths(&collect(fixture, id, "/work").unwrap()), ["a/f", "open"]);
    fixture.engine().resume(id).unwrap();
    fixture.reopen();
    assert_eq!(paths(&collect(fixture, id, "/work").unwrap()), ["a/f", "open"]);
    // And it has noticed nothing.
    let mut agent = fixture.attach(id);
    assert_eq!(agent.sh("echo still >&7; busybox cat work/open work/a/f"), "more\nstill\none\n<0>");
    agent.send("exit 7");
    fixture.wait(id);
    assert_eq!(fixture.presence(id), Some(Presence::Remains));
    let told = collect(fixture, id, "/work").unwrap();
    assert_eq!((paths(&told), text(&told, "open")), (vec!["a/f", "open"], "more\nstill\n"));
    fixture.reopen();
    assert_eq!(paths(&collect(fixture, id, "/work").unwrap()), ["a/f", "open"]);
    fixture.destroy(id);
    let place: Place = "/work".parse().unwrap();
    let gone = fixture.engine().collect(id, place.tree());
    assert!(matches!(gone, Err(EngineError::NotFound(_))), "{gone:?}");
    fixture.assert_nothing_left();
}

pub(super) fn names_and_kinds_of_all_sorts_are_told_or_counted(fixture: &mut Fixture<'_>) {
    let (spec, mut agent) = run(fixture);
    let said = agent.sh("cd work; busybox ln -s /etc/passwd link; busybox ln -s a folder; \
         echo x > \"$(busybox printf 'new\\nline')\"; echo x > \"$(busybox printf '\\377')\"; \
         echo s > set; busybox chmod 6755 set; busybox ln a/f hard");
    assert_eq!(said, "<0>");
    let told = collect(fixture, &spec.id, "/work").unwrap();
    assert_eq!(paths(&told), ["a/f", "hard", "new\nline", "set"]);
    assert_eq!(told.0["set"].0, 0o755);
    assert_eq!(told.1, LeftOut { symlinks: 2, names: 1, ..LeftOut::default() });
    // Nor is what a link leads to told by its name.
    for (folder, refused) in
        [("/work/folder/f", "symbolic link"), ("/none", "no such folder"), ("/work/set", "no folder")]
    {
        let said = collect(fixture, &spec.id, folder);
        assert!(format!("{said:?}").contains(refused), "{folder} {said:?}");
    }
}

pub(super) fn what_a_guest_sees_is_told_and_nothing_else(fixture: &mut Fixture<'_>) {
    let (spec, mut agent) = run(fixture);
    let id = &spec.id;
    assert_eq!(text(&collect(fixture, id, "/etc").unwrap(), "template"), "of the template\n", "the control");
    // Folders of the template that were moved, and files of it that are gone.
    let said = agent
        .sh("busybox mv /etc /moved; busybox mkdir /etc; echo own > /etc/own; echo in /tmp > /tmp/t; \
         echo none > /etc/none; busybox chmod 0 /etc/none; busybox mkdir /bin/sub; echo b > /bin/sub/b; busybox rm -r /bin/sub");
    assert_eq!(said, "<0>");
    let told = collect(fixture, id, "/etc").unwrap();
    assert_eq!((paths(&told), told.0["none"].clone()), (vec!["none", "own"], (0, b"none\n".to_vec())));
    assert_eq!(text(&collect(fixture, id, "/moved").unwrap(), "template"), "of the template\n");
    assert_eq!(paths(&collect(fixture, id, "/tmp").unwrap()), ["t"]);
    let everything = collect(fixture, id, "/").unwrap();
    assert!(everything.0.contains_key("bin/busybox") && everything.0.contains_key("work/a/f"));
    // Neither the disk beside the root, nor what is in memory or another file system.
    for folder in ["tmp/", "proc/", "sys/", "dev/", "upper/", "bin/sub", "lost+found"] {
        assert!(!everything.0.keys().any(|path| path.starts_with(folder)), "{folder}");
    }
    // A root of a sandbox can't say what the layers of its files are, and if it says so, it is not believed.
    let said = agent.sh("busybox mkdir /trick; busybox mknod /trick/white c 0 0 2>&1; \
         busybox setfattr -n trusted.overlay.redirect -v /etc /trick 2>/dev/null; \
         busybox setfattr -n user.overlay.redirect -v /etc /trick 2>/dev/null; echo t > /trick/t");
    let told = collect(fixture, id, "/trick").unwrap();
    assert_eq!(paths(&told), ["t"], "{said}");
}

pub(super) fn a_volume_is_not_entered(fixture: &mut Fixture<'_>) {
    let id = VolumeId::random();
    fixture.engine().create_volume(&id, 32).unwrap();
    let volume = VolumeMount { id, name: "v".parse().unwrap(), path: "/work/v".parse().unwrap() };
    let spec = SandboxSpec { volumes: vec![volume], ..fixture.spec() };
    fixture.engine().create(&spec).unwrap();
    fixture.engine().start(&spec.id).unwrap();
    let mut agent = fixture.attach(&spec.id);
    assert_eq!(
        agent.sh("echo of all > /work/v/f; echo own > /work/own; busybox cat /work/v/f"),
        "of all\n<0>"
    );
    assert_eq!(paths(&collect(fixture, &spec.id, "/work").unwrap()), ["own"]);
    assert_eq!(paths(&collect(fixture, &spec.id, "/work/v").unwrap()), Vec::<&str>::new());
}

pub(super) fn a_paused_one_is_told_from_its_image(fixture: &mut Fixture<'_>) {
    let (spec, mut agent) = run(fixture);
    assert_eq!(agent.sh("exec 7>work/open; echo before >&7"), "<0>");
    fixture.engine().pause(&spec.id).unwrap();
    fixture.engine().checkpoint(&spec.id, &spec.id, Keep::Flushed).unwrap();
    fixture.destroy(&spec.id);
    let told = collect(fixture, &spec.id, "/work").unwrap();
    assert_eq!((paths(&told), text(&told, "open")), (vec!["a/f", "open"], "before\n"));
    // The image is as it was.
    for _ in 0..2 {
        let copy = fixture.spec();
        fixture.engine().restore(&copy, &spec.id).unwrap();
        assert_eq!(
            fixture.attach(&copy.id).sh("echo after >&7; busybox cat work/open"),
            "before\nafter\n<0>"
        );
        assert_eq!(text(&collect(fixture, &copy.id, "/work").unwrap(), "open"), "before\nafter\n");
    }
    assert_eq!(text(&collect(fixture, &spec.id, "/work").unwrap(), "open"), "before\n");
}
