//! Templates that have an image of a running state: what is made from it, and what happens when that fails.

use std::collections::BTreeSet;
use std::time::Duration;

use sandglass_control::TemplateDefinition;
use sandglass_engine::engine::Lack;
use sandglass_engine::{Engine as _, EngineError};
use sandglass_store::{
    CommandDefaults, ImageState, MadeFrom, NewSnapshot, Purpose, SandboxRow, SnapshotName, SnapshotRow,
    StartPath, Store as _,
};
use sandglass_types::budget::Amount;
use sandglass_types::{
    EndReason, Error, ErrorKind, PauseMode, Reference, ResumeMode, SandboxId, SandboxState, SnapshotId,
};

use crate::fixture::{HOUR, Server, World, defaults, eventually, request, spec, written};
use crate::scripted::Manner;
use crate::trouble::broken;

/// Those of the next image.
fn later() -> CommandDefaults {
    CommandDefaults { user: "root".into(), ..defaults() }
}

/// Makes a template of a new sandbox, and ends that.
async fn keep(server: &Server, name: &str) -> SnapshotRow {
    let id = server.create().await;
    let kept = server.control.keep_as_template(server.team, &id, name, spec("base"), defaults(), None).await;
    server.kill(&id).await;
    kept.unwrap()
}

async fn create_of(server: &Server, name: &str) -> Result<SandboxRow, Error> {
    let request = sandglass_control::CreateSandbox { template: name.into(), ..request(HOUR) };
    server.control.create(server.team, request).await
}

/// The images and how far they have come.
async fn images(server: &Server) -> Vec<(String, ImageState)> {
    let node = server.store.node().await.unwrap();
    let rows = server.store.snapshots_on_node(node).await.unwrap();
    let mut images: Vec<_> = rows.into_iter().map(|row| (row.id.to_string(), row.state)).collect();
    // Those that are to be removed first; a clock that stands still does not order them.
    images.sort_by_key(|(_, state)| *state != ImageState::Deleting);
    images
}

async fn last_event(server: &Server, id: &SandboxId) -> String {
    server.control.events(server.team, id).await.unwrap().pop().unwrap().detail
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_made_of_a_template_with_an_image_goes_on_from_there() {
    let world = World::scripted(Manner::Obedient);
    let mut server = world.start().await.unwrap();
    let kept = keep(&server, "web").await;
    for restarted in [false, true] {
        if restarted {
            server.stop().await;
            server = world.start().await.unwrap();
        }
        let row = create_of(&server, "web").await.unwrap();
        assert_eq!((row.made_from.clone(), row.start_path), (MadeFrom::Template, StartPath::Restore));
        assert_eq!((row.template.as_str(), row.defaults.as_ref()), ("web", Some(&defaults())));
        assert_eq!(written(&world.home(&row.id).join("identity")).await, format!("{} 2 None\n", row.id));
        // It comes back by itself, whatever became of its template.
        server.control.pause(server.team, &row.id, PauseMode::Full).await.unwrap();
        server.control.resume(server.team, &row.id, HOUR, ResumeMode::Restore).await.unwrap();
        server.kill(&row.id).await;
        let cold = server.create().await;
        assert_eq!(server.row(&cold).await.start_path, StartPath::Cold);
        server.kill(&cold).await;
    }
    assert_eq!(images(&server).await, [(kept.id.to_string(), ImageState::Ready)]);
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_is_no_snapshot_and_its_name_is_taken() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    let kept = keep(&server, "web").await;
    let id = server.create().await;
    let name: Reference = "web".parse().unwrap();
    for name in ["web", "web:v2", "base"] {
        let name: Reference = name.parse().unwrap();
        let error = server.control.snapshot(server.team, &id, Some(&name)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        assert!(error.to_string().contains("name of a template"), "{error}");
    }
    // Nor does a template take the name of a snapshot, neither at the beginning nor at the end of its build.
    let mine: Reference = "mine:v2".parse().unwrap();
    let named = server.control.snapshot(server.team, &id, Some(&mine)).await.unwrap();
    let definition = TemplateDefinition { name: "mine".into(), ..TemplateDefinition::default() };
    let begun = server.control.begin_template(server.team, &definition).await.map(drop);
    let kept_too =
        server.control.keep_as_template(server.team, &id, "mine", spec("base"), defaults(), None).await;
    for error in [begun.unwrap_err(), kept_too.map(drop).unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Conflict);
        let said = error.to_string();
        // Who builds templates may delete it, whose ever it is.
        let words = ["the team 'default'", "snapshot of the name 'mine'", named.id.as_str()];
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    }
    let there: BTreeSet<_> = images(&server).await.into_iter().map(|(id, _)| id).collect();
    assert_eq!(there, BTreeSet::from([&kept, &named].map(|row| row.id.to_string())));
    server.control.delete_snapshot_of_any(&named.id).await.unwrap();
    for id in [&named.id, &kept.id] {
        let refused = server.control.delete_snapshot_of_any(id).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NotFound, "gone, or of a template");
    }
    assert_eq!(
        server.control.delete_snapshot(server.team, &name).await.unwrap_err().kind(),
        ErrorKind::Forbidden
    );
    let by_id: Reference = kept.id.as_str().parse().unwrap();
    assert_eq!(
        server.control.delete_snapshot(server.team, &by_id).await.unwrap_err().kind(),
        ErrorKind::NotFound
    );
    assert_eq!(create_of(&server, kept.id.as_str()).await.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(create_of(&server, "web:v2").await.unwrap_err().kind(), ErrorKind::NotFound);
    // A snapshot of what was made from it says itself what its commands have.
    let copy = create_of(&server, "web").await.unwrap().id;
    let snapshot = server.control.snapshot(server.team, &copy, None).await.unwrap();
    let again = create_of(&server, snapshot.id.as_str()).await.unwrap();
    assert_eq!((again.template.as_str(), again.defaults), ("web", Some(defaults())));
    for id in [id, copy, again.id] {
        server.kill(&id).await;
    }
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_of_the_server_gets_no_image_while_a_snapshot_has_its_name() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    let definition = TemplateDefinition { name: "base".into(), ..TemplateDefinition::default() };
    // From before the server had the template.
    let of = server.row(&server.create().await).await;
    let older = NewSnapshot {
        id: SnapshotId::random(),
        node: of.node,
        team: of.team,
        purpose: Purpose::Snapshot,
        name: Some(SnapshotName { name: "base".into(), tag: "v1".into() }),
        template: of.template,
        defaults: None,
        rootfs: of.rootfs,
        limits: of.limits,
        source: of.id.clone(),
        generation: of.generation,
        volumes: Vec::new(),
        created_at: of.created_at,
        quota: Amount::UNBOUNDED,
        capacity: Amount::UNBOUNDED,
    };
    server.store.insert_snapshot(&older, &[]).await.unwrap();
    server.store.snapshot_ready(&older.id, None).await.unwrap();
    let refused = server.control.begin_template(server.team, &definition).await.map(drop).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Conflict);
    assert!(refused.to_string().contains(older.id.as_str()), "{refused}");
    server.control.delete_snapshot_of_any(&older.id).await.unwrap();
    let begun = server.control.begin_template(server.team, &definition).await.unwrap().id;
    for id in [of.id, begun] {
        server.kill(&id).await;
    }
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_renewed_image_takes_the_place_of_no_newer_one() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    let first = keep(&server, "web").await;
    let second = keep(&server, "web").await;
    let id = server.create().await;
    let renew = async |instead_of| {
        server
            .control
            .keep_as_template(server.team, &id, "web", spec("base"), later(), Some(instead_of))
            .await
    };
    assert_eq!(renew(&first.id).await.unwrap_err().kind(), ErrorKind::Conflict);
    assert_eq!(images(&server).await, [(second.id.to_string(), ImageState::Ready)]);
    let third = renew(&second.id).await.unwrap();
    assert_eq!(images(&server).await, [(third.id.to_string(), ImageState::Ready)]);
    server.kill(&id).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_sandbox_of_a_build_ends_with_its_server() {
    let world = World::scripted(Manner::Obedient);
    let mut server = world.start().await.unwrap();
    let definition = TemplateDefinition { name: "web".into(), ..TemplateDefinition::default() };
    let id = server.control.begin_template(server.team, &definition).await.unwrap().id;
    let paused = server.control.begin_template(server.team, &definition).await.unwrap().id;
    // A copy of it is nobody's build.
    let copies = server.control.fork(server.team, &paused, 2, HOUR).await.unwrap();
    let copies: Vec<_> = copies.into_iter().map(|copy| copy.unwrap().id).collect();
    for id in [&paused, &copies[0]] {
        server.control.pause(server.team, id, PauseMode::Full).await.unwrap();
    }
    let other = server.create().await;
    server.stop().await;
    server = world.start().await.unwrap();
    for id in [&id, &paused] {
        assert_eq!(server.ended(id).await, EndReason::Killed);
        assert!(server.why(id).await.contains("a template was being built in it"));
    }
    assert_eq!(server.row(&copies[0]).await.state, SandboxState::Paused);
    for id in [&other, &copies[1]] {
        assert_eq!(server.row(id).await.state, SandboxState::Running);
    }
    for id in copies.iter().chain([&other]) {
        server.kill(id).await;
    }
    world.nothing_left().await;
    assert_eq!(world.engine().images().unwrap(), []);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn where_its_image_can_not_be_restored_it_is_started_cold_and_says_so() {
    for (manner, name, verb) in [
        (Manner::Obedient, "web", "boot"),
        (Manner::Obedient, "base", "create"),
        // It is restored, and does not become who it is told to be.
        (Manner::Stubborn, "web", "boot"),
        (Manner::Stubborn, "base", "create"),
    ] {
        let world = World::scripted(manner);
        let server = world.start().await.unwrap();
        keep(&server, name).await;
        let before = world.trouble.calls(verb);
        if manner == Manner::Obedient {
            world.trouble.fail("restore", [broken()]);
        }
        let row = create_of(&server, name).await.unwrap();
        assert_eq!(world.trouble.calls(verb), before + 1, "{manner:?} {name}");
        assert_eq!((row.state, row.start_path), (SandboxState::Running, StartPath::Cold));
        let said = last_event(&server, &row.id).await;
        assert!(said.contains("it was started cold"), "{said}");
        assert_eq!(written(&world.home(&row.id).join("identity")).await, format!("{} 2 None\n", row.id));
        // It is as good as any.
        server.control.pause(server.team, &row.id, PauseMode::Full).await.unwrap();
        server.kill(&row.id).await;
        world.nothing_left().await;
        server.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_room_it_is_not_tried_another_way_and_what_fails_twice_is_refused() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    keep(&server, "web").await;
    let full = EngineError::NoRoom { lack: Lack::Disk, step: "copy", source: "the disk is full".into() };
    world.trouble.fail("restore", [full]);
    assert_eq!(create_of(&server, "web").await.unwrap_err().kind(), ErrorKind::Capacity);
    assert_eq!(world.trouble.calls("boot"), 0);
    world.trouble.fail("restore", [broken()]);
    world.trouble.fail("boot", [broken()]);
    assert_eq!(create_of(&server, "web").await.unwrap_err().kind(), ErrorKind::Internal);
    world.nothing_left().await;
    let row = create_of(&server, "web").await.unwrap();
    assert_eq!(row.start_path, StartPath::Restore);
    server.kill(&row.id).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_new_image_takes_the_place_of_the_old_one_once_it_is_complete() {
    let world = World::scripted(Manner::Obedient);
    let mut server = world.start().await.unwrap();
    let first = keep(&server, "web").await;
    let id = server.create().await;
    // One that fails changes nothing.
    world.trouble.fail("checkpoint", [broken()]);
    let failed = server.control.keep_as_template(server.team, &id, "web", spec("base"), later(), None).await;
    assert_eq!(failed.unwrap_err().kind(), ErrorKind::Internal);
    assert_eq!(images(&server).await, [(first.id.to_string(), ImageState::Ready)]);
    // Nor does one during which the server dies.
    let (held, before) = (world.trouble.hold("checkpoint"), world.trouble.calls("checkpoint"));
    let (control, team, of) = (server.control.clone(), server.team, id.clone());
    let keeping =
        tokio::spawn(
            async move { control.keep_as_template(team, &of, "web", spec("base"), later(), None).await },
        );
    eventually("it is written", async || (world.trouble.calls("checkpoint") > before).then_some(())).await;
    keeping.abort();
    let stopping = tokio::spawn(server.stop());
    drop(held);
    stopping.await.unwrap();
    server = world.start().await.unwrap();
    let engine = world.engine();
    eventually("what was half written is gone", async || {
        let only = images(&server).await == [(first.id.to_string(), ImageState::Ready)];
        (only && engine.images().unwrap() == [first.id.image()]).then_some(())
    })
    .await;
    // The old one stays for as long as somebody is made of it.
    let (held, before) = (world.trouble.hold("restore"), world.trouble.calls("restore"));
    let (control, team) = (server.control.clone(), server.team);
    let of = sandglass_control::CreateSandbox { template: "web".into(), ..request(HOUR) };
    let creating = tokio::spawn(async move { control.create(team, of).await });
    eventually("it is being made", async || (world.trouble.calls("restore") > before).then_some(())).await;
    let second =
        server.control.keep_as_template(server.team, &id, "web", spec("base"), later(), None).await.unwrap();
    let both = [(first.id.to_string(), ImageState::Deleting), (second.id.to_string(), ImageState::Ready)];
    assert_eq!(images(&server).await, both);
    drop(held);
    let old = creating.await.unwrap().unwrap();
    assert_eq!((old.start_path, old.defaults), (StartPath::Restore, Some(defaults())));
    // Whoever comes next removes it; here that is the next one that is kept.
    let third =
        server.control.keep_as_template(server.team, &id, "web", spec("base"), later(), None).await.unwrap();
    assert_eq!(images(&server).await, [(third.id.to_string(), ImageState::Ready)]);
    assert_eq!(engine.images().unwrap(), [third.id.image()]);
    let new = create_of(&server, "web").await.unwrap();
    assert_eq!((new.start_path, new.defaults), (StartPath::Restore, Some(later())));
    for id in [id, old.id, new.id] {
        server.kill(&id).await;
    }
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_has_all_of_its_time_also_if_it_is_started_cold() {
    let world = World::scripted(Manner::Obedient);
    let server = world.start().await.unwrap();
    keep(&server, "web").await;
    let (held, before) = (world.trouble.hold("restore"), world.trouble.calls("restore"));
    world.trouble.fail("restore", [broken()]);
    let (control, team) = (server.control.clone(), server.team);
    let minute = Duration::from_secs(60);
    let of = sandglass_control::CreateSandbox { template: "web".into(), ..request(minute) };
    let creating = tokio::spawn(async move { control.create(team, of).await });
    eventually("it is being made", async || (world.trouble.calls("restore") > before).then_some(())).await;
    world.clock.advance(minute * 3);
    drop(held);
    let row = creating.await.unwrap().unwrap();
    assert_eq!(row.start_path, StartPath::Cold);
    server.control.pause(server.team, &row.id, PauseMode::Full).await.unwrap();
    server.kill(&row.id).await;
    world.nothing_left().await;
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_of_another_root_file_system_than_the_server_s_own_is_not_used() {
    let mut world = World::scripted(Manner::Obedient);
    let mut server = world.start().await.unwrap();
    keep(&server, "base").await;
    keep(&server, "web").await;
    assert!(server.control.template("base").await.unwrap().image.is_some());
    server.stop().await;
    world.rootfs = Some(sandglass_types::Digest::from_bytes([7; 32]));
    server = world.start().await.unwrap();
    let before = world.trouble.calls("restore");
    let row = create_of(&server, "base").await.unwrap();
    assert_eq!((row.start_path, row.generation.0), (StartPath::Cold, 1));
    assert_eq!(row.rootfs, world.rootfs.unwrap());
    assert_eq!(world.trouble.calls("restore"), before);
    assert_eq!(server.control.template("base").await.unwrap().image, None);
    // One that was built on it stays on what it was built on.
    let web = create_of(&server, "web").await.unwrap();
    assert_eq!(web.start_path, StartPath::Restore);
    assert_ne!(web.rootfs, row.rootfs);
    let names = server.control.templates().await.unwrap().into_iter().map(|template| template.name);
    assert_eq!(names.collect::<Vec<_>>(), ["base", "web"]);
    server.control.delete_template("web").await.unwrap();
    assert_eq!(server.control.delete_template("web").await.unwrap_err().kind(), ErrorKind::NotFound);
    server.control.delete_template("base").await.unwrap();
    assert_eq!(server.control.delete_template("base").await.unwrap_err().kind(), ErrorKind::Forbidden);
    assert_eq!(images(&server).await, []);
    for id in [row.id, web.id] {
        server.kill(&id).await;
    }
    world.nothing_left().await;
    server.stop().await;
}
