//! Reading and writing in a race against the user whom it is done for. See [`crate::path::races`].

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;

use super::{download, upload, *};
use crate::job::Jobs;
use crate::path::races::{Arena, PLAIN, Trap};
use crate::settings::tests::configure;

/// Access as the racer, whichever way it was asked for: with the token or a signature.
fn access(arena: &Arena, agent: &Arc<Agent>) -> Access {
    Access {
        agent: Arc::clone(agent),
        settings: Arc::new(Settings::new(configure(None))),
        user: User {
            name: "racer".into(),
            home: "/".into(),
            shell: "/bin/sh".into(),
            identity: arena.racer(),
        },
        metadata: Metadata::default(),
    }
}

/// Whether it was done; a refusal must be one of those that a race may bring.
fn done<T>(result: Result<T, Refusal>) -> Option<T> {
    result
        .map_err(|Refusal(status, text)| assert!([400, 403, 404, 409].contains(&status.as_u16()), "{text}"))
        .ok()
}

#[test]
fn nothing_is_read_through_processes() {
    let agent = Arc::new(Agent::new(Jobs::marked(), None).unwrap());
    Arena::is_lost(Trap::Magic, |arena, inside| {
        fs::write(inside.join("file"), PLAIN).unwrap();
        let opened = done(download::open(&access(arena, &agent), &arena.path("door/file")));
        opened.is_some_and(|opened| {
            let mut text = String::new();
            fs::File::from(opened.file).read_to_string(&mut text).unwrap();
            assert_eq!(text, PLAIN);
            true
        })
    });
}

#[test]
fn nothing_is_written_elsewhere() {
    let agent = Arc::new(Agent::new(Jobs::marked(), None).unwrap());
    for trap in [Trap::Link, Trap::Magic, Trap::Relinked] {
        Arena::is_lost(trap, |arena, inside| {
            let there = inside.join("file");
            // Once it is there before, and once it is made.
            let is_new = there.exists() && fs::remove_file(&there).is_ok();
            if !is_new {
                fs::write(&there, PLAIN).unwrap();
            }
            let file = done(upload::create(&access(arena, &agent), &arena.path("door/file")));
            file.is_some_and(|file| {
                let stat = fs::File::from(file).metadata().unwrap();
                assert_eq!((stat.ino(), stat.len()), (fs::metadata(&there).unwrap().ino(), 0));
                true
            })
        });
    }
}
